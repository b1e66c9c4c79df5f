"""Commands print their own words alone: libraries that they import stay silent, unless the user's environment has them speak."""

import json
import subprocess
import sys

import pytest

from tests.support import tiny_run

ASKED = ("TRANSFORMERS_VERBOSITY", "TRANSFORMERS_NO_ADVISORY_WARNINGS", "HF_DATASETS_DISABLE_PROGRESS_BARS")


@pytest.fixture
def without_torch(tmp_path) -> dict[str, str]:
    """The environment of a user who set none of these variables, and where PyTorch is not found, be it installed or not.

    pytest has imported tba_jax, which set them in its own.
    """
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    ours = tiny_run.environment() | {"HF_HOME": str(tmp_path / "hub"), "PYTHONPATH": str(folder)}
    return {name: value for name, value in ours.items() if name not in ASKED}


SPEAKING = {"TRANSFORMERS_VERBOSITY": "warning", "HF_DATASETS_DISABLE_PROGRESS_BARS": "0"}


@pytest.mark.parametrize("settings", [{}, SPEAKING], ids=["silent", "asked"])
def test_libraries_speak_only_where_they_are_asked_to(without_torch, tmp_path, settings):
    """transformers of PyTorch that it does not find, datasets by a bar."""
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text("".join(json.dumps({"a": i}) + "\n" for i in range(10)))
    # datasets takes a torch that was refused for one that is there.
    program = "import sys, tba_jax, transformers; sys.modules.pop('torch'); import datasets"
    program += f"; datasets.load_dataset({str(tmp_path / 'rows')!r}, split='train')"
    asked = without_torch | settings
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tiny_run.ROOT, env=asked, capture_output=True, text=True, timeout=120
    )
    words = done.stderr
    assert done.returncode == 0, done.stdout + words
    assert all((told in words) == bool(settings) for told in ("PyTorch was not found", "Generating train split")), words
    assert bool(words) == bool(settings), words
