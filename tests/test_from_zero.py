"""docs/from_zero.md, block by block, as a user types it: with a tiny random Qwen2 model, Qwen's tokenizer and GSM8K's rows."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tba_jax.storage import layout
from tests.support import random_checkpoints, tiny_checkpoints, tiny_run

PAGE = tiny_run.ROOT / "docs" / "from_zero.md"
HUB_ID = "Qwen/Qwen2.5-0.5B"
# A few minutes of a real model are a few steps of a tiny one.
FEW = "--config.learner.steps=3 --config.evaluation.queries=4 --config.evaluation.samples=1 --config.learner.learning_rate=0.01"
SHOWN = "--config.evaluation.queries=4"


def environment(folder: Path) -> dict[str, str]:
    """Of the environment that runs the tests, without network."""
    own = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "XDG_CACHE_HOME": str(folder / "cache")}
    # A make within `make test` would say which folder it enters.
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    return {name: value for name, value in tiny_run.environment().items() if name not in outer} | own


made_by_make = pytest.mark.skipif(
    not (Path(sys.prefix) / ".installed").is_file(),
    reason=f"make would install into {sys.prefix}, which it has not made",
)


@made_by_make
@pytest.mark.parametrize(
    "arguments, said",
    [
        (["gsm8k"], "name the model: make gsm8k MODEL=Qwen/Qwen2.5-0.5B, or MODEL=<a folder with config.json"),
        (["gsm8k", "MODEL=anything", "DATA=docs"], "DATA=docs holds no train.jsonl"),
        (["venv", "ACCELERATOR=cuda"], "ACCELERATOR=cuda must be one of cuda12, cuda13 and tpu"),
    ],
    ids=["no model", "no rows", "no accelerator"],
)
def test_what_make_lacks_is_told_at_once(arguments, said, tmp_path):
    command = ["make", *arguments, f"VENV={sys.prefix}"]
    seen = environment(tmp_path)
    done = subprocess.run(command, cwd=tiny_run.ROOT, env=seen, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0 and said in done.stderr and done.stdout == ""


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The files of this checkout as a clone has them, with the environment that runs the tests."""
    asked = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(asked, cwd=tiny_run.ROOT, capture_output=True, text=True, check=True)
    folder = tmp_path / "tba_jax"
    for name in listed.stdout.splitlines():
        if (tiny_run.ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tiny_run.ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def script(model: Path, data: Path) -> str:
    """The page as one script: with a local model and data in place of the hub's, and without the clone."""
    lines = ["set -ex"]
    page = PAGE.read_text()
    for match in re.finditer(r"^```(sh|python)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        if match[1] == "python":
            file = re.findall(r"Write this file as `([\w.]+)`", page[: match.start()])[-1]
            lines += [f"cat > {file} <<'END_OF_FILE'", match[2].replace(HUB_ID, str(model)), "END_OF_FILE"]
            continue
        text = "\n".join(line for line in match[2].splitlines() if not line.startswith("git clone"))
        text = text.replace(f"make gsm8k MODEL={HUB_ID}", f"make gsm8k MODEL={model} DATA={data} ARGS='{FEW}'")
        text = text.replace("--for_this_machine", f"--for_this_machine {FEW}").replace(" evaluate ", f" evaluate {SHOWN} ")
        lines.append(text)
    return "\n".join(lines)


@pytest.mark.slow
@made_by_make
def test_the_page_runs_as_it_stands(checkout, data_dir, tmp_path):
    model = random_checkpoints.write(
        tmp_path / "model", "qwen2.5-0.5b", data_dir / "tokenizers" / "qwen2.5", p_end=1 / 12, temperature=0.7
    )
    done = subprocess.run(
        ["bash", "-c", script(model, data_dir / "gsm8k")],
        cwd=checkout.parent,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    (tmp_path / "transcript.txt").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, done.stderr[-6000:]
    (run,) = (layout.RunDir(folder) for folder in (checkout / "runs").glob("gsm8k-*"))
    assert layout.read_json(run.finished)["step"] == 3
    assert "<html" in (checkout / "report.html").read_text()[:500]
    assert json.loads((checkout / "report.json").read_text())["step"] == 3
    original, before = tiny_checkpoints.load(model)
    rounded = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16).astype(jnp.float32), before)
    for name in ("gsm8k-policy", "my-policy"):
        exported, params = tiny_checkpoints.load(checkout / name)
        moved = jax.tree.map(lambda new, old: float(jnp.abs(new - old).max()), params, rounded)
        assert exported == original and max(jax.tree.leaves(moved)) > 1e-3, "nothing was learned"
