"""Python files that users write, recipes and tasks: loaded, and blamed in one sentence for what they raise."""

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType


def load(path: Path, module_name: str, *, called: str) -> ModuleType:
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
        raise ValueError(f"{called}: importing it raised {told(error, path)}") from error
    return module


def told(error: BaseException, path: Path) -> str:
    """The error in one sentence, with the last line of the file at `path` that it came by."""
    if isinstance(error, SyntaxError):  # perhaps of a file that this one imports
        return f"{type(error).__name__}: {error.msg} (line {error.lineno} of {error.filename})"
    here = path.resolve()
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).resolve() == here]
    return f"{type(error).__name__}: {error}{f' (line {lines[-1]} of {path})' if lines else ''}"
