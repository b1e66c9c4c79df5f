"""The local supervisor: one trainer, some searchers and an evaluator as processes of this machine, each with its devices.

One role's trouble is its own: a role that dies is started again, after pauses that grow. `judge` in run/restart.py says when that
ends the run. No process outlives the supervisor, however it ends.
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from tba_jax.replay import segment
from tba_jax.replay.log import REGISTER
from tba_jax.roles import placement as placement_lib
from tba_jax.roles.placement import Placement
from tba_jax.roles.role_processes import RoleProcesses
from tba_jax.run import processes, restart
from tba_jax.run.restart import Verdict
from tba_jax.storage import contract, layout, places

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
# Where storage did not answer whether the run has finished, it is asked again after this time.
LOOK_AGAIN_SECONDS = 2.0
# A role that has written no metrics this long after its start is taken to have compiled.
STARTING_SECONDS = 60.0


class _Role:
    """One supervised role."""

    def __init__(self, name: str, arguments: Sequence[str], placement: Placement, run: layout.RunDir, line: processes.Lifeline):
        self.name, self._arguments, self._placement, self._run, self._lifeline = name, list(arguments), placement, run, line
        self.kind = name.split("-")[0]
        self.started = self.next_start = self.next_look = 0.0
        # This role starts once these roles are at work.
        self.after: list[_Role] = []
        # Lives; deaths without ten minutes of life in between; deaths and refusals of storage in a row without any work between.
        self.starts = self.deaths = self.deaths_in_a_row = self.refusals_in_a_row = 0
        # Deaths of this searcher since anybody has made rows, or the trainer a step.
        self.deaths_in_vain = 0
        self.refusals = restart.Refusals()
        self._metrics_before = 0
        self.done = self.rests = False
        # Its processes; None before it is started, and between its lives.
        self.life: RoleProcesses | None = None

    def shares_cores(self, other: "_Role") -> bool:
        return not set(self._placement.cpus).isdisjoint(other._placement.cpus)

    @property
    def is_at_work(self) -> bool:
        """Whether the role has compiled its programs: it has written metrics, or has had the time for it, or has ended."""
        if self.life is None or self.done:
            return self.started > 0
        return time.monotonic() > self.started + STARTING_SECONDS or self.has_worked

    @property
    def has_worked(self) -> bool:
        """Whether the role has written metrics since it was started last."""
        return self.metrics_size() not in (0, self._metrics_before)

    def metrics_size(self) -> int:
        """Bytes of the role's metrics; 0 where there are none, or their storage is away."""
        try:
            return (self._run.metrics(self.name) / "metrics.jsonl").stat().st_size
        except OSError:
            return 0

    def start(self) -> None:
        self.started, self._metrics_before = time.monotonic(), self.metrics_size()
        self.starts += 1
        parts = placement_lib.split(self._placement)
        self.life = RoleProcesses(self.name, self._arguments, parts, self._run, self._lifeline)

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        assert self.life is not None
        return self.life.poll()


class Supervisor:
    """Runs roles until the run is finished."""

    def __init__(self, run: layout.RunDir, *, max_restarts: int, stop_seconds: float):
        """Args: run: with the id that every role must find."""
        self._run, self._max_restarts, self._stop_seconds = run, max_restarts, stop_seconds
        self._lifeline = processes.Lifeline()
        self._roles: list[_Role] = []
        self._proof = run.finished
        self._is_away, self._next_look = False, 0.0
        # See _signs_of_rows; None before searchers die.
        self._signs: tuple[int, dict[str, tuple[int, bytes]]] | None = None

    def run(
        self,
        roles: Mapping[str, tuple[Sequence[str], Placement]],
        *,
        until: Sequence[str],
        stop: Callable[[], bool],
        proof: places.Place | None = None,
    ) -> int:
        """Supervises `roles` (name -> arguments, placement) until all roles named in `until` have ended with code 0.

        Args: proof: the file without which code 0 only means that somebody stopped a role; default: RunDir.finished.

        Searchers and evaluators that share cores start one after the other. Each then finds most programs in the compilation
        cache; if all started at once, they would compile the same programs beside each other.

        Returns:
          0; or the exit code of the role that ended the run, 1 where it died too often by failures without a code of their own;
          or 130 where `stop` ended it.
        """
        self._proof = self._run.finished if proof is None else proof
        self._roles.clear()
        for name, (arguments, placement) in roles.items():
            role = _Role(name, arguments, placement, self._run, self._lifeline)
            self._roles.append(role)
            if name != "trainer":  # the others wait for the trainer's snapshots, and it waits for their rows
                role.after = [other for other in self._roles[:-1] if other.name != "trainer" and role.shares_cores(other)]
        waiting = set(until)
        while waiting:
            if stop():
                return processes.STOPPED
            self._look_for_the_run()
            for role in self._roles:
                if (final := self._look_after(role)) is not None:
                    return final
                if role.done:
                    waiting.discard(role.name)
            time.sleep(_POLL_SECONDS)
        return 0

    def _look_for_the_run(self) -> None:
        """Says so when the workdir does not hold the run any more, or again. Roles that wait for it are started at once then."""
        if not self._run.id or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_AGAIN_SECONDS
        try:
            contract.check_is_there(self._run)
        except OSError as error:
            if not self._is_away:
                log.warning("%s; the run goes on once it is back", error)
            self._is_away = True
            return
        if self._is_away:
            log.warning("workdir %s is back", self._run.root)
            for role in self._roles:
                role.next_start = min(role.next_start, time.monotonic())
        self._is_away = False

    def _look_after(self, role: _Role) -> int | None:
        """Starts a role when it is time, and notes that it is done. Returns the code that ends the run, None while it goes on."""
        if role.rests:
            return None
        if role.life is None:
            if not self._is_away and time.monotonic() >= role.next_start and all(other.is_at_work for other in role.after):
                role.after = []
                role.start()
            return None
        if role.done or (code := role.poll()) is None or time.monotonic() < role.next_look:
            return None
        try:
            if self._run.id:  # the proof must not be that of another run in its place
                contract.check_is_there(self._run)
            # Code 0 alone does not tell whether the run has finished, or somebody stopped this role.
            role.done = code == 0 and places.exists(self._proof)
        except OSError as error:
            log.warning("%s has ended; storage does not answer whether the run has: %s", role.name, error)
            role.next_look = time.monotonic() + LOOK_AGAIN_SECONDS
            return None
        return None if role.done else self._died(role, code)

    def _died(self, role: _Role, code: int) -> int | None:
        """Schedules the next start of a role. Returns the code that ends the run, None while it goes on."""
        assert role.life is not None
        words = f"{role.name} (exit code {code}): {role.life.last_words(code)}"
        is_new = role.starts == 1 and not role.has_worked
        if role.has_worked:
            role.deaths_in_a_row = role.refusals_in_a_row = 0
            role.refusals.forget()
        now = time.monotonic()
        if code in restart.PATIENCE_SECONDS:
            role.refusals_in_a_row += 1
        else:
            role.deaths = 1 if now - role.started > restart.HEALTHY_SECONDS else role.deaths + 1
            role.deaths_in_a_row, role.refusals_in_a_row = role.deaths_in_a_row + 1, 0
        seconds = role.refusals.seconds(code, began=role.started, now=now)
        most = self._max_restarts
        verdict = restart.judge(role.kind, code, is_new=is_new, deaths=role.deaths, max_restarts=most, seconds=seconds)
        if verdict is Verdict.ENDS and code == processes.NO_REWARDS and role.kind == "searcher":
            return self._rest(role, code, words)
        if verdict is Verdict.ENDS:
            often = f"; it died {role.deaths} times, more than supervisor.max_restarts={self._max_restarts}"
            final = (*restart.PATIENCE_SECONDS, processes.NOT_FINITE, processes.NO_REWARDS)
            explained = code in final or (code == processes.BAD_INPUT and is_new)
            print(words if explained else words + often, file=sys.stderr)
            return code if explained else 1
        if verdict is Verdict.AGAIN and role.kind == "searcher" and (end := self._nobody_is_left(role, words)) is not None:
            return end
        if role.kind == "evaluator" and self._is_in_vain(role):
            self._give_up(role, words)
        else:
            self._schedule(role, words)
        return None

    def _is_in_vain(self, evaluator: _Role) -> bool:
        """Whether the run waits for nobody but an evaluator that dies again and again."""
        trained = any(role.kind == "trainer" and role.done for role in self._roles)
        return trained and evaluator.deaths_in_a_row > self._max_restarts

    def _give_up(self, role: _Role, words: str) -> None:
        role.done = role.rests = True
        log.warning(
            "%s; it died %d times in a row, more than supervisor.max_restarts=%d, and is given up: the training is done, and "
            "python -m tba_jax evaluate --workdir=%s --step=N --output=FILE evaluates a snapshot",
            *(words, role.deaths_in_a_row, self._max_restarts, self._run.root),
        )

    def _schedule(self, role: _Role, words: str) -> None:
        """Starts a role again after a pause, and says how often it has ended."""
        pause = restart.pause_seconds(max(role.deaths_in_a_row + role.refusals_in_a_row, 1))
        if role.refusals_in_a_row:
            often = f"its storage has refused {role.refusals_in_a_row} times in a row"
        else:
            often = f"it has died {role.deaths} times"
        assert role.life is not None
        log.warning("%s; %s; starting it again in %.1f s (see %s)", words, often, pause, role.life.log)
        role.life, role.next_start = None, time.monotonic() + pause

    def _rest(self, role: _Role, code: int, words: str) -> int | None:
        """Leaves a searcher ended. Returns its code where no other searcher is left."""
        role.rests = True
        if all(other.rests for other in self._searchers()):
            print(words, file=sys.stderr)
            return code
        log.warning("%s; it is not started again", words)
        return None

    def _searchers(self) -> list[_Role]:
        return [role for role in self._roles if role.kind == "searcher"]

    def _nobody_is_left(self, role: _Role, words: str) -> int | None:
        """Notes a searcher's death. Returns 1 where no searcher comes to work, and nobody else makes rows or trains on them."""
        role.deaths_in_vain = 1 if role.has_worked else role.deaths_in_vain + 1
        may_decide = all(other.rests or other.deaths_in_vain > self._max_restarts for other in self._searchers())
        if self._is_away or not (may_decide or self._signs is None):
            return None
        try:
            signs = self._signs_of_rows()
        except OSError as error:
            log.warning("storage does not answer which rows the run has: %s", error)
            return None
        at_work = any(other.life is not None and other.has_worked for other in self._searchers())
        if signs != self._signs or at_work:
            self._signs = signs
            for other in self._searchers():
                other.deaths_in_vain = min(other.deaths_in_vain, 1)
            return None
        print(
            f"{words}; all searchers died more than supervisor.max_restarts={self._max_restarts} times without making a row, and "
            "nobody else makes rows: the trainer has nothing to learn from",
            file=sys.stderr,
        )
        return 1

    def _signs_of_rows(self) -> tuple[int, dict[str, tuple[int, bytes]]]:
        """What changes when somebody makes rows, or trains on them: the trainer's metrics, and the newest commit of every log."""
        trained = sum(role.metrics_size() for role in self._roles if role.kind == "trainer")
        commits: dict[str, tuple[int, bytes]] = {}
        for name in places.names_in(self._run.replay / REGISTER):
            writer = name.removesuffix(".json")
            last = segment.last_segment(self._run.replay / writer, 0)
            try:
                commits[writer] = last, places.read_bytes(segment.manifest(self._run.replay / writer, last))
            except FileNotFoundError:  # a writer that has not made a row
                continue
        return trained, commits

    def close(self) -> None:
        """Asks all roles to stop, kills those that do not within stop_seconds, and waits until none is left."""
        running = [role.life for role in self._roles if role.life is not None and role.poll() is None]
        for life in running:
            life.terminate()
        deadline = time.monotonic() + self._stop_seconds
        for life in running:
            life.end_by(deadline)
        self._roles.clear()
        self._lifeline.close()
