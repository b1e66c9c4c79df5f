"""A model, settings and a batch small enough that an update of them is compared with loops."""

import dataclasses
from typing import Any

import numpy as np
import optax

from tba_jax import trajectory
from tba_jax.learner import state as state_lib
from tba_jax.learner import update as update_lib
from tba_jax.learner.optimizer import linear_then_constant
from tba_jax.models import scoring
from tba_jax.models.config import DecoderConfig
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.inputs import ObjectiveSettings
from tests.support import applied

MODEL = DecoderConfig(layers=2, width=16, heads=4, kv_heads=2, head_size=4, ffn=24, vocab=12, max_positions=16)
POLICY = Policy(model=MODEL)
Q, K, P, R = 6, 4, 5, 6
B = Q * K
BETA = 0.5
EOS = 1
SPACE = scoring.ResponseSpace(temperature=0.8, banned_tokens=(0,), eos_id=EOS)
# Gradients are read off the parameters after a step of plain descent by 1.
DESCENT: state_lib.Optimizers = {"policy": optax.sgd(1.0)}


def settings(**changes: Any) -> update_lib.LearnerConfig:
    config = update_lib.LearnerConfig(
        policy=POLICY,
        objective=OBJECTIVES["trajectory_balance"],
        settings=ObjectiveSettings(completions=K),
        micro_batch_rows=B,
        logit_bytes=1 << 20,
        space=SPACE,
        remat="none",
    )
    return dataclasses.replace(config, **changes)


def schedules(**changes: Any) -> update_lib.Schedules:
    """β = BETA and γ = τ = 1, but for `changes`."""
    values = {"beta": BETA, "ref_temperature": 1.0, "reward_temperature": 1.0}
    constants = {name: linear_then_constant(start=value, end=value, steps=0) for name, value in values.items()}
    return update_lib.Schedules(**constants | changes)


def random_params() -> Params:
    return applied.random(POLICY.model_specs, scale=0.2, seed=0)


def random_batch(seed: int = 0) -> state_lib.Batch:
    rng = np.random.default_rng([1, seed])
    lengths, response_length = rng.integers(1, P + 1, Q), rng.integers(1, R + 1, B).astype(np.int32)
    prompt_length, place = np.repeat(lengths, K).astype(np.int32), np.arange(P + R)
    prompts = np.repeat(rng.integers(1, MODEL.vocab, (Q, P + R)), K, axis=0)
    tokens = np.where(place < prompt_length[:, None], prompts, rng.integers(1, MODEL.vocab, (B, P + R)))
    tokens[place >= (prompt_length + response_length)[:, None]] = 0
    mask = trajectory.response_mask(response_length, R)
    ref, sampler, behavior = np.where(mask, -rng.exponential(1.0, (3, B, R)), 0.0).astype(np.float32)
    return state_lib.Batch(
        tokens=tokens.astype(np.int32),
        prompt_length=prompt_length,
        response_length=response_length,
        ref_logprobs=ref,
        policy_logprobs=sampler,
        behavior_logprobs=behavior,
        policy_step=np.where(mask, -rng.integers(0, 4, (B, 1)), -1).astype(np.int32),
        reward=rng.normal(size=B).astype(np.float32),
    )
