"""Where a run stands right now, from the files of its roles and from what their supervisor knows.

A line of metrics that is older than its role's last start is history. A rate holds as long as its role goes on at that pace.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tba_jax.roles.lives import Life, State, Supervised
from tba_jax.roles.tails import Line, Tails, last_step
from tba_jax.run import best_step, layout, places, status
from tba_jax.text.visible import visible_line

# Lines of a role that are looked at; rates are those of the last so many seconds, but of a few lines at least.
POINTS, RATE_SECONDS, _RATE_POINTS = 40, 60.0, 4
# The first steps after a start follow each other at another pace: rows have waited for them.
_LEAST_SECONDS = 1.0
# A rate holds for so long after its role's last line, or for so many times the time between two lines.
HOLD_SECONDS, _HOLD_LINES = 10.0, 3.0
# A wait is shown once it is so long.
WAIT_SECONDS = 10.0
# Nobody here knows whether a role of another machine lives: what it wrote holds for so long. Its folder is looked for so often.
JOINED_SECONDS, _LIST_SECONDS = 600.0, 10.0
# What a role's record says of a process that has ended as it should.
_ENDS = ("finished", "stopped")
_WARM_START = "warm start"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Standing:
    """What there is to say of a run. Texts are of one line, and hold no control characters.

    seconds: since this start of the run, which may have done steps before: first_step is the newest of these.
    step: the newest that is known, also from before a restart. steps: of the whole run.
    headline: what to say in place of figures, "" where they hold.
    trainer: the newest line of the trainer's metrics; {} where it has written none since it was started.
    rewards: of the trainer's last lines, by step, for a trend.
    steps_per_second, eta_seconds: None where the pace is not known. tokens_per_second: the trainer's; it and mfu likewise.
    searchers: name -> tokens per second, None where that is not known. joined: how many of them were started elsewhere.
    evaluations: (step, held-out score) of the evaluator's lines that are known. best: the best of all steps that were evaluated.
    says: (role, sentence) of each role that does something else than its work.
    troubles: role -> what is wrong with its rewards, "" where nothing is; of roles that have said so since they were started.
    """

    seconds: float
    first_step: int = 0
    step: int = 0
    steps: int
    headline: str = ""
    trainer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rewards: Sequence[tuple[int, float]] = ()
    steps_per_second: float | None = None
    eta_seconds: float | None = None
    searchers: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    joined: int = 0
    evaluations: Sequence[tuple[int, float]] = ()
    best: best_step.Scored | None = None
    says: Sequence[tuple[str, str]] = ()
    troubles: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_trained(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.steps

    def rate(self, name: str) -> float | None:
        """A rate of the trainer's last line; None where the line has none, or the trainer does not keep that pace."""
        value = self.trainer.get(name) if self.steps_per_second is not None else None
        return value if isinstance(value, float) else None


class Lookout:
    """Looks at a run again and again. Its time begins when it is made: what is older is of the run's past."""

    def __init__(
        self,
        run: layout.RunDir,
        *,
        steps: int,
        searchers: Sequence[str],
        warm_start_steps: int,
        supervised: Callable[[], Supervised] = Supervised,
    ):
        """Args: searchers: names of those that are started here. supervised: what the supervisor of the roles knows of them."""
        self._run, self.steps, self._searchers, self._warm_start_steps = run, steps, list(searchers), warm_start_steps
        self._supervised = supervised
        self._begin, self._began = time.monotonic(), time.time()
        self.first_step = last_step(run.metrics("trainer"))
        self._tails = Tails(count=POINTS)
        self._joined: list[str] = []
        self._next_list = self._next_ask = 0.0
        self._has_reference = False

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._begin

    def list_again(self) -> None:
        """Has `roles` see at once who has come lately."""
        self._next_list = 0.0

    def roles(self) -> list[str]:
        """All whose files are looked at: those of this machine, and those that have written something lately."""
        own = ["trainer", *self._searchers, "evaluator", "reference"]
        if time.monotonic() >= self._next_list:
            self._next_list = time.monotonic() + _LIST_SECONDS
            self._joined = [name for name in _lively(self._run) if name not in own and not name.startswith("trainer")]
        return own + self._joined

    def __call__(self) -> Standing:
        """Raises OSError where the storage refuses."""
        known, now = self._supervised(), time.time()
        if known.is_away:
            away = f"workdir {visible_line(str(self._run.root))} does not hold the run; it goes on once that is back"
            return Standing(seconds=self.seconds, steps=self.steps, headline=away)
        roles = self.roles()
        told = {name: status.read(self._run.metrics(name)) for name in roles}
        news = {name: each for name, each in told.items() if each.time >= self._life(known, name).began}
        lines, evaluated = self._tails(self._run.metrics("trainer")), self._tails(self._run.metrics("evaluator"))
        present = _since(lines, self._life(known, "trainer").began)
        step = int(lines[-1]["step"]) if lines else 0
        trains = self._life(known, "trainer").state is State.RUNS and step < self.steps
        waits = news["trainer"].seconds >= WAIT_SECONDS if "trainer" in news else False
        pace = _pace(present, now) if trains and not waits else None
        makers = [name for name in roles if self._makes_rows(name) and step < self.steps]
        speeds = {name: self._speed(known, name, now) for name in makers}
        headline = "stopping" if known.stops else self._headline(known, step, bool(present))
        is_warm = headline.startswith(_WARM_START)  # its role says the same, without the loss
        return Standing(
            seconds=self.seconds,
            first_step=self.first_step,
            step=step,
            steps=self.steps,
            headline=headline,
            trainer=present[-1] if present else {},
            rewards=[(int(line["step"]), float(line["reward"])) for line in present if "reward" in line],
            steps_per_second=pace,
            eta_seconds=_seconds_left(self.steps - step, pace, since=now - present[-1]["time"]) if pace else None,
            searchers={name: speed for name, speed in speeds.items() if name in self._searchers or speed is not None},
            joined=sum(speed is not None for name, speed in speeds.items() if name in self._joined),
            evaluations=_scores(evaluated),
            best=_best(evaluated),
            says=self._says(known, [name for name in roles if not (name == "reference" and is_warm)], news),
            troubles={name: each.trouble for name, each in news.items()},
        )

    def _makes_rows(self, name: str) -> bool:
        return name in self._searchers or name in self._joined

    def _life(self, known: Supervised, name: str) -> Life:
        """Of a role. Roles of this process begin with this object; of those elsewhere what they wrote lately counts."""
        if name in known.lives:
            life = known.lives[name]
            is_up = life.state in (State.RUNS, State.DONE)
            return life if is_up else dataclasses.replace(life, began=float("inf"))
        if name in self._joined:
            return Life(state=State.RUNS, began=time.time() - JOINED_SECONDS)
        if known.lives:  # the reference policy is made before the others start, and then they alone are supervised
            return Life(state=State.BEFORE, began=float("inf"))
        return Life(state=State.RUNS, began=self._began)

    def _speed(self, known: Supervised, name: str, now: float) -> float | None:
        """Tokens per second of a searcher; None where it has none now."""
        life = self._life(known, name)
        lines = _since(self._tails(self._run.metrics(name)), life.began)
        if life.state is not State.RUNS or not lines or not _holds(lines, now):
            return None
        return lines[-1].get("tokens_per_second")

    def _headline(self, known: Supervised, step: int, has_figures: bool) -> str:
        life = self._life(known, "trainer")
        if has_figures:
            return ""
        if life.state is State.DONE:
            return f"all {self.steps} steps are done"
        if not self._knows_reference():
            return self._warm_start(known)
        if life.state is State.PAUSES:
            return f"the trainer has ended after step {step}"
        return f"resuming after step {step}" if step else "starting"

    def _knows_reference(self) -> bool:
        if not self._has_reference and time.monotonic() >= self._next_ask:
            self._has_reference = places.exists(self._run.initial_reference)
            self._next_ask = time.monotonic() + places.poll_seconds([self._run.shared], 0.0)
        return self._has_reference

    def _warm_start(self, known: Supervised) -> str:
        lines = _since(self._tails(self._run.metrics("reference")), self._life(known, "reference").began)
        if lines and "loss" in lines[-1]:
            return f"{_WARM_START} {lines[-1]['step']}/{self._warm_start_steps}  loss {lines[-1]['loss']:.3f}"
        return "preparing the reference policy"

    def _says(self, known: Supervised, roles: Sequence[str], news: Mapping[str, status.Told]) -> list[tuple[str, str]]:
        """Who does something else than its work; roles that say the same share an entry.

        Args: news: of roles that have said something since they were started.
        """
        said: dict[_Doing, list[tuple[str, float]]] = {}
        for name in roles:
            life = self._life(known, name)
            doing, seconds = _doing(life, news.get(name, status.Told()), makes_rows=self._makes_rows(name))
            if name in known.lives and name not in news and self._starts(name, life):
                doing, seconds = _Doing(text="its process starts"), time.time() - life.began
            if doing.text:
                said.setdefault(doing, []).append((name, seconds))
        waiting = sum(bool(each.waits) for name, each in news.items() if self._makes_rows(name))
        entries = []
        for doing, those in said.items():
            first = visible_line(those[0][0])
            sentence = doing.sentence(max(seconds for _, seconds in those))
            if doing.waits and first == "trainer" and waiting:
                sentence += f"; {waiting} of {sum(map(self._makes_rows, roles))} searchers wait for a snapshot"
            entries.append((first if len(those) == 1 else f"{first} and {len(those) - 1} more", visible_line(sentence)))
        return entries

    def _starts(self, name: str, life: Life) -> bool:
        """Whether a role runs that has written nothing yet; where it writes nothing for long, its storage refuses."""
        starts = life.state is State.RUNS and time.time() - life.began < JOINED_SECONDS
        return starts and not _since(self._tails(self._run.metrics(name)), life.began)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Doing:
    """What a role does beside its work; waits: whether that is to wait for what `text` says. done, total: of its parts, or 0."""

    text: str = ""
    waits: bool = False
    done: int = 0
    total: int = 0

    def sentence(self, seconds: float) -> str:
        if self.waits:
            return f"has waited {seconds:.0f} s for {self.text}"
        parts = f": {self.done} of {self.total}" if self.total else ""
        separator = ", " if parts else " "
        return f"{self.text}{parts}" + (f"{separator}{seconds:.0f} s" if seconds >= 1 else "")


def _doing(life: Life, told: status.Told, *, makes_rows: bool) -> tuple[_Doing, float]:
    """What a role does, and for how many seconds it has; 0 where nobody counts."""
    if life.state is State.PAUSES:
        often = f"died {life.deaths} times" if life.deaths != 1 else "died once"
        often = f"its storage refused {life.refusals} times" if life.refusals else often
        return _Doing(text=f"starts again in {life.due_in:.0f} s ({often})"), 0.0
    if life.state is State.RESTS:
        return _Doing(text="has ended and is not started again"), 0.0
    if life.state is not State.RUNS or told.phase in _ENDS:
        return _Doing(), 0.0
    # What began after the wait has ended it, such as the compilation of the first update once there are rows.
    waits = told.waits and not (told.phase and told.phase_seconds < told.seconds)
    if waits and told.seconds >= WAIT_SECONDS and not makes_rows:  # searchers may wait for a snapshot in a run that is well
        return _Doing(text=told.waits, waits=True), told.seconds
    return _Doing(text=told.phase, done=told.done, total=told.total), told.phase_seconds


def _lively(run: layout.RunDir) -> list[str]:
    """Names of roles whose files have changed lately, in order. A run of weeks has folders of many that are gone."""
    newest = time.time() - JOINED_SECONDS
    found = []
    try:
        with os.scandir(run.metrics("trainer").parent) as folders:
            for folder in folders:
                with contextlib.suppress(FileNotFoundError):
                    written = folder.stat().st_mtime  # of whole files, such as the status
                    with contextlib.suppress(FileNotFoundError):
                        written = max(written, os.stat(os.path.join(folder.path, "metrics.jsonl")).st_mtime)
                    if folder.is_dir() and written >= newest:
                        found.append(folder.name)
    except FileNotFoundError:
        return []
    return sorted(found)


def _since(lines: Sequence[Line], began: float) -> list[Line]:
    """The lines that a role has written since its start."""
    return [line for line in lines if line.get("time", 0.0) >= began]


def _interval(lines: Sequence[Line]) -> float:
    """Seconds between two lines, the mean; 0 of one line."""
    return (lines[-1]["time"] - lines[0]["time"]) / max(len(lines) - 1, 1)


def _holds(lines: Sequence[Line], now: float) -> bool:
    """Whether a role still goes on at the pace of its last lines."""
    return bool(lines) and now - lines[-1]["time"] <= max(HOLD_SECONDS, _HOLD_LINES * _interval(lines))


def _pace(lines: Sequence[Line], now: float) -> float | None:
    """Steps per second over the last lines of a trainer's life; None where there are too few, or they are old."""
    recent = [line for line in lines if line["time"] >= lines[-1]["time"] - RATE_SECONDS]
    recent = recent if len(recent) >= _RATE_POINTS else list(lines[-_RATE_POINTS:])
    if len(recent) < 2 or not _holds(recent, now):
        return None
    steps, seconds = recent[-1]["step"] - recent[0]["step"], recent[-1]["time"] - recent[0]["time"]
    return steps / seconds if steps > 0 and seconds >= _LEAST_SECONDS else None


def _seconds_left(steps: int, pace: float, *, since: float) -> float | None:
    """Until `steps` more are done, None where that time has passed.

    Args: pace: steps a second. since: seconds since the newest step that is known.
    """
    left = steps / pace - since
    return left if left > 0 else None


def _scores(lines: Sequence[Line]) -> list[tuple[int, float]]:
    """(step, held-out reward of greedy responses) in the order of steps; of a step that was evaluated twice, the later one."""
    scores = {int(line["step"]): float(line["greedy_reward"]) for line in lines if "greedy_reward" in line}
    return sorted(scores.items())


def _best(lines: Sequence[Line]) -> best_step.Scored | None:
    """The best step, as the newest of the evaluator's lines that says has it."""
    for line in reversed(lines):
        if best_step.BEST_STEP in line and best_step.BEST_SCORE in line:
            return best_step.Scored(int(line[best_step.BEST_STEP]), float(line[best_step.BEST_SCORE]))
    return None
