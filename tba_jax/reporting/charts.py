"""The sections of a report's page, from what was gathered: figures with their titles, and the sentences beside them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax.reporting import buffer, figures, learning, samples
from tba_jax.reporting import marks as marks_lib
from tba_jax.reporting import rows as rows_lib
from tba_jax.reporting.figures import Clock, Figure
from tba_jax.reporting.gathering import Gathered
from tba_jax.reporting.series import Series

# Title, what the chart tells, axis, and the figures: (name in metrics.jsonl, name on the page).
_CURVES: tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Distance from the reference",
        "KL(π_θ‖π_ref) of the trained rows. It grows as the policy leaves the reference.",
        "nats per response",
        (("kl_to_ref", "KL"),),  # not the k3 estimate: one unlikely token makes it so large that nothing else can be seen
    ),
    (
        "Entropy",
        "Of the policy's next token. Near 0, all responses to a query are the same, and nothing is explored.",
        "nats per token",
        (("entropy", "entropy"),),
    ),
    (
        "log Z",
        "The estimated log partition function, with which trajectory balance compares each row.",
        "nats",
        (("log_z", "mean"), ("log_z_std", "deviation over queries")),
    ),
    (
        "Effective sample share",
        "Near 1, all trained rows count alike as samples of the policy; near 0, a few rows carry the estimate.",
        "share",
        (("effective_sample_share", "effective sample share"),),
    ),
    (
        "Groups that teach nothing",
        "Share of the queries of a batch whose responses all have the same reward.",
        "share of queries",
        (("equal_reward_groups", "equal rewards"),),
    ),
    (
        "Difficulty of the queries",
        "Shares of the queries of whose newest responses none, some and all succeed. Only those in between can be compared.",
        "share of queries",
        (("queries_failed", "fail"), ("queries_mixed", "in between"), ("queries_solved", "solved")),
    ),
    (
        "Clipped tokens",
        "Share of the tokens whose ratio to the sampler is clipped. Always above 0: the searchers are too far behind.",
        "share of tokens",
        (("ratio_clipped", "clipped"),),
    ),
    (
        "Log-prob gap",
        "Largest gap between the log-probs of searcher and learner on the same weights. It should stay near 0.",
        "nats per token",
        (("logprob_gap_max", "largest"), ("logprob_gap_mean", "mean")),
    ),
    (
        "Loss",
        "Of the objective. Trajectory balance's loss falls as the policy nears its target; it need not reach 0.",
        "loss",
        (("loss", "loss"),),
    ),
    ("Gradient norm", "Before clipping, in units of the reward.", "norm", (("grad_norm", "gradient norm"),)),
    ("Response length", "Of the trained rows.", "tokens", (("response_length", "mean length"),)),
    ("Speed of the trainer", "Updates a second since the process started.", "steps/s", (("steps_per_second", "steps/s"),)),
    (
        "Tokens of the trainer",
        "Tokens a second of the rows it trained on, and with what the model computed beside them, such as padding.",
        "tokens/s",
        (("tokens_per_second", "of rows"), ("computed_tokens_per_second", "computed")),
    ),
    ("Model FLOPs utilisation", "Share of the peak of the devices that went into updates.", "share", (("mfu", "MFU"),)),
    ("Rows in the buffer", "Rows that the trainer may draw.", "rows", (("buffer_rows", "rows"), ("buffer_queries", "queries"))),
)
# The same of searchers: title, what the chart tells, axis, the figure.
_OF_SEARCHERS = (
    ("Reward of fresh rows", "Of the rows that each searcher has just sampled, trained on or not.", "reward", "reward"),
    ("Speed of the searchers", "Tokens a second of each, since its process started.", "tokens/s", "tokens_per_second"),
    (
        "Memory bandwidth of the searchers",
        "Share of the peak of each one's devices that decode steps need at least.",
        "share",
        "bandwidth_share",
    ),
)
_IN_BUFFER = {"Rows in the buffer"}


@dataclasses.dataclass
class Charts:
    """figures: id -> chart; content: names of the template; again: where the trainer began to work again.

    time_title: of the axis of time.
    """

    figures: dict[str, Figure] = dataclasses.field(default_factory=dict)
    content: dict[str, Any] = dataclasses.field(default_factory=dict)
    marks: list[marks_lib.Mark] = dataclasses.field(default_factory=list)
    again: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    time_title: str = ""

    def put(self, section: str, figure: Figure | None, *, title: str, told: str = "", wide: bool = False) -> None:
        """Adds a chart to a section of the page, if there is one."""
        if figure is not None:
            name = f"figure-{len(self.figures)}"
            self.figures[name] = figure
            shown = {"id": name, "title": title, "told": told, "wide": wide, "height": figure["height"]}
            self.content.setdefault(section, []).append(shown)


def of(found: Gathered, *, begin: float, end: float) -> Charts:
    """All charts and sentences. Args: begin, end: unix seconds of the first and the last sign of life."""
    clock = Clock(begin, end)
    made = Charts(time_title=clock.title)
    trainer = found.roles.get("trainer")
    series = trainer.by_step if trainer else Series("step")
    marks = found.marks.marks or marks_lib.inferred(found.lines, found.writers, found.checkpoints)
    made.marks = marks_lib.placed(marks, series.column("step").mean, series.column("time").mean)
    made.again = figures.vertical_lines(made.marks, clock)
    _learning(made, found, series, clock)
    made.put(
        "events", figures.events(made.marks, clock), title="What happened when", wide=True,
        told="Hover over a mark for the role. A grey dashed line in the other charts is where the trainer resumed.",
    )  # fmt: skip
    for title, told, y, names in _CURVES:
        section = "buffer" if title in _IN_BUFFER else "signals"
        made.put(section, figures.of_trainer(series, clock, names, y=y), title=title, told=told)
    searchers = {name: role.by_time for name, role in found.roles.items() if name.startswith("searcher")}
    for title, told, y, name in _OF_SEARCHERS:
        made.put("signals", figures.of_searchers(searchers, clock, name, y=y), title=title, told=told)
    if trainer:
        told = "Each column is a part of the run, each row an age: how many steps before the update the rows were sampled."
        made.put("staleness", figures.heat_map_of_ages(trainer.ages, series, clock), title="Staleness", told=told, wide=True)
    _timeline(made, found, clock, begin, end)
    made.content |= {"groups": [], "worst": [], "writers": [], "row_count": 0}
    with found.part("the rows"):
        _rows(made, found)
    return made


def _learning(made: Charts, found: Gathered, series: Series, clock: Clock) -> None:
    traces: list[Figure] = []
    steps, times = series.column("step").mean, series.column("time").mean
    names = (("reward", "trained rows"), ("reward_own", "of them, the run's own"), ("reward_mounted", "of them, of mounted runs"))
    for name, called, colour in ((*each, figures.COLOURS[place]) for each, place in zip(names, (0, 5, 3), strict=True)):
        if name in series:
            traces += figures.line(called, series.column(name), steps, times, clock, colour=colour, band=name == "reward")
    evaluated = np.array([each["step"] for each in found.evaluations], float)
    if len(evaluated):
        when = np.interp(evaluated, steps, times) if len(steps) else np.full(len(evaluated), np.nan)
        for number, name in enumerate(("greedy_reward", "sampled_reward"), 1):
            values = np.array([each.get(name, np.nan) for each in found.evaluations])
            there = np.isfinite(values)
            traces.append(
                {
                    "x_by": {"step": figures.rounded(evaluated[there]), "time": clock(when[there])},
                    "y": figures.rounded(values[there]),
                    "name": "held out, " + name.removesuffix("_reward"),
                    "mode": "lines+markers",
                    "marker": {"size": 7},
                    "line": {"color": figures.COLOURS[number], "width": 1.5, "dash": "solid" if number == 1 else "dot"},
                }
            )
    if any(trace["y"] for trace in traces):
        told = "Held-out queries are never trained on. The pale band is the range of the steps that share a point."
        made.put("reward", figures.chart(traces, y="reward", height=340), title="Reward", told=told, wide=True)
    of_held_out, told_held_out = learning.held_out(found.evaluations)
    of_trained, told_trained = learning.trained(series)
    made.content["learns"] = {
        "verdict": learning.verdict(of_held_out, of_trained),
        "sentences": [told_held_out, told_trained],
    }


def _timeline(made: Charts, found: Gathered, clock: Clock, begin: float, end: float) -> None:
    totals = {}
    for name, role in found.roles.items():
        of_role = role.shares.totals()
        if not of_role:
            continue
        totals[name] = of_role
        made.put("shares", figures.shares_of_time(name, role.shares, clock, begin, end), title="", wide=True)
    made.content["waits"] = {
        "heading": learning.heading_of_waits(totals),
        "sentences": [learning.waits(name, of_role) for name, of_role in totals.items() if not name.startswith("reference")],
    }
    last = found.spans[-1].begin + found.spans[-1].seconds - found.spans[0].begin if found.spans else 0.0
    told = f"A row for each thread of each role, over the last {last:.0f} recorded seconds. Drag to see earlier ones, scroll to "
    told += "zoom, double-click to see all."
    made.put("spans", figures.recorded_spans(found.spans), title="The recorded end, span by span", told=told, wide=True)


def _rows(made: Charts, found: Gathered) -> None:
    if found.table is None or found.draws is None or found.reader is None or not len(found.table.columns):
        return
    columns = found.table.columns
    counts = found.draws.counts(found.table.writers, columns.writer, columns.row)
    own = [found.reader.is_own(writer) for writer in found.table.writers]
    of_run = rows_lib.with_steps_of_run(columns, own)
    newest = max(found.step, int(of_run.newest_step.max()))
    others = "" if all(own) else " Rows of mounted runs are left out: their steps are those of another run."
    made.content["row_count"] = len(columns)
    made.content["drawn_share"] = float((counts > 0).mean())
    made.content["writers"] = buffer.summary(columns, counts, found.table.writers)
    made.put("buffer", buffer.by_draws(counts), title="Draws per row",
             told="0 are rows that no step has trained on.")  # fmt: skip
    made.put("buffer", buffer.by_age(of_run, newest), title="Age of the rows",
             told=f"All rows of the log that can be read, as of step {newest:,}.{others}")  # fmt: skip
    made.put("buffer", buffer.rewards_by_step(of_run), title="Reward distribution by policy step", wide=True,
             told=f"Each column adds up to 100 %: what the policy of these steps earned.{others}")  # fmt: skip
    hard, told = buffer.difficulty(columns)
    made.put("buffer", hard, title="Queries by difficulty", told=told, wide=True)
    source = samples.Source(
        reader=found.reader, table=found.table, draws=found.draws, tokenizer=found.tokenizer, snapshots=found.snapshots,
        newest_step=newest,
    )  # fmt: skip
    with found.part("the samples"):
        _samples(made, found, source, columns, samples.chosen(of_run, counts))


_GROUPS = {
    "worst": ("Worst", "The lowest rewards. Of equal rewards, rows that a step trained on come first, then the newest."),
    "disagreeing": (
        "Disagreeing",
        "Queries whose responses differ most in reward: of each the best row and the worst, side by side.",
    ),
    "best": ("Best", "The highest rewards. Of equal rewards, rows that a step trained on come first, then the newest."),
    "newest": ("Newest", "The rows of the newest policy."),
}


def _samples(
    made: Charts, found: Gathered, source: samples.Source, columns: rows_lib.Columns, chosen: Mapping[str, Sequence[int]]
) -> None:
    shown, problems = samples.made(source, columns, [i for indices in chosen.values() for i in indices])
    found.problems += problems
    for key, (title, told) in _GROUPS.items():
        of_group = [shown[i] for i in chosen[key] if i in shown]
        if of_group:
            made.content["groups"].append({"key": key, "group": samples.Group(title=title, told=told, samples=of_group)})
    made.content["worst"] = [shown[i] for i in chosen["worst"] if i in shown][:3]
