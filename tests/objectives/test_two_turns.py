"""Trajectory balance where an environment answers, on an enumerated space: a token of the policy, one of the environment, and
another one of the policy. Whoever drew the rows, it leads to the soft optimum of that tree if the environment's token follows
from the prompt and the policy's; where it is random, the policy's own rows alone do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tba_jax.objectives.objective import ObjectiveInputs, ObjectiveSettings, PolicyOutputs
from tba_jax.objectives.trajectory_balance import trajectory_balance

A, E, BETA, Q, K, STEPS, STALE = 4, 3, 0.5, 4, 16, 3000, 50
rng = np.random.default_rng(0)
REWARD = jnp.float32(rng.normal(size=(A, E, A)))
REF = {name: jnp.float32(rng.normal(size=shape)) for name, shape in {"first": (A,), "second": (A, E, A)}.items()}
# The environment's answer to each first token: P(e | a).
ANSWERS = {"deterministic": jnp.eye(E)[jnp.array([2, 0, 1, 0])], "random": jnp.float32(rng.dirichlet(np.ones(E), A))}
UNIFORM = jax.tree.map(jnp.zeros_like, REF)
SKEWED = {"first": jnp.float32([2, -1, 0, 1]), "second": jnp.zeros((A, E, A))}


def joint(logits, answers):
    """float32[A, E, A]: the probability of each response."""
    first, second = jax.nn.softmax(logits["first"]), jax.nn.softmax(logits["second"])
    return first[:, None, None] * answers[:, :, None] * second


def soft_optimum(answers):
    """The policy of the highest E r − β KL(π‖π_ref), in which the environment's tokens have no share."""
    ref = jax.tree.map(jax.nn.log_softmax, REF)
    second = ref["second"] + REWARD / BETA
    value = jnp.sum(answers * jax.nn.logsumexp(second, axis=-1), axis=1)
    return {"first": ref["first"] + value, "second": second}


def rows(policy, sampler, key, answers):
    """Q·K rows: outputs, and inputs whose masked tokens hold numbers that must not count."""
    first_key, answer_key, second_key = jax.random.split(key, 3)
    a = jax.random.categorical(first_key, sampler["first"], shape=(Q * K,))
    e = jax.random.categorical(answer_key, jnp.log(answers)[a])
    b = jax.random.categorical(second_key, sampler["second"][a, e])

    def logprobs(logits, masked):
        first, second = jax.nn.log_softmax(logits["first"])[a], jax.nn.log_softmax(logits["second"])[a, e, b]
        return jnp.stack([first, jnp.full(Q * K, masked), second, jnp.full(Q * K, 3 * masked)], axis=1)

    inputs = ObjectiveInputs(
        ref_logprobs=logprobs(REF, 11.0),
        behavior_logprobs=logprobs(sampler, -7.0),
        mask=jnp.tile(jnp.array([True, False, True, False]), (Q * K, 1)),
        reward=REWARD[a, e, b],
        beta=jnp.float32(BETA),
        ref_temperature=jnp.ones(()),
        reward_temperature=jnp.ones(()),
        settings=ObjectiveSettings(completions=K),
    )
    return PolicyOutputs(logprobs=logprobs(policy, 5.0), log_z=jnp.zeros(Q * K)), inputs


@functools.partial(jax.jit, static_argnames="kind")
def distance(answers, sampler, *, kind):
    """Total variation between the policy after training and the soft optimum. kind: whose rows: "fixed", "stale" or "own"."""
    optimizer = optax.chain(optax.adam(optax.cosine_decay_schedule(0.03, STEPS)))

    def update(carry, key):
        policy, moments, old, step = carry
        drawn = {"fixed": sampler, "stale": old, "own": policy}[kind]
        gradient = jax.grad(lambda policy: trajectory_balance(*rows(policy, jax.lax.stop_gradient(drawn), key, answers)))(policy)
        changes, moments = optimizer.update(gradient, moments)
        old = jax.tree.map(lambda x, y: jnp.where(step % STALE == 0, x, y), policy, old)
        return (optax.apply_updates(policy, changes), moments, old, step + 1), None

    begin = REF, optimizer.init(REF), REF, 0
    (policy, *_), _ = jax.lax.scan(update, begin, jax.random.split(jax.random.key(1), STEPS))
    return jnp.sum(jnp.abs(joint(policy, answers) - joint(soft_optimum(answers), answers))) / 2


@pytest.mark.parametrize(("kind", "sampler"), [("fixed", UNIFORM), ("fixed", SKEWED), ("stale", UNIFORM), ("own", UNIFORM)])
def test_where_answers_follow_from_the_tokens_any_rows_lead_to_the_optimum(kind, sampler):
    answers = ANSWERS["deterministic"]
    start = float(jnp.sum(jnp.abs(joint(REF, answers) - joint(soft_optimum(answers), answers))) / 2)
    found = float(distance(answers, sampler, kind=kind))
    assert start > 0.4 and found <= 0.03, (start, found)


def test_where_answers_are_random_only_the_policys_own_rows_do():
    answers = ANSWERS["random"]
    kinds = (UNIFORM, "own"), (UNIFORM, "stale"), (UNIFORM, "fixed"), (SKEWED, "fixed")
    own, stale, uniform, skewed = (float(distance(answers, sampler, kind=kind)) for sampler, kind in kinds)
    print(f"random answers: own rows {own:.3f}, old {stale:.3f}, uniform {uniform:.3f}, skewed {skewed:.3f}")
    assert own <= 0.05 < min(uniform, skewed), (own, uniform, skewed)
