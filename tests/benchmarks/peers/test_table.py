"""The tables of the comparison of systems: medians of medians, ratios, and systems without figures."""

from typing import Any

import pytest

from benchmarks.peers import cases, table
from benchmarks.peers.jobs import WARM_UP_STEPS
from benchmarks.peers.table import Group


def record(*seconds: float, rows_per_second: float = 1.0, **parts: float) -> dict[str, Any]:
    """A run whose warm-up took very long."""
    slow = [1000.0] * WARM_UP_STEPS
    return {
        "seconds": slow + list(seconds),
        "parts": {part: slow + [value] * len(seconds) for part, value in parts.items()},
        "tokens": [0] * WARM_UP_STEPS + [2048] * len(seconds),
        "rows_per_second": rows_per_second,
    }


def test_the_median_is_of_the_runs_medians_without_their_warm_up():
    found = table.medians([record(1.0, 2.0, 9.0), record(5.0, 5.0, 50.0), record(3.0, 4.0, 4.0, update=2.5)])
    assert found["step"] == 4.0
    assert found["parts"] == {"update": 2.5}
    assert found["tokens"] == 2048


def test_ratios_are_of_seconds_of_a_step_and_of_rows_per_second():
    found = {
        Group("fixed", True): {
            "trl": [record(6.0, 6.0, rows_per_second=5.0)],
            "bare": [record(1.0, 1.0, rows_per_second=30.0)],
            "tba_interleaved": [record(4.0, 4.0, rows_per_second=8.0)],
            "tba_async": [record(3.0, 3.0, rows_per_second=10.0)],
        }
    }
    (line,) = [line for line in table.lines(found) if line.startswith("| TRL GRPO")]
    assert line.split(" | ")[-4:] == ["1.50", "1.60", "2.00", "2.00 |"]
    (line,) = [line for line in table.lines(found) if line.startswith("| bare JAX update | 1.00")]
    assert not any(cell.strip(" |") for cell in line.split(" | ")[-6:]), "it is an update alone"


def test_a_system_without_figures_has_its_reason_below_the_table():
    found = {Group("fixed", True): {"trl": "trl==0 cannot be installed: no such version", "tunix": [record(1.0, 1.0)]}}
    lines = table.lines(found)
    assert any(line.startswith("| Tunix GRPO | 1.00") for line in lines)
    assert any("TRL GRPO" in line and "no such version" in line for line in lines)
    assert "no such version" in table.figures(found)["fixed/with"]["trl"]["failed"]


def test_slow_rewards_are_compared_with_the_same_step_without_them():
    found = {
        Group("fixed", True): {"tba_async": [record(3.0, 3.0)]},
        Group("slow_rewards", True): {"tba_async": [record(4.0, 4.0)], "trl": "failed"},
    }
    (line,) = [line for line in table.lines(found) if "slow rewards leave" in line]
    assert "0.75" in line


def test_the_picture_is_drawn_without_the_systems_that_failed(tmp_path):
    found = {
        Group("fixed", True): {"trl": "failed", "tba_async": [record(3.0, 3.0, update=2.0)]},
        Group("long_tailed", True): {},
    }
    table.plot(tmp_path / "peers.png", found)
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("flag, known", [("cases", cases.CASES), ("systems", cases.SYSTEMS)])
def test_an_unknown_name_is_refused_with_those_that_are_known(flag, known):
    with pytest.raises(ValueError, match=f"--{flag}=fixd .*{next(iter(known))}"):
        cases.checked(["fixd"], known, flag)
    assert cases.checked([], known, flag) == list(known)
