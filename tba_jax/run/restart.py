"""Runs a role again after it ended too early: one rule for the local supervisor, Slurm, Kubernetes, SkyPilot and a terminal.

    python -m tba_jax.run.restart --workdir=DIR [--deaths=N] [--pod] [--end=FILE] COMMAND …

runs COMMAND, a role of the run in DIR, again until `Lives` says that another life would not help, or it was asked to stop, and
ends with its exit code. After storage failed it waits until the run is in DIR: a role whose mount is lost would begin a new run.
Each process of a trainer has a wrapper of its own. JAX ends the other processes when one has ended, and all come back together.
"""

from __future__ import annotations

import argparse
import enum
import errno
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time

from tba_jax.run import world

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
LOOK_SECONDS = 5.0  # how often a folder is looked into whose run is away
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


def _flags(command: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in command if word.startswith("--") and "=" in word)


def _process_of_several(command: list[str]) -> int | None:
    """The number of this process of a trainer of several, by the flags of its command or by its launcher; None for all else."""
    flags = _flags(command)
    if flags.get("--role") != "trainer":
        return None
    try:
        processes, process = (int(flags[name]) if name in flags else None for name in ("--processes", "--process"))
        found = world.find(coordinator=flags.get("--coordinator", ""), processes=processes, process=process)
    except ValueError:  # the role will say what is wrong with its flags
        return None
    return None if found.processes == 1 else found.process or 0


def _environment() -> dict[str, str]:
    """What a role is started with. By default JAX keeps compiled programs, which roles execute, in a folder of this host and of
    this user alone, and keeps none where another user made that folder."""
    folder = os.path.join(tempfile.gettempdir(), f"tba_jax-{os.getuid()}-programs")
    try:
        if not os.path.lexists(folder):
            os.mkdir(folder, 0o700)
        there = os.lstat(folder)
        is_private = stat.S_ISDIR(there.st_mode) and there.st_uid == os.getuid() and not there.st_mode & 0o077
    except OSError:  # no room, or read-only: the role compiles
        is_private = False
    return {"JAX_COMPILATION_CACHE_DIR": folder if is_private else "", **os.environ}


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
    lives, process, environment = Lives("", max_restarts=deaths), _process_of_several(command), _environment()
    while True:
        begin = time.monotonic()
        # In a session of its own: a Ctrl-C of the terminal reaches this process alone, and a second signal would drop a batch.
        child = subprocess.Popen(command, start_new_session=True, env=environment)
        if asked.is_set():  # it came before the child was known
            child.send_signal(signal.SIGTERM)
        code = child.wait()
        code = 128 - code if code < 0 else code
        if code == 128 + signal.SIGABRT and process is not None:
            code = PEER_LOST
            _say(
                f"process {process} of this trainer was ended by JAX because another process had ended, was silent for trainer."
                "heartbeat_seconds, did not come within trainer.connect_seconds or has the same number: see the other processes' "
                "logs; started again together, all resume where the journal ends"
            )
        if asked.is_set() or code in (0, STOPPED):
            return code
        if lives.end(code, began=begin, now=time.monotonic()) is not Verdict.AGAIN:
            return code
        asked.wait(lives.pause)
        storage_failed = code in PATIENCE_SECONDS
        patience = PATIENCE_SECONDS[code] - lives.seconds if storage_failed else 0.0
        if storage_failed and not _comes_back(workdir, asked=asked, seconds=patience):
            return code
        if asked.is_set():
            return code
        reason = "storage failed" if storage_failed else f"ended with code {code}"
        _say(f"{reason}; running the role again")


def _holds(workdir: str, *names: str) -> bool:
    """Whether a file of one of these names is in the folder."""
    return any(os.path.exists(os.path.join(workdir, name)) for name in names)


def _comes_back(workdir: str, *, asked: threading.Event, seconds: float) -> bool:
    """Waits until the folder holds a run. False where a stop, or the end of the time, comes first."""
    deadline, tells = time.monotonic() + seconds, True
    while not _holds(workdir, "config.json", "shared.json"):
        if asked.is_set() or time.monotonic() >= deadline:
            return False
        if tells:
            _say(f"{workdir} holds no run at the moment; waiting until it is back")
        tells = False
        asked.wait(min(LOOK_SECONDS, seconds))
    return True


def pod_code(code: int, *, role: str, asked: bool, is_new: bool, is_finished: bool) -> int:
    """What a pod of Kubernetes ends with whose role has ended with a code. The podFailurePolicy of its Job reads it.

    | 0          | the run has finished for this role, or a searcher rests because no row has had a reward    |
    | 2, 4, 7    | bad input, not finite, storage forbids: would end the role in the same way again           |
    | 6, 130     | the end began in another process of the trainer, and is counted there                      |
    | 143, other | a request to stop, or a death: another pod takes the place of this one                     |

    is_new: there is no run yet. is_finished: the training is done; then a dead evaluator is let go.
    """
    if asked and code in (0, STOPPED, BAD_INPUT):
        return 128 + signal.SIGTERM
    if (code == NO_REWARDS and role == "searcher") or (role == "evaluator" and is_finished and not asked):
        return 0
    return 1 if code == BAD_INPUT and not is_new else code


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="restart", usage=argparse.SUPPRESS)
    parser.add_argument("--workdir", required=True, help="folder of the run")
    parser.add_argument("--deaths", type=int, default=0, help="how many deaths in a row are survived")
    parser.add_argument("--pod", action="store_true", help="end with a code for the Job of a pod")
    parser.add_argument("--end", default="", help="what files begin with that say how a role ended that was not done")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command of a role")
    given = parser.parse_args(arguments)
    if given.deaths < 0 or not given.command:
        parser.error(f"--deaths={given.deaths} must be at least 0, and the command of a role must follow")
    asked = threading.Event()
    code = run(given.command, workdir=given.workdir, deaths=given.deaths, asked=asked)
    if given.end and (code or asked.is_set()):
        # For a launcher that sees one code for all processes, and that would kill the others where a stop is no 0.
        is_stop = asked.is_set() or code == STOPPED
        with open(f"{given.end}.{os.uname().nodename}-{os.getpid()}", "w", encoding="utf-8") as file:
            print("stopped" if is_stop else f"code {code}", file=file)
        code = 0 if code == STOPPED else code
    if not given.pod:
        return code
    _say(f"ended with code {code}{', as it was asked to stop' if asked.is_set() else ''}")
    is_new = not _holds(given.workdir, "config.json", "shared.json")
    role, is_finished = _flags(given.command).get("--role", ""), _holds(given.workdir, "finished.json")
    return pod_code(code, role=role, asked=asked.is_set(), is_new=is_new, is_finished=is_finished)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
