"""The record of a role: begun when its process has joined the run, and ended with the reason why the process ends."""

import contextlib
import logging
from collections.abc import Iterator

from tba_jax.experiment.joining import Invocation
from tba_jax.roles import gpus
from tba_jax.run import beginnings, compilations, contract, layout, places
from tba_jax.run.record import Record
from tba_jax.text.visible import visible

log = logging.getLogger(__name__)


def of_role(s: Invocation, name: str) -> Record:
    """A record in the folder of a role's metrics. Args: name: of the role's metrics."""
    megabytes = s.config.metrics.timeline_megabytes
    return Record(s.run.metrics(name), timeline_megabytes=megabytes, traces=s.run.profiles(name), profile=s.profile)


def begin(s: Invocation, name: str) -> Record:
    """As `of_role`, of a process that begins: the record holds where it runs, and what it compiles until the record is closed."""
    record = of_role(s, name)
    record.events.tell("start", step=0, **beginnings.told(gpus.jax_devices()))
    record.until_close.enter_context(compilations.watched(record))
    return record


def end(record: Record, run: layout.RunDir, *, role: str) -> None:
    """Closes the record of a role that no error ended, and says in its log why it ends: with the run, or because it was asked to.

    Args: role: how the log calls it.
    """
    try:
        steps = contract.steps_of(run) if contract.is_finished(run) else None
    except places.STORAGE_ERRORS:  # which does not say
        steps = None
    record.close("stopped" if steps is None else "finished")
    if steps is None:
        log.info("stopped; the same command starts this %s again", role)
    else:
        log.info("the run in %s has finished its %d steps: this %s is done", run.shared, steps, role)


@contextlib.contextmanager
def told_failures(record: Record) -> Iterator[None]:
    """An error that ends the process is the reason in the record of its end."""
    try:
        yield
    except BaseException as error:
        first = (str(error).strip().splitlines() or [""])[0]
        record.close(visible(f"{type(error).__name__}: {first}".removesuffix(": ")))
        raise
