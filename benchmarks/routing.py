"""Does it matter that searchers route tokens through other experts than the learner does? The demo with a mixture of experts.

    python -m benchmarks.routing --workdir=runs/routing [--arms=tb,grpo] [--engines=float32,bfloat16,int8] [--starts=3] [--jobs=0]

The policy has 8 experts in each layer, of which a token goes through 2, and the learner computes in float32. The one searcher, a
process of its own, computes in float32 as well, or in bfloat16, or samples from int8 weights. Its log-probs are those of the
behaviour; nothing replays its routing or corrects for it. The reference scores rows in the trainer. The searcher waits while the
rows of two updates have not been drawn, so that engines differ in their speed and not in what the trainer sees. Each warm start
has one run of each arm and engine; `again` is float32 with another seed, so it shows what chance does. All arms have one learning
rate.

Snapshots are evaluated afterwards, in float32. The last column is the mean over a run's evaluations, less that of the arm's run
in float32 from the same start. The second table compares experts on worked examples of the demo's sums, drawn by another seed
than the warm start's: the share of tokens and layers where an engine chooses another set of experts than the learner would, and
of tokens where it does in any layer; of the warm starts, and of the last policies of the first arm on float32 rows. Finished
runs are kept, so the command resumes where it was stopped. It writes workdir/routing.json and workdir/routing.png.
"""

import concurrent.futures
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import side_by_side, summary
from tba_jax import sharding
from tba_jax.experiment import stored_run
from tba_jax.models import kv_cache, parameters
from tba_jax.roles.sampler import Scoring, load_reference
from tba_jax.run import processes
from tba_jax.storage import layout
from tba_jax.storage.published import Published
from tba_jax.supervised.tuning import encode_examples
from tba_jax.tasks.arithmetic import Arithmetic
from tba_jax.telemetry import metrics

# Settings of the learner. TBA′ without ratios has the gradient of trajectory balance, up to a factor that Adam does not see.
ARMS: dict[str, dict[str, Any]] = {
    "tb": {"objective": "trajectory_balance"},
    "tba_prime": {"objective": "tba_prime"},
    "tba_prime_no_ratios": {"objective": "tba_prime", "importance_clip": 0.0},
    "grpo": {"objective": "grpo"},
    "grpo_no_clipping": {"objective": "grpo", "clip_low": 1.0, "clip_high": 1e6},
}
# Settings of the searcher.
ENGINES: dict[str, dict[str, Any]] = {
    "float32": {},
    "again": {},
    "bfloat16": {"model.compute_dtype": "bfloat16"},
    "int8": {"searchers.weights": "int8"},
}

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the runs.", required=True)
_ARMS = flags.DEFINE_list("arms", [*ARMS], f"Of {', '.join(ARMS)}.")
_ENGINES = flags.DEFINE_list("engines", [*ENGINES], f"Of {', '.join(ENGINES)}; float32 is among them.")
_STARTS = flags.DEFINE_integer("starts", 3, "Warm starts, of the seeds 1, 2 …", lower_bound=1)

RECIPE = "configs/demo.py"
# The experts of a token are together as wide as the feed-forward of the demo's policy.
MODEL: dict[str, Any] = {"model.experts": 8, "model.experts_per_token": 2, "model.ffn": 192, "searchers.scores_reference": False}
EXAMPLES = 256


class Run(NamedTuple):
    arm: str
    engine: str
    start: int

    def job(self, root: Path) -> side_by_side.Job:
        settings = {
            **MODEL,
            "seed": self.start + 100 * (self.engine == "again"),
            "learner.steps": 60,
            "learner.schedule": "constant",
            "learner.clip_norm": 0.0,
            "searchers.count": 1,
            "searchers.slots": 192,
            # A searcher that is slower or faster makes neither older rows nor more of them.
            "searchers.max_updates_ahead": 2,
            "replay.recent_fill": "wait",
            "evaluation.enabled": False,
            "evaluation.every_steps": 10,
            "evaluation.batch_size": 128,
            **{f"learner.{name}": value for name, value in ARMS[self.arm].items()},
        }
        place = root / f"start{self.start}"
        return side_by_side.Job(root=place, name=f"{self.arm}-{self.engine}", recipe=RECIPE, settings=settings, warm=True)


def make(root: Path, run: Run, cores: Sequence[int]) -> None:
    """A trainer and a searcher, each with its own settings, on these cores."""
    job, begun, ended = run.job(root), time.monotonic(), threading.Event()
    side_by_side.prepare(job)
    where: dict[str, Any] = dict(cores=cores, env=job.environment, fine=(processes.NOT_FINITE,))
    words, config = ["tba_jax.main", f"--config={RECIPE}", f"--workdir={job.workdir}"], layout.RunDir(job.workdir).config

    def role(name: str, own: dict[str, Any], until: Callable[[], bool]) -> int:
        output = Path(f"{job.workdir}.{name}.out")
        return side_by_side.call([*words, f"--role={name}"], {**job.settings, **own}, output, until=until, **where)

    def search() -> None:
        # A searcher takes over the schedule that it finds, and with it the seed: the trainer writes that of the run.
        while not ended.is_set() and layout.read_json(config)["config"]["seed"] != job.settings["seed"]:
            time.sleep(0.1)
        role("searcher", ENGINES[run.engine], ended.is_set)

    with concurrent.futures.ThreadPoolExecutor(1) as beside:
        searcher = beside.submit(search)
        try:
            code = role("trainer", {}, lambda: searcher.done() and searcher.exception() is not None)
        finally:
            ended.set()
        searcher.result()
    if code:
        job.stopped.write_text(f"{code}\n")
    print(f"start {run.start} {job.name}: {time.monotonic() - begun:.0f} s", flush=True)


def staleness(workdir: Path) -> float:
    """The mean age of the rows of a run, in updates."""
    return float(np.mean([line["staleness_mean"] for line in metrics.each_line(layout.RunDir(workdir).metrics("trainer"))]))


def chosen(policy: Any, params: Any, tokens: jax.Array, weights: str) -> jax.Array:
    """bool[L, e, B, T]: the experts of each token. Args: weights: "full" or "int8"; policy.model.compute_dtype holds too."""
    definition, real = kv_cache.define(policy.model, weights, unstacked=False), jnp.ones(tokens.shape)

    def loads(counted: jax.Array) -> jax.Array:
        model = parameters.module(definition.graphdef, policy.for_sampling(params, {}, weights))
        routing = model.routed(tokens, counted=counted)[1]
        assert routing is not None
        return routing.tokens

    # The loads of experts are linear in how often a token counts: their derivative says which token chose which expert.
    return jax.jit(jax.jacrev(loads))(real) > 0.5


def differing(workdir: Path, step: int | None) -> dict[str, tuple[float, float]]:
    """Engine -> shares of tokens and layers, and of tokens, whose experts are not the learner's. step: None: the warm start."""
    run, mesh = layout.RunDir(workdir), sharding.make_mesh((1, 1, 1), setting="routing")
    stored = stored_run.read(run, called=str(workdir))
    policy, sizes = stored.policy, stored.config.task
    if step is None:
        params = load_reference(
            Scoring(contract=stored.contract, policy=policy, mesh=mesh, logit_megabytes=128, score_tokens=4096), run
        )
    else:
        params = Published(run.policies).load(step, policy.trained_specs, policy.trained_shardings(mesh))
    task = Arithmetic(digits=sizes.arithmetic.digits, train_queries=1, heldout_queries=EXAMPLES, seed=0)
    examples = task.worked_examples(np.random.default_rng(10**6), EXAMPLES)
    lengths = dict(prompt_length=sizes.prompt_length, response_length=sizes.response_length)
    batch = encode_examples(examples, stored.tokenizer, **lengths)
    # Rows have their padding behind them.
    real = np.arange(batch.tokens.shape[1]) < (batch.prompt_length + batch.response_length)[:, None]
    own, found = chosen(policy, params, batch.tokens, "full"), {}
    for engine in ("bfloat16", "int8"):
        settings = ENGINES[engine]
        dtype = settings.get("model.compute_dtype", "float32")
        its = dataclasses.replace(policy, model=dataclasses.replace(policy.model, compute_dtype=dtype))
        other = chosen(its, params, batch.tokens, settings.get("searchers.weights", "full"))
        differs = np.asarray(jnp.any(own != other, axis=1))[:, real]
        found[engine] = float(differs.mean()), float(differs.any(axis=0).mean())
    return found


def main(argv: Sequence[str]) -> None:
    del argv
    root, starts = Path(_WORKDIR.value).absolute(), range(1, _STARTS.value + 1)
    for flag, given, known in (("arms", _ARMS.value, ARMS), ("engines", _ENGINES.value, ENGINES)):
        if unknown := [name for name in given if name not in known]:
            raise app.UsageError(f"--{flag}={','.join(unknown)} is not among {', '.join(known)}")
    for start in starts:
        side_by_side.ensure_warm_start(root / f"start{start}", MODEL | {"seed": start}, recipe=RECIPE)
    runs = [Run(arm, engine, start) for start in starts for arm in _ARMS.value for engine in _ENGINES.value]
    side_by_side.share_cores(lambda run, cores: make(root, run, cores), [run for run in runs if not run.job(root).is_done()])
    side_by_side.evaluate_afterwards([run.job(root) for run in runs])
    curves = {run: summary.curve(run.job(root).workdir) for run in runs}
    steps = list(curves[runs[0]])
    summary.table("objective", "searcher", "staleness", *(f"accuracy at {step}" for step in steps), "mean, less float32's")
    for arm in _ARMS.value:
        for engine in _ENGINES.value:
            of = [curves[Run(arm, engine, start)] for start in starts]
            own = [curves.get(Run(arm, "float32", start), {}) for start in starts]
            apart = [
                float(np.mean([curve[step] - other.get(step, np.nan) for step in steps[1:]]))
                for curve, other in zip(of, own, strict=True)
            ]
            ages = [staleness(Run(arm, engine, start).job(root).workdir) for start in starts]
            summary.row(
                arm,
                engine,
                summary.spread(ages, ".1f"),
                *(summary.spread([curve[step] for curve in of]) for step in steps),
                summary.spread(apart),
            )
    print()
    summary.table("policy", "searcher", "tokens and layers with other experts, %", "tokens, %")
    first = [Run(_ARMS.value[0], "float32", start).job(root).workdir for start in starts]
    differ = {title: [differing(of, step) for of in first] for title, step in (("warm start", None), ("last", int(steps[-1])))}
    for title, shares in differ.items():
        for engine in shares[0]:
            cells = (summary.spread([100 * each[engine][i] for each in shares], ".2f") for i in range(2))
            summary.row(title, engine, *cells)
    told = {f"{run.arm} {run.engine} start {run.start}": curve for run, curve in curves.items()}
    (root / "routing.json").write_text(json.dumps({"accuracy": told, "routing": differ}, indent=1))
    panels = {arm: {engine: [curves[Run(arm, engine, s)] for s in starts] for engine in _ENGINES.value} for arm in _ARMS.value}
    summary.plot(root / "routing.png", panels, across="updates", up="held-out greedy accuracy")


if __name__ == "__main__":
    app.run(main)
