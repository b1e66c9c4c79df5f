"""The warm start against a plain loop over its random stream."""

import functools
from typing import Any

import jax
import numpy as np
import optax

from tba_jax import sharding
from tba_jax.learner import optimizer as optimizer_lib
from tba_jax.models.config import DecoderConfig
from tba_jax.models.parameters import Params
from tba_jax.supervised import objectives
from tba_jax.tasks.arithmetic import CHARACTERS, Arithmetic
from tba_jax.text.tokenizers import CharacterTokenizer
from tests.support import applied


def test_the_warm_start_is_a_plain_loop_over_its_random_stream():
    task = Arithmetic(digits=1, train_queries=10, heldout_queries=4, seed=0)
    tokenizer = CharacterTokenizer(CHARACTERS)
    sizes = dict(layers=1, width=16, heads=4, kv_heads=2, head_size=4, ffn=24, max_positions=24)
    model = DecoderConfig(**sizes, vocab=tokenizer.vocab_size)
    mesh = sharding.make_mesh((1, 2, 1), setting="learner.mesh", devices=jax.devices()[:2])
    lengths: dict[str, int] = dict(prompt_length=5, response_length=12)
    run = dict(seed=3, steps=4, batch_size=8, learning_rate=1e-2, warmup_steps=1, report_every_steps=3)
    settings = objectives.WarmStart(model=model, mesh=mesh, **run, **lengths)
    reports: list[tuple[int, float]] = []
    found = settings.train(task, tokenizer, report=lambda *point: reports.append(point))
    config = objectives.StepConfig(objective=objectives.likelihood, R=12, micro_batch_rows=8, logit_bytes=1 << 30, remat="none")
    schedule = optimizer_lib.linear(peak=1e-2, steps=4, warmup_steps=1)
    optimizer = optimizer_lib.adamw(schedule, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.01, clip_norm=1.0)
    params = jax.jit(functools.partial(applied.init, config=model))(jax.random.key(3))
    opt_state, rng, losses = jax.jit(optimizer.init)(params), np.random.default_rng([3, 1]), []

    @jax.jit
    def step(params: Params, opt_state: Any, examples: objectives.Batch) -> Any:
        def mean(params: Params) -> jax.Array:
            return objectives.likelihood(applied.merge(params, model), examples, config)["loss"] / examples.response_length.sum()

        loss, grads = jax.value_and_grad(mean)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for _ in range(4):
        examples = objectives.encode_examples(task.worked_examples(rng, 8), tokenizer, **lengths)
        params, opt_state, loss = step(params, opt_state, examples)
        losses.append(float(loss))
    assert [step for step, _ in reports] == [3, 4]
    np.testing.assert_allclose([loss for _, loss in reports], [np.mean(losses[:3]), losses[3]], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), jax.device_get(found), params)
