"""Bidirectional post-norm encoders, BERT and RoBERTa: the module, with a sentence-embedding or a classification head, its
checkpoints (a part of architectures.ARCHITECTURES), and the files of sentence-transformers.

Rows are padded on the right: BERT's positions are indices in the row, and both classification heads read the first token.
"""

import functools
import json
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from tba_jax import sharding
from tba_jax.models import attention, parameters
from tba_jax.models.attention import Attend, Attention
from tba_jax.models.config import STD, EncoderConfig
from tba_jax.models.hugging_face import files
from tba_jax.models.hugging_face.files import Architecture, Key, Settings, Stored, Tensors
from tba_jax.models.layers import Einsum, Embedding, FeedForward, Norm, ScalarHead, full_precision
from tba_jax.models.parameters import Definition

# Modules of a sentence-transformers folder that Encoder.sentence_embeddings computes.
_MODULES = ("Transformer", "Pooling", "Normalize")


class EncoderBlock(nnx.Module):
    """A layer of the encoder: attention and feed-forward, each added to the residual stream before a norm."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        c = config
        norm = functools.partial(Norm, c.norm, "D", c.sizes, epsilon=c.norm_epsilon, rngs=rngs)
        self.attention = Attention(c, rngs=rngs)
        self.attention_norm = norm()
        self.feed_forward = FeedForward(c, rngs=rngs)
        self.feed_forward_norm = norm()

    def __call__(self, x: jax.Array, attend: Attend) -> jax.Array:
        """Maps x [t, D] to [t, D]."""
        x = self.attention_norm(x + self.attention(x, None, attend)[0])
        return self.feed_forward_norm(x + self.feed_forward(x))


class Encoder(nnx.Module):
    """Embeddings, a norm, L blocks, and a classification head (config.head)."""

    pooler: Any = None
    classifier: Any = None

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        self.embedding = Embedding("VD", c.sizes, rngs=rngs)
        self.position_embedding = Embedding("SD", c.sizes, rngs=rngs)
        self.token_type_embedding = Embedding("AD", c.sizes, rngs=rngs)
        self.embedding_norm = Norm(c.norm, "D", c.sizes, epsilon=c.norm_epsilon, rngs=rngs)
        self.layers = parameters.stack(lambda rngs: EncoderBlock(c, rngs=rngs), c.layers, rngs)
        if c.pooler:
            self.pooler = Einsum("BD,DE->BE", c.sizes, bias=True, rngs=rngs)
        if c.head == "classification":
            self.classifier = ScalarHead(c.width, outputs=len(c.labels), bias=True, std=STD, rngs=rngs)

    @full_precision
    def __call__(self, tokens: jax.Array, token_mask: jax.Array) -> jax.Array:
        """Hidden states after the last layer, compute_dtype[B, T, D]; those at padding have no meaning.

        Args: tokens: int32[B, T], padded on the right; token_mask: bool[B, T], true on real tokens. Raises ValueError: T is more
          than the encoder's positions.
        """
        c = self.config
        chex.assert_rank([tokens, token_mask], 2)
        chex.assert_equal_shape([tokens, token_mask])
        if tokens.shape[1] > c.position_limit:
            told = f"rows of {tokens.shape[1]} tokens are longer than the {c.position_limit} positions of the encoder"
            raise ValueError(f"{told}: truncate the texts")
        B, T = tokens.shape
        # Real tokens are one segment and padding is another, so that a row without real tokens has something to attend to.
        attend = attention.whole_rows(B, T, token_mask.astype(jnp.int32), causal=False, kernel=c.attention)
        positions = jnp.broadcast_to(jnp.arange(T), (B, T))
        if c.position_offset:
            positions = jnp.cumsum(token_mask, axis=1) * token_mask + c.position_offset - 1
        x = self.embedding(tokens.reshape(-1), dtype=c.compute_dtype)
        x = x + self.position_embedding(positions.reshape(-1), dtype=c.compute_dtype)
        x = x + self.token_type_embedding(jnp.zeros(B * T, jnp.int32), dtype=c.compute_dtype)  # one segment a row
        x = self.embedding_norm(sharding.constrain(x, "tD"))

        def layer(block: EncoderBlock, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return block(x, attend), None

        return parameters.scan(layer, self.layers, x, dtype=c.compute_dtype, policy=None)[0].reshape(B, T, -1)

    @full_precision
    def classify(self, tokens: jax.Array, token_mask: jax.Array) -> jax.Array:
        """float32[B, labels]: logits of the classes, in the order of config.labels. Args: see __call__."""
        hidden = self(tokens, token_mask)
        # logits = W₂ tanh(W₁ h₀ + b₁) + b₂, in float32: one small product a row, and the reward reads it.
        with jax.default_matmul_precision("highest"):
            return self.classifier(jnp.tanh(self.pooler(hidden[:, 0].astype(jnp.float32))))

    def sentence_embeddings(self, tokens: jax.Array, token_mask: jax.Array) -> jax.Array:
        """float32[B, D]: sentence embeddings, vectors of length 1 (0 without real tokens). Args: see __call__.

        The mean of the hidden states over real tokens, special tokens included, then L2-normalised: Reimers and Gurevych, 2019
        (arXiv:1908.10084, section 3, MEAN) and the convention of the published MiniLM models.
        """
        hidden = self(tokens, token_mask).astype(jnp.float32)
        weights = token_mask[:, :, None].astype(jnp.float32)
        # e = m / |m|, m = Σ_t h_t / number of real tokens; the floors are those of the published code.
        mean = jnp.sum(hidden * weights, axis=1) / jnp.maximum(jnp.sum(weights, axis=1), 1e-9)
        return mean * jax.lax.rsqrt(jnp.maximum(jnp.sum(mean * mean, axis=-1, keepdims=True), 1e-24))


def define(config: EncoderConfig) -> Definition[Encoder]:
    return parameters.define(lambda rngs: Encoder(config, rngs=rngs))


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
        what = "a language model, which embeds no sentences unless it was trained to"
        told = f"{settings.path}: architectures={other} is {what}"
        raise ValueError(f"{told}: that is believed of sentence-transformers folders, which hold a modules.json")
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
        told = f"{path} lists {', '.join(other)}, which would be left out"
        raise ValueError(f"{told}; an encoder computes {', '.join(_MODULES)} only")
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
        define=define,
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
