"""The notebook: its form, the ways it finds tba_jax, and all of it from end to end in fresh environments."""

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

from tests.support import executed_notebook, tiny_run

NOTEBOOK = tiny_run.ROOT / "colab" / "tba_jax.ipynb"
CELLS: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = {cell["id"]: "".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"}
# What is copied where the notebook is opened elsewhere.
COPIED = ("tba_jax", "configs", "colab", "requirements.txt", "pyproject.toml")


def test_it_is_a_notebook_without_outputs():
    whole = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert whole["nbformat"] == 4 and whole["nbformat_minor"] >= 5 and len({cell["id"] for cell in CELLS}) == len(CELLS)
    for cell in CELLS:
        assert re.fullmatch(r"[\w-]{1,64}", cell["id"]) and isinstance(cell["metadata"], dict)
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | (
            {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        )
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None


@pytest.mark.parametrize("name", CODE)
def test_a_cell_compiles_and_is_short(name):
    compile(re.sub(r"^(\s*)[%!].*$", r"\1pass", CODE[name], flags=re.MULTILINE), name, "exec")
    assert len(CODE[name].splitlines()) <= (60 if name == "source" else 30)
    assert max(map(len, CODE[name].splitlines())) <= 140


def test_nothing_is_left_for_the_reader_to_replace():
    assert 'REPOSITORY = ""  # @param' in CODE["source"]
    assert not re.search(r"OWNER|YOUR|TODO|<[a-z-]+>", "".join(CODE.values()))


def test_each_part_tells_its_minutes():
    words = "\n".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
    parts = re.findall(r"^## \d.*$", words, re.MULTILINE)
    timed = [line for line in parts if re.search(r"\((CPU: .+; T4, TPU: not measured|seconds|no time at all)\)$", line)]
    assert [re.match(r"## (\d)\. ", line)[1] for line in timed] == list("12345678"), parts


def find(folder: Path, answer: str = "") -> str:
    """The folder of tba_jax that the first cell finds from `folder`. Raises CalledProcessError where it finds none."""
    done = subprocess.run(
        [sys.executable, "-c", CODE["source"]], cwd=folder, input=f"{answer}\n", capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1].rpartition("tba_jax is in ")[2]


def repository(folder: Path) -> Path:
    """A folder that looks like tba_jax."""
    (folder / "tba_jax").mkdir(parents=True)
    (folder / "tba_jax" / "main.py").touch()
    return folder


@pytest.mark.parametrize("below", [".", "colab"])
def test_it_finds_its_checkout(tmp_path, below):
    root = repository(tmp_path / "checkout")
    (root / below).mkdir(exist_ok=True)
    assert find(root / below) == str(root)


@pytest.mark.parametrize("inside", ["", "tba_jax-main"])
def test_it_finds_a_zip_beside_it(tmp_path, inside):
    """Of the repository's files, or of a folder with them; other zips, and files that only look like zips, stay as they are."""
    made = repository(tmp_path / "made" / inside)
    here = tmp_path / "here"
    here.mkdir()
    shutil.make_archive(str(here / "source"), "zip", tmp_path / "made")
    with zipfile.ZipFile(here / "another.zip", "w") as other:
        other.writestr("notes.txt", "")
    (here / "broken.zip").write_text("no zip")
    assert find(here) == str(here / "tba_jax_source" / made.relative_to(tmp_path / "made"))
    assert [path.name for path in (here / "tba_jax_source").rglob("*.txt")] == []
    (here / "source.zip").unlink()
    assert find(here).startswith(str(here / "tba_jax_source")), "what was unpacked is found again"


def test_it_asks_once_for_a_repository(tmp_path):
    made, here = repository(tmp_path / "made"), tmp_path / "here"
    here.mkdir()
    git = ["git", "-C", str(made), "-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=first"]):
        subprocess.run([*git, *words], check=True)
    assert find(here, made.as_uri()) == str(here / "tba_jax_source" / "repository")
    assert find(here, "file:///nowhere") == str(here / "tba_jax_source" / "repository"), "it asks no second time"


def test_an_address_that_cannot_be_fetched_is_named(tmp_path):
    with pytest.raises(subprocess.CalledProcessError) as failed:
        find(tmp_path, "file:///nowhere/tba_jax")
    assert "git could not fetch 'file:///nowhere/tba_jax'" in failed.value.stderr.splitlines()[-1] + failed.value.stderr


def test_without_any_source_it_says_what_to_do(tmp_path):
    with pytest.raises(subprocess.CalledProcessError) as failed:
        find(tmp_path)
    assert "zip" in failed.value.stderr.splitlines()[-1] and "REPOSITORY" in failed.value.stderr.splitlines()[-1]


def test_a_form_is_filled_in_as_the_reader_does():
    left = {"WORKDIR", "STEPS"}
    assert executed_notebook.filled_in('WORKDIR = "a"  # @param\nuse(WORKDIR)', {"WORKDIR": "b", "STEPS": 3}, left) == (
        "WORKDIR = 'b'  # @param\nuse(WORKDIR)"
    )
    assert left == {"STEPS"}


def python_of(version: str) -> str:
    """An interpreter of this version that can make environments. Skips where there is none."""
    candidates = [sys.executable, f"python{version}", *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    for candidate in candidates:
        asked = [candidate, "-c", "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"]
        try:
            done = subprocess.run(asked, capture_output=True, text=True, check=False)
        except OSError:
            continue
        if done.returncode == 0 and done.stdout.strip() == version:
            return candidate
    pytest.skip(f"there is no Python {version} here that can make an environment")


def environment(folder: Path, version: str, *packages: str) -> Path:
    """The interpreter of a new environment with what executes notebooks, and nothing else that the notebook needs."""
    subprocess.run([python_of(version), "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "nbclient", "nbformat", "ipykernel", *packages]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode and not os.environ.get("REQUIRE_PACKAGES"):
        pytest.skip(f"packages cannot be fetched here: {' '.join(done.stderr.split())[-200:]}")
    assert done.returncode == 0, done.stderr
    return python


def opened(folder: Path, way: str) -> Path:
    """The notebook as it is opened from a checkout, or alone beside a zip of it."""
    checkout = folder / "checkout"
    for name in COPIED:
        source = tiny_run.ROOT / name
        if source.is_dir():
            shutil.copytree(source, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, checkout / name)
    if way == "checkout":
        return checkout / "colab" / NOTEBOOK.name
    alone = folder / "content"
    alone.mkdir()
    shutil.make_archive(str(alone / "tba_jax"), "zip", checkout)
    shutil.rmtree(checkout)
    return Path(shutil.copy(NOTEBOOK, alone))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "way", "packages"),
    [("3.11", "checkout", ()), ("3.13", "zip", ("jax==0.7.2", "flax==0.11.2"))],
    ids=["3.11", "3.13-with-colab-s-jax"],
)
def test_all_of_it_runs(tmp_path, data_dir, version, way, packages):
    python, given, result = environment(tmp_path / "venv", version, *packages), opened(tmp_path, way), tmp_path / "result.ipynb"
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
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    outputs = {cell["id"]: cell["outputs"] for cell in json.loads(result.read_text())["cells"] if cell["cell_type"] == "code"}
    texts = {name: json.dumps(each, ensure_ascii=False) for name, each in outputs.items()}
    assert all(each.get("output_type") != "error" for cell in outputs.values() for each in cell)
    replaced = "jax 0.7.2 is here and >=0.10 is needed: it is replaced now"
    assert (replaced in texts["packages"]) is bool(packages) and "a CPU with" in texts["device"]
    for name in ("run_demo", "run_stories"):
        assert any("image/png" in each.get("data", {}) for each in outputs[name]), name
    assert "step 12" in texts["before_and_after"] and "step 10" in texts["run_stories"]
    assert "srcdoc" in texts["report"] and "report.html" in texts["report"]
    assert "iframe" in texts["tensorboard"] and "colab-stories.zip" in texts["export_policy"]
    (archive,) = tmp_path.rglob("exported/colab-stories.zip")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(zipfile.ZipFile(archive).namelist())
