"""Evaluates a policy snapshot of a run on its held-out queries and prints the report; the run's folder stays as it is.

python -m tba_jax evaluate --workdir=DIR [--step=N] [--output=FILE] [--config.SETTING=VALUE …]

Settings change how it is evaluated: evaluation.queries, evaluation.samples_per_query, task.tldr.gold_path … Those that say what
the run's rows mean cannot differ from the run's.
"""

import argparse
import ast
import difflib
import functools
import json
import operator
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tba_jax.commands import command_line
from tba_jax.run import layout, places, processes
from tba_jax.schemas import flatten


def evaluate(workdir: Path, *, step: int | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The report of one snapshot, as in DIR/evaluations (see Evaluator.report). Needs no other process, and disturbs none.

    Args:
      step: of a published snapshot; None: the newest.
      overrides: flags --config.SETTING=VALUE, over the run's own config.

    Raises:
      ValueError: there is no run of this version or no such snapshot, or a setting is wrong or makes another run of it.
    """
    import jax

    from tba_jax import sharding
    from tba_jax.experiment import composition, meshes
    from tba_jax.rewards import models
    from tba_jax.roles.evaluator import Evaluator
    from tba_jax.run import contract, snapshots
    from tba_jax.tasks.interface import Closable

    run = layout.open_run_dir(workdir)
    stored = contract.read_run(run, called=str(workdir))
    experiment = composition.rebuild(stored, called=str(workdir), config=_overridden(stored["config"], overrides))
    steps = snapshots.committed_steps(run.policies)
    if not steps:
        raise ValueError(f"{run.policies} holds no snapshot yet")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise ValueError(f"--step={step} is not a snapshot of {workdir}; there are {', '.join(map(str, steps))}")
    if not places.exists(run.initial_reference):
        raise ValueError(f"{run.initial_reference} is gone: it names the reference policy, which reports compare with")
    config, task = experiment.config, experiment.task
    meshes.check(experiment, role="evaluator", devices=len(jax.devices()))
    models.check(task, role="evaluator")
    models.start(task, sharding.task_mesh(config.evaluation.task_devices))
    made = Evaluator(
        config,
        experiment.contract,
        run,
        policy=experiment.policy,
        tokenizer=experiment.tokenizer,
        task=task,
        queries=composition.heldout_queries(experiment),
    )
    try:
        return made.report(step)
    except FileNotFoundError as error:
        raise ValueError(f"snapshot {step} of {workdir} is gone: the run removed it meanwhile (publish.keep)") from error
    finally:
        if isinstance(task, Closable):
            task.close()


def _overridden(config: Mapping[str, Any], overrides: Sequence[str]) -> Any:
    """A run's config with the settings that flags change. Raises ValueError for one that there is not, or of another type."""
    from ml_collections import config_dict

    made = config_dict.ConfigDict(config)
    leaves = flatten(made.to_dict())
    for flag in overrides:
        name, assigned, text = flag.removeprefix("--config.").partition("=")
        if not (flag.startswith("--config.") and assigned):
            raise ValueError(f"{flag!r} is not a flag: settings are given as --config.SETTING=VALUE")
        if name not in leaves:
            close = difflib.get_close_matches(name, leaves, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"the run's config has no setting {name!r}{hint}")
        *path, last = name.split(".")
        functools.reduce(operator.getitem, path, made)[last] = _value(flag, text, leaves[name])
    return made


def _value(flag: str, text: str, before: Any) -> Any:
    """A setting's new value, of the type that it has."""
    if isinstance(before, str):
        return text
    try:
        value = ast.literal_eval(text.capitalize() if isinstance(before, bool) else text)
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"{flag}: {text!r} is not a value") from error
    if isinstance(before, list | tuple) and isinstance(value, list | tuple):
        return type(before)(value)
    if isinstance(before, float) and type(value) is int:
        return float(value)
    if before is not None and type(value) is not type(before):
        raise ValueError(f"{flag} must be of type {type(before).__name__}, as {before!r} is")
    return value


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tba_jax evaluate", description=__doc__, allow_abbrev=False)
    parser.add_argument("--workdir", type=Path, required=True, help="the run's folder")
    parser.add_argument("--step", type=int, help="trainer step of the snapshot; default: the newest")
    parser.add_argument("--output", type=Path, help="a file that the report is written to as well")
    given, overrides = parser.parse_known_args(arguments)
    command_line.log_to_stderr()
    if given.output is not None and not given.output.parent.is_dir():
        command_line.refuse(ValueError(f"--output={given.output}: its folder does not exist"))
    if given.output is not None and given.output.resolve().is_relative_to(given.workdir.resolve()):
        command_line.refuse(ValueError(f"--output={given.output} lies in --workdir={given.workdir}, which stays as it is"))
    with command_line.failures():
        try:
            report = evaluate(given.workdir, step=given.step, overrides=overrides)
        except ValueError as error:
            if processes.is_storage_failure(error):
                raise
            command_line.refuse(error)
        from tba_jax.roles.evaluator import plain

        text = json.dumps(plain(report), indent=1, ensure_ascii=False)
        print(text)
        if given.output is not None:
            given.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
