"""Teacher-forced log-probabilities: the one function by which trainer and searcher score a given response."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from tba_jax import sharding
from tba_jax.models import attention, parameters
from tba_jax.models.attention import Prefix
from tba_jax.models.config import DecoderConfig, ResponseSpace
from tba_jax.models.decoder import Decoder, Head
from tba_jax.models.experts import Routing
from tba_jax.models.layers import full_precision
from tba_jax.models.parameters import Params
from tba_jax.packing import Packed, Sequences, summed


@jax.named_scope("score")
def response_logprobs(
    model: Decoder,
    tokens: jax.Array,
    prompt_length: jax.Array,
    response_length: jax.Array,
    *,
    R: int,
    space: ResponseSpace,
    logit_bytes: int,
    remat: str,
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities and entropies of response tokens within the response space, float32[B, R] each, nats, 0 where masked.

    Args:
      model: with float32 master weights, which it casts, or weights in its compute dtype.
      tokens: int32[B, T], rows as in trajectory; prompt_length: int32[B], at least 1 and at most T − R;
      response_length: int32[B], end-of-sequence included.
      R: the most tokens that a response may have.
      logit_bytes: what logits [B, time, V] may take at a time, over all devices; at least one time step, see token_logprobs.
      remat: what the backward pass recomputes of the layers, a name of layers.REMAT.
    """
    chex.assert_rank([tokens, prompt_length, response_length], [2, 1, 1])
    cut = jax.vmap(lambda row, begin: jax.lax.dynamic_slice_in_dim(row, begin, R))
    # The last token of a row predicts nothing that is scored, so it is left out of the forward pass.
    hidden, responses = cut(model(tokens[:, :-1], remat=remat), prompt_length - 1), cut(tokens, prompt_length)
    logprobs, entropy = token_logprobs(model, hidden, responses, space=space, logit_bytes=logit_bytes)
    mask = jnp.arange(R)[None, :] < response_length[:, None]
    return jnp.where(mask, logprobs, 0.0), jnp.where(mask, entropy, 0.0)


@jax.named_scope("score")
def packed_hidden_states(model: Decoder, sequences: Sequences, *, remat: str, none: int) -> tuple[jax.Array, Routing | None]:
    """compute_dtype[W·M, places, D]: the hidden states that the listed response tokens are predicted from; and how experts were
    chosen on the way to these states, or None without experts. A state counts once for each token that is predicted from it.

    Args: remat: see response_logprobs; none: see packed_logprobs.
    """
    W, M, S = sequences.tokens.shape
    flat = jax.tree.map(lambda x: x.reshape(W * M, -1), sequences)
    prefix = None if sequences.prefix is None else Prefix(sequences.prefix, flat.parents)
    states, listed = (x.reshape(W, -1) for x in (sequences.states, sequences.numbers < none))
    counted = jax.vmap(lambda states, listed: jnp.zeros(M * S).at[states].add(listed))(states, listed).reshape(W * M, S)
    where: dict[str, Any] = dict(positions=flat.positions, segments=flat.segments, prefix=prefix)
    hidden, routing = model.routed(flat.tokens, **where, counted=counted, remat=remat)
    predicting = jax.vmap(lambda of_way, states: of_way[states])(hidden.reshape(W, M * S, -1), sequences.states)
    return predicting.reshape(W * M, *predicting.shape[2:]), routing


@jax.named_scope("score")
def packed_logprobs(
    model: Decoder, hidden: jax.Array, sequences: Sequences, *, R: int, space: ResponseSpace, logit_bytes: int, none: int
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities and entropies, see response_logprobs, of the response tokens that a micro-batch lists: float32[W·M,
    places] each. Args: none: the number of padding, B·R."""
    numbers, targets = (x.reshape(hidden.shape[:2]) for x in (sequences.numbers, sequences.targets))
    listed = numbers < none
    used = jnp.max(jnp.sum(listed, axis=1))
    logprobs, entropy = token_logprobs(model, hidden, targets, numbers % R, space=space, logit_bytes=logit_bytes, used=used)
    return jnp.where(listed, logprobs, 0.0), jnp.where(listed, entropy, 0.0)


def by_row(values: jax.Array, numbers: jax.Array, *, B: int, R: int) -> jax.Array:
    """Values of the listed response tokens, [W·M, places], in their rows: [B, R], 0 elsewhere."""
    flat = jnp.zeros(B * R, values.dtype)
    return flat.at[numbers.reshape(-1)].add(values.reshape(-1), mode="drop").reshape(B, R)


def packed_shardings(mesh: Mesh) -> Any:
    """The shardings of packing.Packed, a prefix of its tree: every micro-batch is split over the mesh as rows are."""
    sequences: Any = sharding.sequences_sharding(mesh)
    whole = sharding.replicated(mesh)
    return Packed(micro_batches=sequences, count=whole, of_row=whole)


def program(
    mesh: Mesh, *, graphdef: nnx.GraphDef, R: int, space: ResponseSpace, logit_megabytes: int
) -> Callable[[Params, Packed], jax.Array]:
    """A jitted function that scores B packed rows on a mesh: (parameters, packed) to float32[B, R], nats, 0 where masked.

    Args: graphdef: of the decoder; R: see response_logprobs; logit_megabytes: what logits take at a time on each device.
    """

    def score(params: Params, packed: Packed) -> jax.Array:
        model, (B,), logit_bytes = parameters.module(graphdef, params), packed.of_row.shape, (logit_megabytes << 20) * mesh.size

        def of_micro_batch(micro: Sequences, _: jax.Array) -> jax.Array:
            hidden = packed_hidden_states(model, micro, remat="none", none=B * R)[0]
            logprobs, _ = packed_logprobs(model, hidden, micro, R=R, none=B * R, space=space, logit_bytes=logit_bytes)
            return by_row(logprobs, micro.numbers, B=B, R=R)

        return summed(of_micro_batch, packed)

    return sharding.on_mesh(mesh, jax.jit(score))


def sequence_scores(model: Decoder, tokens: jax.Array, length: jax.Array, *, remat: str) -> jax.Array:
    """float32[B, labels], read at the last real token (the `ForSequenceClassification` models of transformers).

    Args: model: with head="score"; tokens: int32[B, T], padded on the right; length: int32[B], real tokens.
    """
    hidden = model(tokens, remat=remat)
    last = jax.vmap(lambda row, n: jax.lax.dynamic_index_in_dim(row, n - 1, keepdims=False))(hidden, length)
    return model.score(last)


def mean_prompt_states(model: Decoder, tokens: jax.Array, prompt_length: jax.Array) -> jax.Array:
    """float32[Q, D]: means of the last hidden states over the tokens of each prompt, without gradient; 0 where there are none.

    Args: tokens: int32[Q, n], rows that begin with a prompt, whatever follows it; prompt_length: int32[Q], at most n.
    """
    hidden = jax.lax.stop_gradient(model(tokens))
    real = (jnp.arange(tokens.shape[1])[None, :] < prompt_length[:, None])[..., None]
    return jnp.sum(jnp.where(real, hidden.astype(jnp.float32), 0.0), axis=1) / jnp.maximum(prompt_length, 1)[:, None]


def shares_prompts(model: DecoderConfig, mesh: Mesh) -> bool:
    """Whether rows of equal prompts are scored with one prompt on a mesh: splash reads no sequence but a token's own."""
    platform = mesh.devices.flat[0].platform
    chosen = model.attention == "auto"
    kernel = attention.fastest(platform, model.compute_dtype, model.head_size) if chosen else model.attention
    return kernel != "splash"


@full_precision
def token_logprobs(
    model: Decoder,
    hidden: jax.Array,
    tokens: jax.Array,
    position: jax.Array | None = None,
    *,
    space: ResponseSpace,
    logit_bytes: int,
    used: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of tokens given their hidden states, and entropies of their distributions, float32[B, R] each, nats.

    Args:
      hidden: [B, R, D]; tokens: int32[B, R]; position: int32[B, R], the place of each token in its response; None: from 0 on.
      logit_bytes: of float32[B, time, V], the largest array that is made; at least one time step. All rows take part in every
        block of time, so that on a mesh every device has its rows in each.
      used: int32[]: what comes later in rows is not computed, but for the rest of a block; None: all is.
    """
    B, R, _ = hidden.shape
    steps = max(1, min(R, logit_bytes // (4 * B * model.config.vocab)))
    kernel = jax.vmap(functools.partial(row_logprobs, space=space), in_axes=(None, 0, 0, 0))
    position = jnp.broadcast_to(jnp.arange(R), (B, R)) if position is None else position
    given = model.head(vmapped=True), hidden, jnp.asarray(tokens), position
    return kernel(*given) if steps == R else _by_blocks(kernel, steps, *given, R if used is None else used)


def row_logprobs(
    head: Head, hidden: jax.Array, tokens: jax.Array, position: jax.Array, *, space: ResponseSpace
) -> tuple[jax.Array, jax.Array]:
    """The log-prob kernel, of some tokens of one row; to be vmapped over rows.

        z_t = head(h_t) / temperature over the response space
        log π(y_t | x, y_<t) = z_t[y_t] − log Σ_v exp z_t[v]
        entropy_t = −Σ_v π(v | x, y_<t) log π(v | x, y_<t)

    Args: hidden: [t, D]; tokens, position: int32[t].
    """
    return chosen_logprobs(restrict(head(hidden), position, space) / space.temperature, tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_blocks(
    kernel: Callable[..., tuple[jax.Array, jax.Array]],
    steps: int,
    head: Head,
    hidden: jax.Array,
    tokens: jax.Array,
    position: jax.Array,
    used: jax.Array | int,
) -> tuple[jax.Array, jax.Array]:
    """The kernel of all rows on `steps` times at a time, as far as `used` goes: one block's logits exist at once.

    The backward pass computes them again. It has a loop of its own: JAX' derivative of a loop that may skip blocks would keep a
    copy of the head's weight for each block.
    """
    (B, R), cut = tokens.shape, functools.partial(_cut, steps=steps)
    blocks = cut(hidden), cut(tokens), cut(position)

    def add(i: jax.Array, found: Any) -> Any:
        of_block = kernel(head, *(x[i] for x in blocks))
        return jax.tree.map(lambda x, block: x.at[i].set(block), found, of_block)

    nothing = jnp.zeros(blocks[1].shape, jnp.float32)
    found = jax.lax.fori_loop(0, -(-used // steps), add, (nothing, nothing))
    logprobs, entropy = (x.swapaxes(0, 1).reshape(B, -1)[:, :R] for x in found)
    return logprobs, entropy


def _blocks_forward(kernel: Any, steps: int, *given: Any) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    return _by_blocks(kernel, steps, *given), given


def _blocks_backward(kernel: Any, steps: int, given: tuple[Any, ...], cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    head, hidden, tokens, position, used = given
    cut = functools.partial(_cut, steps=steps)
    blocks, of_found = (cut(hidden), cut(tokens), cut(position)), tuple(map(cut, cotangents))

    def add(i: jax.Array, sums: Any) -> Any:
        of_hidden, of_masters = sums
        block, *which = (x[i] for x in blocks)
        _, pull_back = jax.vjp(lambda head, block: kernel(head, block, *which), head, block)
        of_head, of_block = pull_back(tuple(x[i] for x in of_found))
        return of_hidden.at[i].set(of_block), [x + each.master for x, each in zip(of_masters, of_head.maps, strict=True)]

    nothing = jnp.zeros_like(blocks[0]), [jnp.zeros_like(each.master) for each in head.maps]
    of_hidden, of_masters = jax.lax.fori_loop(0, -(-used // steps), add, nothing)
    of_hidden = of_hidden.swapaxes(0, 1).reshape(len(hidden), -1, hidden.shape[-1])[:, : hidden.shape[1]]
    maps = (each.replace(weight=None, master=of) for each, of in zip(head.maps, of_masters, strict=True))
    return head.replace(maps=tuple(maps), quant_scale=None), of_hidden, None, None, None


_by_blocks.defvjp(_blocks_forward, _blocks_backward)


def _cut(x: jax.Array, *, steps: int) -> jax.Array:
    """[B, R, ...] -> [blocks, B, steps, ...], padded with zeros."""
    B, R, *rest = x.shape
    padded = jnp.pad(x, ((0, 0), (0, -R % steps), *((0, 0) for _ in rest)))
    return padded.reshape(B, -1, steps, *rest).swapaxes(0, 1)


@jax.custom_vjp
def chosen_logprobs(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """log softmax(logits) at the tokens, and the entropy of softmax(logits), float32[t] each, nats. Entropy carries no gradient.

        log π(y) = z[y] − log Z,  log Z = m + log Σ_v exp(z[v] − m),  m = max_v z[v]
        entropy = log Z − Σ_v π(v) z[v]

    The backward pass, ∂ log π(y) / ∂ z[v] = 1[v = y] − π(v), keeps exp(z − m) and its sum. JAX' own derivative of log_softmax
    reads and writes more arrays of the logits' size.

    Args: logits: float32[t, V], -inf outside of the response space. tokens: int32[t].
    """
    return _chosen_forward(logits, tokens)[0]


def _chosen_forward(logits: jax.Array, tokens: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    largest = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - largest)
    total = jnp.sum(weights, axis=-1)
    # 0 · -inf is no number, but 0 times a finite one is 0. On CPUs a selection, or z − m with two readers, would be one more
    # array of the logits' size.
    mean = jnp.sum(weights * jnp.maximum(logits, jnp.finfo(logits.dtype).min), axis=-1) / total
    log_normalizer = largest[..., 0] + jnp.log(total)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return (chosen - log_normalizer, log_normalizer - mean), (weights, total, tokens)


def _chosen_backward(kept: tuple[jax.Array, ...], cotangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
    weights, total, tokens = kept
    is_token = jnp.arange(weights.shape[-1]) == tokens[..., None]
    return cotangents[0][..., None] * (is_token - weights / total[..., None]), None


chosen_logprobs.defvjp(_chosen_forward, _chosen_backward)


def restrict(logits: jax.Array, position: jax.Array, space: ResponseSpace) -> jax.Array:
    """The logits [..., V] in float32, -inf outside of the response space.

    Args: position: int32[...], the response index t of the token that the logits predict, from 0.
    """
    logits = logits.astype(jnp.float32)
    V = logits.shape[-1]
    if space.banned_tokens:
        logits = jnp.where(jnp.zeros(V, bool).at[jnp.array(space.banned_tokens)].set(True), -jnp.inf, logits)
    if space.min_length > 1:
        too_early = (position + 1 < space.min_length)[..., None] & (jnp.arange(V) == space.eos_id)
        logits = jnp.where(too_early, -jnp.inf, logits)
    return logits
