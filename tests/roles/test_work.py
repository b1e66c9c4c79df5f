"""What a trainer computes, counted by hand for whole rows, and its rates between points."""

import time

import numpy as np
import pytest

from tba_jax import packing
from tba_jax.models import hardware
from tba_jax.roles import work
from tba_jax.roles.work import Work, WorkRates
from tba_jax.telemetry.metrics import Peaks
from tests.support import tiny_decoders

P, R, Q, K = 6, 4, 3, 5
MODEL = tiny_decoders.CONFIGS["grouped, tied"]


@pytest.mark.parametrize("shares", [True, False])
def test_operations_of_whole_rows(shares):
    limits = packing.Limits(rows=Q * K, group=K, prompt=P, response=R, shares=shares)
    whole = np.full(Q * K, P), np.full(Q * K, R)
    plan = packing.plan(packing.Lengths(*whole, np.arange(Q * K) // K), limits, second_pass=0.0)
    counted = work.of_plan(plan, MODEL, responses=Q * K * R, passes=3)
    # Rows that share a prompt compute their last token too.
    prompt = hardware.forward_flops(MODEL, positions=P, logits=0)
    response = hardware.forward_flops(MODEL, positions=P + R, logits=R) - prompt
    apart = Q * K * hardware.forward_flops(MODEL, positions=P + R - 1, logits=R)
    assert counted.flops == 3 * (Q * prompt + Q * K * response if shares else apart)
    assert counted.tokens == plan.useful_tokens and counted.computed == plan.computed_tokens
    twice = work.of_plan(plan, MODEL, responses=Q * K * R, passes=6)
    assert twice.flops == 2 * counted.flops and (counted + counted) - counted == counted


def test_rates_are_of_the_time_between_two_points(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    rates, done = WorkRates(Peaks(flops=2000.0, bandwidth=1.0)), Work()
    step = Work(tokens=60, computed=80, flops=6000)
    assert rates.scalars() == {}

    def update(seconds: float) -> None:
        nonlocal done
        now[0] += seconds
        done += step
        rates.take(done)

    update(50.0)
    assert rates.scalars() == {}  # the first update waited for a compiler
    update(1.0)
    update(3.0)
    assert rates.scalars() == {"tokens_per_second": 30.0, "computed_tokens_per_second": 40.0, "mfu": 12000 / 4.0 / 2000}
    assert rates.scalars() == {}
    update(0.5)
    assert rates.scalars()["tokens_per_second"] == 120.0


def test_shares_are_there_where_the_peak_is_known():
    done = Work(tokens=1, computed=2, flops=300, bytes=40)
    assert done.shares(2.0, Peaks(1000.0, 100.0)) == {"mfu": 0.15, "bandwidth_share": 0.2}
    assert done.shares(2.0, Peaks(0.0, 100.0)) == {"bandwidth_share": 0.2} and done.shares(2.0, Peaks(0.0, 0.0)) == {}
