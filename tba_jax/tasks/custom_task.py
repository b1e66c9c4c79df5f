"""Custom tasks: a class in the user's Python file, named FILE.py:CLASS."""

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from tba_jax.run import user_code
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
    module = user_code.load(path, f"tba_jax_task_{path.stem}", called=f"task.name={name!r}")
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
        raise ValueError(f"task.name={name!r}: {what} raised {user_code.told(error, Path(name.rpartition(':')[0]))}") from error
