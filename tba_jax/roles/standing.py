"""Where a run stands right now, from the files of its roles and from what their supervisor knows.

A line of metrics that is older than its role's last start is history. A rate holds as long as its role goes on at that pace.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tba_jax.roles.lives import Life, State, Supervised
from tba_jax.roles.tails import Line, Tails
from tba_jax.run import layout, places, status
from tba_jax.text.visible import visible_line

# Lines of a role that are looked at; rates are those of the last so many seconds, but of a few lines at least.
POINTS, RATE_SECONDS, _RATE_POINTS = 40, 60.0, 4
# A rate holds for so long after its role's last line, or for so many times the time between two lines.
HOLD_SECONDS, _HOLD_LINES = 10.0, 3.0
# A wait is shown once it is so long.
WAIT_SECONDS = 10.0
# Nobody here knows whether a role of another machine lives: what it wrote holds for so long. Its folder is looked for so often.
JOINED_SECONDS, _LIST_SECONDS = 600.0, 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Standing:
    """What there is to say of a run. Texts are of one line, and hold no control characters.

    step: the newest that is known, also from before a restart. steps: of the whole run.
    headline: what to say in place of figures, "" where they hold.
    trainer: the newest line of the trainer's metrics; {} where it has written none since it was started.
    rewards: of the trainer's last lines, by step, for a trend.
    steps_per_second, eta_seconds: None where the pace is not known. tokens_per_second: the trainer's; it and mfu likewise.
    searchers: name -> tokens per second, None where that is not known. joined: how many of them were started elsewhere.
    evaluations: the first and the newest line of the evaluator's that are known.
    says: (role, sentence) of each role that does something else than its work.
    """

    seconds: float
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
    says: Sequence[tuple[str, str]] = ()

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
        self._run, self._steps, self._searchers, self._warm_start_steps = run, steps, list(searchers), warm_start_steps
        self._supervised = supervised
        self._begin, self._began = time.monotonic(), time.time()
        self._tails = Tails(count=POINTS)
        self._joined: list[str] = []
        self._next_list = self._next_ask = 0.0
        self._has_reference = False

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._begin

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
            return Standing(seconds=self.seconds, steps=self._steps, headline=away)
        roles = self.roles()
        told = {name: status.read(self._run.metrics(name)) for name in roles}
        lines = self._tails(self._run.metrics("trainer"))
        present = _since(lines, self._life(known, "trainer").began)
        step = int(lines[-1]["step"]) if lines else 0
        pace = _pace(present, now) if self._life(known, "trainer").state is State.RUNS and step < self._steps else None
        speeds = {name: self._speed(known, name, now) for name in roles if self._makes_rows(name)}
        return Standing(
            seconds=self.seconds,
            step=step,
            steps=self._steps,
            headline="stopping" if known.stops else self._headline(known, step, bool(present)),
            trainer=present[-1] if present else {},
            rewards=[(int(line["step"]), float(line["reward"])) for line in present if "reward" in line],
            steps_per_second=pace,
            eta_seconds=max(0.0, (self._steps - step) / pace - (now - present[-1]["time"])) if pace else None,
            searchers={name: speed for name, speed in speeds.items() if name in self._searchers or speed is not None},
            joined=sum(speed is not None for name, speed in speeds.items() if name in self._joined),
            evaluations=_scores(self._tails(self._run.metrics("evaluator"))),
            says=self._says(known, told),
        )

    def _makes_rows(self, name: str) -> bool:
        return name in self._searchers or name in self._joined

    def _life(self, known: Supervised, name: str) -> Life:
        """Of a role. Roles of this process, and what the supervisor has not got to yet, begin with this object."""
        if name in known.lives:
            life = known.lives[name]
            is_up = life.state in (State.RUNS, State.DONE)
            return life if is_up else dataclasses.replace(life, began=float("inf"))
        return Life(state=State.RUNS, began=time.time() - JOINED_SECONDS if name in self._joined else self._began)

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
            return f"all {self._steps} steps are done"
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
            return f"warm start {lines[-1]['step']}/{self._warm_start_steps}  loss {lines[-1]['loss']:.3f}"
        return "preparing the reference policy"

    def _says(self, known: Supervised, told: Mapping[str, status.Told]) -> list[tuple[str, str]]:
        """Who does something else than its work; searchers that say the same share an entry."""
        said: dict[str, list[tuple[str, float]]] = {}
        for name, each in told.items():
            sentence, seconds = _sentence(self._life(known, name), each, is_searcher=self._makes_rows(name))
            if sentence:
                said.setdefault(sentence, []).append((name, seconds))
        waiting = sum(bool(each.waits) for name, each in told.items() if self._makes_rows(name) and self._is_new(known, name, each))
        entries = []
        for sentence, those in said.items():
            who = visible_line(those[0][0]) + (f" and {len(those) - 1} more" if len(those) > 1 else "")
            longest = max(seconds for _, seconds in those)
            entries.append((who, visible_line(sentence.replace("{seconds}", f"{longest:.0f} s"))))
        return entries
