"""One decoder-only transformer, of which GPT-2, GPT-NeoX, Llama, Mistral, Qwen2, Qwen3, its mixtures of experts, gpt-oss, Gemma
3 and OLMo 2 are settings."""

import functools
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from tba_jax import sharding
from tba_jax.models import attention, parameters
from tba_jax.models.attention import Attend, Attention, Prefix, Rotary
from tba_jax.models.config import STD, DecoderConfig
from tba_jax.models.experts import Experts, Routing
from tba_jax.models.layers import (
    REMAT_POLICIES,
    Einsum,
    Embedding,
    FeedForward,
    Norm,
    ReadyMap,
    ScalarHead,
    float32_sums,
    full_precision,
    over_rows,
)
from tba_jax.models.parameters import Definition

# Up to so many layers are unrolled where the backward pass recomputes nothing: a loop copies what each layer keeps into arrays of
# all layers, and the weights of each layer out of them. With rematerialisation a loop is what bounds the memory.
_UNROLLED = 8


def _normed(norm: Any, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


@flax.struct.dataclass
class Head:
    """The map of hidden states [t, D] to logits float32[t, V]: float32 because log-prob sums over long rows need it.

    maps: of the weight, and of both parts of its adapter where it has one; their gradients are float32 (layers.float32_sums).
    quant_scale: of an int8 weight, float32[V]; lora_scale: of the adapter.
    """

    maps: tuple[ReadyMap, ...]
    quant_scale: jax.Array | None = None
    lora_scale: float = flax.struct.field(pytree_node=False, default=0.0)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        product, *adapter = self.maps
        logits = product(hidden)
        if self.quant_scale is not None:
            logits = logits * self.quant_scale
        if adapter:
            down, up = adapter
            logits = logits + up((self.lora_scale * down(hidden)).astype(hidden.dtype))
        return logits


class Block(nnx.Module):
    """A layer of the decoder: attention and feed-forward, each with norms and added to the residual stream."""

    attention_post_norm: Any = None
    feed_forward_post_norm: Any = None

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c = config
        norm = functools.partial(Norm, c.norm, "D", c.sizes, epsilon=c.norm_epsilon, rngs=rngs)
        self.parallel_residual = c.parallel_residual
        self.attention_norm = norm() if c.norm_place != "after" else None
        self.attention = Attention(c, rngs=rngs)
        self.feed_forward_norm = norm() if c.norm_place != "after" else None
        self.feed_forward = Experts(c, rngs=rngs) if c.experts else FeedForward(c, rngs=rngs)
        if c.norm_place != "before":
            self.attention_post_norm, self.feed_forward_post_norm = norm(), norm()

    def project(self, x: jax.Array, rotary: Rotary) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query [t, N, H], key and value [t, G, H] of the block's input x [t, D]."""
        return self.attention.project(_normed(self.attention_norm, x), rotary)

    def __call__(
        self, x: jax.Array, rotary: Rotary, attend: Attend, counted: jax.Array | None = None
    ) -> tuple[jax.Array, Any, Routing | None]:
        """Returns x [t, D] after the block, the second result of `attend`, and how experts were chosen. Args: counted: see
        Experts; without experts it is not read."""
        attended, kept = self.attention(_normed(self.attention_norm, x), rotary, attend)
        if self.parallel_residual:
            fed, routing = self._feed(x, counted)
            return x + attended + fed, kept, routing
        x = x + _normed(self.attention_post_norm, attended)
        fed, routing = self._feed(x, counted)
        return x + _normed(self.feed_forward_post_norm, fed), kept, routing

    def _feed(self, x: jax.Array, counted: jax.Array | None) -> tuple[jax.Array, Routing | None]:
        normed = _normed(self.feed_forward_norm, x)
        if isinstance(self.feed_forward, Experts):
            return self.feed_forward(normed, counted)
        return self.feed_forward(normed), None


class Decoder(nnx.Module):
    """Embedding, L blocks, a norm, and a head: the map to logits of the vocabulary, or to scores (config.head)."""

    position_embedding: Any = None
    lm_head: Any = None
    score: Any = None

    def __init__(self, config: DecoderConfig, *, unstacked: bool = False, rngs: nnx.Rngs):
        """Args: unstacked: `layers` is a list of blocks, as kv_cache.py needs them, instead of one stack."""
        c = self.config = config
        self.embedding = Embedding("VD", c.sizes, rngs=rngs)
        if c.positions == "learned":
            self.position_embedding = Embedding("SD", c.sizes, rngs=rngs)
        layers = parameters.stack(lambda rngs: Block(c, rngs=rngs), c.layers, rngs)
        self.layers: Any = parameters.unstack(layers, c.layers) if unstacked else layers
        self.final_norm = Norm(c.norm, "D", c.sizes, epsilon=c.norm_epsilon, rngs=rngs)
        if c.head == "score":
            self.score = ScalarHead(c.width, outputs=c.labels, bias=False, std=STD, rngs=rngs)
        elif not c.tied_embedding:
            self.lm_head = Einsum("tD,DV->tV", c.sizes, rngs=rngs)

    def embed_tokens(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Returns compute_dtype[t, D] for flat tokens and positions, int32[t]."""
        x = self.embedding(tokens, dtype=self.config.compute_dtype)
        if self.config.scaled_embedding:
            x = x * jnp.asarray(math.sqrt(self.config.width), x.dtype)  # rounded as the reference implementation rounds it
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions, dtype=self.config.compute_dtype)
        return sharding.constrain(x, "tD")

    def __call__(self, tokens: jax.Array, **options: Any) -> jax.Array:
        """Hidden states of whole sequences after the final norm, compute_dtype[B, T, D]. Args: see `routed`."""
        return self.routed(tokens, **options)[0]

    @full_precision
    def routed(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        prefix: Prefix | None = None,
        remat: str = "none",
        counted: jax.Array | None = None,
    ) -> tuple[jax.Array, Routing | None]:
        """Hidden states of whole sequences after the final norm, compute_dtype[B, T, D], and how experts were chosen.

        Args:
          tokens: int32[B, T], padded on the right or not at all: causality alone keeps real tokens from attending to padding.
          positions: int32[B, T]; None: from 0 on. segments: int32[B, T], at least 0: tokens attend within their segment, whose
            tokens are consecutive; None: a sequence is one segment.
          prefix: which tokens of other sequences are read as well; with positions and segments, and not by every kernel, see
            scoring.shares_prompts. None: no others.
          remat: what the backward pass recomputes, a name of layers.REMAT.
          counted: [B, T], how often each token counts in the Routing; None, or without experts: there is none.
        """
        c = self.config
        B, T = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(T), (B, T)) if positions is None else positions
        kinds = sorted(set(c.local_layers))
        tables = [attention.rotary(positions.reshape(-1), c, local=local) for local in kinds]
        kernel: dict[str, Any] = dict(causal=True, kernel=c.attention, positions=positions, prefix=prefix)
        attends = [attention.whole_rows(B, T, segments, **kernel, window=c.window * local) for local in kinds]

        def layer(block: Block, x: jax.Array, local: jax.Array | None) -> tuple[jax.Array, Routing | None]:
            """local: bool[]; None: the layers are all of one kind."""
            real = None if counted is None else counted.reshape(-1)
            if local is None:
                return block(x, tables[0], lambda *qkv: (attends[0](*qkv)[0], None), real)[::2]
            rotary = jax.tree.map(lambda of_global, of_local: jnp.where(local, of_local, of_global), *tables)
            whole, windowed = (lambda *qkv, attend=attend: attend(*qkv)[0] for attend in attends)
            return block(x, rotary, lambda *qkv: (jax.lax.cond(local, windowed, whole, *qkv), None), real)[::2]

        x, routing = parameters.scan(
            layer,
            self.layers,
            self.embed_tokens(tokens.reshape(-1), positions.reshape(-1)),
            along=jnp.array(c.local_layers) if len(kinds) > 1 else None,
            dtype=c.compute_dtype,
            policy=REMAT_POLICIES[remat],
            unroll=remat == "none" and c.layers <= _UNROLLED,
        )
        return self.final_norm(x).reshape(B, T, -1), routing

    def head(self, *, vmapped: bool = False) -> Head:
        """The map to logits. Weights are cast and gathered now: call `head` once, outside of the loop that uses the map.

        Args: vmapped: whether the map will be vmapped over rows (layers.over_rows).
        """
        assert self.score is None, "a model with a score head has no language-model head"
        if self.lm_head is None:
            return Head((self._ready("tD,VD->tV", self.embedding.weight, self.embedding.axes, vmapped),))
        head: Any = self.lm_head
        maps: tuple[ReadyMap, ...] = (self._ready(head.equation, head.weight, head.axes, vmapped),)
        if head.lora_a is not None:
            into, out_of = head.adapter_equations()
            maps += (self._ready(into, head.lora_a, "Dr", vmapped), self._ready(out_of, head.lora_b, "rV", vmapped))
        return Head(maps, None if head.quant_scale is None else head.quant_scale[...], lora_scale=head.lora_scale)

    def _ready(self, equation: str, parameter: Any, axes: str, vmapped: bool) -> ReadyMap:
        """The map x -> einsum(equation, x, parameter). Args: see head."""
        product = over_rows(float32_sums(equation)) if vmapped else float32_sums(equation)
        master = parameter[...]
        weight = jax.lax.stop_gradient(sharding.constrain(master.astype(self.config.compute_dtype), axes))
        return ReadyMap(weight, master, product)


def define(config: DecoderConfig) -> Definition[Decoder]:
    """The definition of a decoder, its blocks in one stack."""
    return parameters.define(lambda rngs: Decoder(config, rngs=rngs))
