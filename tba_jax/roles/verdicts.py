"""What follows from the end of a role: whether it is started again, after which pause, or ends the run."""

import enum

from tba_jax.run import processes

# The pause before a role is started again, doubled with each death in a row, and its limit.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 60.0


class Verdict(enum.Enum):
    """What follows from the end of a role that is not done."""

    ENDS_THE_RUN = enum.auto()
    AGAIN = enum.auto()
    AGAIN_UNCOUNTED = enum.auto()  # what has failed may recover by itself, however long that takes
    RESTS = enum.auto()  # is not started again


def judge(kind: str, code: int, *, is_new: bool, deaths: int, max_restarts: int) -> Verdict:
    """What follows from a role's exit code.

    | code             | trainer, reference                       | searcher               | evaluator              |
    |------------------|------------------------------------------|------------------------|------------------------|
    | 2, a new role    | ends the run                             | ends the run           | ends the run           |
    | 3 storage failed | again, without using up restarts         | likewise               | likewise               |
    | 4 not finite     | ends the run                             | again                  | again                  |
    | 5 no rewards     | again, as after other deaths             | rests                  | again                  |
    | others, 2 later  | again; ends the run after max_restarts   | again                  | again                  |

    Args:
      kind: "trainer", "reference", "searcher" or "evaluator".
      is_new: whether this was the role's first life under this supervisor, and it has not been at work.
      deaths: how often it has died without ten minutes of life in between, this death included.
    """
    leads = kind in ("trainer", "reference")
    if code == processes.STORAGE_FAILED:
        return Verdict.AGAIN_UNCOUNTED
    if code == processes.BAD_INPUT and is_new:
        return Verdict.ENDS_THE_RUN
    if code == processes.NO_REWARDS and kind == "searcher":
        return Verdict.RESTS
    if leads and (code == processes.NOT_FINITE or deaths > max_restarts):
        return Verdict.ENDS_THE_RUN
    return Verdict.AGAIN


def pause_seconds(times: int) -> float:
    """Seconds before a role is started again that has ended so often in a row."""
    return min(FIRST_PAUSE_SECONDS * 2 ** min(times - 1, 20), LONGEST_PAUSE_SECONDS)
