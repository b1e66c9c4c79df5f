"""Bidirectional post-norm encoders, by configuration: BERT and RoBERTa, with a sentence-embedding or a classification head.

Rows are padded on the right: BERT's positions are indices in the row, and both classification heads read the first token.
"""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from tba_jax import sharding
from tba_jax.models import attention, parameters
from tba_jax.models.attention import Attend, Attention
from tba_jax.models.config import STD, EncoderConfig
from tba_jax.models.layers import Einsum, Embedding, FeedForward, Norm, ScalarHead, full_precision
from tba_jax.models.parameters import Definition


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

        Args:
          tokens: int32[B, T], padded on the right with any token of the vocabulary.
          token_mask: bool[B, T], true on real tokens.

        Raises ValueError: T is more than the encoder's positions.
        """
        c = self.config
        chex.assert_rank([tokens, token_mask], 2)
        chex.assert_equal_shape([tokens, token_mask])
        if tokens.shape[1] > c.position_limit:
            raise ValueError(
                f"rows of {tokens.shape[1]} tokens are longer than the {c.position_limit} positions of the encoder: "
                "truncate the texts"
            )
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
        x = parameters.scan(lambda block, x, _: block(x, attend), self.layers, x, dtype=c.compute_dtype, policy=None)
        return x.reshape(B, T, -1)

    @full_precision
    def classify(self, tokens: jax.Array, token_mask: jax.Array) -> jax.Array:
        """float32[B, labels]: logits of the classes, in the order of config.labels. Args: see __call__."""
        hidden = self(tokens, token_mask)
        # logits = W₂ tanh(W₁ h₀ + b₁) + b₂, in float32: one small product a row, and the reward reads it.
        with jax.default_matmul_precision("highest"):
            return self.classifier(jnp.tanh(self.pooler(hidden[:, 0].astype(jnp.float32))))

    def sentence_embeddings(self, tokens: jax.Array, token_mask: jax.Array) -> jax.Array:
        """float32[B, D]: sentence embeddings of length 1, so that their dot products are cosine similarities.

        The mean of the hidden states over real tokens, special tokens included, then L2-normalised: Reimers and Gurevych, 2019
        (arXiv:1908.10084, section 3, MEAN) and the convention of the published MiniLM models. A row without real tokens gives 0.

        Args: see __call__.
        """
        hidden = self(tokens, token_mask).astype(jnp.float32)
        weights = token_mask[:, :, None].astype(jnp.float32)
        # e = m / |m|, m = Σ_t h_t / number of real tokens; the floors are those of the published code.
        mean = jnp.sum(hidden * weights, axis=1) / jnp.maximum(jnp.sum(weights, axis=1), 1e-9)
        return mean * jax.lax.rsqrt(jnp.maximum(jnp.sum(mean * mean, axis=-1, keepdims=True), 1e-24))


def define(config: EncoderConfig) -> Definition[Encoder]:
    """The definition of an encoder."""
    return parameters.define(lambda rngs: Encoder(config, rngs=rngs))
