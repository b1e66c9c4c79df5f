"""Evaluates a policy snapshot of a run on its held-out queries and prints or writes the report, without changing the run.

python -m tba_jax evaluate --workdir=DIR [--step=best|last|N] [--output=FILE] [--config=RECIPE[:NAME] | --trust_task]
  [--config.SETTING=VALUE …]

Flags change settings of the evaluation, such as evaluation.queries, evaluation.samples_per_query and task.tldr.gold_path.
Settings that belong to the run's contract cannot change.
"""

import json
from pathlib import Path
from typing import Any

from absl import flags

from tba_jax import outputs
from tba_jax.commands import command_line, recipes
from tba_jax.outputs import visible_json, visible_line
from tba_jax.storage import contract, layout, places


def evaluate(
    workdir: Path, *, step: command_line.AskedStep, settings: command_line.Source = command_line.AS_IT_IS
) -> dict[str, Any]:
    """The report of one snapshot, as in DIR/evaluations (see Evaluator.report). Args: step: see command_line.chosen_step.

    Raises ValueError where there is no run or no such snapshot, nobody trusts its task, or a setting is wrong or the contract's.
    """
    from tba_jax.experiment import jobs, meshes
    from tba_jax.rewards import task_models
    from tba_jax.roles import gpus

    run, experiment = command_line.rebuilt(workdir, settings)
    step = command_line.chosen_step(run, step, called=str(workdir))
    if not places.exists(run.initial_reference):
        raise ValueError(f"{run.initial_reference} is gone: it names the policy of step 0, which the evaluator loads")
    config, task = experiment.config, experiment.task
    devices = gpus.jax_devices()
    meshes.check(experiment, role="evaluator", devices=len(devices))
    experiment = experiment.on_device(devices[0])
    task_models.check(task, role="evaluator")
    with task_models.started(task, config.evaluation.task_devices, date=experiment.contract.date):
        try:
            return jobs.make_evaluator(experiment, run).report(step)
        except FileNotFoundError as error:
            raise ValueError(f"snapshot {step} of {workdir} is gone: the run removed it meanwhile (publish.keep)") from error


def add_flags(values: flags.FlagValues) -> recipes.Program:
    settings = command_line.add_source(values)
    command_line.add_step(values)
    command_line.add_path(values, "output", "a file that the report is written to; without it the report is printed")
    return settings


def run(given: command_line.Given) -> int:
    output = given.output
    if output is not None:
        run = layout.open_run_dir(given.workdir)
        outputs.check_file(output, outside=(run.root, run.shared))
    contract.follow_privacy(given.workdir)
    from tba_jax.roles.evaluator import plain
    from tba_jax.roles.results import with_stderr

    report = evaluate(given.workdir, step=given.step, settings=command_line.source(given))
    text = visible_json(json.dumps(plain(report), indent=1, ensure_ascii=False))
    if output is None:
        print(text)
        return 0
    outputs.write(output, f"{text}\n".encode())
    score = f"{report['score_name']} {with_stderr(report, 'greedy_reward')} of greedy responses"
    print(visible_line(f"step {report['step']}: {score} to {report['queries']} held-out queries; the report is in {output}"))
    return 0
