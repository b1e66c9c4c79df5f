"""Commands print their own words alone: libraries that they import stay silent, unless the user's environment has them speak."""

import json
import subprocess
import sys

from tests.support import tiny_run

PROGRAM = """
import sys, tba_jax, transformers
sys.modules.pop("torch")  # datasets takes a torch that was refused for one that is there
import datasets
datasets.load_dataset({folder!r}, split="train")
"""


def test_libraries_speak_only_where_they_are_asked_to(tmp_path):
    """transformers of PyTorch that it does not find, be it installed or not; datasets, asked to, by a bar."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text("".join(json.dumps({"a": i}) + "\n" for i in range(10)))
    # pytest has imported tba_jax, which set these variables in its own environment.
    own = {name: value for name, value in tiny_run.environment().items() if not name.startswith(("TRANSFORMERS_", "HF_DATASETS"))}
    own |= {"HF_HOME": str(tmp_path / "hub"), "PYTHONPATH": str(tmp_path / "site"), "HF_DATASETS_DISABLE_PROGRESS_BARS": "0"}
    command = [sys.executable, "-c", PROGRAM.format(folder=str(tmp_path / "rows"))]
    done = subprocess.run(command, cwd=tiny_run.ROOT, env=own, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "PyTorch was not found" not in done.stderr, done.stderr
    assert "Generating train split" in done.stderr
