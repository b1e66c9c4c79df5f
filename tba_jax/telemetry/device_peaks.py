"""What devices could compute and read at most, as their makers state it: the denominators of bounds and of utilisation."""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

log = logging.getLogger(__name__)


class Peaks(NamedTuple):
    """flops: operations a second of dense products of bfloat16, or float16 where there is none. bandwidth: bytes a second."""

    flops: float
    bandwidth: float


# device_kind as JAX and nvidia-smi write it -> its peaks. TPUs are counted by chips.
PEAKS = {
    "TPU v4": Peaks(275e12, 1228e9),
    "TPU v5 lite": Peaks(197e12, 819e9),
    "TPU v5e": Peaks(197e12, 819e9),
    "TPU v5": Peaks(459e12, 2765e9),
    "TPU v5p": Peaks(459e12, 2765e9),
    "TPU v6 lite": Peaks(918e12, 1640e9),
    "TPU v6e": Peaks(918e12, 1640e9),
    "NVIDIA B200": Peaks(2250e12, 8000e9),
    "NVIDIA H200": Peaks(989e12, 4800e9),
    "NVIDIA H200 NVL": Peaks(835e12, 4800e9),
    "NVIDIA GH200 480GB": Peaks(989e12, 4000e9),
    "NVIDIA H100 80GB HBM3": Peaks(989e12, 3352e9),
    "NVIDIA H100 NVL": Peaks(835e12, 3938e9),
    "NVIDIA H100 PCIe": Peaks(756e12, 2039e9),
    "NVIDIA A100-SXM4-80GB": Peaks(312e12, 2039e9),
    "NVIDIA A100-SXM4-40GB": Peaks(312e12, 1555e9),
    "NVIDIA A100 80GB PCIe": Peaks(312e12, 1935e9),
    "NVIDIA A100-PCIE-40GB": Peaks(312e12, 1555e9),
    "NVIDIA L40S": Peaks(362e12, 864e9),
    "NVIDIA A10G": Peaks(70e12, 600e9),
    "NVIDIA L4": Peaks(121e12, 300e9),
    "Tesla T4": Peaks(65e12, 320e9),
}


def of(devices: Sequence[Any], *, flops: float = 0.0, bandwidth: float = 0.0) -> Peaks:
    """The peaks of all these devices together; 0 where it is not known, which is said in the log.

    Args: devices: of one kind; flops, bandwidth: of one device, before those of the table (metrics.peak_flops, .peak_bandwidth).
    """
    table = PEAKS.get(kind := devices[0].device_kind, Peaks(0.0, 0.0))
    each = Peaks(flops or table.flops, bandwidth or table.bandwidth)
    if lacks := [name for name, peak in (("mfu", each.flops), ("bandwidth_share", each.bandwidth)) if not peak]:
        told = "the metrics have no %s: set metrics.peak_flops and metrics.peak_bandwidth, since the peaks of %s are not known"
        log.info(told, " and no ".join(lacks), kind)
    return Peaks(len(devices) * each.flops, len(devices) * each.bandwidth)
