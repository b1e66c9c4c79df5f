"""GPUs by what the driver says, and what JAX finds of them. `nvidia-smi` is a script here: no GPU is needed."""

import dataclasses
import os

import jax
import pytest

from tba_jax import main
from tba_jax.commands import command_line
from tba_jax.roles import gpus
from tba_jax.roles.gpus import Gpu
from tests.support import tiny_run


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A machine with two GPUs, by its driver. Returns the environment of a process there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "nvidia-smi"
    answer = "0, GPU-1a2b, NVIDIA H200, 81559, 81079\\n1, GPU-3c4d, A100, 40960, [N/A]\\n"
    script.write_text(f"#!/bin/sh\n[ \"$1\" = --query-gpu=index,uuid,name,memory.total,memory.free ] && printf '{answer}'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


FIRST, SECOND = (
    Gpu(name="0", kind="NVIDIA H200", memory=81559 << 20, free=81079 << 20),
    Gpu(name="1", kind="A100", memory=40960 << 20),
)


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, (FIRST, SECOND)),
        ({"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "0,1"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "1"}, (SECOND,)),
        ({"CUDA_VISIBLE_DEVICES": "MIG-3,GPU-1a"}, (Gpu(name="MIG-3"), dataclasses.replace(FIRST, name="GPU-1a"))),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"PATH": ""}, ()),
        ({"PATH": "", "CUDA_VISIBLE_DEVICES": "0"}, (Gpu(name="0"),)),
    ],
    ids=str,
)
def test_gpus_that_a_process_may_use(monkeypatch, driver, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert gpus.visible() == expected


def test_what_the_driver_does_not_list_or_answer_is_named(driver, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,7")
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=1,7 names GPU 7; the driver lists 0, 1"):
        gpus.visible()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    script = tmp_path / "bin" / "nvidia-smi"
    script.write_text("#!/bin/sh\necho NVIDIA-SMI has failed, it is 2 < 3, really, 4, 5\nexit 9\n")
    assert gpus.visible() == ()
    script.write_text("#!/bin/sh\nexec sleep 20\n")
    monkeypatch.setattr(gpus, "_DRIVER_SECONDS", 0.2)
    with pytest.raises(ValueError, match="nvidia-smi has not answered"):
        gpus.visible()


def refusal(tmp_path, capsys, *flags: str) -> str:
    """What main, in this process, says of a command line that it refuses before anything is written."""
    with pytest.raises(SystemExit, match="2"):
        command_line.execute(main, tiny_run.command(tmp_path / "run", *flags)[3:])
    assert not (tmp_path / "run").exists()
    return capsys.readouterr().err.splitlines()[-1]


def test_a_role_without_its_gpus_is_refused(driver, tmp_path, capsys):
    said = refusal(tmp_path, capsys, "--role=trainer", "--config.searchers.count=1")
    assert said.startswith("error: this process may use 2 × GPU (0, 1), but JAX finds 8 × cpu:")
    assert "ACCELERATOR=cuda13" in said


def test_a_platform_that_no_device_has_is_named(monkeypatch):
    def refuse():
        raise AssertionError

    for name, value in {"JAX_PLATFORMS": "cuda", "PATH": "", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(jax, "devices", refuse)
    with pytest.raises(ValueError, match="JAX finds no device of JAX_PLATFORMS=cuda: name there a platform"):
        gpus.jax_devices()


def test_a_dry_run_says_who_gets_which_gpu(driver, tmp_path, capsys):
    assert command_line.execute(main, tiny_run.command(tmp_path / "run", "--dry_run")[3:]) == 0
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert [line.split()[0] for line in lines] == ["trainer", "searcher-0", "searcher-1", "evaluator"]
    assert "GPUs 0 (its own)" in lines[0] and all("GPUs 1 (shared with" in line for line in lines[1:]), lines


def test_a_gpu_that_another_process_has_filled_is_refused(driver, tmp_path, monkeypatch, capsys):
    """The driver names 79.2 of 79.6 GiB of the first GPU as free, and nothing of the second."""
    gpus.check_free()
    script = tmp_path / "bin" / "nvidia-smi"
    script.write_text(script.read_text().replace("81079", "1024"))
    with pytest.raises(
        ValueError, match=r"GPU 0 has 1\.0 GiB free, and this role takes 59\.7 GiB, 75% of its 79\.6; other processes"
    ):
        gpus.check_free()
    assert "GPU 0 has 1.0 GiB free" in refusal(tmp_path, capsys, "--role=trainer")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.01")
    gpus.check_free()
