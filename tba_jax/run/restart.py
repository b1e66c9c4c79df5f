"""Runs a role again after it ended too early: one rule for the local supervisor, Slurm, Kubernetes and a terminal.

    python3 -m tba_jax.run.restart --workdir=DIR [--deaths=N] [--pod] COMMAND …

runs COMMAND, a role of the run in DIR, again until `Lives` says that another life would not help, or it was asked to stop, and
ends with its exit code. After storage failed it waits until the run is in DIR: a role whose mount is lost would begin a new run.
--pod: in a pod of Kubernetes, see `run_in_pod`. Any Python from 3.7 on runs this module.
"""

from __future__ import annotations

import argparse
import enum
import errno
import os
import signal
import subprocess
import sys
import threading
import time

# Exit codes of a role.
BAD_INPUT = 2
STORAGE_FAILED = 3
NOT_FINITE = 4
NO_REWARDS = 5  # no row has had a reward for so long that the searcher gave up
PEER_LOST = 6  # another process of the same trainer has ended
STORAGE_FORBIDS = 7  # storage that answers, and refuses for good unless somebody changes it
STOPPED = 130
# Errors of storage that no waiting heals: no permission, read-only, over a quota.
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EDQUOT)

# The pause before a role is started again, doubled with each failure in a row, and its limit.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 60.0
# How often a folder is looked into whose run is away, and how long for the end of a run, which a network file system shows late.
LOOK_SECONDS, FINISH_SECONDS = 5.0, 60.0
# After a life this long earlier failures are forgotten: only a role that does not get anywhere is given up.
HEALTHY_SECONDS = 600.0
# So long a role is started again whose storage does not answer, or forbids.
PATIENCE_SECONDS = {STORAGE_FAILED: 7 * 86400.0, STORAGE_FORBIDS: 600.0}
# Roles that come and go while a run trains.
_JOINING = ("searcher", "evaluator")


class Verdict(enum.Enum):
    """What follows from the end of a role that is not done."""

    ENDS = enum.auto()  # its exit code says that another life would end in the same way
    GIVEN_UP = enum.auto()  # it died too often
    AGAIN = enum.auto()


class Lives:
    """How the lives of one role have ended so far, and what follows from its exit code.

    | code              | trainer, reference       | searcher, evaluator                       |
    |-------------------|--------------------------|-------------------------------------------|
    | 2, a new role     | ends                     | ends                                      |
    | 3 storage failed  | again, for a week        | again, for a week                         |
    | 4 not finite      | ends                     | as others                                 |
    | 5 no rewards      | ends                     | ends                                      |
    | 7 storage forbids | again, for ten minutes   | again, for ten minutes                    |
    | others, 2 later   | again; given up after max_restarts deaths                            |

    deaths: ends without ten minutes of life in between, failures of storage left out; a searcher's or an evaluator's only in a
    row of lives without work. in_vain: ends in such a row. seconds: since its storage has failed in one and the same way.
    """

    def __init__(self, kind: str, *, max_restarts: int) -> None:
        """Args: kind: "trainer", "reference", "searcher", "evaluator"; "" for a role that ends like a trainer."""
        self._kind, self._max_restarts, self._is_new = kind, max_restarts, True
        self.deaths = self.in_vain = self._code = 0
        self.seconds = self._since = 0.0

    def end(self, code: int, *, began: float, now: float, has_worked: bool = False) -> Verdict:
        """Counts the end of a life. Args: began, now: of the life, by time.monotonic; has_worked: in this life."""
        is_long, joins = now - began >= HEALTHY_SECONDS, self._kind in _JOINING
        is_new, self._is_new = self._is_new and not has_worked, False
        if is_long or (has_worked and joins):
            self.deaths = 0
        self.in_vain = 1 if is_long or has_worked else self.in_vain + 1
        if self.in_vain == 1 or code != self._code:
            self._code, self._since = code, began
        if code in PATIENCE_SECONDS:
            self.seconds = now - self._since
            return Verdict.AGAIN if self.seconds <= PATIENCE_SECONDS[code] else Verdict.ENDS
        self.deaths, self.seconds = self.deaths + 1, 0.0
        if code == NO_REWARDS or (code == BAD_INPUT and is_new) or (code == NOT_FINITE and not joins):
            return Verdict.ENDS
        return Verdict.GIVEN_UP if self.deaths > self._max_restarts else Verdict.AGAIN

    @property
    def pause(self) -> float:
        """Seconds before the role is started again: they double with each life in vain."""
        return min(FIRST_PAUSE_SECONDS * 2 ** min(self.in_vain - 1, 20), LONGEST_PAUSE_SECONDS)


def _say(sentence: str) -> None:
    print(f"restart: {sentence}", file=sys.stderr, flush=True)


def run(command: list[str], *, workdir: str, deaths: int, asked: threading.Event) -> int:
    """Runs a role until it is done, stopped or given up. Returns its exit code.

    Args: deaths: in a row that are survived; asked: is set by a signal that asks the role to stop.
    """
    child = None

    def pass_on(number: int, frame: object) -> None:
        asked.set()
        if child is not None and child.poll() is None:
            child.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, pass_on)
    lives = Lives("", max_restarts=deaths)
    while True:
        begin = time.monotonic()
        # In a session of its own: a Ctrl-C of the terminal reaches this process alone, and a second signal would drop a batch.
        child = subprocess.Popen(command, start_new_session=True)
        if asked.is_set():  # it came before the child was known
            child.send_signal(signal.SIGTERM)
        code = child.wait()
        code = 128 - code if code < 0 else code
        if asked.is_set() or code in (0, STOPPED):
            return code
        if lives.end(code, began=begin, now=time.monotonic()) is not Verdict.AGAIN:
            return code
        asked.wait(lives.pause)
        storage_failed = code in PATIENCE_SECONDS
        patience = PATIENCE_SECONDS[code] - lives.seconds if storage_failed else 0.0
        if storage_failed and not _shows(workdir, "config.json", "shared.json", asked=asked, seconds=patience, tells=True):
            return code
        if asked.is_set():
            return code
        reason = "storage failed" if storage_failed else f"ended with code {code}"
        _say(f"{reason}; running the role again")


def _shows(workdir: str, *names: str, asked: threading.Event, seconds: float = 0.0, tells: bool = False) -> bool:
    """Waits until a file of one of these names is in the folder. False where a stop, or the end of the time, comes first."""
    deadline = time.monotonic() + seconds
    while not any(os.path.exists(os.path.join(workdir, name)) for name in names):
        if asked.is_set() or time.monotonic() >= deadline:
            return False
        if tells:
            _say(f"{workdir} holds no run at the moment; waiting until it is back")
        tells = False
        asked.wait(min(LOOK_SECONDS, seconds))
    return True


def run_in_pod(command: list[str], *, workdir: str, deaths: int) -> int:
    """As `run`, in a container, and again after the end of another process of its trainer, or a request to stop that went to
    another process of it. Returns the exit code of the pod, which the podFailurePolicy of its Job reads."""
    asked, flags = threading.Event(), dict(word.split("=", 1) for word in command if word.startswith("--") and "=" in word)
    while True:
        code = run(command, workdir=workdir, deaths=deaths, asked=asked)
        if code == 0 and _shows(workdir, "finished.json", asked=asked, seconds=FINISH_SECONDS):
            return 0
        _say(f"ended with code {code} before the run was done{', as it was asked to' if asked.is_set() else ''}")
        if code not in (0, STOPPED, PEER_LOST) or asked.wait(FIRST_PAUSE_SECONDS):
            is_first = flags.get("--process", "0") == "0" and not _shows(workdir, "config.json", "shared.json", asked=asked)
            is_finished = _shows(workdir, "finished.json", asked=asked)
            return pod_code(flags.get("--role", ""), code, asked=asked.is_set(), is_first=is_first, is_finished=is_finished)


def pod_code(kind: str, code: int, *, asked: bool, is_first: bool, is_finished: bool) -> int:
    """What a pod ends with whose role has ended with a code.

    | 0          | the run has finished for this role, or a searcher rests because no row has had a reward    |
    | 2, 4, 7    | bad input, not finite, storage forbids: would end the role in the same way again           |
    | 143, other | a request to stop, or a death: another pod takes the place of this one                     |

    is_first: this is process 0, and there is no run yet. is_finished: the training is done; then a dead evaluator is let go.
    """
    if asked and code in (0, STOPPED, BAD_INPUT):
        return 128 + signal.SIGTERM
    if (code == NO_REWARDS and kind == "searcher") or (kind == "evaluator" and is_finished and not asked):
        return 0
    return 1 if code == BAD_INPUT and not is_first else code


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="restart", usage=argparse.SUPPRESS)
    parser.add_argument("--workdir", required=True, help="folder of the run")
    parser.add_argument("--deaths", type=int, default=0, help="how many deaths in a row are survived")
    parser.add_argument("--pod", action="store_true", help="in a pod of Kubernetes, whose exit codes its Job reads")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command of a role")
    given = parser.parse_args(arguments)
    if given.deaths < 0 or not given.command:
        parser.error(f"--deaths={given.deaths} must be at least 0, and the command of a role must follow")
    if given.pod:
        return run_in_pod(given.command, workdir=given.workdir, deaths=given.deaths)
    return run(given.command, workdir=given.workdir, deaths=given.deaths, asked=threading.Event())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
