"""Alarms: what keeps a run from learning, in one sentence, and which setting to change.

`metrics/<role>/alarms.jsonl` holds an `Alarm` for each kind that the role has told in this run: each is told once.
"""

import collections
import contextlib
import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tba_jax.storage import layout, places

log = logging.getLogger(__name__)

_FILE = "alarms.jsonl"


def _summary(values: Sequence[float]) -> SimpleNamespace:
    """The newest values of a measurement, oldest first, as rules name them."""
    ends = dict(last=values[-1], growth=values[-1] - values[0], gib=f"{values[-1] / 2**30:.2f} GiB")
    return SimpleNamespace(mean=sum(values) / len(values), sum=sum(values), low=min(values), high=max(values), **ends)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """What a role (trainer, searcher or evaluator) looks for in its newest points.

    points: how many of them. needs: measurements that all of them must have. when: whether these, and the config, are an alarm.
    sentence: formatted with the measurements, the newest point, and the config as c. advice: names settings.
    """

    role: str
    points: int = 8
    needs: tuple[str, ...]
    when: Callable[[SimpleNamespace, Any], bool]
    sentence: str
    advice: str


def _height(m: SimpleNamespace) -> float:
    """(mean reward − lowest) / (best − lowest), which bounds the share of solved groups."""
    low, high = m.reward_low.last, m.reward_high.last
    return float(m.reward.mean - low) / (high - low) if high > low else 0.0


def _equal_below_best(m: SimpleNamespace, c: Any) -> bool:
    """Half of the groups are equal and not solved, or nearly all are equal and not all queries are solved."""
    equal, height = m.equal_reward_groups.mean, _height(m)
    is_distilled = c.learner.reference.kind == "teacher" and m.reward_low.last == m.reward_high.last  # a task without rewards
    return not is_distilled and bool(equal - height > 0.5 or (equal >= 0.95 and height < 0.9))


def _may_be_cut(task: Any) -> bool:
    """Whether the settings say that cut responses are meant, or what they get."""
    return task.missing_eos_reward is not None or task.force_eos or task.min_response_length == task.response_length


_GROUPS = ("equal_reward_groups", "reward", "reward_low", "reward_high")
_TO_END = (
    "raise task.response_length, have the policy learn to end (warm_start.steps, a model that was tuned so, "
    "task.chat_template=True for a chat model), or let texts end responses (task.stop_strings)"
)
# Kind of alarm -> what it is. Each limit stands with what it is measured against.
RULES: dict[str, Rule] = {
    "equal_rewards": Rule(
        role="trainer",
        needs=(*_GROUPS, "distinct_rows_per_group"),
        when=_equal_below_best,
        sentence="{equal_reward_groups.mean:.0%} of the groups of the last 8 measured batches have K={c.learner.completions} "
        "equal rewards, at a mean reward of {reward.mean:.3g} (rewards go from {reward_low.last:g} to {reward_high.last:g}); "
        "{distinct_rows_per_group.mean:.3g} of the K rows of a group are distinct: updates have next to nothing to learn from",
        advice="look at responses and rewards (python -m tba_jax show); take queries of which some responses succeed "
        "(searchers.prompt_selection=posterior), more responses (learner.completions), a better initial policy "
        "(warm_start.steps, model.path) or a reward in steps; where responses are the same, raise sampling.temperature",
    ),
    "solved": Rule(  # a fifth of the run is left; 8 points may be a lucky stretch (the demo: 0.96)
        role="trainer",
        points=20,
        needs=(*_GROUPS, "step"),
        when=lambda m, c: m.equal_reward_groups.mean >= 0.99 and _height(m) >= 0.9 and m.step.last <= 0.8 * c.learner.steps,
        sentence="the train queries are solved: {equal_reward_groups.mean:.0%} of the groups of the last 20 measured batches "
        "have equal rewards, at a mean of {reward.mean:.3g}, at step {step.last:.0f} of {c.learner.steps}",
        advice="stop the run (Ctrl-C keeps it), or give it harder queries",
    ),
    "gradient_clipped": Rule(  # the demo learns with norms of up to 17 times the clip
        role="trainer",
        needs=("grad_norm",),
        when=lambda m, c: 0 < 30 * c.learner.clip_norm < m.grad_norm.low,
        sentence="the clip of gradients is always active: norms of the last 8 measured batches are {grad_norm.low:.3g} to "
        "{grad_norm.high:.3g}, far above learner.clip_norm={c.learner.clip_norm:g}; all updates have one size",
        advice="raise learner.clip_norm, or give rewards a smaller scale",
    ),
    "logprob_gap": Rule(  # one comparison proves it
        role="trainer",
        points=1,
        needs=("logprob_gap_alarm", "logprob_gap_limit"),
        when=lambda m, c: m.logprob_gap_alarm.last > 0,
        sentence="sampler and learner disagree by {point[logprob_gap_max]:.2g} nats on a token under the same weights (limit "
        "{logprob_gap_limit.last:g}): a mask, a position or a precision differs, and the run trains on wrong log-probs",
        advice="compare model.compute_dtype, model.attention and searchers.weights of the roles, and try model.attention=xla and "
        "float32; where the gap is known and small, raise learner.logprob_gap_limit",
    ),
    "searchers_behind": Rule(  # the paper's runs learn from rows of up to 20 steps; without searchers, a run learns from old rows
        role="trainer",
        needs=("newest_row_lag",),
        when=lambda m, c: (
            c.searchers.count > 0 and m.newest_row_lag.low > max(64, 8 * c.publish.every_steps) + c.schedule.lag + c.searchers.lag
        ),
        sentence="searchers are far behind: at each of the last 8 measured batches the newest rows came from weights of at least "
        "{newest_row_lag.low:.0f} steps ago, while a snapshot is published every {c.publish.every_steps} steps",
        advice="look at metrics/searcher-*/status.json and the searchers' logs; more searchers, smaller batches "
        "(searchers.queries_per_batch), or a limit on the use of old rows (replay.max_staleness, replay.max_draws_per_row)",
    ),
    "updates_refused": Rule(
        role="trainer",
        needs=("skipped_steps",),
        when=lambda m, c: m.skipped_steps.growth >= 3,
        sentence="{skipped_steps.growth:.0f} updates since 8 measured batches were not finite and are left out, "
        "{skipped_steps.last:.0f} in all (learner.non_finite=skip)",
        advice="the trainer's log names their rows; lower learner.learning_rate or learner.clip_norm",
    ),
    "disk": Rule(
        role="trainer",
        points=1,
        needs=("disk_free", "checkpoint_bytes"),
        when=lambda m, c: m.disk_free.last < m.checkpoint_bytes.last,
        sentence="the disk of the run has {disk_free.gib} left, and the next checkpoint takes about {checkpoint_bytes.gib}",
        advice="free some, or keep less (publish.keep, checkpoint.keep, replay.retention=checkpoints)",
    ),
    "missing_eos_reward": Rule(  # nearly all responses have one and the same reward, which says nothing about what they say
        role="searcher",
        needs=("rows", "finished_rows"),
        when=lambda m, c: c.task.missing_eos_reward is not None and m.finished_rows.sum <= 0.05 * m.rows.sum,
        sentence="{finished_rows.sum:,.0f} of the {rows.sum:,.0f} responses of the last 8 batches end within "
        "task.response_length={c.task.response_length} tokens; others get task.missing_eos_reward={c.task.missing_eos_reward:g}",
        advice=_TO_END,
    ),
    "never_ends": Rule(  # of responses that should end, some do
        role="searcher",
        needs=("rows", "finished_rows"),
        when=lambda m, c: not _may_be_cut(c.task) and m.finished_rows.sum < 0.01 * m.rows.sum,
        sentence="{finished_rows.sum:,.0f} of the {rows.sum:,.0f} responses of the last 8 batches end by themselves within "
        "task.response_length={c.task.response_length} tokens: rewards are of texts that are cut",
        advice=f"{_TO_END}; where all responses are meant to be cut, set task.min_response_length=task.response_length",
    ),
    "rewards_fail": Rule(
        role="searcher",
        needs=("rows", "unscored"),
        when=lambda m, c: m.unscored.sum > 0.05 * m.rows.sum,
        sentence="rewards fail: {unscored.sum:,.0f} of the {rows.sum:,.0f} responses of the last 8 batches have none",
        advice="the searcher's log and status say why the first failed; look at the task's models, grader and limits of time",
    ),
    "turns_unread": Rule(
        role="searcher",
        needs=("turns", "turn_errors"),
        when=lambda m, c: m.turn_errors.sum > 0.5 * m.turns.sum,
        sentence="the environment could not read {turn_errors.sum:,.0f} of the {turns.sum:,.0f} turns of the last 8 batches",
        advice="look at rows with show: the policy must know what a turn looks like (warm_start.steps, the prompt, a model that "
        "was tuned to call tools)",
    ),
    "evaluation_fails": Rule(  # an evaluation has hundreds of responses
        role="evaluator",
        points=1,
        needs=("rows", "unscored"),
        when=lambda m, c: m.unscored.sum > 0.05 * m.rows.sum,
        sentence="{unscored.sum:.0f} of the {rows.sum:.0f} held-out responses have no score, and the means leave them out",
        advice="look at the task's models, grader and limits of time on the evaluator's machine",
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alarm:
    """A line of the file. time: unix seconds. step: of the trainer, or batch of a searcher. Others: see Alarms.tell."""

    time: float
    step: int
    kind: str
    sentence: str
    advice: str


class Alarms:
    """Tells a role's alarms, by a line of the file and a warning of the log. A restarted role knows what it has told."""

    def __init__(self, folder: Path):
        """Args: folder: of the role's metrics, which need not be there yet. Attribute told: the kinds."""
        self._folder = folder
        self.told = {alarm.kind for alarm in read(folder)}

    def tell(self, *, kind: str, sentence: str, advice: str, step: int) -> None:
        """Tells an alarm, unless the role has told its kind. What storage refuses stands in the log alone.

        Args: kind: a name of docs/watching.md. sentence: what is wrong; advice: what to do; both without a period.
        """
        if kind in self.told:
            return
        self.told.add(kind)
        log.warning("%s; what to do: %s (alarm %s, step %d)", sentence, advice, kind, step)
        alarm = Alarm(time=time.time(), step=step, kind=kind, sentence=sentence, advice=advice)
        with contextlib.suppress(OSError):
            places.make_folder(self._folder, below=2)
            layout.append(self._folder / _FILE, [json.dumps(dataclasses.asdict(alarm))])


class Watch:
    """Keeps the newest points of a role, and tells what its rules find in them."""

    def __init__(self, folder: Path, config: Any, *, role: str):
        """Args: folder: of the role's metrics; config: of the run; role: see Rule."""
        self._alarms, self._config = Alarms(folder), config
        self._rules = {kind: rule for kind, rule in RULES.items() if rule.role == role}
        self._points: collections.deque[Mapping[str, Any]] = collections.deque(maxlen=max(rule.points for rule in RULES.values()))

    def look(self, step: int, point: Mapping[str, Any]) -> None:
        """Takes the newest point. Args: step: trainer step, or number of a batch."""
        self._points.append(point)
        for kind, rule in self._rules.items():
            if kind not in self._alarms.told and (sentence := found(rule, list(self._points), self._config)):
                self._alarms.tell(kind=kind, sentence=sentence, advice=rule.advice, step=step)


def found(rule: Rule, points: Sequence[Mapping[str, Any]], config: Any) -> str:
    """What a rule says of the newest points, "" where it finds nothing or a measurement is missing."""
    newest = points[-rule.points :]
    values = {name: [float(point.get(name, math.nan)) for point in newest] for name in rule.needs}
    if len(newest) < rule.points or not all(math.isfinite(value) for series in values.values() for value in series):
        return ""
    measured = SimpleNamespace(**{name: _summary(series) for name, series in values.items()})
    return rule.sentence.format(c=config, point=newest[-1], **vars(measured)) if rule.when(measured, config) else ""


def read(folder: Path) -> list[Alarm]:
    """The alarms that a role has told, oldest first. Torn lines, and files that cannot be read, are left out."""
    found = []
    with contextlib.suppress(OSError):
        for line in layout.each(folder / _FILE):
            with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):  # something else wrote it
                texts = {name: str(line[name]) for name in ("kind", "sentence", "advice")}
                found.append(Alarm(time=float(line["time"]), step=int(line["step"]), **texts))
    return found
