"""--for_this_machine: which variant of a recipe is made for the devices that are here (configs/machines.py)."""

import dataclasses
import logging

from tba_jax.experiment import answer, fitting
from tba_jax.experiment.composition import Experiment
from tba_jax.roles import gpus

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Row:
    """A variant, and what a machine has at least for it: platform of its devices, how many, and GiB of each."""

    variant: str
    platform: str
    count: int
    gib: float


# The first row is taken whose devices are here. GPUs beyond its count are used too, see roles/placement.py.
TABLE = (
    Row("8x80gb", "gpu", count=8, gib=70),
    Row("1x80gb", "gpu", count=1, gib=70),
    Row("1x24gb", "gpu", count=1, gib=20),
    Row("1x16gb", "gpu", count=1, gib=14),
    Row("v5p-8", "tpu", count=4, gib=80),
    Row("v5e-8", "tpu", count=8, gib=15),
    Row("v5e-1", "tpu", count=1, gib=15),
    Row("cpu", "cpu", count=1, gib=0),
)


def variant() -> str:
    """The variant for this machine, by what nvidia-smi says of its GPUs, or JAX of other devices.

    Raises:
      ValueError: there are accelerators of which none is large enough; or see gpus.jax_devices.
    """
    if visible := gpus.visible():
        platform, count, memory = "gpu", len(visible), min(gpu.memory or 0 for gpu in visible)
    else:
        devices = gpus.jax_devices()
        platform, count, memory = devices[0].platform, len(devices), fitting.device_memory(devices[0]) or 0
    for row in TABLE:
        if row.platform == platform and count >= row.count and memory >= row.gib * (1 << 30):
            return row.variant
    least = min((row.gib for row in TABLE if row.platform == platform), default=0)
    raise ValueError(
        f"--for_this_machine has no variant for {answer.machine_in_words()} of {fitting.in_words(memory)}: the smallest has "
        f"{least} GiB; JAX_PLATFORMS=cpu takes the variant for a CPU"
    )


def check_fits(experiment: Experiment) -> None:
    """Tells the estimate of what the run takes here.

    Raises:
      ValueError: a role does not fit by it.
    """
    found, _ = answer.judge(experiment)
    for verdict in found:
        log.info("%s", verdict)
    if problems := [f"{verdict.who} {verdict.sentence}" for verdict in found if verdict.fits is False]:
        raise ValueError(
            f"the run does not fit this machine ({answer.machine_in_words()}), by estimates from shapes: {'; '.join(problems)}; "
            "take a smaller model, adapters (lora.rank) or less memory for search (searchers.slots, evaluation.batch_size)"
        )
