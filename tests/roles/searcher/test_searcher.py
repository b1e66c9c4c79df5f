"""What a searcher appends, in which order, and on which weights, whatever its decoder is ahead with."""

import concurrent.futures
import functools
import itertools
import threading
from collections.abc import Callable

import jax
import numpy as np
import pytest

from tba_jax import sharding
from tba_jax.decoding.engine import Engine, Ticket
from tba_jax.replay.window import REJECTIONS, validate_rows
from tba_jax.roles.searcher.searcher import Searcher
from tba_jax.storage import layout, snapshots
from tba_jax.tasks.interface import Scores
from tests.support import applied, tiny_searcher
from tests.support.tiny_searcher import ROWS, Held, Q, assert_same_rows, committed, publish, rows_of_the_stream, weights


def always() -> bool:
    return True


def search_five_and_two(s, made, ahead: Callable[[], bool] = lambda: False) -> dict[str, np.ndarray]:
    """The rows of five batches by the weights of step 0, and of two by those of step 1."""
    assert not made.may_search and made.refresh() and made.may_search and not made.refresh()
    for batch in range(1, 8):
        if batch == 6:
            publish(s, 1)
            assert made.refresh()
        report = made.search(ahead=lambda: made._stream.taken < 5 * Q and ahead())
        assert committed(s) == batch * ROWS
    rows = rows_of_the_stream(s, made, 7 * Q)
    assert (report.rows, report.policy_step, report.tokens) == (ROWS, 1, rows["response_length"][-ROWS:].sum())
    means = [rows[name][-ROWS:].mean() for name in ("reward", "finished")]
    assert [report.reward, report.finished] == pytest.approx(means)
    return rows


@pytest.fixture(scope="module")
def alone(prepared, tmp_path_factory, one_device_throughout) -> dict[str, np.ndarray]:
    """The rows of `search_five_and_two` by a searcher that is never ahead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_searcher.jobs, "writer_id", lambda name: f"{name}-{'0' * 8}")
        rows = search_five_and_two(*tiny_searcher.make_searcher(prepared, tmp_path_factory.mktemp("alone")))
    # Rows of many kinds, so that it would be noticed if they changed places.
    assert len(set(rows["response_length"])) > 6 and len(set(rows["temperature"])) > 9
    assert rows["policy_step"].max(axis=1).tolist() == [0] * 5 * ROWS + [1] * 2 * ROWS
    return rows


def test_rows_are_appended_in_the_order_of_queries(make, monkeypatch, alone):
    tickets, submit, overtaken = list[Ticket](), Engine.submit, list[bool]()
    monkeypatch.setattr(Engine, "submit", lambda *asked: tickets.append(submit(*asked)) or tickets[-1])

    def ahead() -> bool:
        left = [ticket.left for ticket in tickets]
        overtaken.append(any(mine and not all(left[i + 1 :]) for i, mine in enumerate(left)))  # a later query was answered first
        return True

    made = make(searchers__slots=8, searchers__swap_memory="in_place")
    assert_same_rows(search_five_and_two(*made, ahead=ahead), alone)
    assert any(overtaken)


@pytest.mark.slow
def test_two_lanes_lose_nothing_and_keep_the_order(make, monkeypatch, alone):
    monkeypatch.setattr(jax, "devices", lambda *_: jax.local_devices()[:2])
    s, made = make(searchers__mesh__data=2)
    assert_same_rows(search_five_and_two(s, made, ahead=always), alone)
    publish(s, 2)
    assert made.refresh()
    reported = [made.search(ahead=always).policy_step for _ in range(5)]
    steps = rows_of_the_stream(s, made, 12 * Q)["policy_step"].max(axis=1)
    assert reported == sorted(reported) and reported[-1] == 2 and set(steps[-ROWS:]) == {2}


def search_on(made: Searcher, ahead: Callable[[], bool] = always) -> int:
    """Searches as long as it may, twenty times at most. Returns how often it did."""
    batches = 0
    while made.may_search and batches < 20:
        made.search(ahead=ahead)
        batches += 1
    return batches


def test_batches_are_begun_while_the_trainer_has_room_and_made_whole(quick):
    """The trainer names a head of this searcher once it has taken up rows of it."""
    s, made = quick(searchers__max_updates_ahead=1)
    layout.write_json(s.run.demand, {"share": 0, "heads": {"another": 7}})
    made.refresh()
    assert search_on(made) == 1 and committed(s) == ROWS, "the first batch of a searcher that the trainer has not seen"
    for share, head, batches in ((0, ROWS, 1), (1, ROWS - 1, 1), (2, ROWS - 1, 2), (ROWS + 1, 2 * ROWS, 4), (ROWS, 3 * ROWS, 4)):
        layout.write_json(s.run.demand, {"share": share, "heads": {made.writer: head}})
        assert not made.refresh()
        search_on(made)
        assert committed(s) == batches * ROWS, (share, head)
    publish(s, 1)
    assert made.refresh() and not made.may_search
    rows_of_the_stream(s, made, 4 * Q)


@pytest.mark.parametrize("content", [None, b"", b'{"share": 0, "hea', b"[]", b'{"share": 0}', b'{"share": "x", "heads": {}}'])
def test_a_demand_that_is_missing_or_torn_limits_nobody(quick, content):
    s, made = quick(searchers__max_updates_ahead=1)
    layout.write_json(s.run.demand, {"share": 0, "heads": {}})
    made.refresh()
    made.search()
    assert not made.may_search
    s.run.demand.unlink() if content is None else s.run.demand.write_bytes(content)
    made.refresh()
    assert search_on(made) == 20


def test_tokens_are_drawn_by_the_weights_of_their_step(make):
    s, made = make(searchers__swap="at_once")
    made.refresh()
    loaded: list[bool] = []
    calls = itertools.count()

    def ahead() -> bool:
        if next(calls) == 1:  # the first is before anything is decoded
            for step in (1, 2):  # the second has to wait until the first is in use
                publish(s, step)
                loaded.append(made.refresh())
        return True

    steps = [made.search(ahead=ahead).policy_step for _ in range(4)]
    assert loaded == [True, False] and steps[-1] == 1 and made.refresh()
    assert [made.search(ahead=ahead).policy_step for _ in range(4)][-1] == 2
    rows = rows_of_the_stream(s, made, 8 * Q)
    first, last = rows["policy_step"][:, 0], rows["policy_step"].max(axis=1)
    mixed = first != last
    assert mixed[:ROWS].any() and mixed[4 * ROWS :].any()
    assert set(first.tolist()) == {0, 1, 2} and (first[-ROWS:] == 2).all()
    whole = [rows[name] for name in ("tokens", "prompt_length", "response_length")]
    model, space = s.experiment.policy.model, s.experiment.contract.response_space()
    settings = dict(R=rows["policy_step"].shape[1], config=model, space=space, logit_bytes=1 << 20, remat="none")
    score = jax.jit(functools.partial(applied.response_logprobs, **settings))
    mesh, folder = sharding.make_mesh((1, 1, 1), setting="test"), s.run.reference(layout.reference_id(s.run))
    reference = snapshots.load(folder, applied.specs(model), applied.shardings(model, mesh))
    np.testing.assert_allclose(rows["ref_logprobs"], score(reference, *whole)[0], rtol=0, atol=2e-5)
    for step in range(3):
        difference = np.abs(rows["policy_logprobs"] - score(weights(s, step), *whole)[0]).max(axis=1)
        assert (difference[(first == step) & ~mixed] < 2e-5).all() and (difference[(first != step) & (last != step)] > 0.05).all()


@pytest.mark.slow
def test_threads_of_a_searcher_start_programs_of_several_devices_through_its_meshes(make, monkeypatch):
    """So that they wait for each other, see sharding.OnMesh. The first call of a program compiles it in the calling thread."""
    names, calls, call = set[tuple[str, bool]](), threading.local(), sharding.OnMesh.__call__

    def call_on_mesh(self, *args, **options):
        calls.running = True
        try:
            return call(self, *args, **options)
        finally:
            calls.running = False

    def hear(event: str, seconds: float, **about) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.add((about["fun_name"], getattr(calls, "running", False)))

    monkeypatch.setattr(sharding.OnMesh, "__call__", call_on_mesh)
    monkeypatch.setattr(jax, "devices", lambda *_: jax.local_devices()[:2])
    _, made = make(searchers__mesh__data=1, searchers__mesh__fsdp=2)
    jax.monitoring.register_event_duration_secs_listener(hear)
    with concurrent.futures.ThreadPoolExecutor(1) as refresher:
        refresher.submit(made.refresh).result()
        made.search(ahead=always)
    jax.monitoring.unregister_event_duration_listener(hear)
    assert {f"jit({name})" for name in ("for_sampling", "unstack", "prefill", "decode", "score")} <= {name for name, _ in names}
    assert {name for name, on_mesh in names if not on_mesh} <= {"jit(row_keys)"}, "the keys are of one device"


def test_decoding_goes_on_while_so_many_batches_wait_for_their_rewards(quick):
    before, released, reached = set(threading.enumerate()), threading.Event(), list[int]()

    def late(scores: Scores) -> Scores:
        assert released.wait(60)
        return scores

    s, made = quick(task=lambda task: Held(task, late), searchers__reward_batches=3)
    made.refresh()
    for _ in range(3):
        made.advance()
        reached.append(committed(s))
    assert reached == [0, 0, 0] and made.appended() == []
    fourth = threading.Thread(target=made.advance)
    fourth.start()
    fourth.join(timeout=0.2)
    assert fourth.is_alive() and committed(s) == 0
    released.set()
    fourth.join(timeout=60)
    assert [report.rows for report in made.appended(wait_seconds=None)] == [ROWS] * 4 and made.appended(wait_seconds=None) == []
    rows_of_the_stream(s, made, 4 * Q)
    threads = [each for each in threading.enumerate() if each not in before and each.name.startswith(("reward", "append"))]
    made.close()
    for thread in threads:
        thread.join(timeout=10)
    assert len(threads) > 1 and not any(thread.is_alive() for thread in threads)


def test_rows_without_a_reward_are_kept_and_counted(quick):
    failed = np.arange(ROWS) % 3 == 1

    def some(scores: Scores) -> Scores:
        parts = np.where(failed[:, None], np.nan, scores.parts)
        return Scores(np.where(failed, np.nan, scores.reward).astype(np.float32), parts.astype(np.float32))

    s, made = quick(task=lambda task: Held(task, some, some), task__missing_eos_reward=-1.0)
    made.refresh()
    report = made.search()
    rows = rows_of_the_stream(s, made, Q)
    np.testing.assert_array_equal(np.isnan(rows["reward"]), failed)
    assert report.unscored == failed.sum() and report.reward == pytest.approx(rows["reward"][~failed].mean())
    reasons = validate_rows(rows, vocab_size=s.experiment.policy.model.vocab)
    assert [REJECTIONS[reason] for reason in reasons] == ["reward" if each else "valid" for each in failed]
