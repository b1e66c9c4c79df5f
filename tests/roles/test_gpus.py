"""Accelerators by what driver, files of /dev, /proc and /sys, and JAX say. `nvidia-smi` is a script here: no GPU is needed."""

import dataclasses
import importlib.metadata
import os
from unittest.mock import Mock

import jax
import pytest

from tba_jax import main
from tba_jax.commands import command_line
from tba_jax.roles import gpus
from tba_jax.roles.gpus import Gpu
from tests.support import tiny_run

FIRST, SECOND = (
    Gpu(name="0", kind="NVIDIA H200", memory=81559 << 20, free=81079 << 20),
    Gpu(name="1", kind="A100", memory=40960 << 20),
)
LISTED = "0, GPU-1a2b, NVIDIA H200, 81559, 81079\\n1, GPU-3c4d, A100, 40960, [N/A]\\n"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The root of a machine without any device or driver; processes may use whatever is put there."""
    monkeypatch.setattr(gpus, "_ROOT", tmp_path / "root")
    monkeypatch.setenv("PATH", "")
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "root"


@pytest.fixture
def driver(root, tmp_path, monkeypatch):
    """driver(answer) has nvidia-smi of this machine print the answer; two GPUs before."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")

    def answers(text: str) -> None:
        query = "--query-gpu=index,uuid,name,memory.total,memory.free"
        (tmp_path / "nvidia-smi").write_text(f'#!/bin/sh\n[ "$1" = {query} ] && {text}\n')
        (tmp_path / "nvidia-smi").chmod(0o755)

    answers(f"printf '{LISTED}'")
    return answers


def write(file, text=""):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, (FIRST, SECOND)),
        ({"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "0,1"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "1"}, (SECOND,)),
        ({"CUDA_VISIBLE_DEVICES": "MIG-3,GPU-1a"}, (Gpu(name="MIG-3"), dataclasses.replace(FIRST, name="GPU-1a"))),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ()),
        ({"PATH": ""}, ()),
        ({"PATH": "", "CUDA_VISIBLE_DEVICES": "0"}, (Gpu(name="0"),)),
    ],
    ids=str,
)
def test_gpus_that_a_process_may_use(monkeypatch, driver, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert gpus.visible() == expected


def test_a_driver_that_lacks_a_gpu_hangs_or_fails(driver, monkeypatch):
    monkeypatch.setattr(gpus, "_DRIVER_SECONDS", 0.2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,7")
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=1,7 names GPU 7; the driver lists 0, 1"):
        gpus.visible()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    driver("exec sleep 20")
    with pytest.raises(ValueError, match="nvidia-smi has not answered"):
        gpus.visible()
    driver("echo NVIDIA-SMI has failed, it is 2, really, 4, 5; exit 9")
    assert gpus.visible() == ()


def test_a_role_without_its_gpus_is_refused(driver, tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit, match="2"):
        command_line.execute(main, tiny_run.command(tmp_path / "run", "--role=trainer", "--config.searchers.count=1")[3:])
    said = capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()
    assert said.startswith("error: this process may use 2 × GPU (0, 1), but JAX finds 8 × cpu:")
    assert "ACCELERATOR=cuda13" in said and "ACCELERATOR=cuda12" in said
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert gpus.jax_devices() == jax.devices()


def test_a_platform_that_no_device_has_is_named(root, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "devices", Mock(side_effect=AssertionError))
    with pytest.raises(ValueError, match="JAX finds no device of JAX_PLATFORMS=cuda: name there a platform"):
        gpus.jax_devices()


def test_a_gpu_that_another_process_has_filled_is_refused(driver, monkeypatch):
    gpus.check_free()
    driver(f"printf '{LISTED.replace('81079', '1024')}'")
    told = r"GPU 0 has 1\.0 GiB free, and this role takes 59\.7 GiB, 75% of its 79\.6; other processes hold 78\.6 of the 79\.6"
    with pytest.raises(ValueError, match=told):
        gpus.check_free()
    for name, value in {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.01", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            gpus.check_free()


def test_what_to_install_for_gpus_is_named_with_the_driver(root, monkeypatch):
    write(root / "dev/nvidia0")
    write(root / "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Kernel Module for x86_64  550.54.14  Release\n")
    told = gpus.unused("JAX finds 1 × cpu")
    assert "1 × GPU (/dev/nvidia0)" in told and "JAX_PLATFORMS=cpu" in told and "the driver here is 550.54.14" in told
    assert f"jax[cuda12]=={importlib.metadata.version('jax')}" in told and "driver 525 or" in told and "driver 580 or" in told
    monkeypatch.setattr(gpus, "installed", lambda: {"jax-cuda13-plugin": "0.9.9"})
    told = gpus.unused("JAX finds 1 × cpu")
    assert "jax-cuda13-plugin 0.9.9" in told and "a driver from 580 on" in told and "make venv" not in told


def test_a_tpu_without_libtpu_is_told_what_to_install(root, monkeypatch):
    monkeypatch.setattr(gpus, "installed", dict)
    # Four chips, Google's network card, and a card of another vendor.
    for number, (vendor, device) in enumerate([("0x1ae0", "0x0063")] * 4 + [("0x1ae0", "0x0042"), ("0x8086", "0x0063")]):
        write(root / f"sys/bus/pci/devices/0000:00:0{number}.0/vendor", f"{vendor}\n")
        write(root / f"sys/bus/pci/devices/0000:00:0{number}.0/device", f"{device}\n")
    assert gpus.tpu_chips() == 0 and gpus.unused("x") == "", "a container that was given none"
    write(root / "dev/vfio/0")
    told = gpus.unused("JAX finds 1 × cpu")
    assert told.startswith("this machine has 4 × TPU chip, but JAX finds 1 × cpu: libtpu is not installed: ")
    assert "`make venv ACCELERATOR=tpu`" in told
    monkeypatch.setattr(gpus, "installed", lambda: {"libtpu": "0.0.42"})
    assert "libtpu 0.0.42 is installed and does not start" in gpus.unused("x")


def test_gpus_that_are_not_asked_for_or_not_given_end_no_role(root, monkeypatch):
    (root / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert gpus.unused("x") == "" and "the machine has 1 × GPU" in gpus.hidden_gpus() and gpus.jax_devices() == jax.devices()
    write(root / "dev/nvidia0")
    assert gpus.hidden_gpus() == ""
    with pytest.raises(ValueError, match=r"this machine has 1 × GPU \(/dev/nvidia0\), but JAX finds 8 × cpu: .*make venv ACCEL"):
        gpus.jax_devices()
    for name, value in (("JAX_PLATFORMS", "cpu"), ("CUDA_VISIBLE_DEVICES", ""), ("CUDA_VISIBLE_DEVICES", "-1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert gpus.unused("x") == ""
