"""Responses of several turns: their tokens, their log-probs, what ends them, and that a slow environment stops no other."""

import dataclasses
import time
from unittest import mock

import numpy as np
import pytest

from tba_jax import trajectory
from tba_jax.commands import append, audit, show
from tba_jax.experiment import jobs
from tba_jax.models import parameters, scoring
from tba_jax.replay.reader import LogReader
from tba_jax.reporting import page
from tba_jax.reporting.gathering import RowTable
from tba_jax.roles.searcher import stream
from tba_jax.tasks.guess import hint
from tba_jax.telemetry.status import TimeAccount
from tba_jax.text.turns import Between
from tests.support import frozen_runs, tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")
GAME = {"task__name": "guess", "task__prompt_length": 7, "task__response_length": 16, "task__stop_strings": ("\n",)}
GAME |= {"task__guess__train_queries": 40, "task__guess__heldout_queries": 8, "task__guess__numbers": 3}
# Random weights seldom write a letter and a new line: nothing else can be drawn.
GAME |= {"task__banned_tokens": (*range(3, 13), *range(16, 44)), "task__guess__turns": 3}


@pytest.fixture(scope="module")
def played(tmp_path_factory, one_device_throughout):
    """A run, and the rows of two batches."""
    s = frozen_runs.make(tmp_path_factory.mktemp("game") / "run", 2, **GAME)
    (rows,) = frozen_runs.rows(s).values()
    return s, rows


def test_turns_of_the_policy_and_of_the_game_follow_each_other(played):
    s, rows = played
    tokenizer, trained = s.experiment.tokenizer, trajectory.trained(rows)
    secrets = {trajectory.query_id(query.prompt): query.query.answer for query in s.experiment.queries["train"]}
    seen = set()
    for i, query in enumerate(rows["query_id"].tolist()):
        secret, tokens = secrets[query], trajectory.response(rows, i)
        drawn = trained[i, : len(tokens)]
        edges = np.flatnonzero(np.diff(drawn)) + 1
        parts = [tokenizer.decode(each.tolist()) for each in np.split(tokens, edges)]
        turns, answers = parts[::2], parts[1::2]
        assert drawn[0] and drawn[-1], "the policy has the first word and the last"
        assert (rows["policy_step"][i] >= 0).sum() == drawn.sum() and len(turns) == trajectory.turns(
            trained[i : i + 1]
        ).sum() <= 3
        guesses = [turn.removesuffix("\n") for turn in turns]
        assert answers == [hint(guess, secret) if guess in "abc" and len(guess) == 1 else "?\n" for guess in guesses[:-1]]
        solved = guesses[-1] == secret
        assert rows["reward"][i] == (solved if rows["finished"][i] else -1.0) and secret not in guesses[:-1]
        ended = turns[-1].endswith("\n") or tokens[-1] == tokenizer.eos_id
        assert rows["finished"][i] == (ended and (solved or len(turns) == 3)) and (ended or len(tokens) == 16)
        errors = sum(not (len(guess) == 1 and guess in "abc") for guess in guesses[: len(guesses) if ended else -1])
        calls, counted, seconds = rows["environment"][i]
        assert (calls, counted) == (0, errors) and 0 < seconds < 60
        seen.add((bool(rows["finished"][i]), solved, len(turns)))
    assert len(seen) > 3, seen


def test_log_probs_are_those_of_the_policy_on_the_whole_row(played):
    s, rows = played
    trained, policy = trajectory.trained(rows), s.experiment.policy
    params = frozen_runs.published(s, 0)
    model = parameters.module(policy.base.graphdef, params)
    lengths = rows["prompt_length"], rows["response_length"]
    space = s.experiment.contract.response_space()
    expected, _ = scoring.response_logprobs(model, rows["tokens"], *lengths, R=16, space=space, logit_bytes=1 << 30, remat="none")
    for name in ("policy_logprobs", "ref_logprobs"):
        np.testing.assert_allclose(rows[name][trained], np.asarray(expected)[trained], atol=2e-5, err_msg=name)
        assert not rows[name][~trained].any()


def test_a_row_does_not_depend_on_who_shares_the_decoder(played, monkeypatch):
    s, _ = played
    monkeypatch.setattr(stream, "writer_number", lambda _: 7)
    found = []
    for slots in (0, 3):
        experiment = tiny_run.settings(s.run.root, frozen_runs.config(**GAME, searchers__slots=slots)).experiment
        searcher = jobs.make_searcher(dataclasses.replace(s, experiment=experiment), name="other", account=TimeAccount())
        searcher.refresh()
        searcher.search()
        searcher.close()
        found.append(frozen_runs.rows(s)[searcher.writer])
    for name in ("tokens", "policy_step", "finished", "reward"):
        np.testing.assert_array_equal(found[0][name], found[1][name], err_msg=name)


@pytest.mark.parametrize("said", [[], ValueError("character 'É' is not in the alphabet")], ids=str)
def test_what_cannot_be_read_fails_its_response_alone(played, monkeypatch, said):
    s, _ = played
    with mock.patch.object(Between, "encode", side_effect=said if isinstance(said, ValueError) else lambda *_, **__: said):
        searcher = jobs.make_searcher(s, name="unread", account=TimeAccount())
        searcher.refresh()
        report = searcher.search()
        searcher.close()
    rows = frozen_runs.rows(s)[searcher.writer]
    turns = trajectory.turns(trajectory.trained(rows)).sum(axis=1)
    assert report.unscored and (turns == 1).all(), "those who do not end at once have no second turn"
    assert report.failure == ("step() gave the policy nothing to read, and no end" if not said else str(said))


def test_training_and_evaluation_know_turns(played):
    s, _ = played
    with frozen_runs.trainer(s, polls=True) as trainer:
        measured = [trainer.step() for _ in range(3)]
    assert all(np.isfinite(each["loss"]) for each in measured)
    report = jobs.make_evaluator(s.experiment, s.run).report(0)
    assert report["success"] >= -1 and -1 < report["sampled_reward"] < 1 and report["unscored"] == 0


def test_a_row_is_generated_again_and_shown_turn_by_turn(played):
    s, rows = played
    opened = audit.open_run(s.run.root)
    writer = next(writer for writer in opened.reader.heads() if writer.startswith("frozen-"))
    turns = trajectory.turns(trajectory.trained(rows)).sum(axis=1)
    for row in (int(turns.argmax()), int(turns.argmin())):
        told, same = audit.regenerate(opened, f"{writer}:{row}")
        assert same and "is identical" in told, told
    assert "⟦" in show.show(s.run.root, "newest", 8)


def test_the_report_tells_in_which_turn_rows_fail(played):
    s, rows = played
    table = RowTable(LogReader(s.run.replay, s.experiment.contract.row_shape()), s.run.journal, [])
    lines = page.by_turns(table.rows[table.of_writer(next(w for w in table.writers if w.startswith("frozen-")))])
    turns = trajectory.turns(trajectory.trained(rows)).sum(axis=1)
    assert [int(line["turns"]) for line in lines] == sorted(set(turns.tolist()))
    for line in lines:
        mine = turns == int(line["turns"])
        told = dict(zip(trajectory.ENVIRONMENT, rows["environment"][mine].mean(axis=0), strict=True))
        assert (
            line["rows"] == f"{mine.sum()}"
            and line["failed"] == "0"
            and line["mean reward"] == f"{rows['reward'][mine].mean():.3f}"
        )
        assert line["cut"] == f"{1 - rows['finished'][mine].mean():.1%}" and line["turns not read"] == f"{told['errors']:.2f}"
    broken = table.rows[:1].copy()
    broken["turns"], broken["reward"] = 2, np.nan
    (line,) = page.by_turns(broken)
    assert (line["failed"], line["mean reward"]) == ("1", "")


def test_rows_of_a_file_are_refused_where_an_environment_answers(played, tmp_path):
    s, _ = played
    with pytest.raises(ValueError, match="have up to 3 turns, between which an environment answers: searchers alone make them"):
        append.append(s.run.root, str(tmp_path / "rows.jsonl"), unfit="error")


def test_a_searcher_that_is_stopped_waits_for_no_environment(tmp_path):
    s = frozen_runs.make(tmp_path / "run", 0, **GAME, task__guess__latency=20.0)
    searcher = jobs.make_searcher(s, name="stopped", account=TimeAccount())
    searcher.refresh()
    begun = time.monotonic()
    searcher.advance(waits=lambda: False)
    searcher.close()
    assert time.monotonic() - begun < 15 and not searcher.appended()
