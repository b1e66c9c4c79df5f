"""Collects the user's mistakes, so that one start reports all that can be found together."""

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

    def require(self, condition: object, sentence: str) -> None:
        """Keeps the sentence unless the condition holds."""
        if not condition:
            self.add([sentence])

    def add(self, sentences: Iterable[str]) -> None:
        """Keeps sentences about what is wrong."""
        for sentence in sentences:
            self._found.setdefault(sentence, ValueError(sentence))

    def attempt(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        """What the function returns; None where it raises a ValueError, whose sentences are kept. Raises failures of storage."""
        try:
            return function(*args, **kwargs)
        except Refused as error:
            self.add(error.sentences)
        except ValueError as error:
            if processes.is_storage_failure(error):
                raise
            self._found.setdefault(str(error), error)
        return None

    def __bool__(self) -> bool:
        return bool(self._found)

    def end(self) -> None:
        """Raises the only mistake, or Refused with all of them; does nothing where there are none."""
        if len(self._found) == 1:
            raise next(iter(self._found.values()))
        if self._found:
            raise Refused(list(self._found))
