"""The decoder against itself on other paths (padding, meshes), and the scoring against a NumPy loop over its logits.

Its cached path is in test_kv_cache.py, parity with other implementations in hugging_face/test_load.py.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax import sharding
from tba_jax.models import parameters, scoring
from tba_jax.models.config import DecoderConfig
from tba_jax.models.presets import PRESETS
from tests.support import applied
from tests.support.tiny_decoders import CONFIGS, EVERYTHING, GROUPED, logits_of_whole, random_params

PAD = 0


def random_rows(B: int, P: int, R: int, vocab: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """tokens, prompt_length, response_length of random rows; the first two are full and shortest."""
    rng = np.random.default_rng(seed)
    prompt_length, response_length = rng.integers(1, P + 1, B), rng.integers(1, R + 1, B)
    prompt_length[:2], response_length[:2] = (P, 1), (R, 1)
    tokens = rng.integers(1, vocab, (B, P + R))
    tokens[np.arange(P + R) >= (prompt_length + response_length)[:, None]] = PAD
    return tokens.astype(np.int32), prompt_length.astype(np.int32), response_length.astype(np.int32)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_padding_changes_nothing(config):
    params, sequence = random_params(config), np.array([7, 3, 22, 39, 11], np.int32)
    expected = logits_of_whole(params, sequence[None], config)[0]
    for filler in (0, 17):
        padded = np.asarray(logits_of_whole(params, np.pad(sequence, (0, 4), constant_values=filler)[None], config))
        assert np.isfinite(padded).all()
        np.testing.assert_allclose(padded[0, :5], expected, atol=1e-5)


# Of the logits of 16 rows at one time step.
BYTES_PER_STEP = 16 * GROUPED.vocab * 4


def numpy_scores(params, rows, config, temperature: float, banned: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs and entropies by a loop over rows (each alone, without padding) and tokens, float64."""
    tokens, prompt_length, response_length = rows
    logprobs, entropies = np.zeros((2, len(tokens), response_length.max()))
    allowed = np.array([v for v in range(config.vocab) if v not in banned])
    for b, (n, m) in enumerate(zip(prompt_length, response_length, strict=True)):
        logits = np.asarray(logits_of_whole(params, tokens[b : b + 1, : n + m], config), np.float64)[0]
        for t in range(m):
            weights = np.exp(logits[n - 1 + t, allowed] / temperature)
            probabilities = weights / weights.sum()
            logprobs[b, t] = np.log(probabilities[list(allowed).index(tokens[b, n + t])])
            entropies[b, t] = -(probabilities * np.log(probabilities)).sum()
    return logprobs, entropies


@pytest.mark.parametrize("temperature, banned", [(1.0, ()), (0.7, (PAD,))])
def test_response_logprobs_equal_a_numpy_loop(temperature, banned):
    params, rows = random_params(GROUPED), random_rows(16, 5, 7, 40)
    expected_logprobs, expected_entropy = numpy_scores(params, rows, GROUPED, temperature, banned)
    score = functools.partial(
        applied.response_logprobs,
        config=GROUPED,
        R=7,
        space=scoring.ResponseSpace(temperature=temperature, banned_tokens=banned, eos_id=-1),
        logit_bytes=2 * BYTES_PER_STEP,
        remat="none",
    )
    logprobs, entropy = jax.jit(score)(params, *rows)
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-5)
    np.testing.assert_allclose(entropy, expected_entropy, atol=1e-5)


def score_and_gradient(params, rows, *, logit_bytes: int, remat: str, config=GROUPED, banned: tuple[int, ...] = (PAD,)):
    space = scoring.ResponseSpace(temperature=0.9, banned_tokens=banned, eos_id=-1)

    def loss(p, *rows):
        logprobs, entropy = applied.response_logprobs(
            p, *rows, R=7, config=config, space=space, logit_bytes=logit_bytes, remat=remat
        )
        weights = jnp.sin(jnp.arange(logprobs.size, dtype=jnp.float32)).reshape(logprobs.shape)
        return (weights * logprobs).mean(), (logprobs, entropy)

    (_, scores), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, *rows)
    return scores, gradient


@pytest.fixture(scope="module")
def one_device() -> tuple:
    """Parameters, 16 rows, and their scores and gradients on one device, all logits at once."""
    params, rows = random_params(GROUPED), random_rows(16, 5, 7, 40)
    return params, rows, score_and_gradient(params, rows, logit_bytes=1 << 20, remat="none")


@pytest.mark.parametrize("steps, remat", [(0, "none"), (3, "full"), (7, "dots")])  # 3 does not divide 7; 0: one all the same
def test_blocks_and_remat_change_no_scores_and_no_gradients(one_device, steps, remat):
    params, rows, expected = one_device
    found = score_and_gradient(params, rows, logit_bytes=max(steps * BYTES_PER_STEP, 1), remat=remat)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))  # padding is a banned token in masked positions
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), found, expected)


def test_logits_are_never_there_all_at_once():
    """Temporary memory of log-probs with gradients at B = 16, T = 1024, V = 50,000, as the compiler plans it."""
    B, R, D, V = 16, 1024, 64, 50_000
    config = DecoderConfig(layers=1, width=D, heads=1, kv_heads=1, head_size=D, ffn=D, vocab=V, max_positions=R)
    shapes = (
        jax.ShapeDtypeStruct((V, D), jnp.float32),
        jax.ShapeDtypeStruct((B, R, D), jnp.float32),
        jax.ShapeDtypeStruct((B, R), jnp.int32),
    )

    def naive(weight, hidden, tokens):
        logprobs = jax.nn.log_softmax(jnp.einsum("BRD,VD->BRV", hidden, weight))
        return jnp.take_along_axis(logprobs, tokens[..., None], axis=-1).sum()

    def blocked(weight, hidden, tokens):
        settings = dict(config=config, space=EVERYTHING, logit_bytes=128 << 20)
        return applied.token_logprobs(applied.with_table(weight, config), hidden, tokens, **settings)[0].sum()

    temporary = [
        jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
        for loss in (naive, blocked)
    ]
    assert temporary[0] > 2 * 4 * B * R * V * 0.9  # logits and their gradient
    assert temporary[1] < temporary[0] / 10, temporary


def test_entropy_carries_no_gradient():
    params, rows = random_params(GROUPED), random_rows(2, 5, 7, 40)

    def entropy_sum(p):
        return applied.response_logprobs(p, *rows, R=7, config=GROUPED, space=EVERYTHING, logit_bytes=1, remat="full")[1].sum()

    assert all((leaf == 0).all() for leaf in jax.tree.leaves(jax.jit(jax.grad(entropy_sum))(params)))


def test_no_room_for_logits_names_the_value():
    with pytest.raises(ValueError, match="logit_bytes=0 must be at least 1"):
        score_and_gradient(random_params(GROUPED), random_rows(2, 5, 7, 40), logit_bytes=0, remat="none")


def test_banned_tokens_are_outside_the_distribution():
    logits, space = jnp.asarray([[1.0, 5.0, 2.0, 0.0]]), scoring.ResponseSpace(temperature=2.0, banned_tokens=(1, 3), eos_id=-1)
    allowed = scoring.restrict(logits, jnp.zeros(1, jnp.int32), space) / space.temperature
    found = np.concatenate([scoring.chosen_logprobs(allowed, jnp.full(1, token))[0] for token in range(4)])
    assert found[1] == found[3] == -np.inf
    np.testing.assert_allclose(found[[0, 2]], np.log([1 / (1 + np.exp(0.5)), 1 / (1 + np.exp(-0.5))]), rtol=1e-6)


MESHES = [(8, 1, 1), (1, 4, 2), (2, 2, 2)]  # data, fsdp, tensor


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_meshes_give_the_loss_and_gradients_of_one_device(one_device, sizes):
    params, rows, expected = one_device
    mesh = sharding.make_mesh(sizes, setting="trainer.mesh")
    shardings = applied.shardings(GROUPED, mesh)
    with jax.set_mesh(mesh):
        found = score_and_gradient(
            jax.device_put(params, shardings), sharding.put_rows(mesh, rows), logit_bytes=3 * BYTES_PER_STEP, remat="full"
        )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), found, expected)


@pytest.mark.parametrize(
    "name",
    [
        *("parallel residual, partial rotary", "local and global layers"),  # which hold what each of the next two has, too
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("learned positions", "query and key norms")),
    ],
)
def test_every_architecture_runs_sharded(name):
    config = dataclasses.replace(CONFIGS[name], tied_embedding=False)
    params, rows = random_params(config), random_rows(16, 5, 7, 40)
    mesh = sharding.make_mesh((2, 2, 2), setting="trainer.mesh")
    expected = score_and_gradient(params, rows, logit_bytes=3 * BYTES_PER_STEP, remat="full", config=config)
    sharded = jax.device_put(params, applied.shardings(config, mesh)), sharding.put_rows(mesh, rows)
    with jax.set_mesh(mesh):
        found = score_and_gradient(*sharded, logit_bytes=3 * BYTES_PER_STEP, remat="full", config=config)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), found, expected)


@pytest.mark.parametrize("sizes", [(2, 2, 2)], ids=str)
def test_sharded_layers_gather_weights_and_never_rows(sizes):
    """Under fully-sharded data parallelism a device computes with whole weights and its own rows, not the other way round."""
    config = dataclasses.replace(GROUPED, layers=2)
    mesh = sharding.make_mesh(sizes, setting="trainer.mesh")
    B, P, R = 16, 5, 7
    params = jax.device_put(random_params(config), applied.shardings(config, mesh))
    rows = sharding.put_rows(mesh, random_rows(B, P, R, 40))

    def loss(p, *rows):
        settings = dict(R=R, config=config, space=EVERYTHING, logit_bytes=2 * BYTES_PER_STEP, remat="full")
        return applied.response_logprobs(p, *rows, **settings)[0].sum()

    with jax.set_mesh(mesh):
        program = jax.jit(jax.grad(loss)).lower(params, *rows).compile().as_text()
    # Every gathered array is a parameter: none has the rows of more than one device, B · T tokens or B rows.
    gathered = [tuple(map(int, m.split(","))) for m in re.findall(r"= \w+\[([\d,]+)\]\S* all-gather\(", program)]
    assert gathered
    tokens = B * (P + R - 1)
    assert not [shape for shape in gathered if tokens in shape or B in shape], gathered


def test_a_mesh_that_does_not_divide_names_both_numbers():
    mesh = sharding.make_mesh((2, 1, 4), setting="trainer.mesh")
    with pytest.raises(ValueError, match=r"layers\.attention\.key\.weight: axis 'kv_heads' of size 2 is not divisible by 4"):
        applied.shardings(GROUPED, mesh)


def test_a_vocabulary_that_does_not_divide_stays_whole():
    config = dataclasses.replace(GROUPED, vocab=41, tied_embedding=False)
    mesh = sharding.make_mesh((2, 2, 2), setting="trainer.mesh")
    shardings = applied.shardings(config, mesh)
    assert shardings["lm_head"]["weight"].spec == jax.sharding.PartitionSpec(("fsdp",), None)
    assert applied.shardings(GROUPED, mesh)["embedding"]["weight"].spec[0] == "tensor"
    params, rows = random_params(config), random_rows(16, 5, 7, 40)
    expected = score_and_gradient(params, rows, logit_bytes=3 * BYTES_PER_STEP, remat="full", config=config)
    with jax.set_mesh(mesh):
        found = score_and_gradient(
            jax.device_put(params, shardings),
            sharding.put_rows(mesh, rows),
            logit_bytes=3 * BYTES_PER_STEP,
            remat="full",
            config=config,
        )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), found, expected)


def test_data_parallel_scoring_gathers_nothing():
    mesh = sharding.make_mesh((8, 1, 1), setting="trainer.mesh")
    params = jax.device_put(random_params(GROUPED), sharding.replicated(mesh))
    rows = sharding.put_rows(mesh, random_rows(32, 5, 7, 40))

    def score(p, *rows):
        settings = dict(R=7, config=GROUPED, space=EVERYTHING, logit_bytes=4 * BYTES_PER_STEP, remat="full")
        return applied.response_logprobs(p, *rows, **settings)

    with jax.set_mesh(mesh):
        assert "all-gather" not in jax.jit(score).lower(params, *rows).compile().as_text()


# Parameters of the published checkpoints, a tied embedding counted once.
PUBLISHED = {
    "gpt2": 124_439_808,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "rho-math-1b": 1_100_048_384,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b-text": 3_880_263_168,  # the checkpoint's text model, without its vision model
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_sizes(name):
    config = PRESETS[name]
    assert applied.count(config) == PUBLISHED[name]
    tensor = min(2, config.kv_heads)
    mesh = sharding.make_mesh((1, 8 // tensor, tensor), setting="trainer.mesh")
    shardings = applied.shardings(config, mesh)
    shapes = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), parameters.shapes(applied.specs(config)), shardings
    )
    tokens, length = jax.ShapeDtypeStruct((8, 32), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32)
    settings = dict(R=16, config=config, space=EVERYTHING, logit_bytes=1 << 20, remat="full")
    score = functools.partial(applied.response_logprobs, **settings)
    with jax.set_mesh(mesh):
        logprobs, _ = jax.eval_shape(score, shapes, tokens, length, length)
    assert logprobs.shape == (8, 16) and logprobs.dtype == jnp.float32
    created = jax.eval_shape(lambda key: applied.init(key, config), jax.random.key(0))
    assert jax.tree.map(lambda x: x.shape, created) == jax.tree.map(lambda x: x.shape, parameters.shapes(applied.specs(config)))


def test_the_small_real_model_has_its_published_size():
    tinystories = DecoderConfig(layers=2, width=128, heads=8, kv_heads=4, head_size=16, ffn=384, vocab=2048, max_positions=512)
    assert applied.count(tinystories) == 656_000


def test_local_layers_need_a_window_and_a_window_local_layers():
    for pattern, window in (("lg", 0), ("g", 4), ("", 4), ("lx", 4)):
        with pytest.raises(ValueError, match=f"layer_pattern='{pattern}' does not go with window={window}"):
            dataclasses.replace(GROUPED, layer_pattern=pattern, window=window)


def test_tokens_outside_of_the_window_change_nothing():
    """One local layer of window 3: the state at position 7 depends on tokens 5, 6 and 7."""
    config = dataclasses.replace(GROUPED, layers=1, layer_pattern="l", window=3)
    params, tokens = random_params(config), np.arange(1, 9, dtype=np.int32)[None]
    expected = applied.hidden_states(params, tokens, config=config)[0, 7]
    for position in range(8):
        changed = tokens.copy()
        changed[0, position] = 30
        found = applied.hidden_states(params, changed, config=config)[0, 7]
        assert np.allclose(found, expected, atol=1e-5) == (position < 5)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_init_has_the_abstract_shapes(config):
    created = jax.eval_shape(lambda key: applied.init(key, config), jax.random.key(0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), created) == jax.tree.map(
        lambda x: (x.shape, x.dtype), parameters.shapes(applied.specs(config))
    )
    assert ("lm_head" in created) == (not config.tied_embedding)


def test_init_of_the_layers_does_not_depend_on_the_head():
    def init(config):
        params = applied.init(jax.random.key(3), config)
        ffn = params["layers"]["feed_forward"]
        return {name: ffn[name]["weight"] for name in ("up", "gate", "down")} | params["final_norm"]

    tied = jax.jit(init, static_argnums=0)(GROUPED)
    untied = jax.jit(init, static_argnums=0)(dataclasses.replace(GROUPED, tied_embedding=False, vocab=41))
    jax.tree.map(np.testing.assert_array_equal, tied, untied)
    assert not (tied["up"] == tied["gate"]).any()
    assert (tied["scale"] == 1).all()
    np.testing.assert_allclose(np.std(tied["up"]), 0.02, rtol=0.05)
    np.testing.assert_allclose(np.std(tied["down"]), 0.02 / np.sqrt(4), rtol=0.05)


def test_impossible_shapes_name_the_settings():
    with pytest.raises(ValueError, match=r"model\.heads=4 is not divisible by model\.kv_heads=3"):
        dataclasses.replace(GROUPED, kv_heads=3)
    with pytest.raises(ValueError, match=r"model\.head_size=7 must be even"):
        dataclasses.replace(GROUPED, head_size=7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float32_products_ask_for_full_precision(dtype):
    config = dataclasses.replace(GROUPED, compute_dtype=dtype)

    def loss(params, tokens):
        hidden = applied.hidden_states(params, tokens, config=config, remat="full")
        return applied.logits_of(params, hidden[0], config=config).sum()

    program = str(jax.make_jaxpr(jax.grad(loss))(parameters.shapes(applied.specs(config)), jnp.zeros((1, 4), jnp.int32)))
    products, exact = program.count("dot_general["), program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)")
    assert products > 24  # nine a layer, forward, again and backward
    assert exact == (products if dtype == "float32" else 0)
