"""Teacher-forced log-probabilities: the one function by which trainer and searcher score a given response."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tba_jax import mesh as mesh_lib
from tba_jax import run_config
from tba_jax.models import decoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResponseSpace:
    """Which responses there are, and at which temperature they are scored: the same for the policy and the reference.

    π(y_t|x, y_<t) = softmax(logits / temperature) over all tokens but the banned ones and, where t + 1 < min_length, the
    end of sequence. t counts response tokens from 0, so none ends by it with fewer than min_length of them.

    temperature: the run's scoring temperature T (PAPER §1: one constant that defines the policy and the reference alike);
    banned_tokens: ids below V that no response holds; eos_id: the end of sequence, -1: there is none; min_length: tokens,
    0 and 1: any.
    """

    temperature: float
    banned_tokens: tuple[int, ...]
    eos_id: int
    min_length: int = 0

    def __post_init__(self) -> None:
        if self.min_length > 1 and self.eos_id < 0:
            raise ValueError(f"min_length={self.min_length} holds back the end of sequence, and eos_id={self.eos_id} names none")

    @classmethod
    def of(cls, contract: run_config.Contract) -> Self:
        """That of a run."""
        return cls(
            temperature=contract.scoring_temperature,
            banned_tokens=tuple(contract.banned_tokens),
            eos_id=contract.eos_id,
            min_length=contract.min_response_length,
        )


def response_hidden_states(
    params: decoder.Params,
    prompt_tokens: jax.Array,
    prompt_length: jax.Array,
    response_tokens: jax.Array,
    *,
    config: decoder.DecoderConfig,
    remat: str,
) -> jax.Array:
    """compute_dtype[B, R, D]: the hidden states that responses are predicted from, that of the last prompt token first.

    Args: see response_logprobs.
    """
    P, R = prompt_tokens.shape[1], response_tokens.shape[1]
    tokens = jnp.concatenate([prompt_tokens, response_tokens], axis=1)
    # Rows are moved to the left end: without padding on the left, causal attention needs no mask. The last response token
    # predicts nothing that is scored, so it is left out of the forward pass.
    tokens = jnp.take_along_axis(tokens, (jnp.arange(P + R)[None, :] + (P - prompt_length)[:, None]) % (P + R), axis=1)[:, :-1]
    hidden = decoder.hidden_states(params, tokens, None, config=config, remat=remat)
    return jax.vmap(lambda row, length: jax.lax.dynamic_slice_in_dim(row, length - 1, R))(hidden, prompt_length)


def response_logprobs(
    params: decoder.Params,
    prompt_tokens: jax.Array,
    prompt_length: jax.Array,
    response_tokens: jax.Array,
    response_length: jax.Array,
    *,
    config: decoder.DecoderConfig,
    space: ResponseSpace,
    logit_bytes: int,
    remat: str,
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities and entropies of response tokens within the response space.

    Args:
      params: decoder parameters (float32 master weights; cast inside).
      prompt_tokens: int32[B, P], left-padded; prompt_length: int32[B].
      response_tokens: int32[B, R], right-padded; response_length: int32[B], end-of-sequence included.
      logit_bytes: what logits [B, time, V] may take at a time, over all devices; at least one time step, see token_logprobs.
      remat: what the backward pass recomputes of the layers, a name of layers.REMAT.

    Returns:
      logprobs float32[B, R] and entropy float32[B, R], nats, both 0 where masked. Entropy carries no gradient.
    """
    chex.assert_rank([prompt_tokens, response_tokens], 2)
    chex.assert_rank([prompt_length, response_length], 1)
    hidden = response_hidden_states(params, prompt_tokens, prompt_length, response_tokens, config=config, remat=remat)
    logprobs, entropy = token_logprobs(
        params,
        hidden,
        response_tokens,
        config=config,
        space=space,
        logit_bytes=logit_bytes,
    )
    mask = jnp.arange(response_tokens.shape[1])[None, :] < response_length[:, None]
    return jnp.where(mask, logprobs, 0.0), jnp.where(mask, entropy, 0.0)


def scorer(
    mesh: Mesh, *, config: decoder.DecoderConfig, space: ResponseSpace, logit_megabytes: int
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """response_logprobs as a program of a mesh, without a backward pass; its arguments are those up to response_length.

    Args: logit_megabytes: what logits take at a time on each device.
    """
    score = functools.partial(
        response_logprobs, config=config, space=space, logit_bytes=(logit_megabytes << 20) * mesh.size, remat="none"
    )
    return mesh_lib.on_mesh(mesh, jax.jit(score))


def token_logprobs(
    params: decoder.Params,
    hidden: jax.Array,
    tokens: jax.Array,
    *,
    config: decoder.DecoderConfig,
    space: ResponseSpace,
    logit_bytes: int,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each token given its hidden state, and the entropy of its distribution; never logits [B, R, V].

    The response is cut along time into blocks [B, time] of as many steps as the budget allows, at least one, so that on a
    mesh every device has its rows in every block. One block's logits exist at a time; the backward pass computes them again.

    Args:
      params: parameters of the head, see decoder.logits_of.
      hidden: [B, R, D]; tokens: int32[B, R], the response from its first token on.
      logit_bytes: of float32[B, time, V], the largest array that is made.

    Returns:
      float32[B, R] and float32[B, R], nats. Entropy carries no gradient.
    """
    if logit_bytes < 1:
        raise ValueError(f"logit_bytes={logit_bytes} must be at least 1")
    B, R, D = hidden.shape
    head: decoder.Params = {name: params[name] for name in ("embedding", "lm_head") if name in params}

    def score_block(head: decoder.Params, hidden: jax.Array, tokens: jax.Array, first: Any) -> tuple[jax.Array, jax.Array]:
        """Args: first: int32[], the response index of the block's first token."""
        logits = decoder.logits_of(head, hidden.reshape(-1, D), config=config)
        position = jnp.broadcast_to(first + jnp.arange(tokens.shape[1]), tokens.shape)
        distribution = log_softmax(logits, position.reshape(-1), space)
        chosen = jnp.take_along_axis(distribution, tokens.reshape(-1, 1), axis=-1)
        detached = jax.lax.stop_gradient(distribution)
        entropy = -jnp.sum(jnp.where(jnp.isfinite(detached), jnp.exp(detached) * detached, 0.0), axis=-1)
        return chosen.reshape(tokens.shape), entropy.reshape(tokens.shape)

    steps = max(1, min(R, logit_bytes // (4 * B * config.vocab)))
    if steps == R:
        return score_block(head, hidden, tokens, 0)
    blocks = -(-R // steps)

    def split(x: jax.Array) -> jax.Array:
        """[B, R, ...] -> [blocks, B, steps, ...], padded with zeros."""
        padded = jnp.pad(x, ((0, 0), (0, blocks * steps - R)) + ((0, 0),) * (x.ndim - 2))
        return padded.reshape(B, blocks, steps, *x.shape[2:]).swapaxes(0, 1)

    def one(block: Any) -> Any:
        return jax.checkpoint(score_block)(head, *block)

    found = jax.lax.map(one, (split(hidden), split(tokens), steps * jnp.arange(blocks)))
    logprobs, entropy = (x.swapaxes(0, 1).reshape(B, blocks * steps)[:, :R] for x in found)
    return logprobs, entropy


def restrict(logits: jax.Array, position: jax.Array, space: ResponseSpace) -> jax.Array:
    """The logits, float32[..., V], -inf outside of the response space.

    Args:
      logits: [..., V], any float dtype.
      position: int32[...], the response index t of the token that the logits predict, from 0.
    """
    logits = logits.astype(jnp.float32)
    V = logits.shape[-1]
    if space.banned_tokens:
        logits = jnp.where(jnp.zeros(V, bool).at[jnp.array(space.banned_tokens)].set(True), -jnp.inf, logits)
    if space.min_length > 1:
        too_early = (position + 1 < space.min_length)[..., None] & (jnp.arange(V) == space.eos_id)
        logits = jnp.where(too_early, -jnp.inf, logits)
    return logits


def log_softmax(logits: jax.Array, position: jax.Array, space: ResponseSpace) -> jax.Array:
    """log softmax(logits / temperature) over the response space: float32[..., V], nats, -inf outside. Args: see restrict."""
    return jax.nn.log_softmax(restrict(logits, position, space) / space.temperature, axis=-1)
