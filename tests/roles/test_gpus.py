"""Accelerators by what driver, files of /dev, /proc and /sys, and JAX say. `nvidia-smi` is a script here: no GPU is needed.

Where roles are placed: cores, GPUs and shares of their memory.
"""

import dataclasses
import importlib.metadata
import os
from typing import Any
from unittest.mock import Mock

import jax
import pytest

from configs import base
from tba_jax import main
from tba_jax.commands import command_line
from tba_jax.roles import gpus
from tba_jax.roles.gpus import Gpu, place
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


# As nvidia-smi tells them of an H100 at rest.
MEMORY, FREE = 81_559 << 20, 81_079 << 20


def config_with(**overrides: Any) -> Any:
    return tiny_run.config_with({name.replace("__", "."): value for name, value in overrides.items()})


def some_gpus(count: int, free: int = FREE) -> tuple[Gpu, ...]:
    return tuple(Gpu(name=str(i), memory=MEMORY, free=free) for i in range(count))


def on(count: int, check=lambda devices: None, **settings: Any) -> dict[str, str]:
    """Role -> its GPUs, of a run with two searchers and an evaluator unless settings say otherwise."""
    found = place(config_with(**settings), cpus=range(8), gpus=some_gpus(count), check=check)
    return {name: "".join(placed.gpus) for name, placed in found.items()}


@pytest.mark.parametrize(
    "cpus, expected",
    [
        ([5], [(5,), (5,), (5,), (5,)]),
        ([0, 1], [(0,), (1,), (1,), (1,)]),
        (range(8), [(0, 1, 2, 3), (4, 6), (5, 7), (4, 5, 6, 7)]),
    ],
)
def test_cores(cpus, expected):
    """Of the trainer, two searchers and the evaluator. More searchers than cores take turns."""
    for there in (0, 3):
        found = place(base.get_config(), cpus=cpus, gpus=some_gpus(there))
        assert [placed.cpus for placed in found.values()] == expected
        assert {placed.memory_fraction > 0 for placed in found.values()} == {there > 0}
    found = place(config_with(searchers__count=5, evaluation__enabled=False), cpus=range(4), gpus=())
    assert [found[f"searcher-{i}"].cpus for i in range(5)] == [(2,), (3,), (2,), (3,), (2,)]


@pytest.mark.parametrize(
    "count, trainer, first, second, evaluator",
    [(1, "0", "0", "0", "0"), (2, "0", "1", "1", "1"), (3, "0", "1", "2", "1"), (4, "0", "1", "2", "3"), (8, "01234", *"567")],
)
def test_searchers_and_evaluator_take_turns_on_the_last_gpus_and_the_trainer_has_the_others(
    count, trainer, first, second, evaluator
):
    assert on(count) == {"trainer": trainer, "searcher-0": first, "searcher-1": second, "evaluator": evaluator}


def test_the_trainer_gets_the_most_that_its_mesh_fits():
    def even(devices: int) -> None:
        if devices % 2:
            raise ValueError(f"{devices} is odd")

    assert on(8, even)["trainer"] == "0123" and on(7, even)["trainer"] == "0123"
    with pytest.raises(ValueError, match="1 is odd"):
        on(4, even)


def test_meshes_of_several_gpus_are_blocks():
    split = dict(searchers__mesh__tensor=2, searchers__count=1)
    assert on(8, **split) == {"trainer": "0123", "searcher-0": "45", "evaluator": "7"}
    assert on(2, **split) == {"trainer": "01", "searcher-0": "01", "evaluator": "1"}
    for setting, words in (
        ("searchers__task_devices", "searchers.mesh and searchers.task_devices"),
        ("learner__mesh__fsdp", "lear"),
    ):
        with pytest.raises(ValueError, match=rf"{words}.* make up \d GPUs for .*; there are 2"):
            on(2, **{setting: 4})


def fractions(count: int, **settings: Any) -> list[float]:
    return [placed.memory_fraction for placed in place(config_with(**settings), cpus=[0], gpus=some_gpus(count)).values()]


def test_of_a_shared_gpu_a_trainer_takes_half_or_what_is_set_and_the_others_the_rest():
    assert fractions(4) == [0.95] * 4
    assert fractions(1) == [0.475, 0.158, 0.158, 0.158]
    assert fractions(2) == [0.95, 0.316, 0.316, 0.316]
    set_all = dict(learner__memory_fraction=0.5, searchers__memory_fraction=0.2, evaluation__memory_fraction=0.2)
    assert fractions(1, searchers__count=1, **set_all) == [0.5, 0.2, 0.2]
    assert fractions(3, searchers__count=1, **set_all) == [0.95] * 3
    assert fractions(1, searchers__count=1, learner__memory_fraction=0.55) == [0.55, 0.2, 0.2]
    told = r"GPU 0: 0\.95 of its memory may be taken, too little for learner\.memory_fraction=0\.5"
    with pytest.raises(ValueError, match=told):
        fractions(1, searchers__count=2, **set_all | {"searchers__memory_fraction": 0.3})


def test_what_others_hold_of_a_gpu_is_not_given_out():
    found = place(config_with(searchers__count=1), cpus=[0], gpus=some_gpus(3, free=MEMORY // 2))
    assert {placed.memory_fraction for placed in found.values()} == {0.49}
    with pytest.raises(ValueError, match=r"other processes hold 78\.6 of the 79\.6 GiB of GPU 0: end them"):
        place(config_with(), cpus=[0], gpus=some_gpus(1, free=1 << 30))
