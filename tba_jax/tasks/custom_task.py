"""Custom tasks: a class in the user's Python file, named FILE.py:CLASS; and how files of users, recipes too, are loaded."""

import contextlib
import importlib.util
import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from tba_jax.tasks.interface import Task

log = logging.getLogger(__name__)

_NEEDED = ("score_name", "reward_parts", "reward_version", "queries", "rewards", "worked_examples")


def is_custom(name: str) -> bool:
    """Whether a task's name has the form FILE.py:CLASS."""
    return ".py:" in name


def short_name(name: str) -> str:
    """The name of a task, without folders, which may differ between the machines of a run."""
    return Path(name).name if is_custom(name) else name


def custom_class(name: str) -> Callable[..., Task]:
    """The class of FILE.py:CLASS. Raises ValueError if the file cannot be imported, or has no such class that is a task."""
    file, _, attribute = name.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"task.name={name!r}: there is no file {file}")
    module = load_module(path, f"tba_jax_task_{path.stem}", called=f"task.name={name!r}")
    found = vars(module).get(attribute)
    if not inspect.isclass(found):
        own = sorted(key for key, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__)
        raise ValueError(f"task.name={name!r}: {file} has no class {attribute!r}; it has {', '.join(own) or 'none'}")
    abstract = found.__dict__.get("__abstractmethods__", frozenset())
    if missing := [needed for needed in _NEEDED if needed in abstract or not hasattr(found, needed)]:
        raise ValueError(f"task.name={name!r}: {attribute} lacks {', '.join(missing)} (tba_jax/tasks/interface.py, Task)")
    return cast(Callable[..., Task], found)


def make_custom(factory: Callable[..., Task], settings: Mapping[str, Any]) -> Task:
    """The task with the settings under task.custom. Raises ValueError if its constructor lacks one, or takes no such setting."""
    signature = inspect.signature(factory)
    try:
        signature.bind(**settings)
    except TypeError as error:
        raise ValueError(f"task.custom: the task's constructor takes {signature}: {error}") from error
    return factory(**settings)


@contextlib.contextmanager
def named_errors(name: str, what: str) -> Iterator[None]:
    """Turns any error or exit of a custom task but a ValueError into a ValueError of one sentence, and logs the traceback.

    Args: what: the code that runs, such as "its constructor".
    """
    try:
        yield
    except ValueError:
        raise
    except (Exception, SystemExit) as error:
        log.info("%s of task.name=%r", what, name, exc_info=True)
        raise ValueError(f"task.name={name!r}: {what} raised {blame(error, Path(name.rpartition(':')[0]))}") from error


def load_module(path: Path, module_name: str, *, called: str) -> ModuleType:
    """The module that a file makes.

    Args: module_name: where `sys.modules` holds it, as dataclasses of the file need; called: the file's setting in a message.

    Raises ValueError where the file is no Python file, or its import raised; names the error and the line.
    """
    specification = importlib.util.spec_from_file_location(module_name, path)
    if specification is None or specification.loader is None:
        raise ValueError(f"{called}: {path} is not a Python file")
    module = importlib.util.module_from_spec(specification)
    sys.modules[module_name] = module
    try:
        specification.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ValueError(f"{called}: importing it raised {blame(error, path)}") from error
    return module


def blame(error: BaseException, path: Path) -> str:
    """The error in one sentence, with the last line of the file at `path` that it came by."""
    if isinstance(error, SyntaxError):  # perhaps of a file that this one imports
        return f"{type(error).__name__}: {error.msg} (line {error.lineno} of {error.filename})"
    here = path.resolve()
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).resolve() == here]
    return f"{type(error).__name__}: {error}{f' (line {lines[-1]} of {path})' if lines else ''}"
