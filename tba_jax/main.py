"""The entry of every role.

python -m tba_jax.main --config=configs/X.py --workdir=DIR [--role=all|reference|trainer|searcher|evaluator] [--dry_run]
"""

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import app, flags
from ml_collections import config_flags

from tba_jax.commands import command_line
from tba_jax.run import layout, places, processes

if TYPE_CHECKING:  # what imports JAX is imported late: a mistyped flag is answered at once
    from tba_jax.experiment.composition import Experiment

log = logging.getLogger(__name__)

ROLES = ("all", "reference", "trainer", "searcher", "evaluator")
Job = Callable[[], int]

_ROLE = flags.DEFINE_enum(
    "role", "all", ROLES, "all: supervise one trainer, searchers and an evaluator here; reference: make the initial policy, stop."
)
_NAME = flags.DEFINE_string("name", "", "Name of this role's metrics; default: the role (searchers add their writer id).")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print config, shapes and memory, and stop.")
_SHARED = flags.DEFINE_string(
    "shared", "", "Where searchers and trainer meet, if not in --workdir: a folder, gs://bucket/prefix or s3://bucket/prefix."
)
_INIT_FROM = flags.DEFINE_string("init_from", "", "RUN@STEP: a new run begins from another run's policy of that step.")
_ALLOW_CHANGE = flags.DEFINE_list("allow_change", [], "Schedule settings that a resumed run may change.")


def parse_flags(argv: Sequence[str]) -> list[str]:
    return command_line.parse_flags(argv, {"--config=configs/X.py": command_line.CONFIG, "--workdir=DIR": command_line.WORKDIR})


def main(argv: Sequence[str]) -> None:
    del argv
    command_line.log_to_stderr()
    with command_line.failures():
        job = _prepare(command_line.CONFIG.value)
        sys.exit(job())


def _prepare(config: Any) -> Job:
    """Everything that a user's mistake can stop, and then the job itself, which returns an exit code."""
    from tba_jax.experiment import checks, composition, other_runs
    from tba_jax.run.lease import LeaseHeld

    try:
        if "learner" not in config:
            raise ValueError("--config is not made from configs/base.py; supervised training is python -m tba_jax supervised")
        if _ROLE.value == "searcher":
            _split_cpu(config.searchers.cpu_devices)
        init_from = other_runs.parse_init_from(_INIT_FROM.value)
        if _DRY_RUN.value:
            return _described(composition.build(config))
        from tba_jax.experiment import jobs

        run = layout.open_run_dir(Path(command_line.WORKDIR.value).absolute(), _SHARED.value)
        _check_shared(run)
        experiment = composition.build(config, reward_models=_known_reward_models(run))
        if not places.exists(run.config):
            checks.check_all_are_read(config)
        settings = jobs.Settings(
            experiment=experiment,
            run=run,
            name=_NAME.value,
            label=label_of(config_flags.get_config_filename(flags.FLAGS["config"])),
            allow_change=tuple(_ALLOW_CHANGE.value),
            arguments=tuple(sys.argv[1:]),
            init_from=init_from,
        )
        return jobs.ROLES[_ROLE.value](settings)
    except (ValueError, LeaseHeld) as error:
        if processes.is_storage_failure(error):
            raise
        command_line.refuse(error)


def _described(experiment: "Experiment") -> Job:
    """--dry_run."""
    from tba_jax.experiment import checks, plan
    from tba_jax.rewards import models

    checks.check_all_are_read(experiment.config)
    for role in ("searcher", "evaluator"):
        models.check(experiment.task, role=role)
    print(plan.describe(experiment))
    return lambda: 0


def _known_reward_models(run: layout.RunDir) -> dict[str, str] | None:
    """What the contract of a run that is there says of them, for a role that scores nothing: it does without the models."""
    from tba_jax.run import contract

    if _ROLE.value not in ("trainer", "reference") or not places.exists(run.config):
        return None
    known: dict[str, str] = contract.read_run(run)["contract"]["reward_models"]
    return known


def label_of(recipe: str) -> str:
    """What the run's last line calls it: configs/demo.py -> demo, configs/demo_baselines.py:grpo -> demo_baselines:grpo."""
    return Path(recipe).name.replace(".py", "")


def _split_cpu(devices: int) -> None:
    """Makes JAX see so many CPU devices. Before it sees any; without effect on what runs on accelerators."""
    import jax

    if devices > 1:  # one is what there is, or as many as XLA_FLAGS says
        jax.config.update("jax_num_cpu_devices", devices)


def _check_shared(run: layout.RunDir) -> None:
    if not isinstance(run.shared, places.Bucket):
        return
    if run.shared.root.startswith("memory:"):
        raise ValueError(f"--shared={run.shared} ends with its process; it must be a folder, or one of gs://… and s3://…")
    places.check_answers(
        run.shared, report=lambda seconds: log.warning("%s has not answered for %d s; still trying", run.shared, seconds)
    )


if __name__ == "__main__":
    processes.hold()
    app.run(main, flags_parser=parse_flags)
