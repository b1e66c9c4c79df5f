"""The values of settings that go by the kind of device, in one table that says where each is from.

A setting that is left to the device has the value "auto", or 0 where it is a number. What a user sets goes before this table.
`python -m benchmarks.gpu` tries the values of attention and remat on a device; benchmarks/RESULTS.md has what was found.
"""

import dataclasses
from typing import Any

AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class Default:
    """value: of the setting; source: where it is from, in a sentence."""

    value: Any
    source: str


_CHUNK = "Measured on two CPU cores, 2026-11-24: 8, 16, 32 and 64 steps differ by 4 % at most"
_REMAT = "Measured on two CPU cores, 2026-11-24: dots and none take .90 and 1.24 of its time, 1.7 and 4.0 of its memory"
_BATCH = "a whole batch, so that a step reads the weights once for all rows of an append"
_NOT_MEASURED = "Not measured on this kind of device"
# Setting -> platform of JAX -> default.
DEFAULTS: dict[str, dict[str, Default]] = {
    "model.attention": {
        "cpu": Default("xla", "The only kernel that CPUs have"),
        "gpu": Default("cudnn", f"{_NOT_MEASURED}: it keeps no scores; xla in float32, and with heads that it does not take"),
        "tpu": Default("splash", f"{_NOT_MEASURED}: it keeps no scores, by the compiler's memory (docs/fit.md)"),
    },
    "learner.remat": {
        "cpu": Default("full", _REMAT),
        "gpu": Default("full", f"{_NOT_MEASURED}: the least memory"),
        "tpu": Default("full", f"{_NOT_MEASURED}: the least memory, which docs/fit.md is compiled with"),
    },
    "searchers.decode_chunk": {
        "cpu": Default(32, _CHUNK),
        "gpu": Default(32, f"{_NOT_MEASURED}: that of CPUs"),
        "tpu": Default(32, f"{_NOT_MEASURED}: that of CPUs"),
    },
    # As a share of a batch of the searcher, see `slots`.
    "searchers.slots": {
        "cpu": Default(1.0, f"{_NOT_MEASURED}: {_BATCH}"),
        "gpu": Default(1.0, f"{_NOT_MEASURED}: {_BATCH}"),
        "tpu": Default(1.0, f"{_NOT_MEASURED}: {_BATCH}"),
    },
}


def value(setting: str, given: Any, platform: str) -> Any:
    """The value of a setting on a platform. Args: given: by the user, "auto" or 0 where the device decides."""
    if given not in (AUTO, 0):
        return given
    of_platform = DEFAULTS[setting]
    return of_platform.get(platform, of_platform["gpu"]).value


def slots(given: int, *, queries: int, samples: int, platform: str) -> int:
    """The sequences that a searcher decodes side by side, whole queries of a batch where the device decides.

    Args: given: searchers.slots, 0 where the device decides; queries, samples: of a batch, samples of each query.
    """
    share: float = DEFAULTS["searchers.slots"].get(platform, DEFAULTS["searchers.slots"]["gpu"]).value
    return given or samples * max(1, round(share * queries))
