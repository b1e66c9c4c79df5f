"""How often the interval of `python -m tba_jax estimate` holds the true mean reward, on the demo: the table in RESULTS.md.

python -m benchmarks.off_policy --workdir=DIR [--responses=8192] [--seed=1] [--steps=5,10]

It makes the demo's run of 120 steps, of which every fifth snapshot is kept. For each of these it estimates the mean reward from
the log, and finds it by fresh responses of the decoder to the training queries, in the order in which a searcher takes them.
Estimates of one run share rows, so their errors are alike: the last column has those from twentieths of the queries, which share
none. The run, estimates and rewards that are in DIR are not made again. `--steps` chooses snapshots, so that two processes can
share the work.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks import side_by_side, summary
from tba_jax.commands import command_line, estimate
from tba_jax.replay import off_policy
from tba_jax.storage import layout, published

_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run and the figures are kept.", required=True)
_RESPONSES = flags.DEFINE_integer("responses", 8192, "Fresh responses of each policy.", lower_bound=4000)
_SEED = flags.DEFINE_integer("seed", 1, "Of the run; 1 is the demo's.", lower_bound=0)
_STEPS = flags.DEFINE_list("steps", [], "Steps of snapshots; default: all but step 0.")

SETTINGS = {"learner.steps": 120, "publish.every_steps": 5, "publish.keep": 40}
_SLOTS, _PARTS = 256, 20


class Decoder:
    """Fresh responses to the training queries. Nothing is compiled before the first."""

    def __init__(self, workdir: Path):
        import jax

        from tba_jax import sharding
        from tba_jax.roles.sampler import NoReference, Sampler, Scoring
        from tba_jax.roles.searcher.stream import query_order

        run, experiment = command_line.rebuilt(workdir, command_line.AS_IT_IS)
        self.experiment = experiment = experiment.on_device(jax.devices()[0])
        mesh = sharding.make_mesh((1, 1, 1), setting="off_policy", devices=jax.devices()[:1])
        contract, policy = experiment.contract, experiment.policy
        scoring = Scoring(contract=contract, policy=policy, mesh=mesh, logit_megabytes=128, score_tokens=0)
        parts: dict[str, Any] = dict(policy=policy, tokenizer=experiment.tokenizer)
        parts["reference"] = NoReference(scoring, run)
        sizes: dict[str, Any] = dict(slots=_SLOTS, samples=1, prompt_length=contract.prompt_length)
        self.sampler = Sampler(contract, run, weights="full", **parts, **sizes)
        queries = experiment.queries["train"]
        passes = range(-(-_RESPONSES.value // len(queries)))
        order = np.concatenate([query_order(len(queries), seed=experiment.config.seed, writer=0, epoch=each) for each in passes])
        self.queries = [queries[i] for i in order[: _RESPONSES.value]]

    def rewards(self, step: int) -> np.ndarray:
        """float32[responses]: the rewards of the policy of a step."""
        from tba_jax.decoding.requests import Request
        from tba_jax.decoding.sampling import constant
        from tba_jax.decoding.slots import row_keys
        from tba_jax.rewards.task_models import response_texts, reward_texts

        self.sampler.load_step(step)
        config = self.experiment.config
        keys = np.asarray(row_keys(np.uint32(config.seed + 1), step, np.arange(len(self.queries), dtype=np.uint32)))
        how = constant(1, temperature=config.sampling.temperature)
        pairs = zip(self.queries, keys, strict=True)
        requests = [Request(name="fresh", prompt=query.prompt, keys=key[None], sampling=how) for query, key in pairs]
        made = self.sampler.engine.generate(requests)
        responses = [each.tokens[0, : each.length[0]] for each in made]
        texts = response_texts(responses, self.queries, self.experiment.tokenizer)
        finished = np.concatenate([each.finished for each in made])
        missing_eos = self.experiment.contract.missing_eos_reward
        scores = reward_texts(texts, finished, self.queries, task=self.experiment.task, missing_eos_reward=missing_eos)
        return np.asarray(scores.reward)


def figures(workdir: Path, step: int, file: Path) -> np.ndarray:
    """The figures of the rows that count for a step, see estimate.Measured, from `file` where they are there."""
    if not file.exists():
        opened = estimate.open_policy(workdir, str(step))
        np.save(file, estimate.measure(opened).figures)
    return np.load(file)


@dataclasses.dataclass(frozen=True)
class Covered:
    """Of some estimates: how many intervals hold the truth, hold it not, and how many estimates were refused."""

    yes: int = 0
    no: int = 0
    refused: int = 0

    def __add__(self, other: "Covered") -> "Covered":
        return Covered(self.yes + other.yes, self.no + other.no, self.refused + other.refused)

    def __str__(self) -> str:
        given, refused = self.yes + self.no, f", {self.refused} refused" if self.refused else ""
        return f"{self.yes} of {given}{refused}" if given else "refused"


def covered(found: off_policy.Estimate, truth: float) -> Covered:
    if found.effective < estimate.MIN_EFFECTIVE:
        return Covered(refused=1)
    return Covered(yes=1) if found.low <= truth <= found.high else Covered(no=1)


def estimate_of(rows: np.ndarray) -> off_policy.Estimate:
    return off_policy.estimate(rows["log_weight"], rows["reward"], rows["query"])


def row_of(step: int, rows: np.ndarray, truth: dict[str, float]) -> tuple[Covered, Covered]:
    """Prints a row of the table. Returns what was covered from all queries, and from parts of them."""
    found, number = estimate_of(rows), np.unique(rows["query"], return_inverse=True)[1]  # ids are hashes: in no order
    whole = covered(found, truth["mean"])
    parts = [covered(estimate_of(rows[number % _PARTS == part]), truth["mean"]) for part in range(_PARTS)]
    in_parts = functools.reduce(Covered.__add__, parts)
    cells = [f"{step}", f"{found.rows:,}", f"{found.effective:,.0f}", f"{found.mean:.4f}", f"{found.low:.4f} to {found.high:.4f}"]
    told = "refused" if whole.refused else "yes" if whole.yes else "no"
    summary.row(*cells, f"{truth['mean']:.4f} ± {truth['stderr']:.4f}", told, str(in_parts))
    return whole, in_parts


def main(argv: Sequence[str]) -> None:
    del argv
    root, begin = Path(_WORKDIR.value).absolute(), time.monotonic()
    root.mkdir(parents=True, exist_ok=True)
    job = side_by_side.Job(root=root, name="run", recipe="configs/demo.py", settings={**SETTINGS, "seed": _SEED.value})
    side_by_side.run_all([job])
    steps = [int(step) for step in _STEPS.value] or [step for step in published.kept(layout.RunDir(job.workdir).policies) if step]
    decoder, found = None, []
    for step in steps:
        of_truth = root / f"truth-{step}-{_RESPONSES.value}.json"
        if not of_truth.exists():
            decoder = decoder or Decoder(job.workdir)
            rewards = decoder.rewards(step)
            facts = {"mean": float(rewards.mean()), "stderr": float(rewards.std(ddof=1) / len(rewards) ** 0.5)}
            of_truth.write_text(json.dumps(facts))
        found.append((step, figures(job.workdir, step, root / f"figures-{step}.npy"), json.loads(of_truth.read_text())))
    summary.table("step", "rows", "ESS", "estimate", "95 % interval", "truth ± standard error", "covered", "from twentieths")
    whole, in_parts = (functools.reduce(Covered.__add__, each) for each in zip(*(row_of(*each) for each in found), strict=True))
    print(f"\nintervals that hold the truth: {whole}; from twentieths of the queries: {in_parts}")
    print(f"this call took {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    app.run(main)
