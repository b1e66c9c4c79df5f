"""The notebook: its cells, the ways it finds tba_jax, and all of it from end to end in fresh environments."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from launch.constraints import resolve
from tests.support import executed_notebook, tiny_run

NOTEBOOK = tiny_run.ROOT / "colab" / "tba_jax.ipynb"
CELLS: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = {cell["id"]: "".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"}
# What is copied where the notebook is opened elsewhere.
COPIED = ("tba_jax", "configs", "colab", "requirements.txt", "pyproject.toml", "README.md", "LICENSE")


def test_cells_compile_and_have_no_outputs():
    for name, code in CODE.items():
        compile(re.sub(r"^(\s*)[%!].*$", r"\1pass", code, flags=re.MULTILINE), name, "exec")
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in CELLS)
    assert not re.search(r"OWNER|YOUR|TODO|<[a-z-]+>", "".join(CODE.values())), "nothing is left for the reader to replace"


def find(folder: Path, answer: str = "") -> str:
    """The folder of tba_jax that the first cell finds from `folder`. Raises CalledProcessError where it finds none."""
    done = subprocess.run(
        [sys.executable, "-c", CODE["source"]], cwd=folder, input=f"{answer}\n", capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1].rpartition("tba_jax is in ")[2]


def test_it_asks_once_for_a_repository(tmp_path):
    made, here = tmp_path / "made", tmp_path / "here"
    here.mkdir()
    (made / "tba_jax").mkdir(parents=True)
    (made / "tba_jax" / "main.py").touch()
    git = ["git", "-C", str(made), "-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=first"]):
        subprocess.run([*git, *words], check=True)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        find(here, "file:///nowhere/tba_jax")
    assert "git could not fetch 'file:///nowhere/tba_jax'" in failed.value.stderr
    assert find(here, made.as_uri()) == str(here / "tba_jax_source" / "repository")
    assert find(here, "file:///nowhere") == str(here / "tba_jax_source" / "repository"), "it asks no second time"


def environment(folder: Path, version: str, *packages: str) -> Path:
    """The interpreter of a new environment with what executes notebooks, and nothing else that the notebook needs."""
    if not (interpreter := resolve.find(version)):
        pytest.skip(f"there is no Python {version} here that can make an environment")
    subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "nbclient", "nbformat", "ipykernel", *packages]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode and not os.environ.get("REQUIRE_PACKAGES"):
        pytest.skip(f"packages cannot be fetched here: {' '.join(done.stderr.split())[-200:]}")
    assert done.returncode == 0, done.stderr
    return python


def opened(folder: Path) -> Path:
    """The notebook alone beside a zip of its checkout."""
    checkout, alone = folder / "checkout", folder / "content"
    for name in COPIED:
        source = tiny_run.ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, checkout / name)
    alone.mkdir()
    shutil.make_archive(str(alone / "tba_jax"), "zip", checkout)
    shutil.rmtree(checkout)
    return Path(shutil.copy(NOTEBOOK, alone))


@pytest.mark.slow
def test_all_of_it_runs_beside_the_jax_of_colab(tmp_path, data_dir):
    python = environment(tmp_path / "venv", "3.13", "jax==0.7.2", "flax==0.11.2")
    given, result = opened(tmp_path), tmp_path / "result.ipynb"
    real = {"MODEL": data_dir / "models" / "TinyStories-656K", "STORIES": data_dir / "tinystories" / "tinystories_1000.json"}
    fields = {"STEPS": 12, "SLIDER_STEPS": 10, "STORIES_STEPS": 10} | {name: str(path.resolve()) for name, path in real.items()}
    script = str(Path(executed_notebook.__file__))
    # The flags of the tests are for the XLA of this environment, and another one ends by a flag that it does not know.
    seen = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "PYTHON"))}
    done = subprocess.run(
        [str(python), script, str(given), str(result), json.dumps(fields)],
        env=seen | {"JAX_PLATFORMS": "cpu", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outputs = {cell["id"]: cell["outputs"] for cell in json.loads(result.read_text())["cells"] if cell["cell_type"] == "code"}
    texts = {name: json.dumps(each, ensure_ascii=False) for name, each in outputs.items()}
    assert all(each.get("output_type") != "error" for cell in outputs.values() for each in cell)
    assert "a CPU with" in texts["device"]
    for name in ("run_demo", "run_stories"):
        assert any("image/png" in each.get("data", {}) for each in outputs[name]), name
    assert "step 12" in texts["before_and_after"] and "step 10" in texts["run_stories"]
    assert "srcdoc" in texts["report"] and "iframe" in texts["tensorboard"] and "colab-stories.zip" in texts["export_policy"]
    (archive,) = tmp_path.rglob("exported/colab-stories.zip")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(zipfile.ZipFile(archive).namelist())
