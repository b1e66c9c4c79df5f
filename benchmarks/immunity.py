"""Does it matter which engine drew the rows? Objectives on rows of engines that differ from the learner, where p* is known.

    python -m benchmarks.immunity --workdir=DIR [--python=.venv-engines/bin/python] [--engines=own,int8,…] [--seeds=3]

The space is that of benchmarks/posterior.py, with two queries and heads of 64 as vLLM's kernels want them. Every engine gets
the learner's weights each 20 updates and draws the rows of the next 20. A run is stored in DIR when it has ended and is not
made again; the table and DIR/immunity.png are of all that are there. Runs with vLLM need the Python of an environment that has
it (make engines).
"""

import dataclasses
import itertools
import os
import string
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

from benchmarks import posterior, summary
from benchmarks.posterior import EOS, PAD, Drawn, K, R
from tba_jax.decoding.server_process import ServerProcess
from tba_jax.decoding.servers import Vllm
from tba_jax.learner import optimizer, update
from tba_jax.models import decoder, kv_cache
from tba_jax.models.hugging_face import export
from tba_jax.models.policy import Policy
from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.advantages import bounded_exp, k3, standardised, token_log_ratios
from tba_jax.objectives.objective import ObjectiveInputs, ObjectiveSettings, PolicyOutputs
from tba_jax.packing import Limits
from tba_jax.text.tokenizers import CharacterTokenizer

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the runs.", required=True)
_PYTHON = flags.DEFINE_string("python", "", "Python of an environment with vLLM, for the engine vLLM.")
_ENGINES = flags.DEFINE_list("engines", [], "Engines to run; all by default, vLLM where there is a --python.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Of problem, network and rows.", lower_bound=1)
_UPDATES = flags.DEFINE_integer("updates", 2000, "Of a run, a multiple of 20.", lower_bound=20)

QUERIES = 2
SYNC = 20  # updates between two new weights of the engine
MODEL = dataclasses.replace(posterior.MODEL, positions="rotary", heads=1, kv_heads=1, head_size=64, max_positions=16)
DEFINITION = decoder.define(MODEL)
NOISE = 0.3  # standard deviation of what the perturbed engine adds to logits
TRUNCATION = 2.0

# (weights, key) -> SYNC batches of rows, leaves [SYNC, Q·K, …].
Draw = Callable[[Any, jax.Array], Drawn]


def truncated_grpo(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} 1/|y| Σ_t [ sg( min(ρ_t, 2) ) A log π_θ − β k3_t ],  ρ_t = π_θ/π_behaviour,  A as in `grpo`: float32[].

    GRPO with truncated importance sampling. The published weight has the learner's policy of when the rows were drawn as its
    numerator, beside a clipped ratio of π_θ to that policy.
    """
    ratio = jnp.minimum(bounded_exp(token_log_ratios(jax.lax.stop_gradient(outputs.logprobs), inputs)), TRUNCATION)
    advantage = standardised(inputs.grouped(inputs.reward)).reshape(-1, 1)
    return inputs.mean_per_token(inputs.beta * k3(outputs.logprobs, inputs) - ratio * advantage * outputs.logprobs)


# Title -> the objective, and whose log-probs of the rows it takes for the behaviour's: the engine's, or the learner's own.
ARMS = {
    "trajectory balance": (OBJECTIVES["trajectory_balance"], "engine"),
    "GRPO, learner's log-probs": (OBJECTIVES["grpo"], "learner"),
    "GRPO, engine's log-probs": (OBJECTIVES["grpo"], "engine"),
    "GRPO, truncated weights": (dataclasses.replace(OBJECTIVES["grpo"], loss=truncated_grpo), "engine"),
    "OAPL, engine's log-probs": (OBJECTIVES["oapl"], "engine"),
}


def _jax_engine(weights: str, dtype: str, temperature: float, noise: float) -> Draw:
    """See ENGINES. noise: of the head's weights, so that equal states get equal logits."""
    policy = Policy(model=dataclasses.replace(MODEL, compute_dtype=dtype))
    definition = kv_cache.define(policy.model, weights, unstacked=False)
    off = jax.random.normal(jax.random.key(99), (MODEL.width, MODEL.vocab)) * noise / MODEL.width**0.5

    @jax.jit
    def draw(params: Any, key: jax.Array) -> Drawn:
        params = params | {"lm_head": {"weight": params["lm_head"]["weight"] + off}}
        its = policy.for_sampling(params, {}, weights)
        behavior = posterior.Behavior(temperature=(temperature, temperature))
        how: dict[str, Any] = dict(queries=QUERIES, definition=definition)
        return jax.lax.map(lambda key: posterior.sample(its, key, behavior, **how), jax.random.split(key, SYNC))

    return draw


class _Vllm(Vllm):
    """Draws many responses to a prompt at once."""

    def many(self, prompt: int, samples: int) -> Iterator[tuple[list[int], list[float]]]:
        """Tokens of each response, and nats."""
        bans = {str(token): -100.0 for token in posterior.BANNED}
        asked: dict[str, Any] = dict(prompt=[prompt], n=samples, max_tokens=R, temperature=1.0, logprobs=0, logit_bias=bans)
        asked |= dict(ignore_eos=True, stop_token_ids=[EOS], return_token_ids=True)
        for choice in self._ask("POST", "/v1/completions", asked, 600.0)["choices"]:
            yield choice["token_ids"], choice["logprobs"]["token_logprobs"]


@contextmanager
def _vllm_engine() -> Iterator[Draw]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    tokenizer = CharacterTokenizer(string.ascii_letters[: MODEL.vocab - 3])
    write, token_ids = export.tokenizer_files(tokenizer, None)
    with tempfile.TemporaryDirectory() as folder:
        process = ServerProcess(
            _Vllm,
            python=_PYTHON.value,
            arguments=("--enforce-eager", "--gpu-memory-utilization=0.2", "--max-num-seqs=512", "--no-enable-log-requests"),
            dtype="float32",
            length=1 + R,
            log_file=Path(_WORKDIR.value) / "vllm.log",
            start_seconds=600.0,
        )
        server: _Vllm | None = None
        versions = itertools.count()

        def draw(params: Any, key: jax.Array) -> Drawn:
            nonlocal server
            del key  # the server has its own
            to = Path(folder) / f"{next(versions)}"
            export.save(to, MODEL, jax.device_get(params), dtype="float32", token_ids=token_ids, more=[write])
            if server is None:
                made = process.start(to)
                assert isinstance(made, _Vllm)
                server = made
            else:
                server.load(to, seconds=60.0)
            shape = (QUERIES, SYNC, K, R)
            tokens, logprobs, length = np.full(shape, PAD, np.int32), np.zeros(shape, np.float32), np.zeros(shape[:3], np.int32)
            for query in range(QUERIES):
                for i, (its, nats) in enumerate(server.many(PAD + 1 + query, SYNC * K)):
                    at = (query, *divmod(i, K))
                    tokens[at][: len(its)], logprobs[at][: len(its)], length[at] = its, nats, len(its)

            def batches(x: np.ndarray) -> jax.Array:
                return jnp.asarray(x.swapaxes(0, 1).reshape(SYNC, QUERIES * K, *x.shape[3:]))

            return Drawn(batches(tokens), batches(length), batches(np.zeros_like(logprobs)), batches(logprobs))

        try:
            yield draw
        finally:
            process.kill()


# Title -> weights, compute dtype, temperature and noise of the engine that draws; "own again" draws other rows than "own".
ENGINES = {
    "own": ("full", "float32", 1.0, 0.0),
    "own again": ("full", "float32", 1.0, 0.0),
    "bfloat16": ("full", "bfloat16", 1.0, 0.0),
    "int8": ("int8", "float32", 1.0, 0.0),
    "perturbed": ("full", "float32", 0.9, NOISE),
}
VLLM = "vLLM"


def _learner(arm: str, updates: int) -> tuple[Any, Any]:
    """(problem -> state, (state, problem, rows of SYNC updates) -> (state, gap in nats a token, TV float32[Q]))."""
    objective, whose = ARMS[arm]
    policy, one = Policy(model=MODEL), optax.constant_schedule(1.0)
    optimizers: dict[str, Any] = {"policy": optax.adam(optax.cosine_decay_schedule(posterior.PEAK, updates))}
    config = update.LearnerConfig(
        policy=policy,
        objective=objective,
        settings=ObjectiveSettings(completions=K),
        limits=Limits(rows=QUERIES * K, group=K, prompt=1, response=R, shares=False),
        logit_bytes=1 << 30,
        space=posterior.SPACE,
        remat="none",
    )
    schedules = update.Schedules(beta=optax.constant_schedule(posterior.BETA), ref_temperature=one, reward_temperature=one)
    query = jnp.repeat(jnp.arange(QUERIES), K)

    @jax.jit
    def learn(state: Any, problem: posterior.Problem, rows: Drawn) -> tuple[Any, jax.Array, jax.Array]:
        number = jnp.asarray(posterior.NUMBER_OF_CODE)[posterior.code(rows.tokens)]
        own = posterior.enumerate_logprobs(state.params["policy"], QUERIES, DEFINITION)[query, number]
        gap = jnp.abs(own - rows.behavior_logprobs).sum() / rows.length.sum()
        rows = dataclasses.replace(rows, behavior_logprobs=own) if whose == "learner" else rows

        def one_update(state: Any, its: Drawn) -> tuple[Any, None]:
            batch = posterior.as_batch(its, problem)
            packed = posterior.alone(batch.tokens, batch.prompt_length, batch.response_length, R=R)
            how: dict[str, Any] = dict(optimizers=optimizers, schedules=schedules, config=config)
            return update.train_step(state, {}, batch, packed, whole_groups=True, **how)[0], None

        state, _ = jax.lax.scan(one_update, state, rows)
        return state, gap, posterior.total_variation(state.params["policy"], problem, DEFINITION)

    return lambda problem: optimizer.init_state(policy, problem.ref_params, optimizers), learn


def _run(draw: Draw, start: Any, learn: Any, *, seed: int, salt: int, updates: int) -> dict[str, Any]:
    problem = posterior.make_problem(seed, queries=QUERIES, model=MODEL)
    state, gaps = start(problem), []
    curve = [posterior.total_variation(problem.ref_params, problem, DEFINITION)]
    for number in range(updates // SYNC):
        rows = draw(state.params["policy"], jax.random.key(hash((seed, salt, number))))
        state, gap, distance = learn(state, problem, rows)
        gaps.append(gap)
        curve.append(distance)
    policy = np.exp(np.asarray(posterior.enumerate_logprobs(state.params["policy"], QUERIES, DEFINITION).sum(-1)))
    reward = (policy * np.asarray(problem.rewards)).sum(1).mean()
    best = (np.asarray(problem.target) * np.asarray(problem.rewards)).sum(1).mean()
    return dict(policy=policy, curve=np.mean(curve, axis=1), gap=np.mean(gaps), reward=reward, best=best)


def _file(root: Path, engine: str, arm: str, seed: int) -> Path:
    return root / f"{engine}-{arm}-{seed}-{_UPDATES.value}.npz".replace(" ", "_")


def _make(root: Path, engines: Sequence[str], *, seeds: int, updates: int) -> None:
    """Makes the runs that are missing."""
    for engine in engines:
        missing = [(arm, seed) for arm in ARMS for seed in range(seeds) if not _file(root, engine, arm, seed).exists()]
        if not missing:
            continue
        learners = {arm: _learner(arm, updates) for arm, _ in missing}
        with _vllm_engine() if engine == VLLM else _made(engine) as draw:
            for arm, seed in missing:
                begun, salt = time.monotonic(), int(engine == "own again")
                found = _run(draw, *learners[arm], seed=seed, salt=salt, updates=updates)
                np.savez(draft := root / f"draft-{os.getpid()}.npz", **found)
                os.replace(draft, _file(root, engine, arm, seed))
                seconds = time.monotonic() - begun
                print(f"{engine}, {arm}, seed {seed}: TV to p* {found['curve'][-1]:.4f}, {seconds:.0f} s", flush=True)


@contextmanager
def _made(engine: str) -> Iterator[Draw]:
    yield _jax_engine(*ENGINES[engine])


def _show(root: Path, *, seeds: int) -> None:
    """Prints the table of all engines whose runs are there, and draws them."""
    found: dict[tuple[str, str], list[Any]] = {}
    for arm, engine in itertools.product(ARMS, (*ENGINES, VLLM)):
        files = [_file(root, engine, arm, seed) for seed in range(seeds)]
        if all(file.exists() for file in files):
            found[arm, engine] = [np.load(file) for file in files]
    summary.table("objective", "rows from", "gap, nats per token", "TV to p*", "to the run on own rows", "mean reward", "of p*")
    for (arm, engine), runs in found.items():
        own = found.get((arm, "own"), [])
        off = [np.abs(a["policy"] - b["policy"]).sum(1).mean() / 2 for a, b in zip(runs, own, strict=True)] if own else []
        gap = np.mean([each["gap"] for each in runs])
        cells = [summary.spread([each["curve"][-1] for each in runs]), summary.spread(off) if off and engine != "own" else ""]
        cells += [summary.spread([each[name] for each in runs]) for name in ("reward", "best")]
        summary.row(arm, engine, f"{gap:.1e}", *cells)
    _draw(root / "immunity.png", found)


def _draw(path: Path, found: dict[tuple[str, str], list[Any]]) -> None:
    curves: dict[str, dict[str, list[summary.Curve]]] = {}
    for (arm, engine), runs in found.items():
        points = range(0, len(runs[0]["curve"]), 5)
        lines: list[summary.Curve] = [{SYNC * i: float(each["curve"][i]) for i in points} for each in runs]
        curves.setdefault(arm, {})[engine] = lines
    summary.plot(path, curves, across="updates", up="total variation between π_θ and p*", log=True)


def main(_: list[str]) -> None:
    root, known = Path(_WORKDIR.value), [*ENGINES, VLLM]
    if unknown := sorted(set(_ENGINES.value) - set(known)):
        raise app.UsageError(f"--engines={','.join(unknown)} is not among {', '.join(known)}")
    if _UPDATES.value % SYNC:
        raise app.UsageError(f"--updates={_UPDATES.value} must be a multiple of {SYNC}")
    if VLLM in _ENGINES.value and not _PYTHON.value:
        raise app.UsageError("--engines=vLLM needs --python, of an environment with vLLM")
    root.mkdir(parents=True, exist_ok=True)
    engines = _ENGINES.value or (known if _PYTHON.value else list(ENGINES))
    _make(root, engines, seeds=_SEEDS.value, updates=_UPDATES.value)
    _show(root, seeds=_SEEDS.value)


if __name__ == "__main__":
    app.run(main)
