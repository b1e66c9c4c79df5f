"""Whether rows and snapshots can keep each other going: the settings between which a run could stop for ever.

A trainer waits for rows that it may draw, searchers with backpressure wait for a newer snapshot, and every limit on draws or age
makes rows unusable before the next snapshot comes. What cannot go on although all searchers work and every row is good is
refused here. What can starve only by what happens (a searcher leaves, rewards fail, responses repeat) is let go on by
`publish.at_most_seconds` while the run runs: see roles/trainer/loop.py.
"""

import bisect
import itertools
from typing import Any


def refusals(config: Any) -> list[str]:
    """A sentence about each of the settings that cannot go on together; [] where there are none."""
    rules = (_lag,) if config.schedule.mode == "interleaved" else (_age, _first_update, _draws)
    return [sentence for rule in rules if (sentence := rule(config))]


def first_gap(config: Any) -> int:
    """Trainer steps from the first snapshot to the next regular one: the largest there is between two (see Publishing.is_due)."""
    return min(config.publish.every_steps, config.evaluation.every_steps, config.learner.steps)


def least_kept(config: Any) -> int:
    """The least publish.keep, above 0, that removes no snapshot which searchers may still want.

    In turn, that of the step schedule.lag before. Else that of searchers.lag steps before the newest; two more snapshots may be
    published while it is read.
    """
    if config.schedule.mode == "interleaved":
        return config.schedule.lag + 1
    return config.searchers.lag // config.publish.every_steps + 3


def queries_per_snapshot(config: Any) -> int:
    """Queries that the searchers of the config may ask one snapshot under searchers.max_rows_per_snapshot > 0."""
    s = config.searchers
    return s.count * -(-s.max_rows_per_snapshot // (s.queries_per_batch * s.samples_per_query)) * s.queries_per_batch


def _lag(config: Any) -> str:
    """Fresh rows of step s are of the weights of step max(0, s − lag), and are drawn at once."""
    lag, limit, steps = config.schedule.lag, config.replay.max_staleness, config.learner.steps
    if not limit or lag <= limit or steps <= limit + 1:
        return ""
    return (
        f"schedule.lag={lag} makes every row {lag} steps old, more than replay.max_staleness={limit}: step {limit + 2} would "
        "wait for ever"
    )


def _age(config: Any) -> str:
    """Rows of the weights of step p may be drawn at p … p + limit; where no newer weights come until then, none can be."""
    limit, lag, steps = config.replay.max_staleness, config.searchers.lag, config.learner.steps
    if not limit:
        return ""
    if not config.searchers.count and steps > limit + 1:
        return (
            f"searchers.count=0 leaves only rows of replay.mount, which count as of step 0: under replay.max_staleness={limit} "
            f"no step after {limit + 1} of learner.steps={steps} may draw them"
        )
    every = config.publish.every_steps, config.evaluation.every_steps
    published = [step for step in range(steps + 1) if step == steps or not all(step % each for each in every)]
    for newest, following in itertools.pairwise(published):
        used = published[bisect.bisect_right(published, max(0, newest - lag)) - 1]
        if following - used > limit + 1:
            named = f"searchers.lag={lag}" if lag else _named_gap(config, first_gap(config))
            return (
                f"replay.max_staleness={limit} lets the rows of a snapshot be drawn in {limit + 1} steps, and the next snapshot "
                f"comes after {following - used} ({named}): step {used + limit + 2} would wait for ever"
            )
    return ""


def _first_update(config: Any) -> str:
    """The first update needs rows of `queries` queries, and min_rows in all, of the first snapshot."""
    s, queries, least = config.searchers, config.learner.queries, config.replay.min_rows
    if not s.max_rows_per_snapshot or config.replay.mount:
        return ""
    allowed = queries_per_snapshot(config)
    rows = allowed * s.samples_per_query
    lets = f"searchers.max_rows_per_snapshot={s.max_rows_per_snapshot} lets searchers.count={s.count} searchers"
    if allowed < queries:
        return f"{lets} ask {allowed} queries before the first update, which needs learner.queries={queries}"
    return f"{lets} generate {rows} rows before the first update, which needs replay.min_rows={least}" if rows < least else ""


def _draws(config: Any) -> str:
    """All updates until the second snapshot draw from the rows of the first, each as often as it may be drawn."""
    s, learner, replay = config.searchers, config.learner, config.replay
    if not (s.max_rows_per_snapshot and replay.max_draws_per_row) or replay.mount:
        return ""
    kept = min(s.samples_per_query, replay.capacity_per_query)
    rows, gap = queries_per_snapshot(config) * kept, first_gap(config)
    needed = learner.queries * learner.completions * gap
    if rows * replay.max_draws_per_row >= needed:
        return ""
    return (
        f"searchers.max_rows_per_snapshot={s.max_rows_per_snapshot} lets searchers.count={s.count} searchers generate {rows} "
        f"rows with a snapshot, each drawn replay.max_draws_per_row={replay.max_draws_per_row} times at most; the {gap} updates "
        f"until the next snapshot ({_named_gap(config, gap)}) draw {needed}: the trainer would wait for ever"
    )


def _named_gap(config: Any, gap: int) -> str:
    """The setting that decides how far snapshots are apart."""
    named = {"publish.every_steps": config.publish.every_steps, "evaluation.every_steps": config.evaluation.every_steps}
    return next((f"{name}={value}" for name, value in named.items() if value == gap), f"learner.steps={config.learner.steps}")
