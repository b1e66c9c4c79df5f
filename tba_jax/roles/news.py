"""What the roles of a run tell once: alarms, and troubles with their rewards."""

import time
from collections.abc import Iterator, Mapping, Sequence

from tba_jax.run import alarms, layout
from tba_jax.text.visible import visible_line

# The same trouble is told again after so long.
_TROUBLE_SECONDS = 60.0


class News:
    """Sentences about a run that have not been told yet."""

    def __init__(self, run: layout.RunDir, *, silent: Sequence[str] = ()):
        """Args: silent: roles whose alarms are not told here, since this process logs them itself."""
        self._run, self._silent = run, frozenset(silent)
        # Role -> the kind of trouble that was told, and when it is told again.
        self._troubles: dict[str, tuple[str, float]] = {}
        # Role -> alarms of its file that are known; kinds that were told.
        self._known: dict[str, int] = {}
        self._kinds: set[str] = set()

    def skip(self, roles: Sequence[str]) -> None:
        """Takes the alarms that are there for known: an earlier start of the run has told them."""
        self._known = {role: len(alarms.read(self._run.metrics(role))) for role in roles}

    def __call__(self, roles: Sequence[str], troubles: Mapping[str, str]) -> list[str]:
        """The news of some roles, each a line without control characters. Args: troubles: as standing.Standing has them."""
        return [*self._alarms(roles), *self._of_rewards(troubles)]

    def _alarms(self, roles: Sequence[str]) -> Iterator[str]:
        """Each kind is told once, whichever role tells it first."""
        for role in roles:
            if role in self._silent:
                continue
            told = alarms.read(self._run.metrics(role))
            for alarm in told[self._known.get(role, 0) :]:
                if alarm.kind not in self._kinds:
                    yield visible_line(f"warning: {alarm.sentence.rstrip('.')}. What to do: {alarm.advice}")
                self._kinds.add(alarm.kind)
            self._known[role] = len(told)

    def _of_rewards(self, troubles: Mapping[str, str]) -> Iterator[str]:
        """What is wrong with the rewards of searchers: each kind of trouble is told once, then now and then."""
        for role in [role for role in self._troubles if role not in troubles]:
            self._troubles.pop(role)  # it has ended; what the next life of the role says is new
        for role, trouble in troubles.items():
            kind, (told, again) = trouble.partition(":")[0], self._troubles.get(role, ("", 0.0))
            if trouble and (kind != told or time.monotonic() > again):
                yield visible_line(f"{role}: {trouble}")
                self._troubles[role] = kind, time.monotonic() + _TROUBLE_SECONDS
            elif told and not trouble:
                yield visible_line(f"{role}: rows have rewards again")
                self._troubles.pop(role)
