"""GPUs of 80 GB and what roles need of them, for tests of placements."""

from collections.abc import Callable
from typing import Any

from configs import base
from tba_jax.roles.gpus import Gpu

# As nvidia-smi tells them of an H100 at rest.
MEMORY, FREE = 81_559 << 20, 81_079 << 20


def config_with(**overrides: Any) -> Any:
    config = base.get_config()
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in overrides.items()})
    return config


def gpus(count: int, **changes: int | None) -> tuple[Gpu, ...]:
    """GPUs 0, 1 …"""
    memory: dict[str, int | None] = {"memory": MEMORY, "free": FREE}
    return tuple(Gpu(name=str(i), **(memory | changes)) for i in range(count))


def of(*, fits: Callable[[int], bool] = lambda devices: True, split: bool = False, **gib: float) -> Callable[..., int]:
    """What roles need (GiB, by kind). Args: fits: numbers of devices that the trainer's mesh fits; split: its need is divided."""

    def need(kind: str, *, devices: int, limit: int | None) -> int:
        if kind == "trainer" and not fits(devices):
            raise ValueError(f"the mesh does not fit {devices} devices")
        return int(gib.get(kind, 1) * (1 << 30)) // (devices if split and kind == "trainer" else 1)

    return need
