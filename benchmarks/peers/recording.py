"""When a system's steps ended, and what parts took. The peers' environments import it, so it needs the standard library alone."""

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def digits(texts: list[str], *, seconds: float) -> list[float]:
    """The reward of all systems: the share of digits in each text, after so many seconds."""
    time.sleep(seconds)
    return [sum(character.isdigit() for character in text) / max(1, len(text)) for text in texts]


@dataclasses.dataclass
class Recording:
    """Seconds of each step, of its named parts, and the response tokens in its rows.

    A part may be called several times in a step: its seconds add up. A part that contains another one counts without it.
    """

    seconds: list[float] = dataclasses.field(default_factory=list)
    parts: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    tokens: list[int] = dataclasses.field(default_factory=list)
    _since: float = dataclasses.field(default_factory=time.perf_counter)
    _step: dict[str, float] = dataclasses.field(default_factory=dict)
    _tokens: int = 0
    _inner: list[float] = dataclasses.field(default_factory=list)

    def begin(self) -> None:
        """The first step begins."""
        self._since = time.perf_counter()

    def timed(self, owner: Any, method: str, part: str, *, after: Callable[[Any], Any] = lambda result: None) -> None:
        """Has the method of an object or a class be timed as a part. Args: after: called with its result, within its time."""
        function = getattr(owner, method)

        @functools.wraps(function)
        def call(*arguments: Any, **settings: Any) -> Any:
            begin = time.perf_counter()
            self._inner.append(0.0)
            result = function(*arguments, **settings)
            after(result)
            seconds, inner = time.perf_counter() - begin, self._inner.pop()
            self._step[part] = self._step.get(part, 0.0) + seconds - inner
            if self._inner:
                self._inner[-1] += seconds
            return result

        setattr(owner, method, call)

    def count(self, tokens: int) -> None:
        """Adds response tokens to the step under way."""
        self._tokens += tokens

    def step_ends(self) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._since)
        for part, seconds in self._step.items():
            self.parts.setdefault(part, []).append(seconds)
        self.tokens.append(self._tokens)
        self._since, self._step, self._tokens = now, {}, 0

    def write(self, path: str, **more: Any) -> None:
        told = {"seconds": self.seconds, "parts": self.parts, "tokens": self.tokens, **more}
        Path(path).write_text(json.dumps(told))
