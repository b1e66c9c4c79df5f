"""Finds by compiling the meshes and budgets with which each role of a recipe fits its devices, and prints them as flags.

python -m tba_jax plan --config=RECIPE[:NAME] --topology=v5p:2x2x1 [--seconds=1800] [--config.SETTING=VALUE …]
python -m tba_jax plan --config=RECIPE[:NAME] --topology=trainer=v5p:2x2x2,searcher=v5p:2x2x1 [--config.SETTING=VALUE …]
python -m tba_jax plan --config=RECIPE[:NAME] --gpus=H100x8 [--config.SETTING=VALUE …]

No such device is needed, but the extra `tpu`: the TPU's own compiler runs, and for GPUs as many TPU chips stand in. Lengths are
those of the recipe, or --config.task.prompt_length and --config.task.response_length. Nothing is written, and no weights are
read. Progress is told on stderr.
"""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from tba_jax.commands import command_line, recipes, settings_help
from tba_jax.text.visible import visible

if TYPE_CHECKING:  # imported late: a mistyped flag is answered at once
    from tba_jax.experiment.planning import Planned, Settings


def add_flags(values: flags.FlagValues) -> settings_help.Program:
    recipes.add_flag(values)
    flags.DEFINE_list("topology", [], "TPUs of all roles, or of each: trainer=v5p:2x2x2,searcher=v5p:2x2x1", flag_values=values)
    what = "GPUs of one machine: NAMExCOUNT, or NAMExCOUNT@GIB with the memory of each; H100x8, L4x2@24"
    flags.DEFINE_string("gpus", "", what, flag_values=values)
    what = "after which no other settings are tried, and the best are printed"
    flags.DEFINE_integer("seconds", 1800, what, lower_bound=1, flag_values=values)
    return settings_help.BASE


def run(given: command_line.Given) -> command_line.Job:
    if bool(given.topology) == bool(given.gpus):
        raise ValueError("one of --topology and --gpus says for which devices the run is planned")
    config = recipes.load(given.config, given.overrides, program=settings_help.BASE)
    from tba_jax.experiment import compiling, composition, gpu_plans, meshes, planning, storage, topologies
    from tba_jax.run import layout, processes

    storage.check(storage.of_config(config), limit=storage.DRY_RUN_SECONDS)
    topologies.use_no_devices()
    asked = topologies.parse(given.topology, roles=compiling.ROLES)
    machine = gpu_plans.parse(given.gpus) if given.gpus else None
    roles = [role for role in meshes.roles_of(config) if machine or role in asked]
    if not roles:
        raise ValueError(f"--topology names no role of this run; its roles: {', '.join(meshes.roles_of(config))}")
    for topology in [*asked.values(), *([gpu_plans.stand_in(1)] if machine else [])]:
        try:
            topologies.devices(topology)
        except ValueError as error:
            stands_in = f"--gpus={given.gpus}: TPU chips stand in for GPUs; " if machine else ""
            raise ValueError(f"{stands_in}{error}") from error
    processes.stop_at_once()
    experiment = composition.build(config, reward_models={}, weights=False)
    nowhere = layout.RunDir(Path(os.devnull))  # no run is there: programs are made from shapes

    def job() -> int:
        placement: Settings = {}
        try:
            if machine is not None:
                placement, planned = gpu_plans.OnGpus(experiment, nowhere, gpus=machine, seconds=given.seconds).find()
            else:
                planned = planning.on_topologies(
                    experiment, nowhere, {role: asked[role] for role in roles}, seconds=given.seconds
                )
        except ValueError as error:
            raise processes.BadInput(str(error)) from error
        print(visible(describe(planned, placement, command=[f"--config={given.config}", *given.overrides])))
        return 0

    return job


def describe(planned: "Sequence[Planned]", placement: "Settings", *, command: Sequence[str]) -> str:
    """The text that is printed: a line for each role, the flags, and the dry run that shows all programs.

    Args: placement: settings that say which role gets which devices, {} where --topology does; command: the flags of the recipe.
    """
    from tba_jax.experiment import compiling

    lines = []
    for each in planned:
        worst = each.fit.worst
        share = f"{worst.peak / each.place.limit:.0%} of {compiling.in_words(each.place.limit)}"
        unchecked = "".join(f"; not checked: {what}" for what in each.fit.unchecked)
        lines.append(f"{each.role:9}  fits {each.place.name}: {share} ({worst.name}){unchecked}")
        lines.append(f"{'':9}  limit: {each.binds}")
    found = {**placement, **{name: value for each in planned for name, value in each.settings.items()}}
    flags_of_plan = [f"--config.{name}={value}" for name, value in found.items()]
    topology = ",".join(f"{each.role}={each.place.topology}" for each in planned)
    dry_run = ["python", "-m", "tba_jax.main", *command, *flags_of_plan, "--workdir=DIR", "--dry_run", f"--topology={topology}"]
    programs = "all programs:"
    if placement:  # a dry run knows nothing of GPUs that are not here
        programs = "all programs, on the chips that stand in; the limits of this dry run are those of the chips, not of the GPUs:"
    return "\n".join([*lines, "", "settings:", " ".join(flags_of_plan), "", programs, shlex.join(dry_run)])
