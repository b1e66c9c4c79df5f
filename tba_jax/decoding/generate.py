"""Generation: prefill once per query, then one jitted loop with a KV cache that stops when every row has ended."""

from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.decoding import sampling as sampling_lib
from tba_jax.models import decoder, scoring


@flax.struct.dataclass
class Generation:
    """Responses and their log-probabilities.

    tokens: int32[B, R], right-padded; length: int32[B], end-of-sequence included; finished: bool[B], ended by an
    end-of-sequence token; policy_logprobs: float32[B, R], nats at the scoring temperature; behavior_logprobs:
    float32[B, R], nats of the distribution that was sampled; both 0 where masked.
    """

    tokens: chex.Array
    length: chex.Array
    finished: chex.Array
    policy_logprobs: chex.Array
    behavior_logprobs: chex.Array


@flax.struct.dataclass
class _Loop:
    """State of the decode loop before step t: what is written so far and the logits that step t samples from."""

    step: chex.Array  # int32[]
    logits: chex.Array  # float32[B, V]
    cache: Any  # per layer (key, value) [B, G, S, H]
    done: chex.Array  # bool[B]
    output: Generation


def generate(
    params: decoder.Params,
    prompt_tokens: jax.Array,
    prompt_length: jax.Array,
    keys: jax.Array,
    sampling: sampling_lib.Sampling,
    *,
    config: decoder.DecoderConfig,
    samples_per_query: int,
    response_length: int,
    eos_id: int,
    pad_id: int,
    banned_tokens: tuple[int, ...],
    scoring_temperature: float,
    truncating: bool,
) -> Generation:
    """Samples `samples_per_query` responses for every query; rows of one query are consecutive.

    Args:
      params: decoder parameters, any float dtype; cast to the compute dtype inside.
      prompt_tokens: int32[Q, P], left-padded; prompt_length: int32[Q].
      keys: uint32[B, 2] with B = Q · samples_per_query; token t of a row uses fold_in(its key, t), so a row can be
        generated again whatever it shared a batch with.
      sampling: per-row settings over B rows.
      banned_tokens: not part of the response space, for the policy's log-probs and the behaviour's alike.
      truncating: static, whether `sampling` truncates any row (sampling.is_truncating).
    """
    Q, P = prompt_tokens.shape
    B, R = Q * samples_per_query, response_length
    chex.assert_shape(keys, (B, 2))
    chex.assert_shape(sampling.temperature, (B,))
    params = decoder.cast(params, config)
    prompt_mask = jnp.arange(P)[None, :] >= P - prompt_length[:, None]
    # The last response token needs no cache slot: nothing is predicted from it.
    logits, cache = decoder.prefill(params, prompt_tokens, prompt_mask, cache_length=P + R - 1, config=config)

    def per_row(array: jax.Array) -> jax.Array:
        return jnp.repeat(array, samples_per_query, axis=0)

    prompt_mask, first_position = per_row(prompt_mask), per_row(prompt_length)
    state = _Loop(
        step=jnp.zeros((), jnp.int32),
        logits=per_row(logits),
        cache=jax.tree.map(per_row, cache),
        done=jnp.zeros(B, bool),
        output=Generation(
            tokens=jnp.full((B, R), pad_id, jnp.int32),
            length=jnp.zeros(B, jnp.int32),
            finished=jnp.zeros(B, bool),
            policy_logprobs=jnp.zeros((B, R), jnp.float32),
            behavior_logprobs=jnp.zeros((B, R), jnp.float32),
        ),
    )
    slots = jnp.arange(P + R - 1)
    real_prompt = jnp.pad(prompt_mask, ((0, 0), (0, R - 1)))

    def sample_token(state: _Loop) -> tuple[jax.Array, jax.Array, Generation]:
        """Draws token t of every row. Returns it with the rows that are done after it and the output that holds it."""
        t, out = state.step, state.output
        behavior = sampling_lib.behavior_log_distribution(
            state.logits, sampling, banned_tokens=banned_tokens, truncating=truncating
        )
        uniform = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), t)))(keys)
        token = jnp.where(state.done, pad_id, sampling_lib.sample(behavior, uniform))
        policy = scoring.log_softmax(state.logits, scoring_temperature, banned_tokens)

        def write(buffer: jax.Array, value: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(buffer, value[:, None], t, axis=1)

        def chosen(distribution: jax.Array) -> jax.Array:
            logprob = jnp.take_along_axis(distribution, token[:, None], axis=1)[:, 0]
            return jnp.where(state.done, 0.0, logprob)

        ended = ~state.done & (token == eos_id)
        output = Generation(
            tokens=write(out.tokens, token),
            length=out.length + ~state.done,
            finished=out.finished | ended,
            policy_logprobs=write(out.policy_logprobs, chosen(policy)),
            behavior_logprobs=write(out.behavior_logprobs, chosen(behavior)),
        )
        return token, state.done | ended, output

    def step(state: _Loop) -> _Loop:
        token, done, output = sample_token(state)
        t = state.step
        cache_mask = real_prompt | ((slots >= P) & (slots <= P + t))[None, :]
        logits, cache = decoder.decode_step(params, token, first_position + t, P + t, state.cache, cache_mask, config=config)
        return _Loop(step=t + 1, logits=logits, cache=cache, done=done, output=output)

    # Token R - 1 is sampled outside of the loop: it needs no decode step after it.
    state = jax.lax.while_loop(lambda s: (s.step < R - 1) & ~jnp.all(s.done), step, state)
    return jax.lax.cond(jnp.all(state.done), lambda s: s.output, lambda s: sample_token(s)[2], state)


def row_keys(seed: int, writer: int, rows: jax.Array | np.ndarray) -> jax.Array:
    """uint32[B, 2]: the random key of each row, from (run seed, writer hash uint32, row sequence number uint32[B])."""
    key = jax.random.fold_in(jax.random.key(seed), writer)
    return jax.random.key_data(jax.vmap(lambda row: jax.random.fold_in(key, row))(rows))
