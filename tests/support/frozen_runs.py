"""Runs in one process, and workdirs whose log nobody writes to any more, for tests of what reads one."""

import shutil
from pathlib import Path

import jax

from tba_jax.experiment import jobs
from tba_jax.run.metrics import TimeAccount
from tests.support import tiny_run


def run(workdir, **changes):
    c = tiny_run.config(schedule__mode="interleaved", replay__recent_probability=1.0, **changes)
    return jobs.everything(tiny_run.settings(workdir, c))()


def config(**changes):
    """Rewards that differ between the rows of a query, so that updates are not zero."""
    return tiny_run.config(task__missing_eos_reward=-1.0, **changes)


def make(workdir, batches=6, **changes):
    """A workdir with a reference and a log that nobody writes to any more."""
    s = tiny_run.settings(workdir, config(**changes))
    jobs.reference(s)()
    trainer, lease = jobs.make_trainer(s, publish_every_steps=2)  # publishes step 0
    trainer.close()
    lease.release()
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


def train(s, *, until, abandon):
    """Steps a trainer to `until`; `abandon` drops it as a kill would: nothing is saved at the end."""
    trainer, lease = jobs.make_trainer(s, publish_every_steps=2)
    try:
        trainer.poll()
        while trainer.step_number < until:
            assert trainer.step() is not None
        state = jax.device_get(trainer.state)
        if not abandon:
            trainer.finish()
        trainer.close()
    finally:
        lease.release()
    return state


def offline(workdir: Path, source: Path, **changes):
    """A run without searchers on the rows of `source`."""
    return tiny_run.settings(workdir, config(replay__mount=(str(source),), searchers__count=0, **changes))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
