"""The entry of every role.

python -m tba_jax.main --config=configs/X.py --workdir=DIR [--role=all|reference|trainer|searcher|evaluator] [--dry_run]
"""

import contextlib
import errno
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags
from ml_collections import config_flags

from tba_jax import lifeline, run_dir

ROLES = ("all", "reference", "trainer", "searcher", "evaluator")
Job = Callable[[], int]

_CONFIG = config_flags.DEFINE_config_file("config", None, "Recipe: a file under configs/.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "The run's folder: shared by all of its roles.")
_ROLE = flags.DEFINE_enum(
    "role", "all", ROLES, "all: supervise one trainer, searchers and an evaluator here; reference: make the initial policy, stop."
)
_NAME = flags.DEFINE_string("name", "", "Name of this role's metrics; default: the role (searchers add their writer id).")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print config, shapes and memory, and stop.")
_ALLOW_CHANGE = flags.DEFINE_list("allow_change", [], "Schedule settings that a resumed run may change.")

log = logging.getLogger("tba_jax")

# How ml_collections says that a key does not exist.
_UNKNOWN_KEY = re.compile(r'Did you mean "(.+?)" instead of "(.+?)"')


def parse_flags(argv: Sequence[str]) -> list[str]:
    """absl's parser, with one sentence where a flag or a config key is wrong."""
    try:
        remaining = flags.FLAGS(list(argv))
        if _CONFIG.value is not None:
            _ = _CONFIG.value.seed  # a recipe that could not be loaded fails at its first setting
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        _refuse(error)
    if _CONFIG.value is None or not _WORKDIR.value:
        _refuse(ValueError("--config=configs/X.py and --workdir=DIR are needed"))
    if len(remaining) > 1:
        _refuse(ValueError(f"{remaining[1]!r} is not a flag"))
    return remaining


def _refuse(error: BaseException) -> NoReturn:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if unknown := _UNKNOWN_KEY.search(text):
        text = f"the config has no setting {unknown[2]!r}; did you mean {unknown[1]!r}?"
    elif (name := text.strip("'\"")).isidentifier():
        text = f"the config has no setting {name!r}"
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(lifeline.BAD_INPUT)


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """A storage that refuses ends the role by one sentence; any other failure ends its log with one, after the traceback."""
    try:
        yield
    except Exception as error:
        sentence = " ".join(str(error).split())
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
        if full or "No space left" in sentence:
            print(f"error: storage failed, the run stops; what was committed stays readable: {sentence}", file=sys.stderr)
            sys.exit(lifeline.STORAGE_FAILED)
        if isinstance(error, FloatingPointError):
            print(f"error: {sentence}", file=sys.stderr)
            sys.exit(lifeline.NOT_FINITE)
        traceback.print_exc()
        print(f"error: {type(error).__name__}: {sentence}", file=sys.stderr)
        sys.exit(1)


def main(argv: Sequence[str]) -> None:
    del argv
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", force=True
    )
    log.setLevel(logging.INFO)
    run = run_dir.RunDir(Path(_WORKDIR.value).absolute())
    with _failures():
        job = _prepare(_CONFIG.value, run)
        sys.exit(job())


def _prepare(config: Any, run: run_dir.RunDir) -> Job:
    """Everything that a user's mistake can stop, and then the job itself, which returns an exit code."""
    from tba_jax import experiment as experiment_lib
    from tba_jax.replay.lease import LeaseHeld

    try:
        experiment = experiment_lib.build(config)
        if _DRY_RUN.value:
            from tba_jax import dry_run

            print(dry_run.describe(experiment))
            return lambda: 0
        from tba_jax import roles

        settings = roles.Settings(
            experiment=experiment,
            run=run,
            name=_NAME.value,
            label=Path(config_flags.get_config_filename(flags.FLAGS["config"])).stem,
            allow_change=tuple(_ALLOW_CHANGE.value),
            arguments=tuple(sys.argv[1:]),
        )
        return roles.ROLES[_ROLE.value](settings)
    except (ValueError, LeaseHeld) as error:
        _refuse(error)


if __name__ == "__main__":
    lifeline.hold()
    app.run(main, flags_parser=parse_flags)
