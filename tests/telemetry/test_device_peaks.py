"""The peaks of devices: from the table, from settings, and said where they are not known."""

import types

import pytest

from tba_jax.experiment import topologies
from tba_jax.telemetry import device_peaks
from tba_jax.telemetry.metrics import PEAKS, Peaks


def devices(kind: str, count: int) -> list[types.SimpleNamespace]:
    return [types.SimpleNamespace(device_kind=kind)] * count


def test_peaks_add_up_and_what_is_not_known_is_said(caplog):
    caplog.set_level("INFO")
    of_one = PEAKS["NVIDIA H200"]
    assert device_peaks.of(devices("NVIDIA H200", 4)) == Peaks(4 * of_one.flops, 4 * of_one.bandwidth)
    assert device_peaks.of(devices("NVIDIA H200", 2), flops=1e12) == Peaks(2e12, 2 * of_one.bandwidth)
    assert device_peaks.of(devices("gpu of tomorrow", 1), flops=2.0, bandwidth=5.0) == Peaks(2.0, 5.0) and not caplog.text
    assert device_peaks.of(devices("gpu of tomorrow", 2), bandwidth=5.0) == Peaks(0.0, 10.0)
    assert "gpu of tomorrow" in caplog.text and "no mfu" in caplog.text and "metrics.peak_flops" in caplog.text


@pytest.mark.parametrize("name", topologies.MEMORY)
def test_gpus_whose_memory_is_known_by_name_have_peaks(name):
    """The words of a kind are those that the driver gives: "NVIDIA H100 80GB HBM3", "Tesla T4"."""
    kinds = [kind for kind in PEAKS if name in kind.replace("-", " ").split()]
    assert kinds and all(PEAKS[kind].flops > 1e13 and PEAKS[kind].bandwidth > 1e11 for kind in kinds)
