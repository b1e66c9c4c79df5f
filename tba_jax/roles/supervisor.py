"""The local supervisor: one trainer, some searchers and an evaluator as processes of this machine, each with its devices.

A role that dies is started again, after pauses that grow; `Lives` in run/restart.py says when that ends the run. Whether a role
works is what its own status says. No process outlives the supervisor, however it ends.
"""

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from tba_jax.outputs import visible
from tba_jax.roles.gpus import Placement, split
from tba_jax.run import processes
from tba_jax.run.restart import Lives, Verdict
from tba_jax.storage import contract, layout, places
from tba_jax.telemetry import status

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
# Where storage did not answer, it is asked again after this time.
LOOK_AGAIN_SECONDS = 2.0
# A role that has written no metrics this long after its start is taken to have compiled.
STARTING_SECONDS = 60.0
# When one process of a trainer has ended, the others have so long to see it and to end, then they are killed.
END_TOGETHER_SECONDS = 60.0


class RoleProcesses:
    """One life of a role: one process, or all processes of a trainer. They run from the moment that this object is made."""

    def __init__(self, name: str, arguments: Sequence[str], placed: Placement, run: layout.RunDir, lifeline: processes.Lifeline):
        parts = split(placed)
        self._name, self._run, self._lifeline = name, run, lifeline
        # A launcher may have told the supervisor of a world that is not this role's.
        self._world = ["--processes=1"] if name in ("trainer", "reference") else []
        if len(parts) > 1:
            with socket.create_server(("127.0.0.1", 0)) as free:  # a port of its own for each life
                self._world = [f"--coordinator=127.0.0.1:{free.getsockname()[1]}", f"--processes={len(parts)}"]
        self._spoke, self._first_end = 0, 0.0  # the process whose end is that of the role; when the first process ended
        self._started = [self._start(number, arguments, part) for number, part in enumerate(parts)]

    def _start(self, number: int, arguments: Sequence[str], part: Placement) -> subprocess.Popen[bytes]:
        environment = os.environ | self._lifeline.child_environment(part.cpus, run_id=self._run.id)
        # Transparent huge pages for large buffers; a measurable gain for every role on a CPU.
        environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        # A role that is started again finds its programs compiled, and so does the second of two searchers.
        environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(self._run.compilation_cache))
        environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
        if part.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(part.gpus)
            environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order of nvidia-smi, which told the memory of each number
        if part.memory_fraction:
            environment.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # the old name: JAX refuses both together
            environment["XLA_CLIENT_MEM_FRACTION"] = str(part.memory_fraction)
        world = [*self._world, f"--process={number}"] if self._world else []
        with self._open_log(number) as output:  # None: the child inherits the supervisor's output
            return subprocess.Popen(
                [sys.executable, "-m", "tba_jax.main", *arguments, *world],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=self._lifeline.child_fds,
                start_new_session=True,  # a Ctrl-C reaches the supervisor alone, which then ends the others in order
            )

    def _log(self, number: int) -> Path:
        return self._run.log(self._name if number == 0 else f"{self._name}-process-{number}")

    def _open_log(self, number: int) -> contextlib.AbstractContextManager[IO[bytes] | None]:
        path = self._log(number)
        try:
            places.make_folder(path.parent)
            return open(path, "ab")
        except OSError as error:
            log.warning("%s has no log: %s", self._name, error)
            return contextlib.nullcontext()

    @property
    def log(self) -> Path:
        """The log of the process that ended the role."""
        return self._log(self._spoke)

    @property
    def pid(self) -> int:
        """The process that writes the role's status."""
        return self._started[0].pid

    def poll(self) -> int | None:
        """The exit code of the role once all its processes have ended, None before: that of the process that ended the others."""
        codes = [process.poll() for process in self._started]
        if any(code is None for code in codes):
            if any(code is not None for code in codes):  # the others see it, and end; those that do not are killed
                self._first_end = self._first_end or time.monotonic()
                if time.monotonic() - self._first_end > END_TOGETHER_SECONDS:
                    for process in self._started:
                        process.kill()
            return None
        # JAX aborts a process whose peer has ended.
        lost = {processes.PEER_LOST} | ({-signal.SIGABRT} if len(codes) > 1 else set())
        own = [number for number, code in enumerate(codes) if code not in {0, *lost}]
        ended_with = [number for number, code in enumerate(codes) if code]
        self._spoke = (own or ended_with or [0])[0]
        return codes[self._spoke]

    def last_words(self, code: int) -> str:
        """The last line of the role's log. Where its exit code has a meaning, the last line that begins with "error: "."""
        try:
            lines = processes.last_lines(self.log)
        except OSError as error:
            return f"(no log: {error})"
        # Threads of libraries may write further lines after the error.
        errors = [line for line in lines if code in processes.EXPLAINED_CODES and line.startswith("error: ")]
        return visible((errors or lines or ["(no output)"])[-1])

    def terminate(self) -> None:
        """Asks all processes to stop."""
        for process in self._started:
            process.terminate()

    def end_by(self, deadline: float) -> None:
        """Waits until all processes have ended, and kills those that have not by then. Args: deadline: of time.monotonic."""
        for process in self._started:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclasses.dataclass(eq=False, kw_only=True)
class _Role:
    """One supervised role. metrics: the folder of its status. after: roles that must be at work before it starts. next_look: when
    it is looked after again, by time.monotonic. rests: it is given up, while the run goes on."""

    name: str
    arguments: Sequence[str]
    placement: Placement
    metrics: Path
    lives: Lives
    after: "list[_Role]"
    life: RoleProcesses | None = None
    started: float = 0.0
    next_look: float = 0.0
    done: bool = False
    rests: bool = False

    @property
    def kind(self) -> str:
        return self.name.split("-")[0]

    @property
    def is_at_work(self) -> bool:
        """Whether the role has compiled its programs: it has written metrics, or has had the time for it, or has ended."""
        ended = self.life is None or self.done or self.rests
        return self.started > 0 if ended else time.monotonic() > self.started + STARTING_SECONDS or self.has_worked

    @property
    def has_worked(self) -> bool:
        """Whether the role's status has figures of its metrics in this life."""
        with contextlib.suppress(OSError):
            told = status.read(self.metrics)
            return self.life is not None and told.pid == self.life.pid and bool(told.figures)
        return False


class Supervisor:
    """Runs roles until the run is finished."""

    def __init__(self, run: layout.RunDir, *, max_restarts: int, stop_seconds: float):
        """Args: run: with the id that every role must find."""
        self._run, self._max_restarts, self._stop_seconds = run, max_restarts, stop_seconds
        self._lifeline = processes.Lifeline()
        self._roles: list[_Role] = []
        self._proof = run.finished
        self._is_away = False

    def run(
        self,
        roles: Mapping[str, tuple[Sequence[str], Placement]],
        *,
        until: Sequence[str],
        stop: Callable[[], bool],
        proof: places.Place | None = None,
    ) -> int:
        """Supervises `roles` (name -> arguments, placement) until all roles named in `until` have ended with code 0 or rest.
        Searchers and evaluators that share cores start one after the other: each finds most programs in the compilation cache.

        Args: proof: the file without which code 0 only means that somebody stopped a role; default: RunDir.finished.

        Returns: 0; the exit code of the role that ended the run, 1 where it died too often; or 130 where `stop` ended it.
        """
        self._proof = proof or self._run.finished
        self._roles.clear()
        for name, (arguments, placed) in roles.items():
            # The others wait for the trainer's snapshots, and it waits for their rows.
            beside = [other for other in self._roles if "trainer" not in (name, other.name)]
            role = _Role(
                name=name,
                arguments=arguments,
                placement=placed,
                metrics=self._run.metrics(name),
                lives=Lives(name.split("-")[0], max_restarts=self._max_restarts),
                after=[other for other in beside if not set(placed.cpus).isdisjoint(other.placement.cpus)],
            )
            self._roles.append(role)
        while not all(role.done or role.rests for role in self._roles if role.name in until):
            if stop():
                return processes.STOPPED
            for role in self._roles:
                if not (role.done or role.rests) and (code := self._look_after(role)) is not None:
                    return code
            time.sleep(_POLL_SECONDS)
        return 0

    def _look_after(self, role: _Role) -> int | None:
        """Starts a role when it is time, and notes its end. Returns the code that ends the run, None while it goes on."""
        code = None if role.life is None else role.life.poll()
        waits = not all(other.is_at_work for other in role.after) if role.life is None else code is None
        if waits or time.monotonic() < role.next_look:
            return None
        try:
            if self._run.id:  # nothing begins, or is taken for finished, where the workdir does not hold the run
                contract.check_is_there(self._run)
            if self._is_away:
                log.warning("workdir %s is back", self._run.root)
            self._is_away = False
            # Code 0 alone does not tell whether the run has finished, or somebody stopped this role.
            role.done = code == 0 and places.exists(self._proof)
        except OSError as error:
            if not self._is_away:
                log.warning("%s; the run goes on once it is back", error)
            self._is_away = True
            role.next_look = time.monotonic() + LOOK_AGAIN_SECONDS
            return None
        if code is not None:
            return None if role.done else self._died(role, code)
        role.after, role.started = [], time.monotonic()
        role.life = RoleProcesses(role.name, role.arguments, role.placement, self._run, self._lifeline)
        return None

    def _died(self, role: _Role, code: int) -> int | None:
        """Schedules the next life of a role. Returns the code that ends the run, None while it goes on."""
        assert role.life is not None
        words, lives = f"{role.name} (exit code {code}): {role.life.last_words(code)}", role.lives
        verdict = lives.end(code, began=role.started, now=time.monotonic(), has_worked=role.has_worked)
        if verdict is Verdict.AGAIN:
            log.warning("%s; starting it again in %.1f s (see %s)", words, lives.pause, role.life.log)
            role.life, role.next_look = None, time.monotonic() + lives.pause
            return None
        if verdict is Verdict.GIVEN_UP:
            code, words = 1, f"{words}; it died {lives.deaths} times, more than supervisor.max_restarts={self._max_restarts}"
        if verdict is Verdict.GIVEN_UP or code == processes.NO_REWARDS:
            role.rests = role.kind in ("searcher", "evaluator")
        searchers_rest = role.kind == "searcher" and all(other.rests for other in self._roles if other.kind == "searcher")
        if not role.rests or searchers_rest:
            print(f"{words}; no other searcher is left" if searchers_rest else words, file=sys.stderr)
            return code
        advice = f": python -m tba_jax evaluate --workdir={self._run.root} --step=N --output=FILE evaluates a snapshot"
        log.warning("%s; it is not started again%s", words, advice if role.kind == "evaluator" else "")
        return None

    def close(self) -> None:
        """Asks all roles to stop, kills those that do not within stop_seconds, and waits until none is left."""
        running = [role.life for role in self._roles if role.life is not None and role.life.poll() is None]
        for life in running:
            life.terminate()
        deadline = time.monotonic() + self._stop_seconds
        for life in running:
            life.end_by(deadline)
        self._roles.clear()
        self._lifeline.close()
