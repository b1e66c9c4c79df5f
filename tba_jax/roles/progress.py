"""What a person sees of a run: a line of progress while it runs, and at the end two tables, a plot and one line."""

import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.run import layout, metrics, places, status

TAIL_BYTES = 1 << 16
# A wait of the trainer is shown once it is so long; the same trouble is told again after so long.
_WAIT_SECONDS, _TROUBLE_SECONDS = 10.0, 60.0


def last_line(folder: Path) -> dict[str, Any]:
    """The newest whole line of a role's metrics, {} where there is none. Reads only the end of the file."""
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return {}
    # The part after the last newline is a line that is still being written.
    texts = (line.decode(errors="replace") for line in reversed(lines[:-1]))
    return next((line for line in map(metrics.parse_line, texts) if line), {})


class Progress:
    """Prints where the run stands: on a terminal in place, elsewhere as a new line every `plain_seconds`."""

    def __init__(self, run: layout.RunDir, *, steps: int, searchers: int, warm_start_steps: int, plain_seconds: float = 10.0):
        self._run, self._steps, self._searchers, self._warm_start_steps = run, steps, searchers, warm_start_steps
        self._terminal = sys.stdout.isatty()
        self._seconds = 0.5 if self._terminal else plain_seconds
        self.begin = time.monotonic()
        self._next = 0.0
        self._searcher_names = [f"searcher-{i}" for i in range(searchers)]
        # Searcher -> the kind of trouble that was told, and when it is told again.
        self._told: dict[str, tuple[str, float]] = {}

    def __call__(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._seconds
        try:
            told = self._text()
            troubles = self._troubles()
        except OSError as error:  # the run goes on without its line
            told, troubles = " ".join(f"storage does not answer: {error}".split()), {}
        clock = f"{time.monotonic() - self.begin:5.0f} s  "
        clear, end = ("\r\x1b[2K", "") if self._terminal else ("", "\n")
        for role, trouble in troubles.items():
            print(f"{clear}{clock}{role}: {trouble}", flush=True)
        print(f"{clear}{clock}{told}", end=end, flush=True)

    def _troubles(self) -> dict[str, str]:
        """Role -> what is wrong with its rewards, where that is news: each kind of trouble is told once, then now and then."""
        news = {}
        for role in self._searcher_names:
            trouble = status.read(self._run.metrics(role)).trouble
            kind, (told, again) = trouble.partition(":")[0], self._told.get(role, ("", 0.0))
            if trouble and (kind != told or time.monotonic() > again):
                news[role] = trouble
                self._told[role] = kind, time.monotonic() + _TROUBLE_SECONDS
            elif told and not trouble:
                news[role] = "rows have rewards again"
                self._told.pop(role)
        return news

    def _waits(self) -> str:
        """What the trainer waits for, where it does for long."""
        told = status.read(self._run.metrics("trainer"))
        waiting = sum(bool(status.read(self._run.metrics(role)).waits) for role in self._searcher_names)
        if told.seconds < _WAIT_SECONDS:
            return ""
        others = f"; {waiting} of {self._searchers} searchers wait for a snapshot" if waiting else ""
        return f"  the trainer has waited {told.seconds:.0f} s for {told.waits}{others}"

    def _text(self) -> str:
        return self._standing() + self._waits()

    def _standing(self) -> str:
        trainer = last_line(self._run.metrics("trainer"))
        if not trainer:
            warm = last_line(self._run.metrics("reference"))
            if warm and not places.exists(self._run.initial_reference):
                return f"warm start {warm['step']}/{self._warm_start_steps}  loss {warm['loss']:.3f}"
            return "starting" if places.exists(self._run.initial_reference) else "preparing the reference policy"
        parts = [
            f"step {trainer['step']}/{self._steps}",
            f"reward {trainer['reward']:.3f}",
            f"staleness {trainer['staleness_mean']:.1f}",
            f"{trainer['steps_per_second']:.1f} steps/s",
        ]
        speeds = [last_line(self._run.metrics(name)).get("tokens_per_second") for name in self._searcher_names]
        if any(speeds):
            parts.append("searchers " + " + ".join("–" if speed is None else f"{speed:.0f}" for speed in speeds) + " tokens/s")
        evaluation = last_line(self._run.metrics("evaluator"))
        if "greedy_reward" in evaluation:
            parts.append(f"held-out {evaluation['greedy_reward']:.3f} at step {evaluation['step']}")
        return "  ".join(parts)

    def done(self) -> float:
        """Ends the line. Returns the seconds since the start."""
        if self._terminal:
            print()
        return time.monotonic() - self.begin


def evaluations(run: layout.RunDir) -> list[dict[str, Any]]:
    """The figures of all evaluation reports in the order of steps, NaN where one could not be found; the samples stay on disk."""
    files = [run.evaluations / f"{layout.step_name(step)}.json" for step in layout.steps_in(run.evaluations)]
    return [
        {name: math.nan if value is None else value for name, value in layout.read_json(file).items() if name != "samples"}
        for file in files
    ]


def summary(run: layout.RunDir) -> dict[str, float]:
    """Title -> figure of the whole run: staleness, draws per row, waiting share, rows and speeds."""
    last: dict[str, Any] = {}
    count, staleness, largest, gap = 0, 0.0, -math.inf, -math.inf
    for last in metrics.each_line(run.metrics("trainer")):
        count, staleness = count + 1, staleness + last["staleness_mean"]
        largest, gap = max(largest, last["staleness_max"]), max(gap, last.get("logprob_gap_max", gap))
    if not last:
        return {}
    return {
        "mean staleness (steps)": staleness / count,
        "largest staleness (steps)": largest,
        "draws per row": last["draws_per_row"],
        "rows seen by the trainer": last["rows_seen"],
        "trainer waits for rows (% of its time)": 100 * last.get("time_wait_rows", 0.0),
        "trainer steps per second": last["steps_per_second"],
    } | ({"largest gap sampler – learner (nats)": gap} if gap > -math.inf else {})


def finish(run: layout.RunDir, *, label: str, score_name: str, seconds: float) -> None:
    """Prints the table before/after and the run's last line; draws `progress.png`."""
    from rich.console import Console
    from rich.table import Table

    reports = evaluations(run)
    figures = summary(run)
    console = Console()
    staleness = figures.get("mean staleness (steps)", 0.0)
    if reports:
        before, after = reports[0], reports[-1]
        table = Table(title="held-out queries")
        for column in ("", f"step {before['step']}", f"step {after['step']}"):
            table.add_column(column, justify="left" if not column else "right")
        rows = {
            f"greedy {score_name}": "greedy_reward",
            "mean reward of samples": "sampled_reward",
            "greedy responses that end by themselves": "finished",
            "−log π_ref of samples (nats per token)": "ref_nll_per_token",
            "KL to π_ref (nats per response)": "kl_to_ref",
        }
        for title, name in rows.items():
            if name in before:  # a run may have no reference
                table.add_row(title, *(f"{round(report[name], 3) + 0.0:.3f}" for report in (before, after)))
        console.print(table)
    table = Table(title="run", show_header=False)
    for title, value in figures.items():
        table.add_row(title, f"{value:.3g}" if value < 100 else f"{value:.0f}")
    console.print(table)
    if reports and figures:
        plot(run, score_name=score_name, path=run.root / "progress.png")
        scores = f"{score_name} {before['greedy_reward']:.2f} -> {after['greedy_reward']:.2f}"
        print(f"{label}: {scores} in {seconds:.0f} s, mean staleness {staleness:.1f} steps, results in {run.root}", flush=True)


def by_step(lines: Iterable[Mapping[str, Any]], names: Sequence[str]) -> np.ndarray:
    """float64[lines, 1 + names]: step and figures, in the order of steps; of a step that was done twice (a resume repeats some),
    the later line's. The lines themselves are not kept."""
    table = np.fromiter((tuple(line[name] for name in ("step", *names)) for line in lines), np.dtype((float, 1 + len(names))))
    _, from_the_end = np.unique(table[::-1, 0], return_index=True)
    return table[::-1][from_the_end]


def plot(run: layout.RunDir, *, score_name: str, path: Path) -> None:
    """Draws held-out score, reward of training batches and staleness by trainer step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = ("reward", "staleness_mean", "staleness_max")
    steps, reward, mean, largest = by_step(metrics.each_line(run.metrics("trainer")), names).T
    reports = evaluations(run)
    evaluated = [x["step"] for x in reports]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=[3, 1], layout="constrained")
    top.plot(steps, reward, color="tab:blue", alpha=0.5, label="reward of training batches")
    top.plot(evaluated, [x["greedy_reward"] for x in reports], "o-", color="tab:red", label=f"held-out greedy {score_name}")
    top.plot(evaluated, [x["sampled_reward"] for x in reports], "s--", color="tab:orange", label="held-out reward of samples")
    top.set_ylabel(score_name)
    top.legend(loc="lower right")
    top.grid(alpha=0.3)
    bottom.plot(steps, mean, color="tab:green", label="mean")
    bottom.plot(steps, largest, color="tab:green", alpha=0.3, label="largest")
    bottom.set_ylabel("staleness (steps)")
    bottom.set_xlabel("trainer step")
    bottom.legend(loc="upper left")
    bottom.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
