"""Supervised objectives against unpadded rows and NumPy, their update against one pass on one device, and encoding."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

from tba_jax import sharding, trajectory
from tba_jax.learner import optimizer as optimizer_lib
from tba_jax.models.config import DecoderConfig
from tba_jax.models.parameters import Params
from tba_jax.supervised import fine_tuning
from tba_jax.tasks.arithmetic import CHARACTERS, Arithmetic
from tba_jax.text.encoding import encode_pair
from tba_jax.text.tokenizers import CharacterTokenizer
from tests.support import applied

SHAPE: dict[str, Any] = dict(layers=2, width=16, heads=4, kv_heads=2, head_size=4, ffn=24, vocab=12, max_positions=16)
MODELS = {"sft": DecoderConfig(**SHAPE), "reward": DecoderConfig(**SHAPE, head="score")}
B, P, R = 8, 5, 6
KINDS = tuple(fine_tuning.OBJECTIVES)
# Gradients are read off the parameters after a step of plain descent by 1.
DESCENT = optax.sgd(1.0)
# Compiling is most of the time here, and the arithmetic is the same without LLVM's optimisation.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})


def settings(*, micro_batch_rows: int = B, logit_bytes: int = 1 << 20, remat: str = "none") -> fine_tuning.StepConfig:
    return fine_tuning.StepConfig(micro_batch_rows=micro_batch_rows, logit_bytes=logit_bytes, remat=remat)


def random_params(kind: str) -> Params:
    return applied.random(applied.specs(MODELS[kind]), scale=0.3, seed=1)


def random_batch(kind: str, *, filling: int = 0) -> fine_tuning.Batch:
    """The last `filling` rows are filling."""
    rng = np.random.default_rng(1)
    prompts, prompt_length = trajectory.left_pad([rng.integers(1, 12, n).tolist() for n in rng.integers(1, P + 1, B)], P, 0)
    shape = (B,) if kind == "sft" else (B, 2)
    length = rng.integers(1, R + 1, shape).astype(np.int32)
    length[B - filling :] = 0
    tokens = np.where(np.arange(R) < length[..., None], rng.integers(1, 12, (*shape, R)), 0).astype(np.int32)
    made = fine_tuning.Examples if kind == "sft" else fine_tuning.Preferences
    return made(prompts, prompt_length, tokens, length)


def unpadded(prompt: np.ndarray, prompt_length: int, response: np.ndarray, response_length: int) -> np.ndarray:
    """int32[1, n]: one whole row without padding."""
    return np.concatenate([prompt[P - prompt_length :], response[:response_length]])[None]


def hidden_of(kind: str, tokens: np.ndarray) -> jax.Array:
    hidden_states = functools.partial(applied.hidden_states, token_mask=None, config=MODELS[kind], remat="none")
    return jit(hidden_states)(random_params(kind), tokens)


@functools.cache
def totals(kind: str) -> Any:
    total = functools.partial(fine_tuning.totals, objective=fine_tuning.OBJECTIVES[kind], config=settings())
    return jit(lambda params, batch: total(state_of(kind, params), batch))


def state_of(kind: str, params: Params) -> fine_tuning.TuningState:
    return fine_tuning.init_state(params, graphdef=applied.define(MODELS[kind]).graphdef, optimizer=DESCENT)


@pytest.mark.parametrize("filling", [0, 3])
def test_likelihood_is_the_mean_over_response_tokens_of_unpadded_rows(filling):
    batch, terms = random_batch("sft", filling=filling), []
    for row in range(B - filling):
        prompt_length, response_length = batch.prompt_length[row], batch.response_length[row]
        tokens = unpadded(batch.prompt_tokens[row], prompt_length, batch.response_tokens[row], response_length)
        hidden = np.asarray(hidden_of("sft", tokens), np.float64)[0]
        logits = hidden @ random_params("sft")["embedding"]["weight"].T
        distribution = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        terms += [-distribution[t - 1, tokens[0, t]] for t in range(prompt_length, prompt_length + response_length)]
    found = totals("sft")(random_params("sft"), batch)
    assert float(found["size"]) == len(terms) == batch.response_length.sum()
    np.testing.assert_allclose(found["loss"], np.sum(terms), rtol=1e-5)


@pytest.mark.parametrize("filling", [0, 3])
def test_preference_reads_scores_at_the_last_tokens_of_unpadded_rows(filling):
    batch, scores = random_batch("reward", filling=filling), np.zeros((B - filling, 2))
    weight = random_params("reward")["score"]["weight"][:, 0]
    for row, side in np.ndindex(*scores.shape):
        response, length = batch.response_tokens[row, side], batch.response_length[row, side]
        tokens = unpadded(batch.prompt_tokens[row], batch.prompt_length[row], response, length)
        scores[row, side] = np.asarray(hidden_of("reward", tokens))[0, -1] @ weight
    margin = scores[:, 0] - scores[:, 1]
    expected = {"loss": np.log1p(np.exp(-margin)), "pair_accuracy": margin > 0, "margin": margin}
    found = totals("reward")(random_params("reward"), batch)
    assert float(found.pop("size")) == B - filling
    assert found.keys() == expected.keys() and 0 < expected["pair_accuracy"].sum() < len(margin)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values.sum(), rtol=1e-4, err_msg=name)


def one_step(kind: str, config: fine_tuning.StepConfig, mesh_sizes: tuple[int, int, int] | None = None) -> tuple[dict, Any]:
    """Measurements, and the gradient read off the parameters."""
    step = functools.partial(fine_tuning.train_step, objective=fine_tuning.OBJECTIVES[kind], optimizer=DESCENT, config=config)
    state, batch = state_of(kind, random_params(kind)), random_batch(kind, filling=1)
    if mesh_sizes is None:
        after, measurements = jit(step)(state, batch)
    else:
        mesh = sharding.make_mesh(mesh_sizes, setting="training.mesh")
        shardings = jax.tree.map(lambda x: x.sharding, fine_tuning.state_shapes(applied.define(MODELS[kind]), DESCENT, mesh))
        update = sharding.on_mesh(mesh, jit(step, donate_argnums=0, out_shardings=(shardings, sharding.replicated(mesh))))
        after, measurements = update(jax.device_put(state, shardings), sharding.put_rows(mesh, batch))
    assert int(after.step) == 1 and float(measurements["finite"]) == 1
    gradient = jax.tree.map(lambda new, old: old - np.asarray(new), after.params, random_params(kind))
    return {name: float(value) for name, value in measurements.items()}, gradient


@pytest.fixture(scope="module", params=KINDS)
def one_pass(request) -> tuple[str, dict, Any]:
    return request.param, *one_step(request.param, settings())


@pytest.mark.parametrize(
    "changed, mesh_sizes",
    [
        (dict(micro_batch_rows=2), None),
        (dict(micro_batch_rows=4, logit_bytes=4 * 4 * 12 * 2, remat="full"), None),
        (dict(micro_batch_rows=4, remat="dots"), (2, 2, 2)),
    ],
    ids=str,
)
def test_micro_batches_remat_and_meshes_change_nothing(one_pass, changed, mesh_sizes):
    """Filling and responses of different lengths lie unevenly in the micro-batches: a mean of means would differ."""
    kind, measured, gradient = one_pass
    found, found_gradient = one_step(kind, settings(**changed), mesh_sizes)
    assert found.keys() == measured.keys()
    for name in measured:
        np.testing.assert_allclose(found[name], measured[name], rtol=1e-5, atol=1e-6, err_msg=name)
    size = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient))
    for a, b in zip(jax.tree.leaves(found_gradient), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * size)


def test_the_gradient_is_that_of_the_mean_loss(one_pass):
    """A central difference along a random direction."""
    kind, measured, gradient = one_pass
    rng = np.random.default_rng(2)
    direction = jax.tree.map(lambda g: rng.standard_normal(g.shape).astype(np.float32), gradient)
    loss = totals(kind)

    def mean_at(distance: float) -> float:
        found = loss(jax.tree.map(lambda p, d: p + distance * d, random_params(kind), direction), random_batch(kind, filling=1))
        return float(found["loss"] / found["size"])

    slope = sum(float((g * d).sum()) for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True))
    np.testing.assert_allclose((mean_at(1e-3) - mean_at(-1e-3)) / 2e-3, slope, rtol=2e-2)
    np.testing.assert_allclose(mean_at(0.0), measured["loss"], rtol=1e-5)


def test_a_step_that_is_not_finite_leaves_the_state_as_it_was():
    params = random_params("reward")
    params["score"]["weight"][0] = np.inf
    state = state_of("reward", params)
    step = functools.partial(fine_tuning.train_step, objective=fine_tuning.preference, optimizer=DESCENT, config=settings())
    after, measurements = jit(step)(state, random_batch("reward"))
    assert float(measurements["finite"]) == 0 and int(after.step) == 0
    jax.tree.map(np.testing.assert_array_equal, after.params, params)


class JoiningTokenizer(CharacterTokenizer):
    """Joins "ab" into one id, as tokenizers with merges do, and begins every text with `space`, as those of Llama models do."""

    def __init__(self, space: str = ""):
        super().__init__("abc_\n.\0")
        self.space, self.ab = space, self._ids["\0"]

    def encode(self, text: str) -> list[int]:
        return super().encode((self.space + text if text else "").replace("ab", "\0"))

    def decode(self, ids: Any) -> str:
        return super().decode(ids).replace("\0", "ab").removeprefix(self.space)


A, B_, C, SPACE = 3, 4, 5, 6


@pytest.mark.parametrize(
    "space, prompt, response, expected",
    [
        ("", "cab", "c", ([1, C, 9], [C, 2])),
        ("", "ca", "bc", ([1, C, A], [B_, C, 2])),  # the texts meet inside of what is one id
        ("_", "ca", "bc", ([1, SPACE, C, A], [B_, C, 2])),  # and the response alone would begin with a space
        ("a", "ca", "bc", ([1, A, C, A], [B_, C, 2])),  # which is joined with the response, too
    ],
)
def test_a_response_continues_the_prompt_as_it_is_encoded_alone(space, prompt, response, expected):
    tokenizer = JoiningTokenizer(space)
    found = encode_pair(prompt, response, tokenizer)
    assert found == expected and tokenizer.decode([*found[0], *found[1]]) == prompt + response


def test_a_response_that_no_tokens_spell_is_refused(monkeypatch):
    monkeypatch.setattr(JoiningTokenizer, "decode", lambda _, ids: str(list(ids)))
    with pytest.raises(ValueError, match="'ca' and 'bc'"):
        encode_pair("ca", "bc", JoiningTokenizer())


def test_examples_are_padded_and_end():
    tokenizer = CharacterTokenizer("abc")
    found = fine_tuning.encode_examples([("a", "bc"), ("ab", "")], tokenizer, prompt_length=4, response_length=3)
    np.testing.assert_array_equal(found.prompt_tokens, [[0, 0, 1, 3], [0, 1, 3, 4]])
    np.testing.assert_array_equal(found.prompt_length, [2, 3])
    np.testing.assert_array_equal(found.response_tokens, [[4, 5, 2], [2, 0, 0]])
    np.testing.assert_array_equal(found.response_length, [3, 1])
    with pytest.raises(ValueError, match=r"3 response tokens, task\.response_length=2"):
        fine_tuning.encode_examples([("a", "bc")], tokenizer, prompt_length=4, response_length=2)


def test_the_warm_start_is_a_plain_loop_over_its_random_stream():
    task = Arithmetic(digits=1, train_queries=10, heldout_queries=4, seed=0)
    tokenizer = CharacterTokenizer(CHARACTERS)
    model = DecoderConfig(**SHAPE | dict(layers=1, vocab=tokenizer.vocab_size, max_positions=24))
    lengths: dict[str, int] = dict(prompt_length=5, response_length=12)
    reports: list[tuple[int, float]] = []
    mesh = sharding.make_mesh((-1, 1, 1), setting="learner.mesh", devices=jax.devices()[:1])
    found = fine_tuning.warm_start(
        task,
        tokenizer,
        config=model,
        mesh=mesh,
        seed=3,
        steps=4,
        batch_size=8,
        learning_rate=1e-2,
        warmup_steps=1,
        report_every_steps=3,
        report=lambda *point: reports.append(point),
        **lengths,
    )
    config = fine_tuning.StepConfig(micro_batch_rows=8, logit_bytes=1 << 30, remat="none")
    schedule = optimizer_lib.linear(peak=1e-2, steps=4, warmup_steps=1, decay_steps=0)
    optimizer = optimizer_lib.adamw(schedule, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.01, clip_norm=1.0)
    params = jit(functools.partial(applied.init, config=model))(jax.random.key(3))
    opt_state, rng, losses = jit(optimizer.init)(params), np.random.default_rng([3, 1]), []

    @jit
    def step(params: Params, opt_state: Any, examples: fine_tuning.Examples) -> Any:
        def mean(params: Params) -> jax.Array:
            return fine_tuning.likelihood(applied.merge(params, model), examples, config)["loss"] / examples.response_length.sum()

        loss, grads = jax.value_and_grad(mean)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for _ in range(4):
        examples = fine_tuning.encode_examples(task.worked_examples(rng, 8), tokenizer, **lengths)
        params, opt_state, loss = step(params, opt_state, examples)
        losses.append(float(loss))
    assert [step for step, _ in reports] == [3, 4]
    np.testing.assert_allclose([loss for _, loss in reports], [np.mean(losses[:3]), losses[3]], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, params)
