"""What a run has come to: statistics of its evaluations (means with standard errors, pass@k, majorities, perplexities), its best
step; and two tables, a picture and one line for whoever started it."""

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tba_jax.outputs import visible_line
from tba_jax.storage import layout
from tba_jax.telemetry import metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The standard error of a figure has the figure's name and this ending.
STDERR = "_stderr"
_MOST_NATS = 700.0  # exp of more is no float
SCORE = "greedy_reward"
# The best step so far and its score, in the metrics of the evaluator.
BEST_STEP, BEST_SCORE = "best_step", "best_greedy_reward"


def mean(name: str, values: np.ndarray) -> dict[str, float]:
    """The mean of values under `name`, and its standard error under `name` + STDERR. NaN is no value, and is left out.

        m = Σ_q Σ_k x_qk / n
        stderr² = Q/(Q − 1) · Σ_q (Σ_k (x_qk − m))² / n²

    The Q queries with a value are the independent units (clusters), since samples of one query are alike; of a single query its
    samples are. A mean over fewer than two units has no standard error, and the mean of no values is NaN.

    Args: values: float[K, Q], of K responses to each of the queries.
    """
    of_units = values if values.shape[1] > 1 else values.T
    there = ~np.isnan(of_units)
    n, units = there.sum(), there.any(axis=0).sum()
    if not n:
        return {name: math.nan}
    m = of_units[there].mean()
    if units < 2:
        return {name: float(m)}
    sums = np.where(there, of_units - m, 0.0).sum(axis=0)
    return {name: float(m), name + STDERR: float(np.sqrt(units / (units - 1) * np.square(sums).sum()) / n)}


def with_stderr(figures: Mapping[str, Any], name: str) -> str:
    """A figure with its standard error, "0.500 ± 0.031"; without one, "0.500"; "–" where there is no such figure."""
    value, error = figures.get(name), figures.get(name + STDERR)
    if value is None or not math.isfinite(value):
        return "–"
    shown = f"{round(value, 3) + 0.0:.3f}"  # -0.000 is 0
    return shown if error is None or not math.isfinite(error) else f"{shown} ± {error:.3f}"


def pass_at(right: np.ndarray, samples: int, k: int) -> np.ndarray:
    """float64[n]: the chance that k samples of a query, drawn without replacement, hold a right one (Chen et al. 2021, eq. 1).

    Args: right: int[n], how many of the `samples` of each query are right.
    """
    # 1 − C(n − c, k) / C(n, k), as a product that does not overflow.
    factors = 1 - k / np.arange(1, samples + 1)[None]
    return 1 - np.where(np.arange(samples)[None] >= samples - right[:, None], factors, 1.0).prod(axis=1)


def majority(answers: Sequence[str], right: Sequence[bool]) -> float:
    """The share of right samples among those that give the most frequent final answer; the mean over equally frequent answers.

    Args: answers: final answers of the samples in a canonical form; "" means no answer, and does not vote. right: of each sample.
    """
    counts = collections.Counter(answer for answer in answers if answer)
    if not counts:
        return 0.0
    shares = [
        np.mean([correct for given, correct in zip(answers, right, strict=True) if given == answer])
        for answer, count in counts.items()
        if count == max(counts.values())
    ]
    return float(np.mean(shares))


def perplexity(logprob_sum: float, tokens: float) -> float:
    """exp(−Σ log π / tokens), nats in the sum."""
    return math.exp(min(-logprob_sum / tokens, _MOST_NATS))


class Scored(NamedTuple):
    """A step and its held-out score, the mean reward of greedy responses to held-out queries, which is finite."""

    step: int
    score: float


def best(scores: Iterable[tuple[int, float]]) -> Scored | None:
    """The best of (step, score), the latest of equal ones; None where no score is finite."""
    finite = [Scored(step, score) for step, score in scores if math.isfinite(score)]
    return max(finite, key=lambda each: (each.score, each.step), default=None)


def best_figures(found: Scored | None) -> dict[str, float]:
    """The best step so far as metrics take it."""
    return {} if found is None else {BEST_STEP: float(found.step), BEST_SCORE: found.score}


def best_in_words(found: Scored | None, *, apart_from: int) -> str:
    """The best step for a line that has just told of another step, "" where it is the same."""
    return "" if found is None or found.step == apart_from else f"best {found.score:.3f} at step {found.step}"


class Scores:
    """The held-out scores in a folder of reports. A report that has not changed since the last call is not read again."""

    def __init__(self, evaluations: Path):
        """Args: evaluations: RunDir.evaluations; a folder that is not there holds no report."""
        self._folder = evaluations
        self._known: dict[tuple[int, int, int], float] = {}  # by step, size and time of a report

    def __call__(self) -> dict[int, float]:
        """Step -> score, in the order of steps, of the steps that have one. Raises OSError where storage refuses."""
        found: dict[tuple[int, int, int], float] = {}
        for step in layout.steps_in(self._folder):
            file = self._folder / f"{layout.step_name(step)}.json"
            try:
                status = file.stat()
                report = step, status.st_size, status.st_mtime_ns
                found[report] = self._known[report] if report in self._known else _score(file)
            except (FileNotFoundError, IsADirectoryError):  # a trainer that resumes has removed it; or no report
                continue
        self._known = found
        return {step: score for (step, _, _), score in found.items() if math.isfinite(score)}

    def best(self) -> Scored | None:
        """The best of all steps that have a score. Raises OSError where storage refuses."""
        return best(self().items())


def _score(file: Path) -> float:
    """The score in a report, NaN where it says none."""
    try:
        score = layout.read_json(file)[SCORE]
        return float(score) if isinstance(score, int | float) and not isinstance(score, bool) else math.nan
    except (ValueError, OverflowError, KeyError, TypeError):
        return math.nan


def evaluations(run: layout.RunDir) -> list[dict[str, Any]]:
    """The figures of all evaluation reports in the order of steps, NaN where one could not be found; the samples stay on disk."""
    files = [run.evaluations / f"{layout.step_name(step)}.json" for step in layout.steps_in(run.evaluations)]
    return [
        {name: math.nan if value is None else value for name, value in layout.read_json(file).items() if name != "samples"}
        for file in files
    ]


def figures(run: layout.RunDir) -> dict[str, float]:
    """Title -> figure: staleness, draws per row and rows of the whole run; waiting share and speed since the newest start."""
    last: dict[str, Any] = {}
    count, staleness, largest, gap = 0, 0.0, -math.inf, -math.inf
    for last in metrics.each_line(run.metrics("trainer")):
        count, staleness = count + 1, staleness + last["staleness_mean"]
        largest, gap = max(largest, last["staleness_max"]), max(gap, last.get("logprob_gap_max", gap))
    if not last:
        return {}
    since = ", since it resumed" if last.get("resumed_from") else ""
    return {
        "mean staleness (steps)": staleness / count,
        "largest staleness (steps)": largest,
        "draws per row": last["draws_per_row"],
        "rows seen by the trainer": last["rows_seen"],
        f"trainer waits for rows (% of its time{since})": 100 * last.get("time_wait_rows", 0.0),
        f"trainer steps per second{since}": last["steps_per_second"],
    } | ({"largest gap sampler – learner (nats)": gap} if gap > -math.inf else {})


def tell(run: layout.RunDir, *, label: str, score_name: str, outcome: str | None = None) -> None:
    """Prints tables of what the run's folder holds, and draws `progress.png`. Prints nothing of a run that has done nothing.

    Args: outcome: what the last line says of the run beside its figures, such as "in 20 s"; None: there is no last line.
    """
    reports, told = evaluations(run), figures(run)
    top = best((report["step"], report[SCORE]) for report in reports)
    _print_tables(reports, told, top=top, score_name=visible_line(score_name))
    if told:
        draw(run, score_name=score_name).savefig(run.root / "progress.png", dpi=120)
    if outcome is None:
        return
    scores = f"{score_name} {reports[0]['greedy_reward']:.2f} -> {reports[-1]['greedy_reward']:.2f}" if reports else ""
    if top is not None and top.step != reports[-1]["step"]:
        scores += f" (best {top.score:.2f} at step {top.step})"
    staleness = f"mean staleness {told['mean staleness (steps)']:.1f} steps" if told else ""
    parts = (" ".join(filter(None, (scores, outcome))), staleness, f"results in {run.root}")
    print(visible_line(f"{label}: {', '.join(filter(None, parts))}"), flush=True)


def _print_tables(
    reports: Sequence[Mapping[str, Any]], told: Mapping[str, float], *, top: Scored | None, score_name: str
) -> None:
    """The evaluations of the first, the best and the last step, and the figures of the whole run."""
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False, emoji=False)
    if reports:
        named = top.step if top is not None and len(reports) > 1 else None
        ends = [r for i, r in enumerate(reports) if i in (0, len(reports) - 1) or r["step"] == named]
        table = Table("", title="held-out queries")
        for report in ends:
            table.add_column(f"step {report['step']}{', the best' if report['step'] == named else ''}", justify="right")
        rows = {
            f"greedy {score_name}": "greedy_reward",
            "mean reward of samples": "sampled_reward",
            "greedy responses that end by themselves": "finished",
            "−log π_ref of samples (nats per token)": "ref_nll_per_token",
            "KL to the policy of step 0 (nats per response)": "kl_to_initial",
        }
        for title, name in rows.items():
            table.add_row(title, *(with_stderr(report, name) for report in ends))
        console.print(table)
    if told:
        table = Table(title="run", show_header=False)
        for title, value in told.items():
            table.add_row(title, f"{value:.3g}" if value < 100 else f"{value:.0f}")
        console.print(table)


def by_step(lines: Iterable[Mapping[str, Any]], names: Sequence[str]) -> np.ndarray:
    """float64[lines, 1 + names]: step and figures, in the order of steps; of a step that was done twice (a resume repeats some),
    the later line's. The lines themselves are not kept."""
    table = np.fromiter((tuple(line[name] for name in ("step", *names)) for line in lines), np.dtype((float, 1 + len(names))))
    _, from_the_end = np.unique(table[::-1, 0], return_index=True)
    return table[::-1][from_the_end]


def draw(run: layout.RunDir, *, score_name: str) -> "Figure":
    """Held-out score, reward of training batches and staleness by trainer step. Without pyplot no notebook keeps it."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = ("reward", "staleness_mean", "staleness_max")
    score_name = visible_line(score_name).replace("$", r"\$")  # between two of them matplotlib expects mathematics
    steps, reward, mean, largest = by_step(metrics.each_line(run.metrics("trainer")), names).T
    reports = evaluations(run)
    evaluated = [x["step"] for x in reports]
    figure = Figure(figsize=(8, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    top.plot(steps, reward, color="tab:blue", alpha=0.5, label="reward of training batches")
    top.plot(evaluated, [x["greedy_reward"] for x in reports], "o-", color="tab:red", label=f"held-out greedy {score_name}")
    top.plot(evaluated, [x["sampled_reward"] for x in reports], "s--", color="tab:orange", label="held-out reward of samples")
    top.set_ylabel(score_name)
    bottom.plot(steps, mean, color="tab:green", label="mean")
    bottom.plot(steps, largest, color="tab:green", alpha=0.3, label="largest")
    bottom.set_ylabel("staleness (steps)")
    bottom.set_ylim(bottom=0)
    bottom.set_xlabel("trainer step")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for axes in (top, bottom):
        axes.legend(loc="best")
        axes.grid(alpha=0.3)
    return figure
