"""What a config is built into: policy and tokenizer, task and queries, contract."""

import datetime
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs import story_sentiment
from tba_jax import main
from tba_jax.commands import command_line
from tba_jax.experiment import composition, dry_run, stored_run
from tba_jax.schemas import flatten
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout
from tba_jax.telemetry import alarms
from tba_jax.text.tokenizers import HuggingFaceTokenizer, banned_tokens, check_stop_strings
from tests.rewards.test_scorers import write_tokenizer
from tests.support import random_checkpoints, task_files, tiny_checkpoints, tiny_run


@pytest.fixture
def model_folder(tmp_path) -> Path:
    """A tiny Llama of 48 ids and 64 positions, with a tokenizer of 40 ids."""
    folder = shutil.copytree(tiny_checkpoints.path_of("llama_tied"), tmp_path / "model")
    write_tokenizer(folder, vocab=40, around=False)
    (tmp_path / "stories.json").write_text(json.dumps([f"w{i} w{i + 1} w{i + 2}" for i in range(4, 24)]))
    return folder


def story_config(folder: Path, **overrides):
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    settings = {
        "model.path": str(folder),
        "task.story_sentiment.data_path": str(folder.parent / "stories.json"),
        "task.story_sentiment.heldout_queries": 5,
        "learner.queries": 4,
        "task.prompt_length": 16,
        "task.response_length": 48,
    }
    return tiny_run.config_with(settings | named, story_sentiment)


def test_a_pretrained_model_and_its_limits(model_folder):
    built = composition.build(story_config(model_folder))
    assert (built.policy.model.vocab, built.tokenizer.vocab_size, built.contract.eos_id) == (48, 40, 2)
    assert built.contract.banned_tokens == tuple(range(40, 48))  # rows of the embedding without a token
    assert {split: len(queries) for split, queries in built.queries.items()} == {"train": 15, "heldout": 5}
    assert built.queries["train"][0].prompt == (4, 5, 6)
    assert "data_path" not in built.contract.task
    with pytest.raises(ValueError, match=r"task.prompt_length=17 \+ task.response_length=48 = 65 exceed the model's 64"):
        composition.build(story_config(model_folder, task__prompt_length=17))
    definition = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps(definition | {"vocab_size": 39}))
    with pytest.raises(ValueError, match=rf"model.path='{model_folder}': the tokenizer has 40 ids, the embedding only 39"):
        composition.build(story_config(model_folder))
    (model_folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=f"{model_folder} holds no tokenizer"):
        composition.build(story_config(model_folder))
    with pytest.raises(ValueError, match="nowhere"):
        composition.build(story_config(model_folder, model__path=str(model_folder / "nowhere")))


def clock_at(patch, *day):
    date, time = datetime.date(*day), datetime.datetime(*day)
    patch.setattr(composition, "datetime", SimpleNamespace(date=SimpleNamespace(today=lambda: date)), raising=False)
    patch.setattr("transformers.utils.chat_template_utils.datetime", SimpleNamespace(now=lambda: time))


def test_a_run_keeps_the_day_on_which_it_was_made(model_folder, tmp_path, monkeypatch, capsys):
    (model_folder / "chat_template.jinja").write_text("w{{ strftime_now('%-d') }} {{ messages[-1]['content'] }}")
    c = story_config(model_folder, task__chat_template=True)
    run = layout.RunDir(tmp_path / "run")
    clock_at(monkeypatch, 2025, 3, 4)
    made = composition.build(c)
    w4 = made.tokenizer.encode("w4")
    assert made.contract.chat_template["text"] == "w4 {prompt}" and made.queries["train"][0].prompt[:1] == tuple(w4)
    contract_lib.join(run, c, made.contract)
    clock_at(monkeypatch, 2025, 3, 5)
    theirs = flatten(story_sentiment.get_config().to_dict())
    own = [f"--config.{name}={value}" for name, value in flatten(c.to_dict()).items() if value != theirs[name]]
    for flags in (["--role=searcher"], [f"--config={tiny_run.ROOT}/configs/story_sentiment.py", *own]):
        assert command_line.execute(main, [f"--workdir={run.root}", "--dry_run", *flags]) == 0, capsys.readouterr().err
    stored = contract_lib.read_run(run)
    again = composition.rebuild(stored, stored_run.config_of(stored, called="the run"), called="the run")
    assert [*again.queries["heldout"]] == [*made.queries["heldout"]] and again.contract == made.contract
    assert composition.build(c).contract.chat_template["text"] == "w5 {prompt}"
    mounting = composition.build(story_config(model_folder, task__chat_template=True, replay__mount=(str(run.root),)))
    assert mounting.queries["train"][0] == made.queries["train"][0]


def test_rewards_that_are_no_success_rates_are_refused_where_queries_are_chosen_by_them(model_folder, monkeypatch):
    config = story_config(model_folder, searchers__prompt_selection="posterior")
    with pytest.raises(ValueError, match=r"must be within \[0, 1\], and those of .*story_sentiment' are within \[-1, 1\]"):
        composition.build(config)
    for says in (None, (0.0, 1.0)):
        monkeypatch.setattr("tba_jax.tasks.story_sentiment.StorySentiment.reward_range", says)
        composition.build(config)


def test_the_extra_of_a_task_is_named_before_its_model(model_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "vaderSentiment", None)
    with pytest.raises(ValueError, match=r"story_sentiment' needs .*vaderSentiment.*`stories`: pip install -e .\.\[stories\]'"):
        composition.build(story_config(model_folder, model__path="/nowhere"))


def test_what_ends_and_bounds_responses_is_in_the_contract():
    changes = {"task.min_response_length": 32, "task.force_eos": True, "task.banned_tokens": (7, 4, 7)}
    changes |= {"task.stop_strings": ("=", "1+", "="), "task.step_ends": (",", "#", ",")}
    contract = composition.build(tiny_run.config_with(changes)).contract
    assert (contract.min_response_length, contract.stop_strings) == (32, ("1+", "="))
    assert contract.step_ends == ("#", ",") and contract.row_shape().state_values
    assert contract.banned_tokens == (0, 1, 4, 7)


def test_a_model_without_experts_has_none_to_balance():
    with pytest.raises(ValueError, match=r"learner\.router_aux_loss_coef=0\.01 balances experts, and the model has none"):
        composition.build(tiny_run.config_with({"learner.router_aux_loss_coef": 0.01}))


def test_random_weights_may_have_experts():
    experts = {"model.experts": 4, "model.experts_per_token": 2}
    model = composition.build(tiny_run.config_with(experts)).policy.model
    assert (model.architecture, model.experts, model.experts_per_token) == ("qwen3_moe", 4, 2)
    for of_all, of_token in ((4, 0), (4, 5), (0, 2)):
        settings = {"model.experts": of_all, "model.experts_per_token": of_token}
        with pytest.raises(ValueError, match=rf"model\.experts={of_all} must be 2 .* not model\.experts_per_token={of_token}"):
            composition.build(tiny_run.config_with(settings))


def test_a_special_token_whose_text_is_a_stop_string_is_allowed(model_folder, tmp_path):
    folder = tiny_checkpoints.write_byte_bpe(tmp_path / "tokenizer")
    definition = json.loads((folder / "tokenizer.json").read_text())
    special = [{**definition["added_tokens"][0], "id": 258 + i, "content": f"<|{name}|>"} for i, name in enumerate(("turn", "x"))]
    (folder / "tokenizer.json").write_text(json.dumps(definition | {"added_tokens": [*definition["added_tokens"], *special]}))
    tokenizer = HuggingFaceTokenizer(folder)
    assert tokenizer.special_ids == (256, 258, 259)

    def banned(*stops: str) -> tuple[int, ...]:
        task = tiny_run.config_with({"task.stop_strings": stops}).task
        check_stop_strings(task.stop_strings, tokenizer)
        return banned_tokens(task, tokenizer, 262)

    for text in ("<|turn|>", "<|end|>"):
        with pytest.raises(ValueError, match=re.escape(f"task.step_ends holds {text!r}, which no response can")):
            check_stop_strings([text], tokenizer, setting="task.step_ends", special=False)
    check_stop_strings(["turn"], tokenizer, setting="task.step_ends", special=False)
    assert banned() == banned("turn") == (258, 259, 260, 261)
    assert banned("<|turn|>") == (259, 260, 261)


def test_a_stop_string_is_one_that_the_tokenizer_can_spell(data_dir):
    spells, other = (HuggingFaceTokenizer(data_dir / "models" / name) for name in tiny_checkpoints.REAL_MODELS[::-1])
    check_stop_strings(["漢"], spells)
    for tokenizer, text in ((spells, "  "), (other, "a 漢")):  # the first makes one space of many
        with pytest.raises(ValueError, match=re.escape(f"task.stop_strings holds {text!r}, which no response can")):
            check_stop_strings([text], tokenizer)


@pytest.mark.usefixtures("one_device")
def test_a_tokenizer_that_drops_characters_of_prompts_is_told_once(tmp_path, caplog):
    tokens = tiny_checkpoints.write_letters(tmp_path / "tokens", "0123456789of ")
    random_checkpoints.write(tmp_path / "policy", "pythia-410m", tokens, labels=0, seed=0)
    file = task_files.write(tmp_path)
    file.write_text(file.read_text().replace('Query(f"{i:06b}")', 'Query(f"1/{i + 2} of 10")'))
    c = tiny_run.config(task__name=f"{file}:Ones", task__prompt_length=16, model__path=str(tmp_path / "policy"))
    s = tiny_run.settings(tmp_path / "run", c)
    assert dry_run.estimated(s, full=False)() == 0 and caplog.text.count("1/10 of 10") == 1 and not s.run.root.exists()
    s.run.metrics("trainer").mkdir(parents=True)
    for _ in range(2):
        composition.tell_changed_prompts(s.experiment, alarms.Alarms(s.run.metrics("trainer")))
    (told,) = alarms.read(s.run.metrics("trainer"))
    assert (told.kind, told.step) == (composition.KIND, 0)
    assert "40 of 40 train prompts" in told.sentence and "8 of 8 heldout prompts" in told.sentence
    assert "'1/10 of 10', which the policy reads as '110 of 10'" in told.sentence
