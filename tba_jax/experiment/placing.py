"""The placement of a run's roles on this machine, by what they need."""

import functools
import logging

from tba_jax.experiment import estimate, flow
from tba_jax.experiment.composition import Experiment
from tba_jax.roles import gpus, placement
from tba_jax.schemas import require

log = logging.getLogger(__name__)


def place(experiment: Experiment) -> dict[str, placement.Placement]:
    """Role name -> where --role=all runs the role on this machine. Raises ValueError where it cannot, see placement.place."""
    config = experiment.config
    need = functools.partial(estimate.need, experiment)
    placed = placement.place(config, cpus=placement.available_cpus(), gpus=gpus.visible(), need=need)
    count = sum(name.startswith("searcher-") for name in placed)
    if count < config.searchers.count:
        log.warning("the memory of the GPUs holds %d of searchers.count=%d searchers", count, config.searchers.count)
        fewer = config.copy_and_resolve_references()
        fewer.searchers.count = count
        require(not (stuck := flow.refusals(fewer)), "; ".join(stuck))
    return placed


def describe(experiment: Experiment) -> str:
    """The lines of a dry run about where --role=all runs the roles on this machine, or why it cannot."""
    if experiment.config.schedule.mode == "interleaved":
        return "schedule.mode=interleaved: all roles run in turn in one process, on all of its devices"
    try:
        return placement.describe(place(experiment))
    except ValueError as error:
        return f"--role=all cannot place the roles on this machine: {error}"
