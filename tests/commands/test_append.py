"""Responses of a file as rows: a searcher's columns, all at once or not at all."""

import numpy as np
import pytest

from tba_jax import trajectory
from tba_jax.commands import append, audit, command_line
from tba_jax.experiment import jobs, training
from tba_jax.replay import journal
from tba_jax.replay.log import LogWriter
from tba_jax.rewards import task_models
from tests.support import frozen_runs, random_checkpoints, tiny_run
from tests.support.summaries import ROWS, write_rows

pytestmark = pytest.mark.usefixtures("one_device_throughout")


@pytest.fixture
def s(frozen, tmp_path) -> jobs.Invocation:
    """A run with 48 rows of one searcher, none of which is penalised for its length."""
    return frozen(tmp_path / "run", batches=3)


def queries_of(s: jobs.Invocation) -> list[str]:
    return [query.query.prompt for query in s.experiment.queries["train"]]


def test_rows_equal_a_searchers_for_the_same_responses(s, tmp_path, capsys):
    (searched,) = frozen_runs.rows(s).values()
    chosen = np.flatnonzero(searched["finished"] & (searched["response_length"] > 1))
    decode = s.experiment.tokenizer.decode
    prompts = [decode(searched["tokens"][i, : searched["prompt_length"][i]].tolist()) for i in chosen]
    responses = [decode(trajectory.response(searched, i).tolist()) for i in chosen]
    texts = [{"prompt": prompt, "response": text} for prompt, text in zip(prompts, responses, strict=True)]
    command_line.execute(append, [f"--workdir={s.run.root}", f"--responses={write_rows(tmp_path / 'given.jsonl', texts)}"])
    assert f"{len(chosen)} responses are rows of" in capsys.readouterr().out and len(chosen) > 5
    (given,) = (rows for writer, rows in frozen_runs.rows(s).items() if writer.startswith("given-"))
    same = "query_id tokens prompt_length response_length finished reward reward_parts reward_version reference_id policy_step"
    for name in same.split():
        np.testing.assert_array_equal(given[name], searched[name][chosen], err_msg=name)
    # The searcher drew them with the weights of step 0, which are the reference's.
    for name in ("ref_logprobs", "policy_logprobs", "behavior_logprobs"):
        np.testing.assert_allclose(given[name], searched["ref_logprobs"][chosen], atol=1e-6, err_msg=name)


def test_they_train_where_no_objective_needs_their_behaviour_and_are_accounted_for(s, tmp_path):
    texts = [{"prompt": prompt, "response": str(number)} for prompt in queries_of(s)[:10] for number in range(10, 18)]
    path = write_rows(tmp_path / "given.jsonl", texts)
    append.append(s.run.root, path, unfit="refuse")
    offline = frozen_runs.offline(tmp_path / "offline", s.run.root, learner__steps=4)
    assert training.trainer(offline)() == 0
    (given,) = (writer for writer in frozen_runs.rows(s) if writer.startswith("given-"))
    assert given in [writer for line in journal.read_lineage(offline.run.journal) for writer in line["writers"]]
    assert audit.accounts(audit.open_run(offline.run.root))[given].committed == 80
    with pytest.raises(ValueError, match=f"{given}:0 was not generated: its response is from .*given.jsonl"):
        audit.regenerate(audit.open_run(s.run.root), f"{given}:0")
    mounted = frozen_runs.offline(tmp_path / "grpo", s.run.root, learner__objective="grpo")
    with pytest.raises(ValueError, match=r"learner\.objective=grpo reads π_behaviour of .* nobody knows that of writer given-"):
        training.trainer(mounted)
    taken = command_line.Source(overrides=("--config.learner.objective=grpo",))
    with pytest.raises(ValueError, match=r"learner\.objective=grpo reads π_behaviour of every row, and responses of a file"):
        append.append(s.run.root, path, unfit="refuse", settings=taken)


def test_what_fits_is_kept_and_the_rest_counted_and_an_interrupted_append_is_not_seen(s, tmp_path, monkeypatch):
    prompt = queries_of(s)[0]
    texts = [{"prompt": prompt, "response": text} for text in (*map(str, range(18)), "1234567", "7654321")]
    path, appended, commit = write_rows(tmp_path / "given.jsonl", texts), [], LogWriter.append
    with pytest.raises(ValueError, match=r"line 19: the response has more than task\.response_length=6 tokens"):
        append.append(s.run.root, path, unfit="refuse")

    def failing(self, rows):
        if appended:
            raise OSError("the disk is full")
        appended.append(commit(self, rows))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="the disk is full"):
        patch.setattr(LogWriter, "append", failing)
        append.append(s.run.root, path, unfit="skip")
    assert appended and len(frozen_runs.rows(s)) == 1, "nothing is seen"
    told = append.append(s.run.root, path, unfit="skip")
    assert "18 responses are rows" in told and "left out: 2, each of which has more than task.response_length=6" in told
    assert sorted(len(rows["row"]) for rows in frozen_runs.rows(s).values()) == [18, 48]
    with pytest.raises(ValueError, match=r"these 18 responses are in .* already, as writer given-"):
        append.append(s.run.root, path, unfit="skip")
    for rows, sentence in (
        (texts[18:], r"none of its 2 responses"),
        ([{"prompt": "9+9=", "response": "18"}], r"prompt '9\+9=' is none of the 40 train queries of the task"),
        ([{"response": "18"}], "field 'prompt' is missing"),
    ):
        with pytest.raises(ValueError, match=sentence):
            append.append(s.run.root, write_rows(tmp_path / "none.jsonl", rows), unfit="skip")


def test_stop_strings_templates_and_models_of_the_task(tmp_path):
    """Of a run on summaries that end with a line, have at least 4 tokens, and are answers in a chat."""
    tokens = random_checkpoints.byte_tokenizer(tmp_path / "tokens")
    (tokens / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>")
    for seed, (name, labels) in enumerate([("policy", 0), ("reward", 1)]):
        random_checkpoints.write(tmp_path / name, "pythia-410m", tokens, labels=labels, seed=seed)
    write_rows(tmp_path / "rows.jsonl", ROWS)
    paths = {f"task__tldr__{split}_path": str(tmp_path / "rows.jsonl") for split in ("train", "heldout")}
    paths |= {"task__tldr__reward_path": str(tmp_path / "reward"), "model__path": str(tmp_path / "policy")}
    sizes = dict(task__prompt_length=110, task__response_length=12, task__min_response_length=4, task__banned_tokens=(7,))
    form = dict(task__force_eos=True, task__stop_strings=("\n",), task__chat_template=True)
    c = tiny_run.config(task__name="tldr", task__tldr__compute_dtype="float32", **paths, **sizes, **form)
    s = tiny_run.settings(tmp_path / "run", c)
    assert training.reference(s)() == 0
    prompt = queries_of(s)[0]
    banned = s.experiment.tokenizer.decode([7])
    texts = {
        " one<|endoftext|>": "",
        "a\n": "",  # ended by the stop string, whatever its length
        "a\nb": "goes on after one of task.stop_strings=('\\n',)",
        "abcdefghijk\n": "has no end of sequence at token task.response_length=12 (task.force_eos)",
        "ab": "has fewer than task.min_response_length=4 tokens",
        f"abc{banned}": "holds token 7, which is special or one of task.banned_tokens",
        "abcd<|endoftext|>e": "goes on after the end of sequence",
    }
    path = write_rows(tmp_path / "given.jsonl", [{"prompt": prompt, "response": text} for text in texts])
    told = append.append(s.run.root, path, unfit="skip")
    for reason in filter(None, texts.values()):
        assert reason in told
    ((_, rows),) = frozen_runs.rows(s).items()
    assert rows["response_length"].tolist() == [5, 2] and rows["finished"].all()
    eos = s.experiment.contract.eos_id
    assert (trajectory.response(rows, 0)[4], trajectory.response(rows, 1)[1]) == (eos, s.experiment.tokenizer.encode("\n")[0])
    assert set(rows["query_id"].tolist()) == {trajectory.query_id(s.experiment.queries["train"][0].prompt)}
    assert np.isfinite(rows["ref_logprobs"]).all() and (rows["ref_logprobs"][0, :5] < 0).all()
    task = s.experiment.task
    with task_models.started(task, 0, date="2025-01-02"):
        reward = task.rewards([s.experiment.queries["train"][0].query] * 2, [" one", "a\n"], np.ones(2, bool)).reward
    np.testing.assert_allclose(rows["reward"], reward, atol=1e-5)
