"""Joining a run: mistakes that were found before, and what the tokenizer makes of prompts."""

import dataclasses

import pytest

from tba_jax.experiment import jobs, joining, training
from tba_jax.tasks.interface import SPLITS
from tba_jax.telemetry import alarms
from tests.support import random_checkpoints, task_files, tiny_checkpoints, tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")


def test_after_a_mistake_no_device_is_asked_for_and_no_weights_are_fetched(tmp_path, monkeypatch):
    fetched, asked = [], []
    monkeypatch.setattr(joining.initial_policy, "check", lambda *_, fetch, **__: fetched.append(fetch))
    s = tiny_run.settings(tmp_path / "run", tiny_run.config())
    wrong = dataclasses.replace(s, mistakes=joining.Mistakes())
    wrong.mistakes.require(False, "a mesh is wrong")
    with pytest.raises(ValueError, match="a mesh is wrong"):
        joining.join(wrong, may_change_schedule=False, check=lambda: asked.append("devices"))
    assert fetched == [False] and not asked and not (tmp_path / "run" / "config.json").exists()
    joining.join(s, may_change_schedule=False, check=lambda: asked.append("devices"))
    assert fetched == [False, True] and asked


def settings(tmp_path, characters: str):
    """A run of a model with this alphabet on prompts such as "1/5 of 10"."""
    tokens = tiny_checkpoints.write_letters(tmp_path / "tokens", characters)
    random_checkpoints.write(tmp_path / "policy", "pythia-410m", tokens, labels=0, seed=0)
    file = task_files.write(tmp_path)
    text = file.read_text()
    assert 'Query(f"{i:06b}")' in text
    file.write_text(text.replace('Query(f"{i:06b}")', 'Query(f"1/{i + 2} of 10")'))
    c = tiny_run.config(task__name=f"{file}:Ones", task__prompt_length=16, model__path=str(tmp_path / "policy"))
    return tiny_run.settings(tmp_path / "run", c)


def test_a_tokenizer_that_drops_a_character_is_told_once(tmp_path, caplog):
    s = settings(tmp_path, "0123456789of ")
    training.reference(s)()
    (told,) = alarms.read(s.run.metrics("trainer"))
    assert (told.kind, told.step) == (joining.KIND, 0)
    assert "40 of 40 train prompts" in told.sentence and "8 of 8 heldout prompts" in told.sentence
    assert "'1/10 of 10', which the policy reads as '110 of 10'" in told.sentence
    made, lease = training.make_trainer(s, publish_every_steps=2)
    made.close()
    lease.release()
    assert len(alarms.read(s.run.metrics("trainer"))) == 1
    assert sum("1/10 of 10" in record.message for record in caplog.records) == 1


def test_a_dry_run_tells_it_and_writes_nothing(tmp_path, caplog, capsys):
    s = settings(tmp_path, "0123456789of ")
    assert jobs.dry_run(s, full=False)() == 0
    assert sum("1/10 of 10" in record.message for record in caplog.records) == 1 and not s.run.root.exists()


def test_a_tokenizer_that_keeps_prompts_is_not_told(tmp_path):
    assert joining.changed_prompts(settings(tmp_path, "0123456789of /").experiment) is None


def test_of_many_prompts_some_are_looked_at(tmp_path, monkeypatch):
    s = settings(tmp_path, "0123456789of ")
    monkeypatch.setattr(joining, "PROMPTS", 10)
    found = joining.changed_prompts(s.experiment)
    assert found is not None and "10 of 10 train prompts (of 40)" in found.sentence and len(SPLITS) == 2
