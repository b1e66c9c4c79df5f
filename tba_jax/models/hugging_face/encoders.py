"""BERT and RoBERTa checkpoints, and the files of sentence-transformers. ENCODERS is part of architectures.ARCHITECTURES."""

import functools
import json
from pathlib import Path
from typing import Any

from tba_jax.models import encoder
from tba_jax.models.config import EncoderConfig
from tba_jax.models.hugging_face import files
from tba_jax.models.hugging_face.files import Architecture, Key, Settings, Stored, Tensors

# Modules of a sentence-transformers folder that Encoder.sentence_embeddings computes.
_MODULES = ("Transformer", "Pooling", "Normalize")


def _config(*, head: str, labels: tuple[str, ...], **fields: Any) -> EncoderConfig:
    classification = head == "classification"
    return EncoderConfig(head=head, labels=labels if classification else (), pooler=classification, **fields)


def _read(settings: Settings, fields: dict[str, Any]) -> dict[str, Any]:
    _check_sentence_transformers(settings)
    return {"head_size": settings.head_size("hidden_size", "num_attention_heads"), "labels": _read_labels(settings)}


def _read_roberta(settings: Settings, fields: dict[str, Any]) -> dict[str, Any]:
    padding = settings.values.get("pad_token_id", 1)
    if not isinstance(padding, int) or isinstance(padding, bool) or padding < 0:
        raise ValueError(f"{settings.path}: pad_token_id={padding!r} must be a token: positions are counted from it")
    return _read(settings, fields) | {"position_offset": padding + 1}


def _read_labels(settings: Settings) -> tuple[str, ...]:
    """Names of the classes by index; those of transformers where the file names none; () where there are no classes."""
    if not any(name.endswith("ForSequenceClassification") for name in settings.names("architectures")):
        return ()
    names = settings.table("id2label")
    if not names:
        return tuple(f"LABEL_{i}" for i in range(settings.size("num_labels", 2)))
    count = settings.size("num_labels", len(names))
    labels = tuple(str(names[str(i)]) for i in range(len(names)) if str(i) in names)
    if not len(names) == len(set(labels)) == count:
        raise ValueError(f"{settings.path}: id2label={names!r} must give each of the classes 0 to {count - 1} a name of its own")
    return labels


def _write(config: EncoderConfig) -> dict[str, Any]:
    values: dict[str, Any] = {"pad_token_id": config.position_offset - 1} if config.position_offset else {}
    if config.labels:
        values["id2label"] = {str(i): name for i, name in enumerate(config.labels)}
        values["label2id"] = {name: i for i, name in enumerate(config.labels)}
    return values


def _check_sentence_transformers(settings: Settings) -> None:
    """Raises ValueError where the folder asks for an embedding that is not the normalised mean; names the file and the key."""
    folder = settings.path.parent
    poolings = [path for path in [folder / "1_Pooling" / "config.json"] if path.is_file()]
    if (folder / "modules.json").is_file():
        modules = _read_modules(folder / "modules.json")
        poolings = [folder / path / "config.json" for kind, path in modules if kind == "Pooling"]
    elif other := [name for name in settings.names("architectures") if name.endswith("ForMaskedLM")]:
        raise ValueError(
            f"{settings.path}: architectures={other} is a language model, which embeds no sentences unless it was trained to: "
            "that is believed of sentence-transformers folders, which hold a modules.json"
        )
    for path in poolings:
        pooling = files.read_settings(path)
        pooling.only("pooling_mode", "mean", ["mean"])
        pooling.only("pooling_mode_mean_tokens", True)
        for key in pooling.values:
            if key.startswith("pooling_mode_") and key != "pooling_mode_mean_tokens":
                pooling.only(key, False, None)


def _read_modules(path: Path) -> list[tuple[str, str]]:
    """The kind ("Pooling") and the folder ("1_Pooling") of each module."""
    try:
        modules = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in json.loads(path.read_bytes())]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not a list of modules with type and path: {error!r}") from error
    if other := [kind for kind, _ in modules if kind not in _MODULES]:
        raise ValueError(
            f"{path} lists {', '.join(other)}, which would be left out; an encoder computes {', '.join(_MODULES)} only"
        )
    return modules


def _tensors(config: EncoderConfig, *, family: str, pooler: str, classifier: str) -> Tensors:
    """Args: pooler, classifier: begin the names of the heads' tensors."""
    embeddings, layer = f"{family}.embeddings", f"{family}.encoder.layer.{{layer}}"
    tensors: Tensors = {
        f"{embeddings}.word_embeddings.weight": (Stored("embedding.weight", "V D", "V D"),),
        f"{embeddings}.position_embeddings.weight": (Stored("position_embedding.weight", "S D", "S D"),),
        f"{embeddings}.token_type_embeddings.weight": (Stored("token_type_embedding.weight", "A D", "A D"),),
    }
    tensors |= files.norm(f"{embeddings}.LayerNorm", "embedding_norm", bias=True)
    for name in ("query", "key", "value"):
        tensors |= files.linear(f"{layer}.attention.self.{name}", f"layers.attention.{name}", ("(N H) D", "D N H", "(N H)"), True)
    tensors |= files.linear(f"{layer}.attention.output.dense", "layers.attention.out", ("D (N H)", "N H D", "D"), True)
    tensors |= files.norm(f"{layer}.attention.output.LayerNorm", "layers.attention_norm", bias=True)
    tensors |= files.linear(f"{layer}.intermediate.dense", "layers.feed_forward.up", ("F D", "D F", "F"), True)
    tensors |= files.linear(f"{layer}.output.dense", "layers.feed_forward.down", ("D F", "F D", "D"), True)
    tensors |= files.norm(f"{layer}.output.LayerNorm", "layers.feed_forward_norm", bias=True)
    if config.pooler:
        tensors |= files.linear(pooler, "pooler", ("E D", "D E", "E"), True)
    if config.head == "classification":
        tensors |= files.linear(classifier, "classifier", ("C D", "D C", "C"), True)
    return tensors


def _encoder(name: str, language_model: str, **of_family: Any) -> Architecture:
    """Args: name: begins its classes. language_model: begins the names of the tensors that pretraining put on the states."""
    return Architecture(
        heads={
            f"{name}Model": "embedding",
            f"{name}ForMaskedLM": "embedding",
            f"{name}ForSequenceClassification": "classification",
        },
        config=_config,
        define=encoder.define,
        only={
            "position_embedding_type": ("absolute", None),
            "quantization_config": (None,),
            "pruned_heads": ({}, None),
            **dict.fromkeys(("is_decoder", "is_encoder_decoder", "add_cross_attention"), (False, None)),
        },
        fixed={},
        keys={
            "hidden_size": Key("width"),
            "intermediate_size": Key("ffn"),
            "num_hidden_layers": Key("layers"),
            "num_attention_heads": Key("heads"),
            "vocab_size": Key("vocab"),
            "max_position_embeddings": Key("max_positions", absent=512),
            "type_vocab_size": Key("token_types", absent=2),
            "layer_norm_eps": Key("norm_epsilon", Settings.number, 1e-12),
            "hidden_act": Key("activation", Settings.activation, "gelu"),
        },
        write_more=_write,
        prefix=f"{name.lower()}.",
        # No head reads a pooler that the table has not, nor the positions (0, 1, 2, …) that old versions saved.
        ignored=rf"pooler\.dense\.(weight|bias)|embeddings\.position_ids|{language_model}\..*",
        **of_family,
    )


ENCODERS: dict[str, Architecture] = {
    "bert": _encoder(
        "Bert",
        "cls",
        read_more=_read,
        tensors=functools.partial(_tensors, family="bert", pooler="bert.pooler.dense", classifier="classifier"),
    ),
    "roberta": _encoder(
        "Roberta",
        "lm_head",
        read_more=_read_roberta,
        tensors=functools.partial(_tensors, family="roberta", pooler="classifier.dense", classifier="classifier.out_proj"),
    ),
}
