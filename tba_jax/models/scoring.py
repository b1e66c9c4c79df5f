"""Teacher-forced log-probabilities: the one function by which trainer and searcher score a given response."""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from tba_jax.models import decoder


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
    temperature: float,
    banned_tokens: tuple[int, ...],
    logit_bytes: int,
    remat: str,
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities and entropies of response tokens under softmax(logits / temperature).

    Args:
      params: decoder parameters (float32 master weights; cast inside).
      prompt_tokens: int32[B, P], left-padded; prompt_length: int32[B].
      response_tokens: int32[B, R], right-padded; response_length: int32[B], end-of-sequence included.
      temperature: the run's scoring temperature T (PAPER §1: one constant that defines the policy and the reference alike).
      banned_tokens: token ids that are not part of the response space; their logits are -inf before normalisation.
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
        temperature=temperature,
        banned_tokens=banned_tokens,
        logit_bytes=logit_bytes,
    )
    mask = jnp.arange(response_tokens.shape[1])[None, :] < response_length[:, None]
    return jnp.where(mask, logprobs, 0.0), jnp.where(mask, entropy, 0.0)


def token_logprobs(
    params: decoder.Params,
    hidden: jax.Array,
    tokens: jax.Array,
    *,
    config: decoder.DecoderConfig,
    temperature: float,
    banned_tokens: tuple[int, ...],
    logit_bytes: int,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each token given its hidden state, and the entropy of its distribution; never logits [B, R, V].

    The response is cut along time into blocks [B, time] of as many steps as the budget allows, at least one, so that on a
    mesh every device has its rows in every block. One block's logits exist at a time; the backward pass computes them again.

    Args:
      params: parameters of the head, see decoder.logits_of.
      hidden: [B, R, D]; tokens: int32[B, R].
      logit_bytes: of float32[B, time, V], the largest array that is made.

    Returns:
      float32[B, R] and float32[B, R], nats. Entropy carries no gradient.
    """
    if logit_bytes < 1:
        raise ValueError(f"logit_bytes={logit_bytes} must be at least 1")
    B, R, D = hidden.shape
    head: decoder.Params = {name: params[name] for name in ("embedding", "lm_head") if name in params}

    def score_block(head: decoder.Params, hidden: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = decoder.logits_of(head, hidden.reshape(-1, D), config=config)
        distribution = log_softmax(logits, temperature, banned_tokens)
        chosen = jnp.take_along_axis(distribution, tokens.reshape(-1, 1), axis=-1)
        detached = jax.lax.stop_gradient(distribution)
        entropy = -jnp.sum(jnp.where(jnp.isfinite(detached), jnp.exp(detached) * detached, 0.0), axis=-1)
        return chosen.reshape(tokens.shape), entropy.reshape(tokens.shape)

    steps = max(1, min(R, logit_bytes // (4 * B * config.vocab)))
    if steps == R:
        return score_block(head, hidden, tokens)
    blocks = -(-R // steps)

    def split(x: jax.Array) -> jax.Array:
        """[B, R, ...] -> [blocks, B, steps, ...], padded with zeros."""
        padded = jnp.pad(x, ((0, 0), (0, blocks * steps - R)) + ((0, 0),) * (x.ndim - 2))
        return padded.reshape(B, blocks, steps, *x.shape[2:]).swapaxes(0, 1)

    def one(block: Any) -> Any:
        return jax.checkpoint(score_block)(head, *block)

    found = jax.lax.map(one, (split(hidden), split(tokens)))
    logprobs, entropy = (x.swapaxes(0, 1).reshape(B, blocks * steps)[:, :R] for x in found)
    return logprobs, entropy


def log_softmax(logits: jax.Array, temperature: jax.Array | float, banned_tokens: tuple[int, ...]) -> jax.Array:
    """log softmax(logits / temperature) over the response space: float32[..., V], -inf on banned tokens."""
    logits = logits.astype(jnp.float32)
    if banned_tokens:
        banned = jnp.zeros(logits.shape[-1], bool).at[jnp.array(banned_tokens)].set(True)
        logits = jnp.where(banned, -jnp.inf, logits)
    return jax.nn.log_softmax(logits / temperature, axis=-1)
