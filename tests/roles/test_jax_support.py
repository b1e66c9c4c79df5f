"""Accelerators that JAX cannot use, by faked files of /dev, /proc and /sys."""

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
    monkeypatch.setattr(jax_support, "_ROOT", folder)
    monkeypatch.setenv("PATH", "")
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return folder


def write(file, text=""):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def driver(root, version):
    write(root / "proc/driver/nvidia/version", f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release\n")


def tpu(root, number, device, vendor="0x1ae0"):
    write(root / f"sys/bus/pci/devices/0000:00:0{number}.0/vendor", f"{vendor}\n")
    write(root / f"sys/bus/pci/devices/0000:00:0{number}.0/device", f"{device}\n")


@pytest.mark.parametrize("version", ["", "550.54.14"])
def test_what_to_install_is_named_with_the_driver(root, version):
    if version:
        driver(root, version)
    write(root / "dev/nvidia0")
    assert jax_support.driver_version() == version
    told = jax_support.unused("JAX finds 1 × cpu")
    assert told.startswith("this machine has 1 × GPU (/dev/nvidia0), but JAX finds 1 × cpu: ") and "JAX_PLATFORMS=cpu" in told
    for extra, oldest in (("cuda13", 580), ("cuda12", 525)):
        assert f"`make venv ACCELERATOR={extra}` or `pip install 'jax[{extra}]=={JAX}'`" in told and f"driver {oldest} or" in told
    assert ("the driver here is 550.54.14" in told) == bool(version)


def test_support_that_is_installed_and_does_not_start_is_not_asked_for_again(root, monkeypatch):
    write(root / "dev/nvidia0")
    driver(root, "550.54.14")
    monkeypatch.setattr(jax_support, "installed", lambda: {"jax-cuda13-plugin": "0.9.9"})
    told = jax_support.unused("JAX finds 1 × cpu")
    assert "jax-cuda13-plugin 0.9.9" in told and "a driver from 580 on; the driver here is 550.54.14" in told
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


@pytest.mark.parametrize("name, value", [("JAX_PLATFORMS", "cpu"), ("CUDA_VISIBLE_DEVICES", ""), ("CUDA_VISIBLE_DEVICES", "-1")])
def test_who_asks_for_no_gpu_is_told_nothing(root, monkeypatch, name, value):
    write(root / "dev/nvidia0")
    monkeypatch.setenv(name, value)
    assert jax_support.unused("x") == ""


def test_gpus_that_a_container_was_not_given_are_only_mentioned(root):
    (root / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert jax_support.unused("x") == "" and "the machine has 1 × GPU" in jax_support.hidden_gpus()
    write(root / "dev/nvidia0")
    assert jax_support.hidden_gpus() == ""


def test_a_role_is_refused_where_jax_uses_the_cpu_beside_an_accelerator(root):
    """No nvidia-smi is there, as in images without the driver's programs; JAX has the CPU alone."""
    assert gpus.jax_devices() == jax.devices()
    write(root / "dev/nvidia0")
    with pytest.raises(ValueError, match=r"this machine has 1 × GPU \(/dev/nvidia0\), but JAX finds 8 × cpu: .*make venv ACCEL"):
        gpus.jax_devices()
    os.environ["JAX_PLATFORMS"] = "cpu"  # monkeypatch restores it
    assert gpus.jax_devices() == jax.devices()
