"""One batch of responses as a pure function, for programs that generate and learn in one: slots that are never refilled."""

import chex
import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from tba_jax.decoding import decode_loop
from tba_jax.decoding import slots as slots_lib
from tba_jax.decoding.sampling import Sampling
from tba_jax.models import kv_cache
from tba_jax.models.config import DecoderConfig
from tba_jax.models.parameters import Params
from tba_jax.models.response_space import ResponseSpace


@flax.struct.dataclass
class Rollout:
    """As requests.Generation, on the device. tokens: int32[B, R]; length: int32[B]; finished: bool[B]; policy_logprobs,
    behavior_logprobs: float32[B, R], nats, 0 where masked."""

    tokens: chex.Array
    length: chex.Array
    finished: chex.Array
    policy_logprobs: chex.Array
    behavior_logprobs: chex.Array


def rollout(
    params: Params,
    prompt_tokens: jax.Array,
    prompt_length: jax.Array,
    keys: jax.Array,
    sampling: Sampling,
    *,
    config: DecoderConfig,
    graphdef: nnx.GraphDef,
    space: ResponseSpace,
    response_length: int,
    pad_id: int,
) -> Rollout:
    """The same rows as an Engine gives, all at once.

    Args:
      params: plain weights of the policy (Policy.for_sampling), or float32.
      prompt_tokens: int32[Q, P], right-padded; prompt_length: int32[Q].
      keys: uint32[B, 2] with B = Q·K, rows of a query consecutive; sampling: leaves [B].
      graphdef: of the decoder, see kv_cache.define.
    """
    Q, P = prompt_tokens.shape
    chex.assert_shape([keys, sampling.temperature], [(len(keys) // Q * Q, 2), (len(keys),)])
    static = _static(Q, P, len(keys) // Q, config=config, graphdef=graphdef, space=space, response_length=response_length)
    params = kv_cache.unstack(params, config)
    arrivals = _arrivals(prompt_tokens, prompt_length, keys, sampling, static)
    oldest_first, never_enough = jnp.zeros((Q, 1), jnp.int32), jnp.int32(Q + 1)
    prompts, slots = slots_lib.init(static)
    prompts, slots, first = decode_loop.prefill(params, prompts, slots, oldest_first, arrivals, None, config=static)
    _, trace = decode_loop.decode(
        params,
        prompts,
        slots,
        oldest_first,
        jnp.int32(0),
        never_enough,
        None,
        config=static,
        buffers=1,
        window=slots_lib.own_entries(static),
    )
    return _by_row(first, trace, response_length=response_length, pad_id=pad_id)


def _static(
    Q: int, P: int, K: int, *, config: DecoderConfig, graphdef: nnx.GraphDef, space: ResponseSpace, response_length: int
) -> slots_lib.SlotsConfig:
    """A group for each query and a slot for each row: nothing is refilled, and one call decodes to the end."""
    return slots_lib.SlotsConfig(
        model=config,
        graphdef=graphdef,
        space=space,
        groups=Q,
        width=K,
        buffers=1,
        places=K,
        prompt_length=P,
        response_length=response_length,
        chunk=max(response_length - 1, 1),
    )


def _arrivals(
    prompt_tokens: jax.Array, prompt_length: jax.Array, keys: jax.Array, sampling: Sampling, static: slots_lib.SlotsConfig
) -> slots_lib.Arrivals:
    """All prompts at once, each for its own group."""
    Q, K = static.groups, static.places
    keys, sampling = jax.tree.map(lambda x: jnp.asarray(x).reshape(Q, K, *x.shape[1:]), (keys, sampling))
    zeros = jnp.zeros(Q, jnp.int32)
    return slots_lib.Arrivals(
        group=jnp.arange(Q),
        buffer=zeros,
        valid=jnp.ones(Q, bool),
        tokens=prompt_tokens,
        length=prompt_length,
        given=zeros,
        stop_state=zeros,
        samples=slots_lib.Samples(key=keys, sampling=sampling, limit=jnp.full((Q, K), static.response_length)),
    )


def _by_row(first: slots_lib.Tokens, trace: slots_lib.Trace, *, response_length: int, pad_id: int) -> Rollout:
    """The tokens of each row. Args: first: leaves [Q, K], the first tokens; trace: leaves [chunk, Q, K], those that follow."""
    (Q, K), R = first.token.shape, response_length
    B = Q * K
    first = jax.tree.map(lambda x: x.reshape(B), first)
    # Each place is continued by one slot, whichever; idle steps and slots are written nowhere.
    row = jnp.where(trace.place >= 0, jnp.arange(Q)[:, None] * K + trace.place, B)

    def whole(start: jax.Array, steps: jax.Array, fill: float) -> jax.Array:
        empty = jnp.full((B, R), fill, start.dtype).at[:, 0].set(start)
        return empty.at[row, trace.count].set(steps, mode="drop")

    def sums(start: jax.Array, steps: jax.Array) -> jax.Array:
        return start.astype(jnp.int32).at[row].add(steps.astype(jnp.int32), mode="drop")

    t = trace.tokens
    return Rollout(
        tokens=whole(first.token, t.token, pad_id),
        length=sums(jnp.ones(B), jnp.ones_like(row)),
        finished=sums(first.status == slots_lib.FINISHED, t.status == slots_lib.FINISHED) > 0,
        policy_logprobs=whole(first.policy_logprob, t.policy_logprob, 0.0),
        behavior_logprobs=whole(first.behavior_logprob, t.behavior_logprob, 0.0),
    )
