"""The memory that a process may take, and the name of its type of CPU."""

import pytest

from tba_jax.run import machine


def test_memory_is_at_most_that_of_the_machine(monkeypatch):
    whole = machine.memory()
    monkeypatch.setattr(machine, "_group_limits", lambda: [whole // 2, 1 << 60])
    assert machine.memory() == whole // 2


@pytest.mark.parametrize(
    "groups, file, limit",
    [
        ("0::/job/step\n", "job/memory.max", 5 << 20),
        ("0::/job/step\n", "job/step/memory.max", 5 << 20),
        ("4:cpu:/x\n7:memory:/job\n", "memory/job/memory.limit_in_bytes", 5 << 20),
        ("4:cpu:/job\n", "memory/job/memory.limit_in_bytes", 1 << 60),
    ],
)
def test_limits_of_control_groups(groups, file, limit, tmp_path):
    (tmp_path / "cgroup").write_text(groups)
    path = tmp_path / "fs" / file
    path.parent.mkdir(parents=True)
    for text, expected in ((f"{5 << 20}\n", limit), ("max\n", 1 << 60)):
        path.write_text(text)
        assert min(machine._group_limits(list_file=tmp_path / "cgroup", root=tmp_path / "fs")) == expected


def test_a_type_of_cpu_is_its_model_and_its_instructions(tmp_path):
    def named(lines: str) -> str:
        (tmp_path / "cpuinfo").write_text(lines)
        return machine.cpu_type(list_file=tmp_path / "cpuinfo")

    new = named("model\t\t: 143\nflags\t\t: avx2 avx512f\ncpu MHz\t\t: 2100.0")
    assert new == named("model\t\t: 143\nflags\t\t: avx2 avx512f\ncpu MHz\t\t: 900.0")
    assert len({new, *map(named, ("model: 143\nflags: avx2", "model: 85\nflags: avx2", "Features: asimd"))}) == 4
