"""--for_this_machine: which variant of a recipe is made for the devices that are here (configs/machines.py)."""

from tba_jax.experiment import answer, fitting
from tba_jax.roles import gpus

# (variant, platform, devices, GiB of each): what a machine has at least. The first row is taken whose devices are here; GPUs
# beyond its count are used too, see roles/placement.py.
TABLE = (
    ("8x80gb", "gpu", 8, 70),
    ("1x80gb", "gpu", 1, 70),
    ("1x24gb", "gpu", 1, 20),
    ("1x16gb", "gpu", 1, 14),
    ("v5p-8", "tpu", 4, 80),
    ("v5e-8", "tpu", 8, 15),
    ("v5e-1", "tpu", 1, 15),
    ("cpu", "cpu", 1, 0),
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
    rows = [row for row in TABLE if row[1] == platform]
    for name, _, least, gib in rows:
        if count >= least and memory >= gib * (1 << 30):
            return name
    raise ValueError(
        f"--for_this_machine has no variant for {answer.machine_in_words()} of {fitting.in_words(memory)}: the smallest has "
        f"{min((gib for *_, gib in rows), default=0)} GiB; JAX_PLATFORMS=cpu takes the variant for a CPU"
    )
