"""Where a role's time went: seconds from cumulative shares, restarts, and the exact spans at the end."""

import json

import numpy as np
import pytest

from tba_jax.reporting import timeline
from tba_jax.reporting.timeline import DOWN, STARTING, Shares


def account(begin, times, **rates):
    """Lines of an account that begins at `begin`; rates: name -> function of the seconds since then, its seconds."""
    found = []
    for number, at in enumerate(times):
        seconds = {name: rate(at - begin) for name, rate in rates.items()}
        other = at - begin - sum(seconds.values())
        shares = {f"time_{name}": value / (at - begin) for name, value in {**seconds, "other": other}.items()}
        found.append({"step": number + 1, "time": at, **shares})
    return found


def test_the_seconds_of_an_account_are_found_again():
    lines = account(100.0, np.arange(101.0, 161.0), update=lambda t: 0.5 * t, wait_rows=lambda t: max(0.0, t - 30) * 0.4)
    shares = Shares()
    shares.add(lines)
    totals = shares.totals()
    assert totals["update"] == pytest.approx(30, abs=0.1) and totals["wait_rows"] == pytest.approx(12, abs=0.1)
    edges, by_name = shares.buckets()
    late = by_name["wait_rows"][(edges[:-1] > 135) & (edges[1:] < 155)]
    early = by_name["wait_rows"][edges[1:] < 128]
    assert late == pytest.approx(0.4, abs=0.01) and early == pytest.approx(0.0, abs=0.01)
    assert sum(each.max() for each in by_name.values()) > 0
    np.testing.assert_allclose(np.sum([*by_name.values()], axis=0), 1.0)


@pytest.mark.parametrize("known", [True, False])
def test_a_restart_begins_another_account(known):
    first = account(100.0, np.arange(101.0, 131.0), update=lambda t: 0.9 * t, publish=lambda t: 0.05 * t)
    second = account(200.0, np.arange(201.0, 221.0), update=lambda t: 0.2 * t, wait_rows=lambda t: 0.7 * t)
    shares = Shares([100.0, 195.0] if known else [])
    shares.add(first + second)
    totals = shares.totals()
    assert totals["update"] == pytest.approx(27 + 4, abs=0.5) and totals["wait_rows"] == pytest.approx(14, abs=0.5)
    assert totals[DOWN] == pytest.approx(65 if known else 70, abs=1.0)
    assert totals.get(STARTING, 0.0) == pytest.approx(5 if known else 0, abs=0.1)


def test_a_searcher_that_counts_anew_has_another_account():
    first = account(0.0, np.arange(1.0, 31.0), decode=lambda t: 0.9 * t)
    second = account(100.0, np.arange(101.0, 131.0), decode=lambda t: 0.9 * t)
    shares = Shares()
    shares.add(first + second)
    assert shares.totals()["decode"] == pytest.approx(54, abs=1.0) and shares.totals()[DOWN] == pytest.approx(70, abs=1.0)


def test_a_long_run_stays_within_its_buckets():
    shares = Shares()
    for begin in range(1, 200_000, 10_000):
        times = np.arange(begin, begin + 10_000, 100.0)
        shares.add([{"step": t, "time": float(t), "time_update": 0.75, "time_other": 0.25} for t in times])
    edges, by_name = shares.buckets()
    assert len(edges) <= timeline.BUCKETS + 1 and shares.totals()["update"] == pytest.approx(150_000, rel=0.01)
    assert by_name["update"] == pytest.approx(0.75, abs=0.01)


def test_lines_without_shares_and_odd_ones_are_left_out():
    shares = Shares()
    shares.add(
        [{"step": 1, "time": 1.0}, {"step": 2, "time": 2.0, "time_update": "x"}, {"step": 3, "time": 3.0, "time_other": 1.0}]
    )
    assert shares.totals() == {"other": 1.0}


def test_the_last_spans_of_all_roles_are_bounded(tmp_path):
    for role in ("trainer", "searcher-0"):
        (tmp_path / role).mkdir()
        lines = [{"at": 1000.0 + i, "lane": "main", "spans": [["update", 0.0, 0.5], ["wait_rows", 0.5, 0.4]]} for i in range(500)]
        (tmp_path / role / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"at": 15')
    folders = {role: tmp_path / role for role in ("trainer", "searcher-0", "absent")}
    found = timeline.spans(folders, most=100, seconds=60.0)
    assert len(found) == 100 and {span.role for span in found} == {"trainer", "searcher-0"}
    assert found[-1].begin == pytest.approx(1499.5) and found == sorted(found)
    assert min(span.begin for span in timeline.spans(folders, seconds=60.0)) >= 1438


def test_spans_that_are_none_are_left_out(tmp_path):
    lines = [{"at": "x", "lane": "main", "spans": []}, {"at": 1.0, "lane": "main", "spans": [["a", 0.0], 3, ["b", 0.0, 1.0]]}]
    (tmp_path / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [span.name for span in timeline.spans({"trainer": tmp_path})] == ["b"]


def test_a_first_line_right_after_the_account_began_is_no_restart():
    lines = account(100.0, [100.2, 107.0, 112.0], journal=lambda t: 0.1 + 0.01 * t, update=lambda t: 0.5 * t)
    shares = Shares([90.0])
    shares.add(lines)
    assert DOWN not in shares.totals()
