"""Does training reach p* ∝ π_ref·exp(r/β), whoever produced the rows? A space small enough to add up says so exactly.

    python -m benchmarks.objectives --workdir=DIR --only=posterior,baselines

Four symbols and an end, at most four tokens: 341 responses to each of 8 prompts. The transformer, the sampler and the update
are those of training.
"""

import concurrent.futures
import functools
import itertools
import os
import time
from pathlib import Path
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import summary
from tba_jax import packing
from tba_jax.decoding import sampling
from tba_jax.learner import optimizer as state_lib
from tba_jax.learner import update
from tba_jax.models import decoder, parameters, scoring
from tba_jax.models.config import DecoderConfig
from tba_jax.models.policy import Policy
from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.objective import ObjectiveSettings
from tba_jax.packing import Limits

# Tokens: symbols, end, padding, and for each query the token that is its prompt.
SYMBOLS, EOS, PAD, QUERIES = 4, 4, 5, 8
BANNED = tuple(range(PAD, PAD + 1 + QUERIES))
SPACE = scoring.ResponseSpace(temperature=1.0, banned_tokens=BANNED, eos_id=EOS)
K, R = 20, 4
BETA, PEAK, LOG_Z_PEAK = 0.5, 1e-3, 1e-2
# Standard deviations of r/β and, about, of the logits of π_ref.
REWARD_SPREAD, LOGIT_SPREAD = 1.4, 0.7
BOUND = 0.03
POINTS = 40
MAX_DELAY = 50
FROZEN_ROWS = 1024

MODEL = DecoderConfig(
    layers=2,
    width=64,
    heads=4,
    kv_heads=4,
    head_size=16,
    ffn=128,
    vocab=PAD + 1 + QUERIES,
    max_positions=8,
    positions="learned",
    tied_embedding=False,
)
DECODER = decoder.define(MODEL)
Definition = parameters.Definition[decoder.Decoder]


# All fields are traced, so that one program serves all.
@flax.struct.dataclass
class Behavior:
    """Who produces the rows. Even rows are drawn at the first of each pair, odd rows at the second, by the policy of `delay`
    updates ago, at most MAX_DELAY (π_ref before). log: batches that π_ref draws once and for all, in turn; 0: all are new."""

    temperature: tuple[float, float] = (1.0, 1.0)
    top_p: tuple[float, float] = (1.0, 1.0)
    delay: int = 0
    log: int = 0


# At this temperature what is left of logits is below float32's rounding: uniform over symbols and end.
_UNIFORM = 1e9

BEHAVIORS = {
    "on-policy": Behavior(),
    "uniform": Behavior(temperature=(_UNIFORM, _UNIFORM)),
    "50 updates old": Behavior(delay=MAX_DELAY),
    "half temperature 2, half top-p 0.8": Behavior(temperature=(2.0, 1.0), top_p=(1.0, 0.8)),
    "top-p 0.8 alone": Behavior(top_p=(0.8, 0.8)),
}


def all_responses() -> tuple[np.ndarray, np.ndarray]:
    """Every response: tokens int32[N, R], right-padded, and length int32[N], the end included."""
    endless = list(itertools.product(range(SYMBOLS), repeat=R))
    ended = [(*t, EOS) for n in range(R) for t in itertools.product(range(SYMBOLS), repeat=n)]
    length = np.array([len(t) for t in ended + endless], np.int32)
    return np.array([t + (PAD,) * (R - len(t)) for t in ended + endless], np.int32), length


RESPONSES, LENGTHS = all_responses()
N = len(RESPONSES)


def code(tokens: Any) -> Any:
    """Base-5 code of padded responses [..., R], padding counted as end: int[...]."""
    return (tokens.clip(max=EOS) * 5 ** np.arange(R - 1, -1, -1)).sum(-1)


# The number of the response with a code; N, out of bounds, where there is none.
NUMBER_OF_CODE = np.full(5**R, N, np.int32)
NUMBER_OF_CODE[code(RESPONSES)] = np.arange(N)


@flax.struct.dataclass
class Problem:
    """ref_params: π_ref; ref_logprobs: float32[Q, N, R], its teacher-forced log-probs, nats; rewards: float32[Q, N];
    target: float32[Q, N], p*; log_z: float32[Q], nats, and frozen_log_z: its estimate from FROZEN_ROWS draws of π_ref."""

    ref_params: Any
    ref_logprobs: chex.Array
    rewards: chex.Array
    target: chex.Array
    log_z: chex.Array
    frozen_log_z: chex.Array


def prompts(queries: int, copies: int) -> tuple[jax.Array, jax.Array]:
    """int32[queries·copies, 1] and the length of each, 1; those of one query are consecutive."""
    return jnp.repeat(PAD + 1 + jnp.arange(queries), copies)[:, None], jnp.ones(queries * copies, jnp.int32)


def as_rows(queries: int, copies: int, responses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """tokens int32[queries·copies, 1 + R] of prompts, each followed by its response, and the prompts' lengths."""
    tokens, length = prompts(queries, copies)
    return jnp.concatenate([tokens, responses], axis=1), length


def enumerate_logprobs(params: Any, queries: int, definition: Definition = DECODER) -> jax.Array:
    """log π(y_t|x, y_<t) of every response to every prompt: float32[Q, N, R], nats, 0 where masked."""
    logprobs, _ = scoring.response_logprobs(
        parameters.module(definition.graphdef, params),
        *as_rows(queries, N, jnp.tile(RESPONSES, (queries, 1))),
        jnp.tile(LENGTHS, queries),
        R=R,
        space=SPACE,
        logit_bytes=1 << 30,
        remat="none",
    )
    return logprobs.reshape(queries, N, R)


@functools.partial(jax.jit, static_argnames=("queries", "model"))
def make_problem(seed: jax.Array, *, queries: int = QUERIES, model: DecoderConfig = MODEL) -> Problem:
    """A random network, far from uniform, as π_ref; normal rewards; p* by brute force."""
    definition = decoder.define(model)
    params_key, rewards_key = jax.random.split(jax.random.key(seed))
    frozen_key = jax.random.fold_in(jax.random.key(seed), 2)
    # Weights of order 1/√D, so that what a position predicts depends on all before it.
    params = jax.tree.map(lambda p: jnp.where(p == 1, p, 6 * p), definition.init(params_key))
    head = params["lm_head"]["weight"]
    params["lm_head"]["weight"] = head / jnp.std(head) * LOGIT_SPREAD / model.width**0.5
    ref_logprobs = enumerate_logprobs(params, queries, definition)
    rewards = BETA * REWARD_SPREAD * jax.random.normal(rewards_key, (queries, N))
    log_ref = jnp.sum(ref_logprobs, axis=-1)
    log_target = log_ref + rewards / BETA
    drawn = jax.random.categorical(frozen_key, log_ref[:, None, :], shape=(queries, FROZEN_ROWS))
    ratios = jnp.take_along_axis(rewards, drawn, axis=1) / BETA  # log p̃/π_ref
    log_z = jax.nn.logsumexp(log_target, axis=1)
    return Problem(
        ref_params=params,
        ref_logprobs=ref_logprobs,
        rewards=rewards,
        target=jnp.exp(log_target - log_z[:, None]),
        log_z=log_z,
        frozen_log_z=jax.nn.logsumexp(ratios, axis=1) - jnp.log(FROZEN_ROWS),
    )


def total_variation(params: Any, problem: Problem, definition: Definition = DECODER) -> jax.Array:
    """TV(π_θ, p*) = ½ Σ_y |π_θ(y|x) − p*(y|x)|: float32[Q]."""
    policy = jnp.exp(jnp.sum(enumerate_logprobs(params, len(problem.rewards), definition), axis=-1))
    return 0.5 * jnp.sum(jnp.abs(policy - problem.target), axis=1)


@flax.struct.dataclass
class Drawn:
    """tokens: int32[B, R], PAD after the end; length: int32[B]; policy_logprobs, behavior_logprobs: float32[B, R], nats, 0 where
    masked."""

    tokens: chex.Array
    length: chex.Array
    policy_logprobs: chex.Array
    behavior_logprobs: chex.Array


def sample(params: Any, key: jax.Array, behavior: Behavior, *, queries: int, definition: Definition = DECODER) -> Drawn:
    """K rows for each prompt. Each token is drawn as searchers draw it, after a pass over all tokens before it."""
    model, rows = parameters.module(definition.graphdef, params), queries * K
    prompt, _ = prompts(queries, K)

    def alternating(pair: Any, dtype: Any) -> jax.Array:
        return jnp.tile(jnp.asarray(pair, dtype), rows // 2)

    settings = sampling.Sampling(
        temperature=alternating(behavior.temperature, jnp.float32),
        top_k=alternating((0, 0), jnp.int32),
        top_p=alternating(behavior.top_p, jnp.float32),
        min_p=alternating((0.0, 0.0), jnp.float32),
    )
    tokens, length = jnp.full((rows, R), PAD, jnp.int32), jnp.zeros(rows, jnp.int32)
    policy = behaved = jnp.zeros((rows, R), jnp.float32)
    running = jnp.ones(rows, bool)
    for t in range(R):
        logits = model.head()(model(jnp.concatenate([prompt, tokens[:, :t]], axis=1))[:, -1])
        logits = scoring.restrict(logits, jnp.full(rows, t), SPACE)
        drawn = sampling.draw(logits, jax.random.uniform(jax.random.fold_in(key, t), (rows,)), settings, scoring_temperature=1.0)
        tokens = tokens.at[:, t].set(jnp.where(running, drawn.token, PAD))
        policy = policy.at[:, t].set(jnp.where(running, drawn.policy_logprob, 0.0))
        behaved = behaved.at[:, t].set(jnp.where(running, drawn.behavior_logprob, 0.0))
        length = length + running
        running &= drawn.token != EOS
    return Drawn(tokens, length, policy, behaved)


def as_batch(rows: Drawn, problem: Problem, *, gives_log_z: bool = False) -> update.Batch:
    """The rows with their rewards and reference log-probs, which are looked up."""
    queries = len(problem.rewards)
    query, number = jnp.repeat(jnp.arange(queries), K), jnp.asarray(NUMBER_OF_CODE)[code(rows.tokens)]
    tokens, prompt_length = as_rows(queries, K, rows.tokens)
    return update.Batch(
        tokens=tokens,
        prompt_length=prompt_length,
        response_length=rows.length,
        ref_logprobs=problem.ref_logprobs[query, number],
        behavior_logprobs=rows.behavior_logprobs,
        reward=problem.rewards[query, number],
        log_z=problem.frozen_log_z[query] if gives_log_z else None,
    )


# Of an update, see update.train_step.
MEASURED = ("loss", "grad_norm", "finite", "ratio_max")


def alone(tokens: jax.Array, prompt_length: jax.Array, response_length: jax.Array, *, R: int) -> packing.Packed:
    """The rows, tokens int32[B, T] and lengths int32[B], as one micro-batch of a sequence each, made where the rows are."""
    B, places = len(tokens), jnp.arange(R)
    states = jnp.minimum(prompt_length[:, None] - 1 + places, tokens.shape[1] - 2)
    targets = jnp.take_along_axis(tokens, states + 1, axis=1)
    numbers = jnp.where(places < response_length[:, None], jnp.arange(B)[:, None] * R + places, B * R)
    states += jnp.arange(B)[:, None] * (tokens.shape[1] - 1)
    made: dict[str, Any] = dict.fromkeys(("segments", "positions", "prefix", "parents"))
    arrays = dict(tokens=tokens[:, :-1], states=states, targets=targets, numbers=numbers)
    made |= {name: leaf[None, None] for name, leaf in arrays.items()}
    return packing.Packed(micro_batches=packing.Sequences(**made), count=jnp.int32(1), of_row=jnp.zeros(B, jnp.int32))


@functools.partial(jax.jit, static_argnames=("objective", "completions", "beta", "settings", "steps", "every"))
def train(
    problem: Problem,
    seed: jax.Array,
    *,
    behavior: Behavior,
    steps: int,
    every: int,
    objective: str = "trajectory_balance",
    completions: int = K,
    beta: float = BETA,
    settings: tuple[tuple[str, float], ...] = (),
) -> tuple[state_lib.TrainState, jax.Array, dict[str, jax.Array]]:
    """Trains from π_ref. Key of an update's rows: fold_in(seed's key, number of the update). settings: of ObjectiveSettings.

    Returns:
      the last state; TV float32[steps/every + 1, Q], at the start and after every `every` updates; the measurements of
      updates, float32[steps/every, every] each.
    """
    learned, valued = OBJECTIVES[objective].log_z_head, OBJECTIVES[objective].value_head
    cosine = functools.partial(optax.cosine_decay_schedule, decay_steps=steps)
    of_head = optax.adam(cosine(LOG_Z_PEAK))
    optimizers: dict[str, Any] = {"policy": optax.adam(cosine(PEAK))}
    optimizers |= {"log_z_head": of_head} if learned else {}
    optimizers |= {"value_head": of_head} if valued else {}
    one = optax.constant_schedule(1.0)
    changes: dict[str, Any] = dict(settings)
    config = update.LearnerConfig(  # the whole batch is one micro-batch
        policy=Policy(model=MODEL),
        objective=OBJECTIVES[objective],
        settings=ObjectiveSettings(completions=completions, **changes),
        limits=Limits(rows=len(problem.rewards) * K, group=completions, prompt=1, response=R, shares=False),
        logit_bytes=1 << 30,
        space=SPACE,
        remat="none",
    )
    schedules = update.Schedules(beta=optax.constant_schedule(beta), ref_temperature=one, reward_temperature=one)
    state = state_lib.init_state(config.policy, problem.ref_params, optimizers)
    key, delay = jax.random.fold_in(jax.random.key(seed), 1), behavior.delay

    def rows_for(params: Any, number: jax.Array) -> Drawn:
        offline, number = behavior.log > 0, jnp.where(behavior.log > 0, number % jnp.maximum(behavior.log, 1), number)
        params = jax.tree.map(functools.partial(jnp.where, offline), problem.ref_params, params)
        return sample(params, jax.random.fold_in(key, number), behavior, queries=len(problem.rewards))

    def one_update(carry: Any, _: None) -> tuple[Any, Any]:
        state, waiting = carry
        # The newest rows go to the slot from which they are taken `delay` updates later: at once where that is 0.
        rows, slots = rows_for(state.params["policy"], state.step + delay), MAX_DELAY + 1
        waiting = jax.tree.map(lambda w, r: w.at[(state.step + delay) % slots].set(r), waiting, rows)
        rows = jax.tree.map(lambda w: w[state.step % slots], waiting)
        batch = as_batch(rows, problem, gives_log_z=OBJECTIVES[objective].given_log_z)
        packed = alone(batch.tokens, batch.prompt_length, batch.response_length, R=R)
        state, measured = update.train_step(
            state, {}, batch, packed, whole_groups=True, optimizers=optimizers, schedules=schedules, config=config
        )
        return (state, waiting), {name: measured[name] for name in MEASURED}

    def some_updates(carry: Any, _: None) -> tuple[Any, Any]:
        carry, measured = jax.lax.scan(one_update, carry, length=every)
        return carry, (total_variation(carry[0].params["policy"], problem), measured)

    waiting = jax.lax.map(lambda number: rows_for(problem.ref_params, number), jnp.arange(MAX_DELAY + 1))
    (state, _), (distances, measured) = jax.lax.scan(some_updates, (state, waiting), length=steps // every)
    start = total_variation(problem.ref_params, problem)
    return state, jnp.concatenate([start[None], distances]), measured


def predicted_log_z(state: state_lib.TrainState, *, queries: int = QUERIES) -> jax.Array:
    """log Z_φ(x) of a run with learned log Z: float32[Q], nats."""
    model = state.model(state.params, {})
    return model.log_z_head(scoring.mean_prompt_states(model.policy, *prompts(queries, 1)))[:, 0]


def compile_train(*, queries: int = QUERIES, **static: Any) -> Any:
    """`train` for any seed and behaviour, called as f(problem, seed, behavior=…). static: its other arguments."""
    return train.lower(make_problem(0, queries=queries), 0, behavior=Behavior(), **static).compile()


def compare(root: Path, *, steps: int = 4000, seeds: int = 3) -> None:
    """Prints a table of every behaviour and seed (other networks, rewards and samples); the figure goes to root/posterior."""
    compiled = compile_train(steps=steps, every=max(1, steps // POINTS))
    runs = {name: functools.partial(compiled, behavior=behavior) for name, behavior in BEHAVIORS.items()}
    _run_all(runs, "rows from", steps=steps, seeds=seeds, path=root / "posterior" / "posterior.png")


# Of those with a KL term these have other optima: the mean gradient of k3 is that of KL(π_ref‖π_θ), GRPO and IcePop divide the
# reward by its spread, and the pairs of online DPO are the best and the worst of K.
_OTHER_OPTIMA = ("grpo", "dr_grpo", "icepop", "online_dpo")
# On-policy p* is the optimum of the others here (of ppo but for the error of its values). No log Z head, no values of states.
_P_STAR = ("trajectory_balance", "f_trajectory_balance", "frozen_log_z", "gflowrl", "tba_prime", "reinforce", "rloo")
WITH_KL = (*_P_STAR, "optimal_baseline", "proximal_rloo", "ppo", *_OTHER_OPTIMA)
STALE = "50 updates old"


def compare_objectives(root: Path, *, steps: int = 2000, seeds: int = 2) -> None:
    """Prints a table of every objective and seed on the same stale data; the figure goes to root/baselines."""
    stale, every = BEHAVIORS[STALE], max(1, steps // POINTS)
    runs = {name: functools.partial(compile_train(steps=steps, every=every, objective=name), behavior=stale) for name in WITH_KL}
    _run_all(runs, f"objective, rows {STALE}", steps=steps, seeds=seeds, path=root / "baselines" / "baselines.png")


OFFLINE = ("trajectory_balance", "rloo", "tba_prime", "proximal_rloo", "grpo", "online_dpo")
LOGS = (25, 250)


def compare_offline(root: Path, *, steps: int = 4000, seeds: int = 6) -> None:
    """Prints a table of every objective, log and seed, where π_ref has drawn all rows before; the figure goes to root/offline."""
    compiled = {name: compile_train(steps=steps, every=max(1, steps // POINTS), objective=name) for name in OFFLINE}
    runs = {
        f"{name}, {log * K} rows a query": functools.partial(compiled[name], behavior=Behavior(log=log))
        for log in LOGS
        for name in OFFLINE
    }
    _run_all(runs, "objective, log of π_ref", steps=steps, seeds=seeds, path=root / "offline" / "offline.png")


def _run_all(runs: dict[str, Any], column: str, *, steps: int, seeds: int, path: Path) -> None:
    """Prints the table of runs, called as f(problem, seed), and draws their TV over updates."""

    def run(cell: tuple[int, str]) -> tuple[np.ndarray, float]:
        begin = time.monotonic()
        seed, name = cell
        distance = np.asarray(runs[name](make_problem(seed), seed)[1])
        return distance, time.monotonic() - begin

    summary.table("seed", column, "TV to p*, before", "after, mean of queries", "largest", "seconds")
    cells = list(itertools.product(range(seeds), runs))
    curves: dict[str, list[summary.Curve]] = {name: [] for name in runs}
    # One operation of so small a network does not use several cores: as many runs at a time as there are.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for (seed, name), (distance, seconds) in zip(cells, pool.map(run, cells), strict=True):
            before, after, largest = distance[0].mean(), distance[-1].mean(), distance[-1].max()
            summary.row(f"{seed}", name, f"{before:.3f}", f"{after:.4f}", f"{largest:.4f}", f"{seconds:.0f}")
            updates = np.linspace(0, steps, len(distance))
            curves[name].append(dict(zip(updates.tolist(), distance.mean(axis=1).tolist(), strict=True)))
    print()
    summary.table(column, "TV to p*, before", "after, mean of queries")
    for name, of_name in curves.items():
        summary.row(name, *(summary.spread([curve[at(curve)] for curve in of_name], ".4f") for at in (min, max)))
    path.parent.mkdir(parents=True, exist_ok=True)
    summary.plot(path, {f"{seeds} seeds": curves}, across="updates", up="total variation between π_θ and p*", log=True)
