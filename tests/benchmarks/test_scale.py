"""The scale benchmark at a tiny size: the ledger balances, whoever is killed and however the storage fails."""

import collections
import dataclasses

import numpy as np
import pytest

from benchmarks import scale


@pytest.mark.parametrize("place", ["folder", "s3"])
def test_no_acknowledged_row_is_lost_although_a_generator_is_killed_and_storage_throttles(tmp_path, monkeypatch, place):
    monkeypatch.setattr(scale, "GENERATORS", 1)
    load = dict(writers=3, rate=32.0, rows=16, seconds=2.0, stalls=0.1, dies=0.1, leaves=0.05, poll_seconds=0.2)
    with scale.placed(place, tmp_path, **load) as (asked, proxy):
        found = scale.measure(asked, proxy=proxy, faults=True, outage_seconds=0.3)
    assert found.balances, found.report
    assert found.committed >= 16 * len(found.visibility) > 0
    assert found.report["passed_over"] == 0
    if proxy is not None:
        assert proxy.counts["503"] > 0 and proxy.counts["PUT"] > found.counts["appends"]
        assert scale.dollars(found.requests, asked.seconds) > 0


def test_a_lost_or_unseen_row_shows(tmp_path):
    (tmp_path / "told").mkdir()
    (tmp_path / "told" / "0").write_text("w 32 5.0\nw 64 6.0\n")
    report, asked = collections.Counter(seen=64), scale.Load(root=str(tmp_path))
    seen = [("w", 32, 5.5), ("w", 64, 7.0)]
    found = scale.result(asked, tmp_path / "told", report, seen, {}, {"w": 64})
    np.testing.assert_allclose(found.visibility, [0.5, 1.0])
    assert found.balances
    assert not scale.result(asked, tmp_path / "told", report, seen, {}, {"w": 32}).balances
    assert not dataclasses.replace(found, report=collections.Counter(seen=48)).balances


def test_a_day_costs_what_the_price_list_says():
    # 1,000 PUT, 10,000 GET and 100 LIST in an hour: 24 × ($0.005 + $0.004 + $0.0005).
    assert scale.dollars({"PUT": 1000, "GET": 10_000, "LIST": 100, "DELETE": 10**6}, 3600.0) == pytest.approx(0.228)
