"""BERT and RoBERTa checkpoints: classes, config.json in both directions, tensors, and the files of sentence-transformers.

ENCODERS is part of architectures.ARCHITECTURES. A linear weight of the checkpoint is [out, in].
"""

import json
from pathlib import Path
from typing import Any

from tba_jax.models import encoder
from tba_jax.models.config import ACTIVATION_NAMES, ACTIVATIONS, EncoderConfig
from tba_jax.models.hugging_face import files
from tba_jax.models.hugging_face.files import Architecture, Settings, Stored, Tensors

# Modules of a sentence-transformers folder that Encoder.sentence_embeddings computes.
_MODULES = ("Transformer", "Pooling", "Normalize")


def _config(*, head: str, labels: tuple[str, ...], **fields: Any) -> EncoderConfig:
    """Labels and the pooler belong to classification alone: the embedding does not read them."""
    classification = head == "classification"
    return EncoderConfig(head=head, labels=labels if classification else (), pooler=classification, **fields)


def _read(settings: Settings) -> dict[str, Any]:
    width, heads = settings.size("hidden_size"), settings.size("num_attention_heads")
    if width % heads:
        raise ValueError(f"{settings.path}: hidden_size={width} is not divisible by num_attention_heads={heads}")
    settings.only("position_embedding_type", "absolute", None)
    settings.only("quantization_config", None)
    settings.only("pruned_heads", {}, None)
    for key in ("is_decoder", "is_encoder_decoder", "add_cross_attention"):
        settings.only(key, False, None)
    _check_sentence_transformers(settings)
    return {
        "layers": settings.size("num_hidden_layers"),
        "width": width,
        "heads": heads,
        "head_size": width // heads,
        "ffn": settings.size("intermediate_size"),
        "vocab": settings.size("vocab_size"),
        "max_positions": settings.size("max_position_embeddings", 512),
        "token_types": settings.size("type_vocab_size", 2),
        "norm_epsilon": settings.number("layer_norm_eps", 1e-12),
        "activation": settings.choice("hidden_act", ACTIVATION_NAMES, "gelu"),
        "labels": _read_labels(settings),
    }


def _read_roberta(settings: Settings) -> dict[str, Any]:
    padding = settings.values.get("pad_token_id", 1)
    if not isinstance(padding, int) or isinstance(padding, bool) or padding < 0:
        raise ValueError(f"{settings.path}: pad_token_id={padding!r} must be a token: positions are counted from it")
    return _read(settings) | {"position_offset": padding + 1}


def _read_labels(settings: Settings) -> tuple[str, ...]:
    """Names of the classes by index; those of transformers where the file names none; () where there are no classes."""
    if not any(name.endswith("ForSequenceClassification") for name in settings.names("architectures")):
        return ()
    names = settings.table("id2label")
    if not names:
        return tuple(f"LABEL_{i}" for i in range(settings.size("num_labels", 2)))
    count = settings.size("num_labels", len(names))
    labels = tuple(names[str(i)] for i in range(len(names)) if str(i) in names)
    if not len(names) == len(labels) == len({str(name) for name in labels}) == count:
        raise ValueError(f"{settings.path}: id2label={names!r} must give each of the classes 0 to {count - 1} a name of its own")
    return tuple(str(name) for name in labels)


def _write(config: EncoderConfig) -> dict[str, Any]:
    c = config
    values: dict[str, Any] = {
        "model_type": c.architecture,
        "hidden_size": c.width,
        "intermediate_size": c.ffn,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "vocab_size": c.vocab,
        "max_position_embeddings": c.max_positions,
        "type_vocab_size": c.token_types,
        "layer_norm_eps": c.norm_epsilon,
        "hidden_act": ACTIVATIONS[c.activation].names[0],
    }
    if c.position_offset:
        values["pad_token_id"] = c.position_offset - 1
    if c.labels:
        values["id2label"] = {str(i): name for i, name in enumerate(c.labels)}
        values["label2id"] = {name: i for i, name in enumerate(c.labels)}
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
        _check_pooling(files.read_settings(path))


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


def _check_pooling(settings: Settings) -> None:
    settings.only("pooling_mode", "mean", ["mean"])
    settings.only("pooling_mode_mean_tokens", True)
    for key in settings.values:
        if key.startswith("pooling_mode_") and key != "pooling_mode_mean_tokens":
            settings.only(key, False, None)


def _norm(name: str, path: str) -> Tensors:
    return files.norm(name, path, bias=True)


def _body_tensors(prefix: str) -> Tensors:
    embeddings, layer = f"{prefix}embeddings", f"{prefix}encoder.layer.{{layer}}"
    tensors: Tensors = {
        f"{embeddings}.word_embeddings.weight": (Stored("embedding.weight", "V D", "V D"),),
        f"{embeddings}.position_embeddings.weight": (Stored("position_embedding.weight", "S D", "S D"),),
        f"{embeddings}.token_type_embeddings.weight": (Stored("token_type_embedding.weight", "A D", "A D"),),
    }
    tensors |= _norm(f"{embeddings}.LayerNorm", "embedding_norm")
    for name in ("query", "key", "value"):
        tensors |= files.linear(f"{layer}.attention.self.{name}", f"layers.attention.{name}", ("(N H) D", "D N H", "(N H)"), True)
    tensors |= files.linear(f"{layer}.attention.output.dense", "layers.attention.out", ("D (N H)", "N H D", "D"), True)
    tensors |= _norm(f"{layer}.attention.output.LayerNorm", "layers.attention_norm")
    tensors |= files.linear(f"{layer}.intermediate.dense", "layers.feed_forward.up", ("F D", "D F", "F"), True)
    tensors |= files.linear(f"{layer}.output.dense", "layers.feed_forward.down", ("D F", "F D", "D"), True)
    return tensors | _norm(f"{layer}.output.LayerNorm", "layers.feed_forward_norm")


def _head_tensors(config: EncoderConfig, pooler: str, classifier: str) -> Tensors:
    tensors = files.linear(pooler, "pooler", ("E D", "D E", "E"), True) if config.pooler else {}
    if config.head == "classification":
        tensors |= files.linear(classifier, "classifier", ("C D", "D C", "C"), True)
    return tensors


def _bert_tensors(config: EncoderConfig) -> Tensors:
    return _body_tensors("bert.") | _head_tensors(config, "bert.pooler.dense", "classifier")


def _roberta_tensors(config: EncoderConfig) -> Tensors:
    pooler = "classifier.dense" if config.head == "classification" else "roberta.pooler.dense"
    return _body_tensors("roberta.") | _head_tensors(config, pooler, "classifier.out_proj")


# Harmless, because no head reads them: the pooler where it is not in the table above, and a buffer that old versions saved
# (0, 1, 2, …). The language model that pretraining put on the hidden states (cls., lm_head.) is as harmless.
_LEFT_OUT = r"pooler\.dense\.(weight|bias)|embeddings\.position_ids"

_ENCODER: dict[str, Any] = {
    "config": _config,
    "write": _write,
    "define": encoder.define,
}

ENCODERS: dict[str, Architecture] = {
    "bert": Architecture(
        heads={
            "BertModel": "embedding",
            "BertForMaskedLM": "embedding",
            "BertForSequenceClassification": "classification",
        },
        read=_read,
        tensors=_bert_tensors,
        prefix="bert.",
        ignored=rf"{_LEFT_OUT}|cls\..*",
        **_ENCODER,
    ),
    "roberta": Architecture(
        heads={
            "RobertaModel": "embedding",
            "RobertaForMaskedLM": "embedding",
            "RobertaForSequenceClassification": "classification",
        },
        read=_read_roberta,
        tensors=_roberta_tensors,
        prefix="roberta.",
        ignored=rf"{_LEFT_OUT}|lm_head\..*",
        **_ENCODER,
    ),
}
