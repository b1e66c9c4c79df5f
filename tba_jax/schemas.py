"""Schemas: each setting's default and the values that it may have; and mistakes that one start reports together.

A schema is a tree of sections, `c.learner.steps = setting(500, at_least=1)`. Two things are made of it: the config that recipes
change, which holds the defaults alone (`Schema.defaults`), and the check of what they changed (`Schema.refusals`).
"""

import copy
import dataclasses
import difflib
import functools
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

from ml_collections import config_dict

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """The values that a setting may have. Every float must be finite, also without a limit.

    at_least, above, at_most, below: limits of a number. or_zero: 0 is allowed too. one_of: the choices of a text. registry: the
    choices are the names in this registry (see Schema.refusals). given: a text must not be empty. Choices hold for each text of a
    tuple, too.

    path: the setting names a path, which recipes.absolute_paths makes absolute; "or hub": if it is there, else a name on the hub;
    "of class": it may be FILE.py:CLASS.

    free, fixed: a resumed run may always change the setting, or never.
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    or_zero: bool = False
    one_of: tuple[str, ...] = ()
    registry: str = ""
    given: bool = False
    path: Literal["", "always", "or hub", "of class"] = ""
    free: bool = False
    fixed: bool = False

    def check(self, name: str, value: Any, registries: Mapping[str, Collection[str]]) -> None:
        """Raises ValueError, which names setting, value and limit, where the setting may not have the value."""
        choices = registries[self.registry] if self.registry else self.one_of
        several = isinstance(value, tuple | list)
        wrong = [each for each in (value if several else (value,)) if each not in choices] if choices else []
        if wrong:
            close = difflib.get_close_matches(str(wrong[0]), choices, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            holds = f" holds {wrong[0]!r}, which" if several else ""
            raise ValueError(f"{name}={value!r}{holds} is not one of {', '.join(filter(None, choices))}{hint}")
        if self.given and not value:
            raise ValueError(f"{name} is not given: set --config.{name}=VALUE")
        if isinstance(value, int | float) and not isinstance(value, bool) and not self._allows(value):
            ends = (self.at_least, self.above), (self.at_most, self.below)
            finite = "finite" if isinstance(value, float) and (None, None) in ends else ""
            raise ValueError(f"{name}={value} must be {' and '.join(filter(None, (self.limits(), finite)))}")

    def limits(self) -> str:
        """The rule in words, such as "at least 1" or "one of full, int8"; "" if every value of the type is allowed."""
        if self.one_of or self.registry:
            return f"one of {', '.join(self.one_of)}" if self.one_of else f"one of the {self.registry}"
        low = self.at_least if self.above is None else self.above
        high = self.at_most if self.below is None else self.below
        if low is not None and high is not None:
            return f"within {'[' if self.above is None else '('}{low}, {high}{']' if self.below is None else ')'}"
        words = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        return "0 or " * self.or_zero + "".join(f"{word} {limit}" for word, limit in words.items() if limit is not None)

    def _allows(self, number: float) -> bool:
        limits = ((self.at_least, operator.ge), (self.above, operator.gt), (self.at_most, operator.le), (self.below, operator.lt))
        within = all(limit is None or holds(number, limit) for limit, holds in limits)
        return (self.or_zero and number == 0) or (within and math.isfinite(number))


@dataclasses.dataclass(frozen=True)
class Setting:
    """A leaf of a schema."""

    default: Any
    rule: Rule


def setting(default: Any, **rule: Any) -> Setting:
    """A leaf of a schema with a rule; `rule` are the fields of Rule."""
    return Setting(default, Rule(**rule))


class Schema:
    """All settings of a program, each with its default and its rule."""

    def __init__(self, sections: config_dict.ConfigDict, *, open_section: str = ""):
        """sections: leaves are Settings, or plain defaults without a limit; open_section: the section that recipes may add to."""
        self.rules: dict[str, Rule] = {}  # dotted name of every setting -> its rule
        self._defaults = config_dict.ConfigDict()
        self._add(self._defaults, sections, "")
        self._defaults.lock()
        if open_section:
            functools.reduce(operator.getitem, open_section.split("."), self._defaults).unlock()

    def _add(self, defaults: config_dict.ConfigDict, section: config_dict.ConfigDict, prefix: str) -> None:
        for name, leaf in section.items(preserve_field_references=True):
            if isinstance(leaf, config_dict.ConfigDict):
                defaults[name] = config_dict.ConfigDict()
                self._add(defaults[name], leaf, f"{prefix}{name}.")
                continue
            made = leaf if isinstance(leaf, Setting) else Setting(leaf, Rule())
            defaults[name], self.rules[f"{prefix}{name}"] = made.default, made.rule

    def defaults(self) -> config_dict.ConfigDict:
        """A new config of the defaults. It is locked: a name that it does not have fails."""
        return copy.deepcopy(self._defaults)

    def refusals(self, config: Any, registries: Mapping[str, Collection[str]]) -> dict[str, str]:
        """Checks every setting by itself. Returns setting -> a sentence with value and limit, of each that breaks its rule.

        Args: registries: the name that rules have for a registry -> the names in it. They are no part of the schema, because
        registries import JAX, and recipes import the schema. Raises ValueError: the config lacks a setting.
        """
        leaves = flatten(config.to_dict())
        broken = {name: value for name, value in leaves.items() if holds_surrogate(value)}
        found = {name: f"{name}={value!r} {NO_CHARACTER}" for name, value in broken.items()}
        for name, rule in self.rules.items():
            if name not in leaves:
                raise ValueError(f"the config has no setting {name}: it was not made by this version of tba_jax")
            if name in found:
                continue
            try:
                rule.check(name, leaves[name], registries)
            except ValueError as error:
                found[name] = str(error)
        return found


def require(condition: Any, sentence: str) -> None:
    """Raises ValueError with this sentence unless the condition holds."""
    if not condition:
        raise ValueError(sentence)


NO_CHARACTER = "holds half of a UTF-16 surrogate pair, which is no character: a text must be UTF-8"
_SURROGATE = re.compile("[\ud800-\udfff]")


def holds_surrogate(value: object) -> bool:
    """Whether a text, or a text in a list, holds a lone surrogate: a byte of the command line that is no UTF-8 is one, too."""
    if isinstance(value, list | tuple):
        return any(map(holds_surrogate, value))
    return isinstance(value, str) and _SURROGATE.search(value) is not None


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}, for settings, and for parameters, their specs and their shardings alike."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        leaves |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return leaves


def nearest(name: str, names: Collection[str]) -> str:
    """The dotted name that is most like `name`, "" if no name has a similar last part."""
    section, _, leaf = name.rpartition(".")

    def likeness(other: str) -> float:
        of_section, _, of_leaf = other.rpartition(".")
        same = difflib.SequenceMatcher(None, leaf, of_leaf).ratio()
        return (2 * same + difflib.SequenceMatcher(None, section, of_section).ratio()) if same >= 0.6 else 0.0

    best = max(names, key=likeness, default="")
    return best if best and likeness(best) else ""


def offers(name: str, names: Collection[str]) -> list[str]:
    """The dotted names that `name` may stand for: those that it begins, those of its last part, or else the nearest one."""
    begun = [other for other in names if other.startswith(f"{name}_")]
    same = [other for other in names if other.rpartition(".")[2] == name]
    return begun or same or list(filter(None, [nearest(name, names)]))


def hint(*near: str) -> str:
    """The part of a sentence that offers the nearest names, if there are any."""
    offered = " or ".join(map(repr, filter(None, near)))
    return f"; did you mean {offered}?" if offered else ""


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
        """What the function returns; None where it raises a ValueError, whose sentences are kept."""
        try:
            return function(*args, **kwargs)
        except Refused as error:
            self.add(error.sentences)
        except ValueError as error:
            self._found.setdefault(str(error), error)
        return None

    def __bool__(self) -> bool:
        return bool(self._found)

    def end(self) -> None:
        """Raises the only mistake, or Refused with all of them; does nothing where there are none."""
        found = [*self._found.values()]
        if len(found) == 1:
            raise found[0]
        if found:  # a failure of storage among them stays one, see processes.is_storage_failure
            raise Refused([*self._found]) from next((each for each in found if isinstance(each.__cause__, OSError)), None)
