"""What a searcher appends, in which order, and on which weights, whatever its decoder is ahead with; and how it ends."""

import dataclasses
import functools
import os
import shutil
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tba_jax import trajectory
from tba_jax.decoding import slots
from tba_jax.decoding.engine import Engine, Ticket
from tba_jax.experiment import jobs
from tba_jax.replay.reader import LogReader
from tba_jax.replay.validation import REJECTIONS, validate_rows
from tba_jax.roles.searcher import loop, searcher
from tba_jax.roles.searcher.searcher import Searcher
from tba_jax.roles.searcher.stream import query_order, writer_number
from tba_jax.run import layout, metrics, snapshots
from tba_jax.run.metrics import TimeAccount
from tba_jax.tasks.interface import Query, Scores, Task
from tests.support import applied, tiny_run

Q, S, R = 3, 4, 12  # queries of a batch, samples of a query, response tokens
ROWS = Q * S
# Ten queries, so that a batch holds queries of two passes; four slots, so that a batch does not fit at once.
STREAM = dict(task__arithmetic__train_queries=10, task__response_length=R, sampling__explore_temperature_probability=0.5)
BATCHES = dict(searchers__queries_per_batch=Q, searchers__samples_per_query=S, searchers__max_rows_per_snapshot=0)
DECODER = dict(searchers__slots=4, searchers__decode_chunk=2, searchers__poll_seconds=0.01)


pytestmark = pytest.mark.usefixtures("one_device_throughout")


@pytest.fixture(autouse=True)
def _one_writer(monkeypatch) -> None:
    """Searchers take half of their name by chance."""
    monkeypatch.setattr(searcher, "uuid", types.SimpleNamespace(uuid4=lambda: types.SimpleNamespace(hex="0" * 32)))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, one_device_throughout) -> Path:
    """A run with its reference and snapshot 0."""
    s = settings(tmp_path_factory.mktemp("searcher") / "run")
    jobs.reference(s)()
    s.run.root.joinpath("policy").mkdir()
    publish(s, 0)
    return s.run.root


@pytest.fixture
def make(prepared, tmp_path) -> Callable[..., tuple[jobs.Settings, Searcher]]:
    return functools.partial(make_searcher, prepared, tmp_path)


def settings(folder: Path, **changes: Any) -> jobs.Settings:
    return tiny_run.settings(folder, tiny_run.config(**{**STREAM, **BATCHES, **DECODER, **changes}))


def make_searcher(
    prepared: Path, folder: Path, name: str = "run", task: Callable[[Task], Task] | None = None, **changes: Any
) -> tuple[jobs.Settings, Searcher]:
    """A copy of the prepared run, and a searcher that has not looked at it yet. task: makes another of the task."""
    shutil.copytree(prepared, folder / name)
    s = settings(folder / name, **changes)
    if task is not None:
        s = dataclasses.replace(s, experiment=dataclasses.replace(s.experiment, task=task(s.experiment.task)))
    return s, jobs.make_searcher(s, name="tested", account=TimeAccount())


def weights(s: jobs.Settings, step: int) -> dict[str, Any]:
    """Large enough that responses of all lengths are drawn, and that those of two steps are told apart."""
    return applied.random(s.experiment.policy.trained_specs, scale=0.3, seed=step)


def publish(s: jobs.Settings, step: int, damage: Callable[[Path], None] = lambda folder: None, scale: float = 1.0) -> None:
    """A snapshot, which appears as a whole, damage included."""
    draft = s.run.root / "draft" / layout.step_name(step)
    params = jax.tree.map(lambda leaf: scale * leaf, weights(s, step))
    snapshots.save(draft, params, snapshots.SnapshotInfo(step=step, epoch=1), dtype="float32")
    damage(draft)
    draft.rename(s.run.root / "policy" / draft.name)


def committed(s: jobs.Settings) -> int:
    return sum(LogReader(s.run.replay, s.experiment.contract.row_shape()).heads().values())


def rows_of_the_stream(s: jobs.Settings, made: Searcher, queries: int) -> dict[str, np.ndarray]:
    """All rows of the log, which must be those of the first queries of the stream, in their order, S each."""
    reader = LogReader(s.run.replay, s.experiment.contract.row_shape())
    rows = dict(reader.read(made.writer, 0, reader.heads()[made.writer]))
    prompts, number = [query.prompt for query in s.experiment.queries["train"]], writer_number(made.writer)
    orders = [query_order(10, seed=s.config.seed, writer=number, epoch=epoch) for epoch in range(-(-queries // 10))]
    assert all(sorted(order.tolist()) == list(range(10)) for order in orders)
    asked = [prompts[i] for i in np.concatenate(orders)[:queries] for _ in range(S)]
    assert rows["query_id"].tolist() == [trajectory.query_id(prompt) for prompt in asked]
    np.testing.assert_array_equal(rows["row"], np.arange(queries * S))
    np.testing.assert_array_equal(rows["key"], slots.row_keys(s.config.seed, number, np.arange(queries * S, dtype=np.uint32)))
    steps = [row[:n] for row, n in zip(rows["policy_step"], rows["response_length"], strict=True)]
    assert all(len(each) and (each >= 0).all() and (np.diff(each) >= 0).all() for each in steps)
    return rows


def assert_same_rows(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, column in expected.items():
        np.testing.assert_allclose(found[name], column, rtol=0, atol=1e-5 if name.endswith("_logprobs") else 0, err_msg=name)


def test_rows_are_appended_in_the_order_of_queries(make, monkeypatch):
    found, overtaken, tickets, submit = list[dict[str, np.ndarray]](), 0, list[Ticket](), Engine.submit
    monkeypatch.setattr(Engine, "submit", lambda *asked: tickets.append(submit(*asked)) or tickets[-1])
    for goes_ahead in (False, True):
        tickets.clear()
        s, made = make(str(goes_ahead), searchers__slots=16)
        assert not made.may_search and made.refresh() and made.may_search and not made.refresh()
        for batch in range(1, 10):
            left = [ticket.left for ticket in tickets[(batch - 1) * Q :]]
            overtaken += any(left[:Q]) and not all(left[Q:])  # a query of a later batch was answered before one of this
            report = made.search(ahead=lambda goes_ahead=goes_ahead: goes_ahead)
            assert committed(s) == batch * ROWS
            rows = rows_of_the_stream(s, made, batch * Q)
            assert (report.rows, report.policy_step, report.tokens) == (ROWS, 0, rows["response_length"][-ROWS:].sum())
            means = [rows[name][-ROWS:].mean() for name in ("reward", "finished")]
            assert [report.reward, report.finished] == pytest.approx(means)
        found.append(rows)
    assert overtaken > 0
    assert_same_rows(found[1], found[0])
    # Rows of many kinds, so that it would be noticed if they changed places.
    assert len(set(found[0]["response_length"])) > 6 and len(set(found[0]["temperature"])) > 9


def search_on(made: Searcher, ahead: Callable[[], bool] = lambda: True) -> int:
    """Searches as long as it may, twenty times at most. Returns how often it did."""
    batches = 0
    while made.may_search and batches < 20:
        made.search(ahead=ahead)
        batches += 1
    return batches


def test_a_snapshot_is_asked_so_many_whole_batches_and_the_next_one_as_many(make):
    s, made = make(searchers__max_rows_per_snapshot=ROWS + 1)
    made.refresh()
    assert search_on(made) == 2 and committed(s) == 2 * ROWS
    assert not made.refresh() and not made.may_search
    publish(s, 1)
    assert not made.may_search and made.refresh() and made.may_search
    assert search_on(made) == 2
    # Had more been asked than was answered, the rows of the second snapshot would begin further on in the stream.
    assert rows_of_the_stream(s, made, 4 * Q)["policy_step"].max(axis=1).tolist() == [0] * 2 * ROWS + [1] * 2 * ROWS


@pytest.mark.parametrize("before", [Q, Q + 1])
def test_a_snapshot_that_arrives_in_a_batch_is_asked_as_many_besides(make, before):
    """Besides what was asked before it came; where these queries break into a batch, that one is made whole."""
    s, made = make(searchers__max_rows_per_snapshot=2 * ROWS)
    made.refresh()
    asked = Q - 1

    def ahead() -> bool:
        """Called first when a batch has been asked, then for each query more."""
        nonlocal asked
        asked += 1
        if asked == before:
            publish(s, 1)
            assert made.refresh()
        return True

    batches = search_on(made, ahead)
    assert batches == -(-(before + 2 * Q) // Q)
    steps = rows_of_the_stream(s, made, batches * Q)["policy_step"]
    assert (steps[:, 0] == 0).any() and (steps.max(axis=1)[-ROWS:] == 1).all()


def test_a_snapshot_whose_queries_the_one_before_has_answered_is_followed_by_the_next(make):
    """It arrives while slots are filled, of which there are enough for all that may be asked: all is decoded in one call."""
    s, made = make(searchers__max_rows_per_snapshot=2 * ROWS, searchers__slots=4 * ROWS, searchers__decode_chunk=R)
    made.refresh()

    def ahead() -> bool:
        if not snapshots.is_committed(s.run.policies, 1):
            publish(s, 1)
            made.refresh()
        return True

    assert search_on(made, ahead) == 3
    publish(s, 2)
    assert made.refresh() and search_on(made) == 2


@pytest.mark.parametrize("swap", ["at_once", "new_sequences"])
def test_tokens_are_drawn_by_the_weights_of_their_step_when_a_snapshot_arrives_in_a_batch(make, swap):
    s, made = make(searchers__swap=swap)
    made.refresh()
    loaded: list[bool] = []

    def ahead() -> bool:
        if not loaded:
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
    assert mixed[:ROWS].any() and mixed[4 * ROWS :].any() if swap == "at_once" else not mixed.any()
    assert set(first.tolist()) == {0, 1, 2} and (first[-ROWS:] == 2).all()
    whole = [rows[name] for name in ("tokens", "prompt_length", "response_length")]
    model, space = s.experiment.policy.model, s.experiment.contract.response_space()
    settings = dict(R=rows["policy_step"].shape[1], config=model, space=space, logit_bytes=1 << 20, remat="none")
    score = jax.jit(functools.partial(applied.response_logprobs, **settings))
    for step in range(3):
        difference = np.abs(rows["policy_logprobs"] - score(weights(s, step), *whole)[0]).max(axis=1)
        assert (difference[(first == step) & ~mixed] < 2e-5).all() and (difference[(first != step) & (last != step)] > 0.05).all()


def test_two_lanes_lose_nothing_and_keep_the_order(make, monkeypatch):
    found, feeders = [], set[threading.Thread]()
    for ways in (1, 2):
        monkeypatch.setattr(jax, "devices", lambda *_, ways=ways: jax.local_devices()[:ways])
        s, made = make(str(ways), searchers__mesh__data=ways)
        made.refresh()

        def ahead() -> bool:
            feeders.add(threading.current_thread())
            return True

        for _ in range(5):
            made.search(ahead=ahead)
        found.append(rows_of_the_stream(s, made, 5 * Q))
    assert_same_rows(found[1], found[0])
    assert len(feeders) == 3, "this thread and one of each lane"
    publish(s, 1)
    assert made.refresh()
    reported = [made.search(ahead=ahead).policy_step for _ in range(5)]
    steps = rows_of_the_stream(s, made, 10 * Q)["policy_step"].max(axis=1)
    assert reported == sorted(reported) and reported[-1] == 1
    assert set(steps[: 5 * ROWS]) == {0} and set(steps[-ROWS:]) == {1}


def run_searcher(s: jobs.Settings, made: Searcher, look: Callable[[], None]) -> None:
    """`look` is called between batches. The searcher and its refresher must have ended after a minute."""
    end = time.monotonic() + 60
    threads: set[threading.Thread] = set()

    def stop() -> bool:
        threads.update(thread for thread in threading.enumerate() if thread.name == "refresher")
        look()
        return time.monotonic() > end

    try:
        loop.run_searcher(made, s.config, s.run, name="tested", account=TimeAccount(), stop=stop)
    finally:
        (refresher,) = threads
        refresher.join(timeout=10)
        assert not refresher.is_alive()


def cut_short(folder: Path) -> None:
    os.truncate(folder / "embedding.weight" / "c" / "0" / "0", 100)


def unreadable(folder: Path) -> None:
    (folder / snapshots.COMMIT).unlink()
    (folder / snapshots.COMMIT).mkdir()


@pytest.mark.parametrize(
    "limit, damage, error", [(0, cut_short, ValueError), (ROWS, unreadable, OSError)], ids=["searching", "waiting"]
)
def test_a_snapshot_that_cannot_be_loaded_stops_the_searcher(make, limit, damage, error):
    s, made = make(searchers__max_rows_per_snapshot=limit)

    def look() -> None:
        if committed(s) and not snapshots.is_committed(s.run.policies, 1):
            publish(s, 1, damage)

    with pytest.raises(error, match=r"00000001(: parameter embedding.weight is damaged|/commit\.json)"):
        run_searcher(s, made, look)
    assert rows_of_the_stream(s, made, committed(s) // S)["policy_step"].max() == 0


def test_a_search_that_fails_ends_the_refresher(make):
    s, made = make()
    publish(s, 1, scale=np.nan)
    with pytest.raises(FloatingPointError, match=r"policy step 1 are not finite at response token 0 of query [0-9a-f]{16} "):
        run_searcher(s, made, lambda: None)
    assert committed(s) == 0


def test_a_searcher_takes_up_snapshots_until_the_run_is_finished(make):
    s, made = make(searchers__max_rows_per_snapshot=2 * ROWS)

    def look() -> None:
        """The next snapshot is published when all rows of the one before are there, and the end of the run after three."""
        step = committed(s) // (2 * ROWS)
        if step == 3:
            layout.write_json(s.run.finished, {"step": s.config.learner.steps})
        elif not snapshots.is_committed(s.run.policies, step):
            publish(s, step)

    run_searcher(s, made, look)
    rows = rows_of_the_stream(s, made, 6 * Q)
    assert rows["policy_step"].max(axis=1).tolist() == [step for step in range(3) for _ in range(2 * ROWS)]
    tokens = rows["response_length"].reshape(6, ROWS).sum(axis=1).tolist()
    lines = metrics.read_lines(s.run.metrics("tested"))
    # The first batch, which holds the compilation, is not measured.
    assert [(line["step"], line["policy_step"]) for line in lines] == [(2, 0), (3, 1), (4, 1), (5, 2), (6, 2)]
    assert [(line["rows"], line["tokens"]) for line in lines] == [(ROWS, count) for count in tokens[1:]]


class Held:
    """A task whose n-th call for rewards does what `calls` say for it, before or instead of the task's own."""

    def __init__(self, task: Task, *calls: Callable[[Scores], Scores]):
        self._task, self._calls, self._taken, self._lock = task, calls, 0, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def rewards(self, queries: list[Query], responses: list[str], finished: np.ndarray) -> Scores:
        with self._lock:
            call, self._taken = self._taken, self._taken + 1
        scores = self._task.rewards(queries, responses, finished)
        return self._calls[call](scores) if call < len(self._calls) else scores


def test_the_next_batches_are_decoded_while_one_waits_for_its_rewards(make):
    decoded, reached = threading.Event(), list[int]()

    def late(scores: Scores) -> Scores:
        assert decoded.wait(60)
        return scores

    s, made = make(task=lambda task: Held(task, late), searchers__reward_batches=3)
    made.refresh()
    for _ in range(3):
        made.advance()
        reached.append(committed(s))
    assert reached == [0, 0, 0] and made.appended() == [], "the later ones have their rewards, and wait for the first"
    decoded.set()
    assert [report.rows for report in made.appended(wait_seconds=None)] == [ROWS] * 3 and made.appended(wait_seconds=None) == []
    rows_of_the_stream(s, made, 3 * Q)
    made.close()


def test_so_many_batches_wait_for_rewards_at_most(make):
    begun, released = threading.Event(), threading.Event()

    def late(scores: Scores) -> Scores:
        begun.set()
        assert released.wait(60)
        return scores

    s, made = make(task=lambda task: Held(task, late), searchers__reward_batches=1)
    made.refresh()
    made.advance()
    second = threading.Thread(target=made.advance)
    second.start()
    assert begun.wait(60)
    second.join(timeout=2)
    assert second.is_alive() and committed(s) == 0
    released.set()
    second.join(timeout=60)
    assert not second.is_alive() and len(made.appended(wait_seconds=None)) == 2
    rows_of_the_stream(s, made, 2 * Q)
    made.close()


def test_rows_without_a_reward_are_kept_and_counted(make):
    def some(scores: Scores) -> Scores:
        failed = np.arange(ROWS) % 3 == 1
        parts = np.where(failed[:, None], np.nan, scores.parts)
        return Scores(np.where(failed, np.nan, scores.reward).astype(np.float32), parts.astype(np.float32))

    s, made = make(task=lambda task: Held(task, some, some), task__missing_eos_reward=-1.0)
    made.refresh()
    report = made.search()
    rows = rows_of_the_stream(s, made, Q)
    failed = np.arange(ROWS) % 3 == 1
    np.testing.assert_array_equal(np.isnan(rows["reward"]), failed)
    assert report.unscored == failed.sum() and report.reward == pytest.approx(rows["reward"][~failed].mean())
    reasons = validate_rows(rows, vocab_size=s.experiment.policy.model.vocab)
    assert [REJECTIONS[reason] for reason in reasons] == ["reward" if each else "valid" for each in failed]


def test_a_task_that_fails_stops_the_searcher_and_nothing_is_appended_after(make):
    def fails(scores: Scores) -> Scores:
        raise KeyError("the task's own mistake")

    s, made = make(task=lambda task: Held(task, lambda scores: scores, fails), searchers__reward_batches=2)
    with pytest.raises(KeyError, match="own mistake"):
        run_searcher(s, made, lambda: None)
    assert committed(s) == ROWS
    rows_of_the_stream(s, made, Q)


def test_a_reward_that_hangs_keeps_nobody_from_the_end(make):
    """Of a run that has finished, and of one whose snapshot is broken: rows that have no reward yet are not waited for longer."""
    for broken in (False, True):
        hanging = threading.Event()

        def hangs(scores: Scores, hanging: threading.Event = hanging) -> Scores:
            hanging.wait()
            return scores

        changes = dict(searchers__reward_batches=2, searchers__stop_seconds=1.0)
        s, made = make(str(broken), task=lambda task: Held(task, lambda scores: scores, hangs), **changes)

        def look(s: jobs.Settings = s, broken: bool = broken) -> None:
            if committed(s) == ROWS and not s.run.finished.exists() and not snapshots.is_committed(s.run.policies, 1):
                if broken:
                    publish(s, 1, cut_short)
                else:
                    layout.write_json(s.run.finished, {"step": s.config.learner.steps})

        begin = time.monotonic()
        if broken:
            with pytest.raises(ValueError, match="damaged"):
                run_searcher(s, made, look)
        else:
            run_searcher(s, made, look)
        assert time.monotonic() - begin < 30 and committed(s) == ROWS
        hanging.set()
        time.sleep(0.2)
        assert committed(s) == ROWS, "nothing is appended after the end"


def test_rates_are_those_of_appends(make):
    """Reports that are read together, since the first of them was late, tell the same as if they were not."""
    late, writer = threading.Event(), MetricLines()
    _, made = make(task=lambda task: Held(task, lambda scores: (late.wait(60), scores)[1]), searchers__reward_batches=4)
    made.refresh()
    for _ in range(3):
        made.advance()
    late.set()
    reports = made.appended(wait_seconds=None)
    loop.Rates(writer, TimeAccount()).write(reports)
    for line, report in zip(writer.lines, reports[1:], strict=True):
        elapsed = report.time - reports[0].time
        assert elapsed > 0 and line["rows_per_second"] == pytest.approx((reports.index(report)) * ROWS / elapsed)
    made.close()


class MetricLines:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, step: int, scalars: dict[str, Any]) -> None:
        self.lines.append({"step": step, **scalars})
