"""Threads that do calls beside the work of a process, and never hold up its end."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_Calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class Threads:
    """Daemon threads that do calls in their order. Unlike those of an executor, they do not hold up the end of the process."""

    def __init__(self, count: int, name: str):
        self._calls, self._count = _Calls(), count
        for number in range(count):
            threading.Thread(target=self._do, name=f"{name}-{number}", daemon=True).start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((future, function))
        return future

    def close(self) -> None:
        """The threads end once the calls that were submitted are done."""
        for _ in range(self._count):
            self._calls.put(None)

    def _do(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            try:
                future.set_result(function())
            except BaseException as error:  # raised where the result is asked for
                future.set_exception(error)
            del call, future, function  # they may hold large arrays
