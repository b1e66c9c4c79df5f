"""Models and data sets of the hub while it cannot be reached: a copy that was fetched before is taken, with one warning."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import pytest

from tba_jax.models.hugging_face import load
from tba_jax.tasks import data
from tests.support.tiny_checkpoints import path_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    return tmp_path


def read(setting: str) -> list[data.Row]:
    return data.read("org/rows", fields={"q": str}, setting=setting, split="train")


def test_a_model_that_was_fetched_before_is_taken(home, caplog):
    repository = home / "hub" / "models--org--tiny"
    folder = Path(shutil.copytree(path_of("llama_tied"), repository / "snapshots" / COMMIT))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    assert load.resolve_folder("org/tiny") == folder
    assert caplog.text.count("the hub cannot be reached") == 1 and "model org/tiny" in caplog.text


def test_a_data_set_that_was_fetched_before_is_taken(home, caplog):
    source = home / "rows" / "train.jsonl"
    source.parent.mkdir()
    source.write_text(json.dumps({"q": "one"}) + "\n")
    # A data set that is read from a folder has the same tables under the folder's name: they are put under the hub's.
    datasets.load_dataset(str(source.parent), split="train")
    (made,) = (home / "datasets").glob("*/default*/0.0.0/*/dataset_info.json")
    target = Path(shutil.copytree(made.parent, home / "datasets" / "org___rows" / "default" / "0.0.0" / COMMIT))
    for table in target.glob("*-train.arrow"):
        table.rename(target / "rows-train.arrow")
    information = json.loads((target / "dataset_info.json").read_text())
    (target / "dataset_info.json").write_text(json.dumps(information | {"dataset_name": "rows", "config_name": "default"}))
    assert read("task.x.path") == [{"q": "one"}]
    assert caplog.text.count("the hub cannot be reached") == 1 and "task.x.path='org/rows'" in caplog.text


@pytest.mark.parametrize(
    "setting, advice",
    [
        ("model.path", "FOLDER (with make: MODEL=FOLDER)"),
        ("task.gsm8k.train_path", "FILE.jsonl (with make: DATA=FOLDER, with train.jsonl and test.jsonl)"),
    ],
)
def test_without_a_copy_one_sentence_says_so(home, setting, advice):
    with pytest.raises(ValueError, match=rf"^{setting}='org/") as error, load.named(setting, "org/tiny"):
        read(setting) if "train_path" in setting else load.resolve_folder("org/tiny")
    sentence = str(error.value)
    assert (
        "the hub cannot be reached" in sentence
        and "cache" in sentence
        and sentence.endswith(f"needs no hub: --config.{setting}={advice}")
    )


class Answered(Exception):
    def __init__(self, status: int):
        self.response = SimpleNamespace(status_code=status)


def test_what_counts_as_away():
    assert all(map(load.is_away, (ConnectionRefusedError(), TimeoutError(), Answered(503), Answered(429))))
    assert not any(map(load.is_away, (Answered(404), Answered(401), ValueError("no such split"), FileNotFoundError(2, "x"))))
