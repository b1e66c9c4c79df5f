"""Runs in one process, and workdirs whose log nobody writes to any more, for tests of what reads one."""

import contextlib
import copy
import shutil
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import jax
import numpy as np

from tba_jax import sharding
from tba_jax.experiment import jobs, training
from tba_jax.replay.log import LogWriter
from tba_jax.replay.reader import LogReader
from tba_jax.roles.trainer import trainer as trainer_lib
from tba_jax.roles.trainer.update_program import UpdateProgram
from tba_jax.roles.work import Work
from tba_jax.storage.published import Published
from tba_jax.telemetry.status import TimeAccount
from tests.support import tiny_run


def run(workdir, **changes):
    c = tiny_run.config(schedule__mode="interleaved", replay__recent_probability=1.0, **changes)
    return jobs.everything(tiny_run.settings(workdir, c))()


def config(**changes):
    """Rewards that differ between the rows of a query, so that updates are not zero. Log-probs are not compared."""
    return tiny_run.config(**{"task__missing_eos_reward": -1.0, "learner__logprob_gap_every_steps": 0} | changes)


def make(workdir, batches=6, **changes):
    """A workdir with a reference and a log that nobody writes to any more."""
    s = tiny_run.settings(workdir, config(**changes))
    training.reference(s)()
    with trainer(s):
        pass
    searcher = jobs.make_searcher(s, name="frozen", account=TimeAccount())
    searcher.refresh()
    for _ in range(batches):
        searcher.search()
    return s


def copies(tmp_path_factory):
    """As `make`, but a log is made once for the same settings and then copied."""
    made = {}

    def copy(workdir, batches=6, **changes):
        key = (batches, *sorted(changes.items()))
        if key not in made:
            made[key] = make(tmp_path_factory.mktemp("frozen") / "run", batches, **changes).run.root
        shutil.copytree(made[key], workdir)
        return tiny_run.settings(workdir, config(**changes))

    return copy


class SharedProgram(UpdateProgram):
    """An update program with the compiled functions of the first one in this process that had the same settings."""

    _made: ClassVar[dict[str, dict[str, Any]]] = {}

    def __init__(self, config, contract, policy, **options):
        key = repr(
            (
                config.learner,
                config.searchers.scores_reference,
                config.model,
                config.lora,
                config.seed,
                contract,
                jax.devices(),
                options,
            )
        )
        if key not in self._made:
            super().__init__(config, contract, policy, **options)
            self._made[key] = vars(self).copy()
        moving = copy.copy(self._made[key]["_moving_reference"])
        vars(self).update(self._made[key], work=Work(), frozen={}, _moving_reference=moving)


@contextlib.contextmanager
def trainer(s, *, publish_every_steps=2, shared=True, polls=False):
    """A trainer where the run stands; it publishes step 0 if that has no snapshot yet.

    Args: shared: see SharedProgram; polls: whether it has looked at the log.
    """
    with mock.patch.object(trainer_lib, "UpdateProgram", SharedProgram if shared else UpdateProgram):
        made = training.make_trainer(s, publish_every_steps=publish_every_steps)
    try:
        if polls:
            made.poll()
        yield made
        made.close()
    finally:
        made.lease.release()


def train(s, *, until, abandon):
    """Steps a trainer to `until`; `abandon` drops it as a kill would: nothing is saved at the end."""
    with trainer(s, polls=True) as made:
        while made.step_number < until:
            assert made.step() is not None
        state = jax.device_get(made.state)
        if not abandon:
            made.finish()
    return state


def assert_resumes_as(s, state):
    """A trainer that finds the journal alone does every step again, from the reference on, and comes to the same state."""
    shutil.rmtree(s.run.checkpoints)
    with trainer(s) as again:
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(again.state), state)


def published(s, step):
    """The trained weights of a snapshot."""
    policy, mesh = s.experiment.policy, sharding.make_mesh((1, 1, 1), setting="test", devices=jax.devices()[:1])
    return jax.device_get(Published(s.run.policies).load(step, policy.trained_specs, policy.trained_shardings(mesh)))


def rows(s) -> dict[str, dict[str, np.ndarray]]:
    """Writer -> all its rows in the log."""
    reader = LogReader(s.run.replay, s.experiment.contract.row_shape())
    return {writer: dict(reader.read(writer, 0, head)) for writer, head in reader.heads().items()}


def append_changed(s, writer, **changes):
    """The first four rows of the log, of one query, by another writer. changes: column -> (place in a row and new value)."""
    reader = LogReader(s.run.replay, s.experiment.contract.row_shape())
    source = next(writer for writer in reader.heads() if writer.startswith("frozen-"))
    rows = {name: column.copy() for name, column in reader.read(source, 0, 4).items()}
    for name, (place, value) in changes.items():
        rows[name][place] = value
    LogWriter(s.run.replay, writer, reader.shape, info={}).append(rows)


def offline(workdir: Path, source: Path, **changes):
    """A run without searchers on the rows of `source`."""
    return tiny_run.settings(workdir, config(replay__mount=(str(source),), searchers__count=0, **changes))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
