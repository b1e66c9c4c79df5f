"""Accelerators that JAX cannot use, by faked files of /dev, /proc and /sys, and a script in the place of nvidia-smi."""

import importlib.metadata
import os

import jax
import pytest

from tba_jax.roles import gpus, jax_support

JAX = importlib.metadata.version("jax")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The root of a machine without any device; processes may use whatever is put there."""
    folder = tmp_path / "root"
    folder.mkdir()
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(jax_support, "_ROOT", folder)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return folder


def write(file, text=""):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def nvidia_smi(root, lines):
    script = root.parent / "bin" / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{lines}\n")
    script.chmod(0o755)


def driver(root, version, capability="9.0"):
    """An nvidia-smi that knows the version of the driver, and the compute capability of two GPUs."""
    nvidia_smi(root, f"case $1 in *driver*) told={version};; *compute_cap*) told={capability};; esac; echo $told; echo $told")


def tpu(root, number, device, vendor="0x1ae0"):
    write(root / f"sys/bus/pci/devices/0000:00:0{number}.0/vendor", f"{vendor}\n")
    write(root / f"sys/bus/pci/devices/0000:00:0{number}.0/device", f"{device}\n")


@pytest.mark.parametrize(
    "version, capability, asked",
    [
        ("580.65.06", "9.0", "cuda13"),
        ("581.0", "7.0", "cuda12"),
        ("535.129.03", "8.0", "cuda12"),
        ("470.82.01", "8.0", "driver 470.82.01 is older than 525"),
        ("580.65.06", "3.7", "compute capability is 3.7, and 5.2 is the least"),
    ],
)
def test_the_driver_and_the_gpus_choose_what_to_install(root, version, capability, asked):
    driver(root, version, capability)
    write(root / "dev/nvidia0")
    told = jax_support.unused("JAX finds 1 × cpu")
    assert told.startswith("this machine has 1 × GPU (/dev/nvidia0), but JAX finds 1 × cpu: ") and "JAX_PLATFORMS=cpu" in told
    assert (f"`make venv ACCELERATOR={asked}` or `pip install 'jax[{asked}]=={JAX}'`" in told) == asked.startswith("cuda")
    assert told.count("cuda1") == 2 if asked.startswith("cuda") else asked in told and "make venv" not in told


def test_the_driver_tells_its_version_in_proc_too(root):
    write(root / "dev/nvidia3")
    assert jax_support.driver_version() == "" and "ACCELERATOR=cuda13` or" in jax_support.unused("x")
    assert "ACCELERATOR=cuda12" in jax_support.unused("x")
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.14  Release Build  (dvs-builder@U16)  Thu Feb 22\n"
    write(root / "proc/driver/nvidia/version", line)
    assert jax_support.driver_version() == "550.54.14"
    assert "goes with driver 550.54.14" in jax_support.unused("x") and "cuda13" not in jax_support.unused("x")


def test_a_driver_that_fails_has_no_version(root):
    nvidia_smi(root, "echo NVIDIA-SMI has failed because it 12.5 could not communicate; exit 9")
    assert jax_support.driver_version() == ""


def test_support_that_is_installed_and_does_not_start_is_not_asked_for_again(root, monkeypatch):
    write(root / "dev/nvidia0")
    driver(root, "550.54.14")
    monkeypatch.setattr(jax_support, "installed", lambda: {"jax-cuda13-plugin": "0.9.9"})
    told = jax_support.unused("JAX finds 1 × cpu")
    assert "jax-cuda13-plugin 0.9.9" in told and "a driver from 580 on (the driver is 550.54.14)" in told
    assert importlib.metadata.version("jaxlib") in told and "python -m tba_jax version" in told and "make venv" not in told


def test_a_tpu_without_libtpu_is_told_what_to_install(root, monkeypatch):
    monkeypatch.setattr(jax_support, "installed", dict)
    for number in range(4):
        tpu(root, number, "0x0063")
    tpu(root, 4, "0x0042")  # Google's network card
    tpu(root, 5, "0x0063", vendor="0x8086")
    assert jax_support.tpu_chips() == 0 and jax_support.unused("x") == ""  # a container that was given none
    write(root / "dev/vfio/0")
    told = jax_support.unused("JAX finds 1 × cpu")
    assert told.startswith("this machine has 4 × TPU chip, but JAX finds 1 × cpu: libtpu is not installed: ")
    assert f"`make venv ACCELERATOR=tpu` or `pip install 'jax[tpu]=={JAX}'`" in told
    monkeypatch.setattr(jax_support, "installed", lambda: {"libtpu": "0.0.42"})
    assert "libtpu 0.0.42 is installed and does not start" in jax_support.unused("x")


@pytest.mark.parametrize(
    "environment", [{"JAX_PLATFORMS": "cpu"}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"}], ids=str
)
def test_who_asks_for_no_gpu_is_told_nothing(root, monkeypatch, environment):
    write(root / "dev/nvidia0")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert jax_support.unused("x") == ""


def test_gpus_that_a_container_was_not_given_are_only_mentioned(root, monkeypatch):
    (root / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert jax_support.unused("x") == "" and "the machine has 1 × GPU" in jax_support.hidden_gpus()
    write(root / "dev/nvidia0")
    assert jax_support.hidden_gpus() == ""
    (root / "dev/nvidia0").unlink()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert jax_support.hidden_gpus() == ""


def test_a_role_is_refused_where_jax_uses_the_cpu_beside_an_accelerator(root):
    """No nvidia-smi is there, as in images without the driver's programs; JAX has the CPU alone."""
    assert gpus.jax_devices() == jax.devices()
    write(root / "dev/nvidia0")
    with pytest.raises(ValueError, match=r"this machine has 1 × GPU \(/dev/nvidia0\), but JAX finds 8 × cpu: .*make venv ACCEL"):
        gpus.jax_devices()
    os.environ["JAX_PLATFORMS"] = "cpu"  # monkeypatch restores it
    assert gpus.jax_devices() == jax.devices()
