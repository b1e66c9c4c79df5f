"""The processes of a role that a supervisor starts: one, or all processes of a trainer, which end together."""

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tba_jax.roles.placement import Placement
from tba_jax.run import log_files, processes
from tba_jax.storage import layout, places
from tba_jax.text.visible import visible

log = logging.getLogger(__name__)

# When one process of a trainer has ended, the others have so long to see it and to end, then they are killed.
_END_TOGETHER_SECONDS = 60.0


class RoleProcesses:
    """One life of a role. They run from the moment that this object is made."""

    def __init__(
        self, name: str, arguments: Sequence[str], parts: Sequence[Placement], run: layout.RunDir, lifeline: processes.Lifeline
    ):
        """Args: parts: where each process runs."""
        self._name, self._run = name, run
        # A launcher may have told the supervisor of a world that is not this role's.
        self._world = ["--processes=1"] if name in ("trainer", "reference") else []
        if len(parts) > 1:
            with socket.create_server(("127.0.0.1", 0)) as free:  # a port of its own for each life
                self._world = [f"--coordinator=127.0.0.1:{free.getsockname()[1]}", f"--processes={len(parts)}"]
        self._outputs: list[IO[bytes] | None] = []
        self._started: list[subprocess.Popen[bytes]] = []
        self._spoke = 0  # the process whose end is that of the role
        self._first_end: float | None = None
        for number, part in enumerate(parts):
            self._start(number, arguments, part, lifeline)

    def _start(self, number: int, arguments: Sequence[str], part: Placement, lifeline: processes.Lifeline) -> None:
        environment = os.environ | lifeline.child_environment(part.cpus, run_id=self._run.id)
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
        output = self._open_log(number)
        self._outputs.append(output)
        world = [*self._world, f"--process={number}"] if self._world else []
        self._started.append(
            subprocess.Popen(
                [sys.executable, "-m", "tba_jax.main", *arguments, *world],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=lifeline.child_fds,
                start_new_session=True,  # a Ctrl-C reaches the supervisor alone, which then ends the others in order
            )
        )

    def _log(self, number: int) -> Path:
        return self._run.log(self._name if number == 0 else f"{self._name}-process-{number}")

    @property
    def log(self) -> Path:
        """The log of the process that ended the role."""
        return self._log(self._spoke)

    def _open_log(self, number: int) -> IO[bytes] | None:
        """None where storage refuses the log: the child then inherits the supervisor's output."""
        path = self._log(number)
        try:
            places.make_folder(path.parent)
            return open(path, "ab")
        except OSError as error:
            log.warning("%s has no log: %s", self._name, error)
            return None

    def poll(self) -> int | None:
        """The exit code of the role once all its processes have ended, None before.

        It is that of the process that ended the others: of the first one that does not just say that another one has ended.
        """
        codes = [process.poll() for process in self._started]
        if any(code is None for code in codes):
            if any(code is not None for code in codes):
                self._end_others()
            return None
        for output in self._outputs:
            if output is not None:
                output.close()
        self._outputs = []
        own = [number for number, code in enumerate(codes) if code not in (0, processes.PEER_LOST)]
        lost = [number for number, code in enumerate(codes) if code == processes.PEER_LOST]
        self._spoke = (own or lost or [0])[0]
        return codes[self._spoke]

    def _end_others(self) -> None:
        """Kills processes that have not ended long after another one of the role has."""
        now = time.monotonic()
        self._first_end = now if self._first_end is None else self._first_end
        if now - self._first_end > _END_TOGETHER_SECONDS:
            for process in self._started:
                if process.poll() is None:
                    process.kill()

    def last_words(self, code: int) -> str:
        """The last line of the role's log. Where its exit code has a meaning, the last line that begins with "error: "."""
        try:
            lines = log_files.last_lines(self.log)
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
