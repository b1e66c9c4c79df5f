"""Bounds on rates against sums by hand, and what they are bounded by."""

import pytest

from tba_jax.experiment import bounds, composition
from tba_jax.models import flops
from tba_jax.telemetry.device_peaks import PEAKS, Peaks
from tests.support import tiny_run

LLAMA = 8_030_261_248
EMBEDDING = 128256 * 4096


def found(role: str, peaks: Peaks, *, devices: int = 1, **changes) -> list[bounds.Bound]:
    settings = {"model__preset": "llama-3.1-8b", "model__compute_dtype": "bfloat16", "learner__queries": 4}
    return bounds.bounds(composition.build(tiny_run.config(**(settings | changes))), role=role, devices=devices, peaks=peaks)


def test_an_update_is_bounded_by_operations():
    """4 queries of 4 rows of 7 + 6 tokens: a prompt once and 5 tokens of each row go through the layers, 6 to the vocabulary.

    There are three passes, and attention.
    """
    (bound,) = found("trainer", Peaks(1e12, 1e18))
    weights = 32 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336)
    assert weights == LLAMA - 2 * EMBEDDING - 65 * 4096
    pairs = 12 * 13 // 2 - 7 * 8 // 2 + 7 * 8 // 2 / 4
    one = 2 * weights * (7 / 4 + 5) + 2 * EMBEDDING * 6 + 32 * 4 * 32 * 128 * pairs
    assert bound.by == "FLOP/s" and bound.work == "update"
    assert bound.rows == pytest.approx(1e12 / (3 * one)) and bound.tokens == pytest.approx(13 * bound.rows)
    adapters = {"lora__rank": 4}
    assert found("trainer", Peaks(1e12, 1e18), **adapters)[0].rows == pytest.approx(1e12 / (2 * one))
    moving = {"learner__objective": "tba_prime", "learner__reference__kind": "reset"}
    assert found("trainer", Peaks(1e12, 1e18), **moving)[0].rows == pytest.approx(1e12 / (4 * one))
    assert found("trainer", Peaks(1e12, 1e18), devices=4)[0].rows == pytest.approx(4 * bound.rows)


def test_an_update_is_bounded_by_bytes():
    """Weights are read forward and backward by each of two micro-batches; AdamW reads and writes three numbers of each."""
    (bound,) = found("trainer", Peaks(1e18, 1e12), learner__micro_batch_tokens=8 * 13)
    assert bound.by == "bytes/s" and bound.rows == pytest.approx(16 * 1e12 / (2 * 2 * 2 * LLAMA + 24 * LLAMA))


def test_decoding_is_bounded_by_what_a_step_reads():
    """16 slots in groups of 2: all weights but the embedding, 8 prompts of 7 entries, and half of 16 responses."""
    decoding, scoring = found("searcher", Peaks(1e18, 1e12))
    entry = 2 * 8 * 128 * 2 * 32
    step = 2 * (LLAMA - EMBEDDING) + entry * (8 * 7 + 16 * 3)
    assert decoding.work == "decoding" and decoding.by == "bytes/s"
    assert decoding.tokens == pytest.approx(16 * 1e12 / step) and decoding.rows == pytest.approx(decoding.tokens / 6)
    assert scoring.work == "scoring" and scoring.rows == pytest.approx(16 * 1e12 / (2 * LLAMA))
    assert found("searcher", Peaks(1e18, 1e12), learner__reference__kind="none") == [decoding]
    assert [each.work for each in found("evaluator", Peaks(1e18, 1e12), learner__reference__kind="none")] == [
        "decoding",
        "scoring",
    ]
    rounded = found("searcher", Peaks(1e18, 1e12), searchers__weights="int8")[0]
    assert 1.6 * decoding.tokens < rounded.tokens < 2 * decoding.tokens
    ways = found("searcher", Peaks(1e18, 1e12), devices=2, searchers__mesh__data=1, searchers__mesh__tensor=2)[0]
    assert ways.tokens == pytest.approx(2 * decoding.tokens)


def test_decoding_of_many_rows_is_bounded_by_operations():
    decoding, scoring = found("evaluator", Peaks(1e12, 1e18))
    model = composition.build(tiny_run.config(model__preset="llama-3.1-8b")).policy.model
    assert decoding.by == "FLOP/s" and decoding.rows == pytest.approx(1e12 / flops.decoding(model, prompt=7, response=6))
    assert scoring.rows == pytest.approx(1e12 / flops.forward(model, positions=12, logits=6))


def test_peaks_are_of_the_devices_that_the_compiler_names():
    assert PEAKS["TPU v5"].flops == 459e12 and PEAKS["TPU v5 lite"].bandwidth == 819e9 and "cpu" not in PEAKS
    assert all(1e13 < peaks.flops < 1e16 and 1e11 < peaks.bandwidth < 1e14 for peaks in PEAKS.values())
