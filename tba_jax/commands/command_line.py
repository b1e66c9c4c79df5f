"""What every command does alike: the flags --config and --workdir, one sentence for bad input, exit codes for failures."""

import contextlib
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from absl import flags
from ml_collections import config_flags

from tba_jax.run import processes

CONFIG = config_flags.DEFINE_config_file("config", None, "Recipe: a file under configs/.", lock_config=True)
WORKDIR = flags.DEFINE_string("workdir", None, "The run's folder: checkpoints, metrics, all that a resume needs.")

# How ml_collections says that a key does not exist.
_UNKNOWN_KEY = re.compile(r'Did you mean "(.+?)" instead of "(.+?)"')
# What ml_collections says before the sentence of a recipe that raised: its traceback, in text.
_RECIPE_RAISED = re.compile(r"Error whilst parsing config file:\s+Traceback.*\n(?:ValueError: |(?=\w+Error: ))", re.DOTALL)


def parse_flags(argv: Sequence[str], needed: Mapping[str, Any]) -> list[str]:
    """absl's parser, with one sentence where a flag or a config key is wrong.

    Args:
      needed: flags that must be given, as a user would write one -> its holder.
    """
    try:
        remaining = flags.FLAGS(list(argv))
        if CONFIG.value is not None:
            _ = CONFIG.value.seed  # a recipe that could not be loaded fails at its first setting
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        refuse(error)
    if not all(holder.value for holder in needed.values()):
        *first, last = needed
        refuse(ValueError(f"{', '.join(first)} and {last} are needed"))
    if len(remaining) > 1:
        refuse(ValueError(f"{remaining[1]!r} is not a flag"))
    return remaining


def refuse(error: BaseException) -> NoReturn:
    """Ends the process by one sentence about the user's mistake."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    text = _RECIPE_RAISED.sub("", text)
    if "get_config() takes 0 positional arguments" in text:
        name = text.partition(": TypeError")[0].removeprefix("flag ")
        text = f"{name}: this recipe takes no name after a colon"
    elif unknown := _UNKNOWN_KEY.search(text):
        text = f"the config has no setting {unknown[2]!r}; did you mean {unknown[1]!r}?"
    elif (name := text.strip("'\"")).isidentifier():
        text = f"the config has no setting {name!r}"
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(processes.BAD_INPUT)


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """A storage that refuses ends the process by one sentence; any other failure ends its log with one, after the traceback."""
    try:
        yield
    except Exception as error:
        sentence = " ".join(str(error).split())
        if processes.is_storage_failure(error):
            with contextlib.suppress(OSError):  # the log may lie there too
                print(f"error: storage failed; what was committed stays readable: {sentence}", file=sys.stderr, flush=True)
            # At once: threads that wait for that storage (a checkpoint's, say) would keep the process from its end.
            os._exit(processes.STORAGE_FAILED)
        if isinstance(error, processes.BadInput):
            refuse(error)
        if isinstance(error, FloatingPointError):
            print(f"error: {sentence}", file=sys.stderr)
            sys.exit(processes.NOT_FINITE)
        traceback.print_exc()
        print(f"error: {type(error).__name__}: {sentence}", file=sys.stderr)
        sys.exit(1)


def log_to_stderr() -> None:
    """Warnings of everybody, and what tba_jax tells besides."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", force=True
    )
    logging.getLogger("tba_jax").setLevel(logging.INFO)
