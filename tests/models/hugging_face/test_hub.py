"""Models and data sets of the hub while it cannot be reached: a copy that was fetched before is taken, with one warning."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tba_jax.models.hugging_face import hub

REPOSITORY = Path(__file__).parent.parent.parent.parent
FIXTURE = REPOSITORY / "tests" / "fixtures" / "tiny_llama_tied"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "from tba_jax.models.hugging_face import load; print(load.resolve_folder('org/tiny'))"
DATA = (
    "from tba_jax.tasks import data; "
    "print([dict(row) for row in data.read('org/rows', fields={'q': str}, setting='task.x.path', split='train')])"
)


def call(home: Path, program: str) -> subprocess.CompletedProcess:
    """In a process of its own: the hub's libraries read their settings when they are imported. Nobody listens on that port."""
    settings = {"HF_HOME": str(home), "HF_ENDPOINT": "http://127.0.0.1:9", "PYTHONPATH": str(REPOSITORY)}
    there = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "TRANSFORMERS"))}
    begin = "import logging; logging.basicConfig(format='%(message)s')\n"
    command = [sys.executable, "-c", begin + program]
    return subprocess.run(command, env=there | settings, capture_output=True, text=True, timeout=120, check=False)


def cached(home: Path, kind: str, name: str) -> Path:
    """The snapshot's folder in a cache with the layout of huggingface_hub."""
    repository = home / "hub" / f"{kind}--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return repository / "snapshots" / COMMIT


def test_a_model_that_was_fetched_before_is_taken(tmp_path):
    folder = cached(tmp_path, "models", "org/tiny")
    shutil.copytree(FIXTURE, folder)
    done = call(tmp_path, MODEL)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == folder
    assert done.stderr.count("the hub cannot be reached") == 1 and "model org/tiny" in done.stderr


def test_a_data_set_that_was_fetched_before_is_taken(tmp_path):
    """Its tables lie in the cache of `datasets`, which is what a first fetch leaves."""
    source = tmp_path / "rows" / "train.jsonl"
    source.parent.mkdir()
    source.write_text(json.dumps({"q": "one"}) + "\n")
    # A data set that is read from a folder has the same tables under the folder's name: they are put under the hub's.
    prepare = f"import datasets; datasets.load_dataset({str(source.parent)!r}, split='train')"
    assert call(tmp_path, prepare).returncode == 0
    (made,) = (tmp_path / "datasets").glob("*/default*/0.0.0/*/dataset_info.json")
    target = tmp_path / "datasets" / "org___rows" / "default" / "0.0.0" / COMMIT
    shutil.copytree(made.parent, target)
    for table in target.glob("*-train.arrow"):
        table.rename(target / "rows-train.arrow")
    information = json.loads((target / "dataset_info.json").read_text())
    (target / "dataset_info.json").write_text(json.dumps(information | {"dataset_name": "rows", "config_name": "default"}))
    done = call(tmp_path, DATA)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[{'q': 'one'}]"
    assert done.stderr.count("the hub cannot be reached") == 1 and "task.x.path='org/rows'" in done.stderr


NAMED = "from tba_jax.models.hugging_face import load\nwith load.named('model.path', 'org/tiny'): load.resolve_folder('org/tiny')"


@pytest.mark.parametrize(
    "program, name, advice",
    [
        (NAMED, "model.path='org/tiny'", "--config.model.path=FOLDER (with make: MODEL=FOLDER)"),
        (NAMED.replace("model.path", "task.tldr.reward_path"), "task.tldr.reward_path=", "--config.task.tldr.reward_path=FOLDER"),
        (DATA, "task.x.path='org/rows'", "--config.task.x.path=FILE.jsonl"),
        (
            DATA.replace("task.x.path", "task.gsm8k.train_path"),
            "task.gsm8k.train_path='org/rows'",
            "--config.task.gsm8k.train_path=FILE.jsonl (with make: DATA=FOLDER, with train.jsonl and test.jsonl)",
        ),
    ],
    ids=["model", "reward model", "data", "data of make gsm8k"],
)
def test_without_a_copy_one_sentence_says_so(tmp_path, program, name, advice):
    done = call(tmp_path, program)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ValueError") and name in last
    assert "the hub cannot be reached" in last and "cache" in last and last.endswith(f"needs no hub: {advice}")


class Answered(Exception):
    def __init__(self, status: int):
        self.response = SimpleNamespace(status_code=status)


@pytest.mark.parametrize(
    "error, away",
    [
        (ConnectionRefusedError(), True),
        (TimeoutError(), True),
        (Answered(503), True),
        (Answered(429), True),
        (Answered(404), False),
        (Answered(401), False),
        (ValueError("no such split"), False),
        (FileNotFoundError(2, "x"), False),
    ],
    ids=repr,
)
def test_what_counts_as_away(error, away):
    assert hub.is_away(error) == away
