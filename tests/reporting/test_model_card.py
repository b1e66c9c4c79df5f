"""Model cards: what the hub reads of them, what they say of the run, and texts of others that stay texts."""

import json
from pathlib import Path

import huggingface_hub
import pytest

from tba_jax.experiment.schema import SCHEMA
from tba_jax.replay.journal import Journal
from tba_jax.reporting import model_card
from tba_jax.storage import layout
from tba_jax.storage.contract import plain
from tba_jax.telemetry import status

MERGED = model_card.Exported(name="gsm8k-policy", step=2, dtype="bfloat16", adapter=False)
ADAPTER = model_card.Exported(name="gsm8k-lora", step=2, dtype="float32", adapter=True)
NO_BASE = model_card.base_of("", None)


def config(**changes):
    made = SCHEMA.defaults()
    made.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
    return made


@pytest.fixture
def run(tmp_path) -> layout.RunDir:
    """A run of three journalled steps, of which two were evaluated."""
    made = layout.RunDir(tmp_path / "run")
    for folder in (made.root, made.evaluations):
        folder.mkdir()
    layout.write_json(made.config, {"id": "ab12", "config": plain(config().to_dict()), "init_from": ""})
    journal = Journal(made.journal, 1)
    for step in (1, 2, 3):
        journal.append({"step": step, "writers": ["w0"], "rows": [[0, row] for row in range(5 + step)]})
    journal.close()
    for step, reward in ((0, 0.25), (2, 0.75)):
        evaluate(made, step, reward)
    return made


def evaluate(run: layout.RunDir, step: int, reward: float | None, name: str = "accuracy") -> None:
    figures = {"greedy_reward": reward, name: reward, "sampled_reward": 0.5, "pass@4": 0.875, "pass@4_stderr": 0.02}
    figures |= {"queries": 256, "unscored": 0}
    report = {"step": step, "score_name": name, "time": 1e9, "seconds": 3.0, "samples": {"greedy": []}, **figures}
    layout.write_json(run.evaluations / f"{layout.step_name(step)}.json", report)


def base_of(folder: Path, card: str, path: str = "") -> model_card.Base:
    folder.mkdir(parents=True)
    (folder / model_card.CARD).write_text(card, encoding="utf-8")
    return model_card.base_of(path or str(folder), folder)


def card(run, base=NO_BASE, exported=MERGED, **settings) -> huggingface_hub.ModelCard:
    return huggingface_hub.ModelCard(model_card.text(run, config(**settings), base=base, exported=exported))


def test_the_front_matter_is_what_the_hub_reads(run, tmp_path):
    cached = tmp_path / "models--openai-community--gpt2" / "snapshots" / "607a30d783dfa663caf39e06633721c8d4cfcd7e"
    base = base_of(cached, "---\nlanguage: en\nlicense: mit\n---\n# GPT-2\n", "openai-community/gpt2")
    for exported, library, relation in ((MERGED, "transformers", "finetune"), (ADAPTER, "peft", "adapter")):
        found = card(run, base, exported, model__path="openai-community/gpt2")
        told = found.data.to_dict()
        assert (told["library_name"], told["base_model_relation"], told["license"]) == (library, relation, "mit")
        assert told["base_model"] == "openai-community/gpt2" and told["pipeline_tag"] == "text-generation"
        assert {"tba_jax", "trajectory-balance"} <= set(told["tags"]) and ("lora" in told["tags"]) == exported.adapter
        assert "at revision `607a30d783dfa663caf39e06633721c8d4cfcd7e`" in found.text and "licence as `mit`" in found.text
    folder = tmp_path / "checkpoint"  # the hub refuses a card whose base_model is a path
    found = card(run, base_of(folder, "no front matter\nlicense: mit\n"), model__path=str(folder))
    assert not {"base_model", "license"} & set(found.data.to_dict()) and f"`{folder}`" in found.text
    untold = card(run, learner__objective="grpo")
    assert "base_model" not in untold.data.to_dict() and "trajectory-balance" not in untold.data.tags


def test_the_scores_of_the_step_and_of_step_0(run):
    told = card(run).text
    assert "|  | step 0 | step 2 (this model) |" in told
    assert "| accuracy (reward of greedy responses) | 0.250 | 0.750 |" in told
    assert "| pass@4 | 0.875 ± 0.020 | 0.875 ± 0.020 |" in told
    assert "stderr" not in told
    assert "256 held-out queries" in told and "the best of 2 evaluated steps" in told
    evaluate(run, 3, 0.875)
    assert "The best of 3 evaluated steps is step 3, with 0.875." in card(run).text


def test_settings_and_rows_and_what_is_not_known(run):
    lora = dict(lora__rank=9, lora__targets=("layers.attention.*",), model__path="base", learner__beta_steps=40)
    told = card(run, exported=ADAPTER, learner__beta_start=0.05, learner__beta_end=0.01, **lora).text
    rows = ("| β | 0.05 → 0.01 over 40 steps |", "| steps | 2 of 500 |", "| rows trained on | 13 |", "--max-lora-rank 16 ")
    assert all(row in told for row in rows)
    (run.evaluations / "00000002.json").write_text("{")
    next(run.journal.glob("*.jsonl")).write_text("{}\n{}\n{}\n")
    told = card(run).text
    assert "Step 2 has not been evaluated." in told and "not known: the journal cannot be read" in told
    told = run.metrics("trainer")
    told.mkdir(parents=True)
    (told / "metrics.jsonl").write_text('{"step": 1, "staleness_mean": 4.0}\n{"time": 1}\n{"step": 2, "staleness_mean": "x"}\n')
    (told / "status.json").write_text(json.dumps(vars(status.Told(process={"code": {}}))))
    text = card(run).text
    assert "rows were 4.0 steps old on average" in text and "not known: the trainer's status cannot be read" in text
    (run.evaluations / "00000000.json").unlink()
    assert "Neither this step nor step 0 has been evaluated." in card(run).text


def test_texts_of_others_are_no_markup_and_no_settings_of_the_card(run, tmp_path):
    evil = "a|b`c\n---\nlicense: gpl\n---\n<script>[x](http://y)"
    assert base_of(tmp_path / "a", '---\nlicense: "mit # |`<b>"\nlicense_link: LICENSE|`\n---\n').licence == {}
    base = base_of(tmp_path / "b", "---\nlicense: other\nlicense_name: my-own\nlicense_link: LI|`CENSE\n---\n")
    evaluate(run, 2, 0.75, name=evil)
    exported = model_card.Exported(name=evil, step=2, dtype="float32", adapter=False)
    told = model_card.text(run, config(task__name=evil, model__path=evil), base=base, exported=exported)
    data = huggingface_hub.ModelCard(told).data.to_dict()
    assert data["license"] == "other" and data["license_name"] == "my-own" and data["license_link"] == "LI|`CENSE"
    assert told.count("\n---\n") == 1, "the front matter has one end"
    outside_of_code = told.replace("`a\\|b'c\\x0a---\\x0alicense: gpl\\x0a---\\x0a<script>[x](http://y)`", "")
    assert len(outside_of_code) < len(told) and "<script>" not in outside_of_code and "[x](" not in outside_of_code
    cells = [line.replace("\\|", "").count("|") for line in told.splitlines() if line.startswith("| ")]
    assert set(cells) == {3, 4}
    assert "secret" not in card(run, model__path="https://me:secret@host/x").content
