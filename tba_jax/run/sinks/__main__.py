"""The process of one tracker: python -m tba_jax.run.sinks NAME. Its parent is a Feed.

A tracker may block, raise, print, or keep a core busy: none of this happens in the process of the role. Standard input has a JSON
line with a Session, and then one for each point. What this process writes to standard output are lines {"sentence", "advice"} for
the role's log. It ends after its input does: when the role closes its feed, and when the role dies. A tracker that blocks does
not read its input any more, so a thread looks whether the role still lives.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from typing import Any

from tba_jax.run.sinks import TRACKERS
from tba_jax.run.sinks.session import Session

# After the end of the points, the tracker has so long to send what it has.
_END_SECONDS = 60.0
_LOOK_SECONDS = 1.0  # for the role
_ADVICE = "nothing has to be done: the run goes on, and metrics.jsonl has every point; or leave it out of metrics.sinks"


class _Words:
    """What the role's log is told. The outputs of this process are closed to everybody else, libraries and their children."""

    def __init__(self) -> None:
        self._out, nowhere = os.fdopen(os.dup(1), "w"), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        self._told: set[str] = set()

    def tell(self, sentence: str, advice: str = _ADVICE) -> None:
        """Hands a sentence on, once."""
        if sentence not in self._told and len(self._told) < 10:
            self._told.add(sentence)
            with contextlib.suppress(OSError):
                print(json.dumps({"sentence": _one_line(sentence), "advice": advice}), file=self._out, flush=True)


def _one_line(sentence: str) -> str:
    """The sentence without what would be a secret in a log, on one line."""
    for name, value in os.environ.items():
        if any(word in name.upper() for word in ("KEY", "TOKEN", "SECRET", "PASSWORD", "URL")) and len(value) > 5:
            sentence = sentence.replace(value, f"({name})")
    return "".join(letter if letter.isprintable() else " " for letter in sentence)[:500]


def _end_after(role: int) -> None:
    """Ends this process, whatever its tracker does, once its parent is gone for long. Args: role: pid of the parent."""
    while os.getppid() == role:
        time.sleep(_LOOK_SECONDS)
    time.sleep(_END_SECONDS)
    os._exit(1)


def serve(name: str) -> None:
    """Hands points to the tracker `name` until there are no more."""
    words = _Words()
    sink, session = TRACKERS[name](words.tell), Session(**json.loads(sys.stdin.readline()))
    try:
        sink.begin(session)
    except Exception as error:  # of the tracker's library: nobody else knows its errors
        words.tell(f"{name}: {_reason(error)}")
        return
    for line in sys.stdin:
        with contextlib.suppress(json.JSONDecodeError):  # the role was killed while it wrote the line
            point = _grouped(json.loads(line), session)
            try:
                sink.write(point)
            except Exception as error:
                words.tell(f"{name}: {_reason(error)}")
    limit = threading.Timer(_END_SECONDS, os._exit, args=(1,))
    limit.daemon = True
    limit.start()
    try:
        sink.end()
    except Exception as error:
        words.tell(f"{name}: {_reason(error)}")


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def _grouped(point: dict[str, Any], session: Session) -> dict[str, Any]:
    """The point with the names of trackers. A searcher counts batches anew when it starts, so its axis is that of its weights."""
    if session.kind == "searcher" and "policy_step" in (values := point["values"]):
        point = point | {"step": int(values["policy_step"]), "values": values | {"batch": point["step"]}}
    parts = ("values", "histograms", "tables")
    return point | {part: {session.grouped(name): each for name, each in point[part].items()} for part in parts}


if __name__ == "__main__":
    # The role decides when to end, also where a signal reaches all processes of a job.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(10)
    threading.Thread(target=_end_after, args=(os.getppid(),), name="role", daemon=True).start()
    serve(sys.argv[1])
    os._exit(0)  # threads of libraries may hold up the end
