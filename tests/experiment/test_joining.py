"""Joining a run: what the tokenizer makes of prompts."""

import pytest

from tba_jax.experiment import dry_run, joining, training
from tba_jax.telemetry import alarms
from tests.support import random_checkpoints, task_files, tiny_checkpoints, tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")


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
    joining.tell_changed_prompts(s.experiment, alarms.Alarms(s.run.metrics("trainer")))
    assert len(alarms.read(s.run.metrics("trainer"))) == 1
    assert sum("1/10 of 10" in record.message for record in caplog.records) == 1


def test_a_dry_run_tells_it_and_writes_nothing(tmp_path, caplog, monkeypatch):
    s = settings(tmp_path, "0123456789of ")
    assert dry_run.estimated(s, full=False)() == 0
    assert sum("1/10 of 10" in record.message for record in caplog.records) == 1 and not s.run.root.exists()
    monkeypatch.setattr(joining, "PROMPTS", 10)  # of many prompts some are looked at
    assert "10 of 10 train prompts (of 40)" in joining.changed_prompts(s.experiment)
    assert not joining.changed_prompts(settings(tmp_path / "other", "0123456789of /").experiment)
