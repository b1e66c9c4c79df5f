"""An inference server as a child process: started with a Hugging Face folder, it ends with its parent, even a killed one."""

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tba_jax.decoding.servers import Server, Unavailable
from tba_jax.run import processes

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
# The server has a session of its own, whose processes are all killed when this one's standard input ends.
_LEASH = """
import os, signal, subprocess, sys, threading
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
def end():
    sys.stdin.buffer.read()
    try: os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError: pass
threading.Thread(target=end, daemon=True).start()
code = child.wait()
try: os.killpg(child.pid, signal.SIGKILL)
except ProcessLookupError: pass
os._exit(code & 0xFF)
"""


class ServerProcess:
    """Starts a server of one kind again and again. One thread uses it. Attributes: pid: of the process that holds the server."""

    def __init__(
        self,
        kind: type[Server],
        *,
        python: str,
        arguments: Sequence[str],
        dtype: str,
        length: int,
        log_file: Path,
        start_seconds: float,
    ):
        """Args: python: the interpreter of an environment that has the server; arguments: further ones of its command line;
        length: most tokens of a sequence; log_file: is appended to; start_seconds: that a start may take."""
        self._kind, self._python, self._arguments = kind, python, tuple(arguments)
        self._dtype, self._length, self._log, self._seconds = dtype, length, log_file, start_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, folder: Path) -> Server:
        """A new server of the model in a folder, once it answers. Raises Unavailable where it does not come: says why."""
        self.kill()
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        seed = int.from_bytes(os.urandom(4), "big") >> 1
        its = self._kind.command(folder, port=port, dtype=self._dtype, length=self._length, seed=seed)
        command = [sys.executable, "-c", _LEASH, self._python, "-m", *its, *self._arguments]
        log.info("starting %s: %s", self._kind.name, " ".join(command[3:]))
        environment = {**os.environ, **self._kind.environment}
        environment.pop("JAX_PLATFORMS", None)  # of this process
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        server, until = self._kind(f"http://127.0.0.1:{port}"), time.monotonic() + self._seconds
        while time.monotonic() < until:
            if not self.is_alive:
                raise Unavailable(f"{self._kind.name} ended with code {self._process.returncode} before it was ready{self._told}")
            try:
                server.check_there()
            except Unavailable:
                time.sleep(_LOOK_SECONDS)
            else:
                return server
        self.kill()
        raise Unavailable(f"{self._kind.name} was not ready within searchers.engine_start_seconds={self._seconds:g}{self._told}")

    @property
    def _told(self) -> str:
        last = [line for line in processes.last_lines(self._log) if line.strip()][-3:]
        return f"; the last lines of {self._log}: {' | '.join(last)}" if last else f"; {self._log} is empty"

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Ends the server at once, if there is one."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._process = None
