"""The update that a trainer calls, small and without a run, and random rows for it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from configs import base
from tba_jax import trajectory
from tba_jax.experiment import composition
from tba_jax.roles.trainer.update_program import Placed, UpdateProgram

BETA = 0.1
# Settings of the base recipe: 32 rows of 4 queries. The model's vocabulary is not a setting, it comes beside them.
SIZES: dict[str, Any] = {
    "task.prompt_length": 64,
    "task.response_length": 64,
    "learner.queries": 4,
    "learner.completions": 8,
    "model.layers": 6,
    "model.width": 384,
    "model.heads": 6,
    "model.kv_heads": 6,
    "model.head_size": 64,
    "model.ffn": 1024,
}
LEARNER: dict[str, Any] = {
    "learner.beta_start": BETA,
    "learner.beta_end": BETA,
    "learner.warmup_steps": 0,
    "learner.mesh.data": 1,
    "learner.mesh.fsdp": 1,
    "learner.learning_rate": 1e-4,
}


def update_program(changes: Mapping[str, Any], vocab: int, *, begins: bool = True, donates: bool = True) -> UpdateProgram:
    """The trainer's update on the first device, with random weights.

    Args: changes: settings of the base recipe; begins: False: without a state, so that nothing is on the device; donates: see
      UpdateProgram.
    """
    config = base.get_config()
    config.update_from_flattened_dict(SIZES | LEARNER | dict(changes))
    built = composition.build(config)
    policy = dataclasses.replace(built.policy, model=dataclasses.replace(built.policy.model, vocab=vocab))
    # The ids of a tokenizer's special tokens would be banned: here all responses over the vocabulary count.
    contract = dataclasses.replace(built.contract, banned_tokens=())
    program = UpdateProgram(config, contract, policy, devices=jax.devices()[:1], donates=donates)
    if begins:
        begin(program)
    return program


def begin(program: UpdateProgram) -> None:
    """Gives a program its state: random weights."""
    program.begin(jax.jit(program._policy.base.init)(jax.random.key(0)))


def compiled(program: UpdateProgram, placed: Placed) -> Any:
    """The compiled update of such rows, as `dispatch` calls it. The program need not have a state."""
    state, frozen = program.shapes()["state"], program.shapes()["frozen weights"]
    return program._update.lower(state, frozen, placed.batch, placed.packed, whole_groups=placed.plan.whole_groups).compile()


def random_rows(program: UpdateProgram, changes: Mapping[str, Any], vocab: int) -> trajectory.Rows:
    """Rows of random tokens: a prompt of P tokens for each query, responses of R tokens."""
    sizes = SIZES | dict(changes)
    B, P, R = program.rows, sizes["task.prompt_length"], sizes["task.response_length"]
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab, (B, P + R)).astype(np.int32)
    tokens[:, :P] = tokens[:: sizes["learner.completions"], :P].repeat(sizes["learner.completions"], axis=0)
    logprobs = -rng.exponential(np.log(vocab), (B, R)).astype(np.float32)
    return {
        "tokens": tokens,
        "prompt_length": np.full(B, P, np.int32),
        "response_length": np.full(B, R, np.int32),
        "ref_logprobs": logprobs,
        "policy_logprobs": logprobs,
        "behavior_logprobs": logprobs,
        "policy_step": np.zeros((B, R), np.int32),
        "reward": rng.normal(size=B).astype(np.float32),
    }
