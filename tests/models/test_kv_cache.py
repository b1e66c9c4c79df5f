"""The cached path against whole sequences: shared prompts, entries in any order, precision; its attention against NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.models import kv_cache, parameters
from tba_jax.models.config import DecoderConfig
from tba_jax.models.parameters import Params
from tba_jax.programs import shaped
from tests.support import applied
from tests.support.tiny_decoders import CONFIGS, GROUPED, logits_of_whole, random_params

J, W, P, R = 2, 3, 5, 6
B = J * W
# Logits are as large as 5: float32 rounds their sums by some 1e-6 of that.
ROUNDING = {"atol": 1e-5, "rtol": 5e-6}
PROMPT_LENGTH = np.array([3, 5], np.int32)
unstack, prefill = (jax.jit(each, static_argnames="config") for each in (kv_cache.unstack, applied.prefill))
decode_step = jax.jit(applied.decode_step, static_argnames=("config", "tiled"))


def random_rows() -> tuple[np.ndarray, np.ndarray]:
    """int32[J, P], right-padded with tokens that are in no way special, and int32[B, R]."""
    rng = np.random.default_rng(0)
    return rng.integers(1, 40, (J, P)).astype(np.int32), rng.integers(1, 40, (B, R)).astype(np.int32)


def whole_logits(params: Params, config: DecoderConfig, prompts: np.ndarray, responses: np.ndarray) -> np.ndarray:
    """float32[B, R + 1, V]: what follows the prompt and each response token, of rows without padding between the two."""
    lengths = np.repeat(PROMPT_LENGTH, W)
    rows = [[*prompts[b // W, : lengths[b]], *responses[b]] for b in range(B)]
    tokens = np.array([row + [0] * (P + R - len(row)) for row in rows], np.int32)
    logits = np.asarray(logits_of_whole(params, tokens, config))
    return np.stack([logits[b, n - 1 : n + R] for b, n in enumerate(lengths)])


def empty_own(config: DecoderConfig, entries: int, together: int = 1) -> kv_cache.Cache:
    shape = (B, config.kv_heads // together, entries, together * config.head_size)
    return tuple((np.full(shape, 50.0, np.float32),) * 2 for _ in range(config.layers))


def test_weights_lie_head_by_head_where_heads_fill_tiles(monkeypatch):
    plain = unstack(random_params(GROUPED), config=GROUPED)
    assert kv_cache.head_by_head(plain, GROUPED, jax.device_put) is plain
    monkeypatch.setattr(kv_cache, "_TILE_COLUMNS", GROUPED.head_size)
    relaid = kv_cache.head_by_head(plain, GROUPED, jax.device_put)
    found = {name: x.format.layout.major_to_minor for name, x in parameters.flatten(relaid).items()}
    moved = {name for name, order in found.items() if order != tuple(range(len(order)))}
    maps = [f"attention.{name}.weight" for name in ("query", "key", "value")]
    assert moved == {f"layers.{i}.{name}" for i in range(GROUPED.layers) for name in maps}
    jax.tree.map(np.testing.assert_array_equal, relaid, plain)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), plain)
    told = parameters.flatten(kv_cache.head_by_head(shapes, GROUPED, shaped))
    assert {name for name, x in told.items() if x.format.layout is not None} == moved


@pytest.mark.parametrize(
    "name, form",
    [
        *(
            (name, "plain")
            for name in ("parallel residual, partial rotary", "learned positions", "query and key norms", "experts")
        ),
        *(("grouped, tied", "tiled"), ("local and global layers", "heads side by side"), ("grouped, tied", "large scores")),
        *(("gpt-oss", "plain"), ("gpt-oss", "tiled")),
    ],
)
def test_prefill_and_decode_steps_equal_whole_sequences(name, form):
    """Three rows share each prompt; entries are written in a shuffled order, prompts lie behind another buffer's.

    Of scores above 88 exp would overflow, were not the largest of prompt and response subtracted; their rounding is larger, too.
    """
    config = CONFIGS[name]
    together, tiled = config.kv_heads if form == "heads side by side" else 1, form != "plain"
    prompts, responses = random_rows()
    plain, rounding = random_params(config), ROUNDING
    if form == "large scores":
        plain["layers"]["attention"]["query"]["weight"] *= 100
        rounding = {"atol": 2e-3}
    expected = whole_logits(plain, config, prompts, responses)
    params = unstack(plain, config=config)
    logits, cache = prefill(params, prompts, PROMPT_LENGTH, config=config)
    assert logits.dtype == jnp.float32 and cache[0][0].shape == (J, config.kv_heads, P, config.head_size)
    np.testing.assert_allclose(np.repeat(logits, W, axis=0), expected[:, 0], **rounding)
    shared = jax.tree.map(lambda x: np.concatenate([np.full(x.shape, -50.0, np.float32), x], axis=2), cache)
    own, order = empty_own(config, R + 1, together), np.random.default_rng(1).permutation(R + 1)
    readable = np.concatenate([np.zeros((J, P), bool), np.arange(P) < PROMPT_LENGTH[:, None]], axis=1)
    for t in range(R):
        own_mask = np.tile(np.isin(np.arange(R + 1), order[: t + 1]), (B, 1))
        masks = kv_cache.Masks(prompt=np.repeat(readable[:, None], W, axis=1), own=own_mask)
        position = np.repeat(PROMPT_LENGTH, W) + t
        local = None
        if config.window:
            prompt_age = position.reshape(J, W, 1) - np.tile(np.arange(P), 2)
            local = kv_cache.within_window(masks, config.window, prompt_age=prompt_age, own_age=t - np.argsort(order))
        entry = np.int32(order[t])
        step = (responses[:, t], position, entry, shared, own, masks, local)
        logits, own = decode_step(params, *step, config=config, tiled=tiled)
        np.testing.assert_allclose(logits, expected[:, t + 1], **rounding)


def test_prefill_goes_on_from_what_is_kept():
    """With sinks and a window that is shorter than the prompts."""
    config = CONFIGS["gpt-oss"]
    (prompts, responses), plain = random_rows(), random_params(config)
    params, kept = unstack(plain, config=config), np.array([1, 2], np.int32)
    _, cache = prefill(params, prompts[:, :2], kept, config=config)
    room = jax.tree.map(lambda x: np.pad(x, ((0, 0), (0, 0), (0, P - 2), (0, 0)), constant_values=50.0), cache)
    after = np.stack([row[n : n + P - 1] for row, n in zip(np.pad(prompts, ((0, 0), (0, P))), kept, strict=True)])

    @jax.jit
    def go_on(params: Params, cache: kv_cache.Cache) -> tuple[jax.Array, kv_cache.Cache]:
        return kv_cache.prefill_after(applied.unstacked(params, config), after, kept, PROMPT_LENGTH, cache)

    logits, _ = go_on(params, room)
    np.testing.assert_allclose(logits, whole_logits(plain, config, prompts, responses)[::W, 0], **ROUNDING)


def test_bfloat16_computes_in_bfloat16_and_gives_float32_logits():
    config = dataclasses.replace(GROUPED, compute_dtype="bfloat16")
    prompts, responses = random_rows()
    params = random_params(config)
    unstacked = unstack(params, config=config)
    _, cache = prefill(unstacked, prompts, PROMPT_LENGTH, config=config)
    own = jax.tree.map(lambda x: jnp.zeros((B, *x.shape[1:]), x.dtype), cache)
    masks = kv_cache.Masks(prompt=np.ones((J, W, P), bool), own=np.tile(np.arange(P) == 0, (B, 1)))
    logits, own = decode_step(unstacked, responses[:, 0], np.full(B, P), np.int32(0), cache, own, masks, config=config)
    assert logits.dtype == jnp.float32 and all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves((cache, own)))
    # Row W has a prompt without padding. The same rounding on both paths keeps the sampler's log-probs equal to the learner's.
    scored, exact = (whole_logits(params, of, prompts, responses)[W, 1] for of in (config, GROUPED))
    np.testing.assert_allclose(logits[W], scored, atol=0.05)
    assert 1e-4 < np.abs(logits[W] - exact).max() < 0.3
