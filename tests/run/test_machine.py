"""What nvidia-smi says of GPUs, and the memory that a process may take."""

import os
import stat

import pytest

from tba_jax.run import machine


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A program of that name, which prints the rows that are given."""

    def make(*rows: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return make


def test_gpus_are_those_of_nvidia_smi(nvidia_smi):
    nvidia_smi("0, GPU-1a2b, NVIDIA H200, 143771, 4", "1, GPU-3c4d, NVIDIA H200, 143771, 100000", "2, GPU-5e, Odd, [N/A], [N/A]")
    first, second = machine.gpus()
    assert first == machine.Gpu(index="0", uuid="GPU-1a2b", kind="NVIDIA H200", total=143771 << 20, used=4 << 20)
    assert machine.gpu("1") == second == machine.gpu("GPU-3c4d") == machine.gpu("GPU-3c")
    assert machine.gpu("2") is None and machine.gpu("GPU-") is None


def test_without_nvidia_smi_there_are_no_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpus() == [] and machine.gpu("0") is None


def test_memory_is_at_most_that_of_the_machine(monkeypatch):
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < machine.memory() <= whole
    monkeypatch.setattr(machine, "_group_limits", lambda: [whole // 2, 1 << 60])
    assert machine.memory() == whole // 2


@pytest.mark.parametrize(
    "groups, file, limit",
    [
        ("0::/job/step\n", "job/memory.max", 5 << 20),
        ("0::/job/step\n", "job/step/memory.max", 5 << 20),
        ("4:cpu:/x\n7:memory:/job\n", "memory/job/memory.limit_in_bytes", 5 << 20),
        ("4:cpu:/job\n", "memory/job/memory.limit_in_bytes", None),
    ],
)
def test_limits_of_control_groups(groups, file, limit, tmp_path):
    (tmp_path / "cgroup").write_text(groups)
    path = tmp_path / "fs" / file
    path.parent.mkdir(parents=True)
    path.write_text(f"{5 << 20}\n")
    found = machine._group_limits(list_file=tmp_path / "cgroup", root=tmp_path / "fs")
    assert min(found) == (limit or 1 << 60)
    path.write_text("max\n")
    assert min(machine._group_limits(list_file=tmp_path / "cgroup", root=tmp_path / "fs")) == 1 << 60
