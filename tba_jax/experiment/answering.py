"""Whether the storage that settings and flags name answers: asked before anything else touches it, which might wait for ever."""

import contextlib
import logging
import math
from collections.abc import Iterable
from typing import Any

from tba_jax.experiment.mistakes import Mistakes
from tba_jax.schemas import flatten
from tba_jax.storage import places
from tba_jax.storage.places import Place

log = logging.getLogger(__name__)

# A dry run and a plan wait no longer for a place. A role waits until the place answers: storage may come back.
DRY_RUN_SECONDS = 30.0
# For each other place, once one was waited for in vain.
_OTHERS_SECONDS = 2.0


def named(config: Any, *, init_from: str = "") -> list[tuple[str, Place]]:
    """(setting or flag, place) of the run of --init_from, of the runs of replay.mount, and of whatever settings name by a path;
    one may be a name on the hub. Args: init_from: see other_runs.parse_init_from."""
    paths = [(name, value) for name, value in flatten(config.to_dict()).items() if name.endswith(("_path", ".path"))]
    texts = [("--init_from", init_from.rpartition("@")[0]), *(("replay.mount", folder) for folder in config.replay.mount), *paths]
    found = []
    for name, text in texts:
        if text and isinstance(text, str):
            with contextlib.suppress(ValueError):  # it names no place, and other checks say so
                found.append((name, places.place(text)))
    return found


def check_answers(named: Iterable[tuple[str, Place]], *, limit: float = math.inf) -> None:
    """Returns once each place has answered, and says every ten seconds for which one it waits.

    Args: named: (setting or flag, place); limit: seconds, for the first place that does not answer; the others then have less.

    Raises:
      ValueError: a place has not answered within the limit, or is in no bucket. OSError: a store refuses.
    """
    found = Mistakes()
    for setting, place in dict.fromkeys(named):
        found.attempt(_check, setting, place, limit=min(limit, _OTHERS_SECONDS) if found else limit)
    found.end()


def _check(setting: str, place: Place, *, limit: float) -> None:
    def report(seconds: float) -> None:
        log.warning("%s=%s has not answered for %g s; still trying", setting, place, round(seconds, 1))

    try:
        places.check_answers(place, report=report, limit=limit)
    except TimeoutError as error:
        raise ValueError(f"{setting}={place} has not answered within {limit:g} s, and is not waited for any longer") from error
