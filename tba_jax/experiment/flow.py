"""Whether rows and snapshots can keep each other going: the settings between which a run could stop for ever.

A trainer waits for rows that it may draw, searchers with backpressure wait for a newer snapshot, and every limit on draws or age
makes rows unusable before the next snapshot comes. What cannot go on although all searchers work and every row is good is
refused here. What can starve only by what happens (a searcher leaves, rewards fail, responses repeat) is let go on by
`publish.at_most_seconds` while the run runs: see roles/trainer/loop.py.
"""

import bisect
import itertools
from collections.abc import Iterator
from typing import Any


def refusals(config: Any) -> list[str]:
    """A sentence about each of the settings that cannot go on together."""
    if config.schedule.mode == "interleaved":
        return [*_lag(config)]
    has_quota = config.searchers.max_rows_per_snapshot and not config.replay.mount
    return [*_age(config), *(_quota(config) if has_quota else ())]


def least_kept(config: Any) -> int:
    """The least publish.keep, above 0, that removes no snapshot which searchers may still want.

    In turn, that of the step schedule.lag before. Else that of searchers.lag steps before the newest; two more snapshots may be
    published while it is read.
    """
    if config.schedule.mode == "interleaved":
        return int(config.schedule.lag) + 1
    return int(config.searchers.lag // config.publish.every_steps) + 3


def _lag(config: Any) -> Iterator[str]:
    """Fresh rows of step s are of the weights of step max(0, s − lag), and are drawn at once."""
    lag, limit = config.schedule.lag, config.replay.max_staleness
    if limit and lag > limit and config.learner.steps > limit + 1:
        old = f"schedule.lag={lag} makes every row {lag} steps old, more than replay.max_staleness={limit}"
        yield f"{old}: step {limit + 2} would wait for ever"


def _age(config: Any) -> Iterator[str]:
    """Rows of the weights of step p may be drawn at p … p + limit; where no newer weights come until then, none can be."""
    limit, lag, steps = config.replay.max_staleness, config.searchers.lag, config.learner.steps
    if not limit:
        return
    if not config.searchers.count and steps > limit + 1:
        yield (
            f"searchers.count=0 leaves only rows of replay.mount, which count as of step 0: under replay.max_staleness={limit} "
            f"no step after {limit + 1} of learner.steps={steps} may draw them"
        )
        return
    every = config.publish.every_steps, config.evaluation.every_steps
    published = [step for step in range(steps + 1) if step == steps or not all(step % each for each in every)]
    for newest, following in itertools.pairwise(published):
        used = published[bisect.bisect_right(published, max(0, newest - lag)) - 1]
        if following - used > limit + 1:
            named = f"searchers.lag={lag}" if lag else _first_gap(config)[1]
            yield (
                f"replay.max_staleness={limit} lets the rows of a snapshot be drawn in {limit + 1} steps, and the next snapshot "
                f"comes after {following - used} ({named}): step {used + limit + 2} would wait for ever"
            )
            return


def _quota(config: Any) -> Iterator[str]:
    """The first update needs rows of `queries` queries, and min_rows in all, of the first snapshot; and all updates until the
    second one draw from these rows, each as often as it may be drawn."""
    s, learner, replay = config.searchers, config.learner, config.replay
    # Whole batches are asked.
    asked = s.count * -(-s.max_rows_per_snapshot // (s.queries_per_batch * s.samples_per_query)) * s.queries_per_batch
    lets = f"searchers.max_rows_per_snapshot={s.max_rows_per_snapshot} lets searchers.count={s.count} searchers"
    made = asked * s.samples_per_query
    if asked < learner.queries:
        yield f"{lets} ask {asked} queries before the first update, which needs learner.queries={learner.queries}"
    elif made < replay.min_rows:
        yield f"{lets} generate {made} rows before the first update, which needs replay.min_rows={replay.min_rows}"
    (gap, named), draws = _first_gap(config), replay.max_draws_per_row
    needed, rows = learner.queries * learner.completions * gap, asked * min(s.samples_per_query, replay.capacity_per_query)
    if draws and rows * draws < needed:
        yield (
            f"{lets} generate {rows} rows with a snapshot, each drawn replay.max_draws_per_row={draws} times at most; the {gap} "
            f"updates until the next snapshot ({named}) draw {needed}: the trainer would wait for ever"
        )


def _first_gap(config: Any) -> tuple[int, str]:
    """Trainer steps from the first snapshot to the next regular one, the most between two (see Publishing.is_due); and the
    setting that says so."""
    gaps = {"publish.every_steps": config.publish.every_steps, "evaluation.every_steps": config.evaluation.every_steps}
    name, gap = min({**gaps, "learner.steps": config.learner.steps}.items(), key=lambda item: item[1])
    return gap, f"{name}={gap}"
