"""What keeps a trainer from learning, read from its newest points: those of its metrics, and what `Circumstances` adds.

A rule looks at several points, so that one unlucky batch is no alarm. Each limit stands with its reason.
"""

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from tba_jax.objectives import OBJECTIVES
from tba_jax.roles.trainer import logprob_gap
from tba_jax.roles.watchdog import Point, Rule, Watchdog, mean, series
from tba_jax.run import layout
from tba_jax.run.alarms import Alarms, Finding

if TYPE_CHECKING:
    from tba_jax.roles.trainer.trainer import Trainer

# Points that a rule looks at; `solved` looks at more: what is solved may be a lucky stretch (the demo: 0.96 over 8 points).
POINTS, SOLVED_POINTS = 8, 20

# Share of groups with equal rewards below the best reward: most groups say nothing of what is better.
_EQUAL_BELOW_BEST = 0.5
# Hardly a group differs, while the mean reward is this share of the way from the lowest to the best: not all queries are solved.
_HARDLY_ANY_DIFFERS, _NEAR_BEST = 0.95, 0.9
_SOLVED, _STEPS_LEFT = 0.99, 0.2
# How far above learner.clip_norm every gradient is: the demo learns with up to 17 times that norm.
_CLIPPED_BY = 30.0
# Of the sampler's tokens at most 1/clip have a ratio above the clip, since their mean ratio is 1: a quarter of that is very many.
_RATIOS_CLIPPED = 0.25
# Steps by which the newest row may lag behind, beside so many publications: the paper's runs learn from rows of up to 20 steps.
_STEPS_BEHIND, _PUBLICATIONS_BEHIND = 64, 8
_ROWS_REJECTED = 0.1
_UPDATES_REFUSED = 3


class Circumstances:
    """What rules need beside the metrics of a point. A look costs what rows that came since the last one cost."""

    def __init__(self, trainer: "Trainer"):
        self._trainer = trainer
        # The newest row that was looked at, the extent of all rewards, and the newest weights that a row came from.
        self._arrival, self._low, self._high, self._row_step = -1, math.inf, -math.inf, -1
        # A trainer that resumes does not know the rewards of rows that were evicted before.
        self._sees_all = len(trainer.index) == trainer.index.arrivals
        self._checkpoint_bytes = float(sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.program.trees())))

    def __call__(self) -> dict[str, float]:
        """Returns:
        reward_low, reward_high: the extent of the rewards of rows that have been resident, where it is known: rows that are gone
          say whether one reward of all others is the best or the worst. resident_rows: how many are now.
        newest_row_lag: steps since the weights of the newest own row, if there is one.
        disk_free: bytes, where the disk tells its size. checkpoint_bytes.
        """
        self._look_at_new_rows()
        found = {"checkpoint_bytes": self._checkpoint_bytes, "resident_rows": float(len(self._trainer.index))}
        if self._low < self._high or (self._arrival >= 0 and self._sees_all):
            found |= {"reward_low": self._low, "reward_high": self._high}
        if self._row_step >= 0 and self._trainer.buffer.has_own_rows():
            found["newest_row_lag"] = float(self._trainer.step_number - self._row_step)
        try:
            disk = os.statvfs(self._trainer.run.root)
        except OSError:  # storage that refuses is told by the writers of what must not be lost
            return found
        return found | ({"disk_free": float(disk.f_bavail * disk.f_frsize)} if disk.f_blocks else {})

    def _look_at_new_rows(self) -> None:
        index = self._trainer.index
        new = np.flatnonzero(index.arrival > self._arrival)
        if len(new):
            self._arrival, rewards = int(index.arrival[new].max()), index.reward[new]
            self._low, self._high = min(self._low, float(rewards.min())), max(self._high, float(rewards.max()))
            self._row_step = max(self._row_step, int(index.row_step[new].max()))


def _rewards(points: Sequence[Point], *, count: int) -> tuple[float, float, float, float] | None:
    """Share of equal groups, mean reward, lowest and best reward, over the last `count` points; None where some are unknown."""
    equal, reward = (series(points, name, count=count) for name in ("equal_reward_groups", "reward"))
    low, high = (series(points, name, count=1) for name in ("reward_low", "reward_high"))
    return (mean(equal), mean(reward), low[0], high[0]) if equal and reward and low and high else None


def equal_rewards(points: Sequence[Point], c: Any) -> Finding | None:
    """Most groups have equal rewards that are not the best, so that nothing tells a better response from a worse one.

    Groups of the best reward are solved queries, and no alarm. Their share is at most the mean reward's share of the way from
    the lowest to the best.
    """
    if (found := _rewards(points, count=POINTS)) is None:
        return None
    equal, reward, low, high = found
    height = (reward - low) / (high - low) if high > low else 0.0
    if equal - height <= _EQUAL_BELOW_BEST and not (equal >= _HARDLY_ANY_DIFFERS and height < _NEAR_BEST):
        return None
    groups = f"{equal:.0%} of the groups of the last {POINTS} measured batches have K={c.learner.completions} equal rewards"
    if high == low:
        where = f"all {points[-1]['resident_rows']:,.0f} resident rows have the reward {low:g}"
        advice = (
            "look at responses and rewards (python -m tba_jax show); where all responses fail, take easier queries or a better "
            "initial policy (warm_start.steps, model.path), and else mend the task's reward, which tells no two responses apart"
        )
    else:
        where = f"at a mean reward of {reward:.3g} (rewards go from {low:g} to {high:g})"
        advice = (
            "take queries of which some responses succeed (searchers.prompt_selection=posterior finds them for rewards of 0 and "
            "1), more responses (learner.completions, searchers.samples_per_query), a better initial policy "
            "(warm_start.steps, model.path) or a reward in steps; where responses are the same, raise sampling.temperature"
        )
    entropy, distinct = (series(points, name, count=POINTS) for name in ("entropy", "distinct_rows_per_group"))
    same = f"; entropy is {mean(entropy):.2g} nats a token" if entropy else ""
    same += f"; {mean(distinct):.3g} of the K rows of a group are distinct" if distinct else ""
    return Finding(sentence=f"{groups}, {where}{same}: updates have next to nothing to learn from", advice=advice)


def solved(points: Sequence[Point], c: Any) -> Finding | None:
    """For a long time no group differs, at the best reward, and much of the run is left: it would learn nothing more."""
    found, step = _rewards(points, count=SOLVED_POINTS), points[-1].get("step", math.inf)
    if found is None or step > (1 - _STEPS_LEFT) * c.learner.steps:
        return None
    equal, reward, low, high = found
    if equal < _SOLVED or high == low or (reward - low) / (high - low) < _NEAR_BEST:
        return None
    return Finding(
        sentence=f"the train queries are solved: {equal:.0%} of the groups of the last {SOLVED_POINTS} measured batches have "
        f"equal rewards, at a mean of {reward:.3g}, where {high:g} is the best; {c.learner.steps - step:.0f} of "
        f"{c.learner.steps} steps are left",
        advice="stop the run (Ctrl-C keeps it), or give it harder queries",
    )


def gradient_clipped(points: Sequence[Point], c: Any) -> Finding | None:
    """Every gradient is far above learner.clip_norm: all updates are of one size, whatever their batches say."""
    norms, limit = series(points, "grad_norm", count=POINTS), c.learner.clip_norm
    if not (norms and limit) or min(norms) <= _CLIPPED_BY * limit:
        return None
    return Finding(
        sentence=f"the clip of gradients is always active: norms of the last {POINTS} measured batches are {min(norms):.3g} to "
        f"{max(norms):.3g}, far above learner.clip_norm={limit:g}; all updates have one size, whatever their batches say",
        advice="raise learner.clip_norm, or give rewards a smaller scale",
    )


def ratio_clipped(points: Sequence[Point], c: Any) -> Finding | None:
    """Many tokens' importance ratios are clipped, for objectives that weigh tokens by them."""
    shares = series(points, "ratio_clipped", count=POINTS)
    clip = c.learner.importance_clip
    if not (shares and clip and "importance_clip" in OBJECTIVES[c.learner.objective].settings):
        return None
    if mean(shares) <= _RATIOS_CLIPPED / clip:
        return None
    return Finding(
        sentence=f"importance ratios are clipped all the time: {mean(shares):.0%} of the tokens of the last {POINTS} "
        f"measured batches have π_θ/π_behaviour above learner.importance_clip={clip:g}; on-policy none would, and off-policy at "
        f"most {1 / clip:.0%}",
        advice="lower learner.learning_rate, or use fresher rows (replay.max_staleness, more searchers); "
        "learner.objective=trajectory_balance needs no ratios",
    )


def logprob_gap_alarm(points: Sequence[Point], c: Any) -> Finding | None:
    """Sampler and learner give the same tokens other log-probs under the same weights; one comparison proves it."""
    if not points[-1].get("logprob_gap_alarm"):
        return None
    limit, gap = logprob_gap.limit(c), points[-1].get("logprob_gap_max", math.nan)
    return Finding(
        sentence=f"sampler and learner disagree by {gap:.2g} nats on a token under the same weights (limit {limit:g}): a mask, a "
        "position or a precision differs, and the run trains on wrong log-probs",
        advice="compare model.compute_dtype, model.attention and searchers.weights of the roles, and try model.attention=xla and "
        "float32; where the gap is known and small, raise learner.logprob_gap_limit",
    )


def searchers_behind(points: Sequence[Point], c: Any) -> Finding | None:
    """The newest rows are of old weights: searchers are too slow, have stopped, or get no snapshots."""
    lags = series(points, "newest_row_lag", count=POINTS)
    limit = max(_STEPS_BEHIND, _PUBLICATIONS_BEHIND * c.publish.every_steps) + c.schedule.lag + c.searchers.lag
    if not c.searchers.count or not lags or min(lags) <= limit:  # without searchers, a run learns from old rows
        return None
    return Finding(
        sentence=f"searchers are far behind: the newest rows come from weights of {lags[-1]:.0f} steps ago, and from more than "
        f"{limit} at each of the last {POINTS} measured batches, while a snapshot is published every publish.every_steps="
        f"{c.publish.every_steps} steps",
        advice="look at metrics/searcher-*/status.json and the searchers' logs; more searchers, smaller batches "
        "(searchers.queries_per_batch), or a limit on the use of old rows (replay.max_staleness, replay.max_draws_per_row)",
    )


def rows_rejected(points: Sequence[Point], c: Any) -> Finding | None:
    """Many of the rows that come are left out of training."""
    rejected, seen = (series(points, name, count=POINTS) for name in ("rows_rejected", "rows_seen"))
    if not (rejected and seen) or rejected[-1] - rejected[0] <= _ROWS_REJECTED * (seen[-1] - seen[0]):
        return None
    return Finding(
        sentence=f"{rejected[-1] - rejected[0]:,.0f} of the {seen[-1] - seen[0]:,.0f} rows that came during the last {POINTS} "
        "measured batches are not valid, such as rows whose reward is not a finite number, and are left out of training",
        advice="python -m tba_jax audit says which rows and why; the trainer's log names the first of each kind",
    )


def updates_refused(points: Sequence[Point], c: Any) -> Finding | None:
    """Updates are not finite and left out, again and again (learner.non_finite=skip)."""
    skipped = series(points, "skipped_steps", count=POINTS)
    if not skipped or skipped[-1] - skipped[0] < _UPDATES_REFUSED:
        return None
    return Finding(
        sentence=f"{skipped[-1] - skipped[0]:.0f} updates since {POINTS} measured batches were not finite and are left out, "
        f"{skipped[-1]:.0f} in all (learner.non_finite=skip)",
        advice="the trainer's log names their rows; lower learner.learning_rate or learner.clip_norm, or give rewards a smaller "
        "scale",
    )


def disk_nearly_full(points: Sequence[Point], c: Any) -> Finding | None:
    """The next checkpoint does not fit the disk of the run any more."""
    free, needed = (series(points, name, count=1) for name in ("disk_free", "checkpoint_bytes"))
    if not (free and needed) or free[0] >= needed[0]:
        return None
    return Finding(
        sentence=f"the disk of the run has {_size(free[0])} left, and the next checkpoint takes about {_size(needed[0])}",
        advice="free some, or keep less (publish.keep, checkpoint.keep, replay.retention=checkpoints)",
    )


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


RULES: dict[str, Rule] = {
    "equal_rewards": equal_rewards,
    "solved": solved,
    "gradient_clipped": gradient_clipped,
    "ratio_clipped": ratio_clipped,
    "logprob_gap": logprob_gap_alarm,
    "searchers_behind": searchers_behind,
    "rows_rejected": rows_rejected,
    "updates_refused": updates_refused,
    "disk": disk_nearly_full,
}


def watchdog(run: layout.RunDir, config: Any) -> Watchdog:
    """The watch over a trainer's steps."""
    return Watchdog(Alarms(run.metrics("trainer")), RULES, config, points=SOLVED_POINTS)
