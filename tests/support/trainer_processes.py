"""Trainers of several processes on this machine, which learn from a log that nobody writes to any more."""

import contextlib
import dataclasses
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support import tiny_run

PATIENCE_SECONDS = 300  # for anything: only a hang takes that long


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def offline_flags(source: Path, **settings: object) -> list[str]:
    """The flags of a trainer without searchers on the rows of `source`; dots in names are written as double underscores."""
    told = {"task.missing_eos_reward": -1.0, "searchers.count": 0, "replay.mount": f"('{source}',)", "evaluation.enabled": False}
    told |= {"trainer.connect_seconds": 60.0, "trainer.heartbeat_seconds": 10.0}
    told |= {name.replace("__", "."): value for name, value in settings.items()}
    return [f"--config.{name}={value}" for name, value in told.items()]


def start(workdir: Path, *flags: str, processes: int, devices: int = 1, port: int = 0) -> list[subprocess.Popen[str]]:
    """The processes of a trainer. Args: devices: CPU devices of each; port: of the coordinator, 0: a free one."""
    world = [f"--coordinator=127.0.0.1:{port or free_port()}", f"--processes={processes}"] if processes > 1 else []
    started = []
    for process in range(processes):
        own = [*world, f"--process={process}"] if world else []
        started.append(tiny_run.start(tiny_run.command(workdir, "--role=trainer", *own, *flags), devices=devices))
    return started


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, and all that it said."""

    code: int
    text: str


def wait(started: list[subprocess.Popen[str]], *, seconds: float = PATIENCE_SECONDS) -> list[Ended]:
    """How all of them end, in their order. What has not ended by then is killed, and the test fails."""
    with ended_at_last(started):
        texts = [process.communicate(timeout=seconds)[0] for process in started]
    return [Ended(process.returncode, text) for process, text in zip(started, texts, strict=True)]


@contextlib.contextmanager
def ended_at_last(started: list[subprocess.Popen[str]]) -> Iterator[None]:
    """Kills what still runs at the end of the context."""
    try:
        yield
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()


def run(workdir: Path, *flags: str, processes: int, devices: int = 1) -> list[Ended]:
    """A trainer that finishes. Fails the test where a process ends with another code than 0."""
    ended = wait(start(workdir, *flags, processes=processes, devices=devices))
    for process, each in enumerate(ended):
        assert each.code == 0, f"process {process} of {processes} ended with {each.code}:\n{each.text}"
    return ended
