"""Collects the user's mistakes, so that one start reports all that can be found together."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

from tba_jax.run import processes

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Refused(ValueError):
    """Several mistakes. sentences: one for each."""

    def __init__(self, sentences: Sequence[str]):
        numbered = "; ".join(f"({number}) {sentence}" for number, sentence in enumerate(sentences, 1))
        super().__init__(f"{len(sentences)} mistakes: {numbered}")
        self.sentences = tuple(sentences)


class Mistakes:
    """The mistakes that checks have found so far. A sentence that two checks find is kept once."""

    def __init__(self) -> None:
        self._found: dict[str, ValueError] = {}
        self._silent: list[re.Pattern[str]] = []

    def _keep(self, sentence: str, error: ValueError) -> None:
        if not any(name.search(sentence) for name in self._silent):
            self._found.setdefault(sentence, error)

    def require(self, condition: object, sentence: str) -> None:
        """Keeps the sentence unless the condition holds."""
        if not condition:
            self._keep(sentence, ValueError(sentence))

    def attempt(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        """What the function returns; None where it raises a ValueError, whose sentences are kept. Raises failures of storage."""
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            if processes.is_storage_failure(error):
                raise
            if isinstance(error, Refused):
                for sentence in error.sentences:
                    self._keep(sentence, ValueError(sentence))
            else:
                self._keep(str(error), error)
            return None

    def accepts(self, function: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> bool:
        """Whether the function raises no ValueError; `attempt` otherwise."""
        alone = Mistakes()
        alone.attempt(function, *args, **kwargs)
        self.attempt(alone.end)
        return not alone

    def silence(self, names: Iterable[str]) -> None:
        """From now on, sentences that name one of these settings are not kept: a sentence about each was kept before."""
        self._silent += [re.compile(rf"{re.escape(name)}(?!\w|\.\w)") for name in names]

    def copy(self) -> "Mistakes":
        """The same mistakes and silence, to which others can be added."""
        same = Mistakes()
        same._found, same._silent = dict(self._found), list(self._silent)
        return same

    def __bool__(self) -> bool:
        return bool(self._found)

    def end(self) -> None:
        """Raises the only mistake, or Refused with all of them; does nothing where there are none."""
        if len(self._found) == 1:
            raise next(iter(self._found.values()))
        if self._found:
            raise Refused(list(self._found))
