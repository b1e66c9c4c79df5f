"""Commands print their own words alone: libraries that they import stay silent, unless the user's environment has them speak."""

import json
import re
import subprocess
import sys

import pytest

from tests.support import random_checkpoints, tiny_run

ASKED = ("TRANSFORMERS_VERBOSITY", "TRANSFORMERS_NO_ADVISORY_WARNINGS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
OUR_LOG = re.compile(r"\d\d:\d\d:\d\d ")  # command.log_to_stderr


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """The environment of a user who set none of these variables; pytest has imported tba_jax, which set them in its own."""
    ours = tiny_run.environment() | {"HF_HOME": str(tmp_path / "hub")}
    return {name: value for name, value in ours.items() if name not in ASKED}


@pytest.fixture
def without_torch(environment, tmp_path) -> dict[str, str]:
    """The same where PyTorch is not found, be it installed or not."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    return environment | {"PYTHONPATH": str(folder)}


def words_of(arguments: list[str], environment: dict[str, str]) -> str:
    """What a command that succeeds writes to stderr."""
    done = subprocess.run(arguments, cwd=tiny_run.ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "settings, speaks", [({}, False), ({"TRANSFORMERS_VERBOSITY": "warning"}, True)], ids=["silent", "asked"]
)
def test_transformers_tells_of_pytorch_only_where_it_is_asked_to(without_torch, settings, speaks):
    words = words_of([sys.executable, "-c", "import tba_jax, transformers"], without_torch | settings)
    assert ("PyTorch was not found" in words) == speaks and bool(words) == speaks, words


@pytest.mark.parametrize(
    "settings, speaks", [({}, False), ({"HF_DATASETS_DISABLE_PROGRESS_BARS": "0"}, True)], ids=["silent", "asked"]
)
def test_datasets_draws_bars_only_where_it_is_asked_to(environment, tmp_path, settings, speaks):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text("".join(json.dumps({"a": i}) + "\n" for i in range(10)))
    program = f"import tba_jax, datasets; datasets.load_dataset({str(tmp_path / 'rows')!r}, split='train')"
    words = words_of([sys.executable, "-c", program], environment | settings)
    assert ("Generating train split" in words) == speaks and bool(words) == speaks, words


def test_no_command_lets_a_library_speak(without_torch, tmp_path):
    """Commands that open a tokenizer of transformers: the roles of a run in one process, and what shows its rows."""
    tokenizer = random_checkpoints.byte_tokenizer(tmp_path / "tokenizer")
    model = random_checkpoints.write(tmp_path / "model", "llama-3.2-1b", tokenizer)
    run = tmp_path / "run"
    flags = [f"--config.model.path={model}", "--config.schedule.mode=interleaved", "--config.learner.steps=1"]
    words = words_of(tiny_run.command(run, *flags), without_torch).splitlines()
    assert words and all(OUR_LOG.match(line) for line in words), words
    assert words_of([sys.executable, "-m", "tba_jax", "show", f"--workdir={run}"], without_torch) == ""
