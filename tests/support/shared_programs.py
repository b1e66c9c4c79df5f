"""Jitted functions that several runs of the tests' process share: what one traced and lowered, the next does not do again.

Each run jits its own functions, which are the same function of the same settings for most of the tests' runs.
"""

import dataclasses
import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

_KEPT = 500
_NAMED_SCOPE = type(jax.named_scope(""))
# Interned, or made once.
_BY_IDENTITY = (type, types.ModuleType, types.BuiltinFunctionType, jax.sharding.Mesh)
_jit, _setattr = jax.jit, pytest.MonkeyPatch.setattr
_jitted: dict[Any, Any] = {}
_lock = threading.Lock()
_patches: list[pytest.MonkeyPatch] = []  # that changed the package at some time of this test


class UnknownError(Exception):
    """A value of which no key can be made."""


def key(value: Any, within: tuple[int, ...] = ()) -> Any:
    """Equal for values that make the same program: functions by their code and what they closed over, structs by their fields.

    Raises:
      UnknownError: such an object may change, or is not known.
    """
    if id(value) in within:
        return "recursion", len(within) - within.index(id(value))
    within = (*within, id(value))

    def of_all(values: Any) -> tuple[Any, ...]:
        return tuple(key(each, within) for each in values)

    match value:
        case functools.partial():
            return "partial", key(value.func, within), of_all(value.args), of_all(sorted(value.keywords.items()))
        case types.MethodType():
            return "method", key(value.__func__, within), key(value.__self__, within)
        case types.FunctionType():
            cells = of_all(cell.cell_contents for cell in value.__closure__ or ())
            defaults = of_all(value.__defaults__ or ()), of_all(sorted((value.__kwdefaults__ or {}).items()))
            return value.__module__, value.__qualname__, value.__code__, cells, defaults
        case jax.core.Tracer():
            raise UnknownError
        case np.ndarray() | jax.Array():
            return np.shape(value), str(value.dtype), np.asarray(value).tobytes()
        case dict():
            return "dict", of_all(value.items())
        case tuple() | list():
            return type(value), of_all(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and type(value).__dataclass_params__.frozen:
        return type(value), of_all(getattr(value, field.name) for field in dataclasses.fields(value))
    if isinstance(value, _NAMED_SCOPE):
        return "named scope", value.name
    by_identity = value is None or isinstance(value, _BY_IDENTITY)
    if type(value).__hash__ in (None, object.__hash__) and not by_identity:
        raise UnknownError
    return type(value), value


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """jax.jit, whose result is the one that there is where an equal function was jitted with equal options."""
    if function is None:
        return functools.partial(jit, **options)
    with _lock:
        try:
            found = key(function), key(jax.tree.leaves(options)), jax.tree.structure(options)
            made = _jitted.get(found)
        except (UnknownError, TypeError, ValueError):
            return _jit(function, **options)
        if made is None or _is_changed():
            made = _jit(function, **options)
        if not _is_changed():
            _jitted[found] = made
        if len(_jitted) > _KEPT:
            del _jitted[next(iter(_jitted))]
        return made


def _is_changed() -> bool:
    """Whether a test has other functions or constants in the package now: keys know nothing of them."""
    _patches[:] = [patch for patch in _patches if any(_is_ours(target) for target, *_ in patch._setattr)]
    return bool(_patches)


def _is_ours(target: Any) -> bool:
    return str(getattr(target, "__module__", None) or getattr(target, "__name__", "")).startswith("tba_jax")


def _noted_setattr(patch: pytest.MonkeyPatch, target: Any, *arguments: Any, **options: Any) -> None:
    if isinstance(target, str) or _is_ours(target):
        with _lock:
            _jitted.clear()
            _patches.append(patch)
    _setattr(patch, target, *arguments, **options)


def forget() -> None:
    """What is jitted from now on is not shared with what was jitted before."""
    with _lock:
        _jitted.clear()


def share() -> None:
    """Lets all of this process jit by `jit`."""
    jax.jit = jit
    pytest.MonkeyPatch.setattr = _noted_setattr  # type: ignore[method-assign]
