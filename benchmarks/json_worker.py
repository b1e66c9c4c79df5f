"""A process that answers requests: one JSON object a line on its stdin, one on its stdout. With the standard library alone."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


class Worker:
    """The caller's end. Raises RuntimeError: the process ended; with its stderr."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path, errors: Any):
        self.folder, self._process, self._errors = folder, process, errors

    def send(self, do: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer says so
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The answer to the oldest request that has none."""
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        code = self._process.wait()
        self._errors.seek(0)
        raise RuntimeError(f"the process in {self.folder} ended with code {code}:\n{self._errors.read()}")

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.send(do, **arguments)
        return self.answer()


@contextlib.contextmanager
def started(module: str, *, folder: Path, environment: Mapping[str, str]) -> Iterator[Worker]:
    """`python -m module` in a folder, which ends with the context."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        process = subprocess.Popen([sys.executable, "-m", module], cwd=folder, env=environment, **pipes)
        try:
            yield Worker(process, folder, errors)
        finally:
            process.terminate()  # it may be in the middle of a long request
            process.wait()


def serve(handlers: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """The process' end: answers requests until there are no more. Libraries print to stdout as they like; the answers have it for
    themselves. A request that fails ends the process with a traceback."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        with contextlib.suppress(KeyboardInterrupt):  # the parent's Ctrl-C comes here as well
            for line in sys.stdin:
                request = json.loads(line)
                answers.write(json.dumps(handlers[request.pop("do")](**request)) + "\n")
                answers.flush()
