"""Teacher-forced log-probabilities: the one function by which trainer and searcher score a given response."""

import chex
import jax
import jax.numpy as jnp

from tba_jax.models import decoder


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
    rows_per_block: int,
    remat: bool,
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities and entropies of response tokens under softmax(logits / temperature).

    Args:
      params: decoder parameters (float32 master weights; cast inside).
      prompt_tokens: int32[B, P], left-padded; prompt_length: int32[B].
      response_tokens: int32[B, R], right-padded; response_length: int32[B], end-of-sequence included.
      temperature: the run's scoring temperature T (PAPER §1: one constant that defines the policy and the reference alike).
      banned_tokens: token ids that are not part of the response space; their logits are -inf before normalisation.
      rows_per_block: rows whose [R, V] logits exist at a time; the backward pass recomputes them. The largest divisor of B up to
        this number is used; on a mesh, a multiple of the devices that rows are split over keeps every device busy in every block.
      remat: recompute each layer in the backward pass.

    Returns:
      logprobs float32[B, R] and entropy float32[B, R], nats, both 0 where masked. Entropy carries no gradient.
    """
    chex.assert_rank([prompt_tokens, response_tokens], 2)
    chex.assert_rank([prompt_length, response_length], 1)
    if rows_per_block < 1:
        raise ValueError(f"rows_per_block={rows_per_block} must be at least 1")
    P, R = prompt_tokens.shape[1], response_tokens.shape[1]
    prompt_mask = jnp.arange(P)[None, :] >= P - prompt_length[:, None]
    mask = jnp.arange(R)[None, :] < response_length[:, None]
    tokens = jnp.concatenate([prompt_tokens, response_tokens], axis=1)
    token_mask = jnp.concatenate([prompt_mask, mask], axis=1)
    # The last token predicts nothing that is scored, so it is left out of the forward pass.
    hidden = decoder.hidden_states(params, tokens[:, :-1], token_mask[:, :-1], config=config, remat=remat)[:, P - 1 :]

    def score_block(rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        block_hidden, block_tokens = rows
        logits = decoder.logits_of(params, block_hidden, config=config)
        distribution = log_softmax(logits, temperature, banned_tokens)
        chosen = jnp.take_along_axis(distribution, block_tokens[..., None], axis=-1)[..., 0]
        detached = jax.lax.stop_gradient(distribution)
        entropy = -jnp.sum(jnp.where(jnp.isfinite(detached), jnp.exp(detached) * detached, 0.0), axis=-1)
        return chosen, entropy

    B = hidden.shape[0]
    rows = max(rows for rows in range(1, min(rows_per_block, B) + 1) if B % rows == 0)

    def split(x: jax.Array) -> jax.Array:
        """[B, ...] -> [B/rows, rows, ...]; a block takes rows from all over the batch, so from every device of the mesh."""
        return x.reshape(rows, B // rows, *x.shape[1:]).swapaxes(0, 1)

    def join(x: jax.Array) -> jax.Array:
        return x.swapaxes(0, 1).reshape(B, *x.shape[2:])

    if rows == B:
        logprobs, entropy = score_block((hidden, response_tokens))
    else:
        blocks = jax.lax.map(jax.checkpoint(score_block), (split(hidden), split(response_tokens)))
        logprobs, entropy = (join(x) for x in blocks)
    return jnp.where(mask, logprobs, 0.0), jnp.where(mask, entropy, 0.0)


def log_softmax(logits: jax.Array, temperature: jax.Array | float, banned_tokens: tuple[int, ...]) -> jax.Array:
    """log softmax(logits / temperature) over the response space: float32[..., V], -inf on banned tokens."""
    logits = logits.astype(jnp.float32)
    if banned_tokens:
        banned = jnp.zeros(logits.shape[-1], bool).at[jnp.array(banned_tokens)].set(True)
        logits = jnp.where(banned, -jnp.inf, logits)
    return jax.nn.log_softmax(logits / temperature, axis=-1)
