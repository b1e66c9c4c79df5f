"""The wheel, installed without a checkout: recipes are found from any folder, with their models and data."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tba_jax.commands import recipes
from tba_jax.run import processes
from tests.support import tiny_run

pytestmark = pytest.mark.slow


def call(*arguments: str, at: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """In a folder that is no checkout, and sees none."""
    seen = {name: value for name, value in tiny_run.environment().items() if name != "PYTHONPATH"}
    return subprocess.run(arguments, cwd=at, env=seen, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Made from a copy, since a build leaves folders behind."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("tba_jax", "configs"):
        shutil.copytree(tiny_run.ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE"):
        shutil.copy(tiny_run.ROOT / name, source)
    options = ["--quiet", "--no-deps", "--disable-pip-version-check", "--retries=1", "--timeout=60"]
    done = call(sys.executable, "-m", "pip", "wheel", *options, f"--wheel-dir={folder}", str(source), at=folder)
    if done.returncode and not os.environ.get("REQUIRE_PACKAGES"):
        pytest.skip(f"a wheel cannot be built here, which needs setuptools: {' '.join(done.stderr.split())[-200:]}")
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("tba_jax-*.whl")
    return made


@pytest.fixture(scope="module")
def python(wheel) -> str:
    """The interpreter of a new environment with the wheel, which sees the packages of the tests' own environment."""
    folder = wheel.parent / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    own = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", at=wheel.parent).stdout.strip())
    (own / "other.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    done = call(
        python, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check", str(wheel), at=wheel.parent
    )
    assert done.returncode == 0, done.stderr
    where = call(python, "-c", "import tba_jax, configs; print(tba_jax.__file__, configs.__file__)", at=wheel.parent)
    assert where.stdout.split() == [str(own / name / "__init__.py") for name in ("tba_jax", "configs")], where.stdout
    return python


def test_the_wheel_has_every_file_of_package_and_recipes(wheel):
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith("tba_jax-")}
    there = {
        str(path.relative_to(tiny_run.ROOT))
        for name in ("tba_jax", "configs")
        for path in (tiny_run.ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == there


def test_help_and_a_mistyped_recipe_list_those_that_are_there(python, tmp_path):
    shown = call(python, "-m", "tba_jax.main", "--help", at=tmp_path)
    assert all(recipe in shown.stdout for recipe in recipes.listed()), shown.stdout + shown.stderr
    refused = call(python, "-m", "tba_jax.main", "--config=demoo", "--workdir=run", at=tmp_path)
    assert refused.returncode == processes.BAD_INPUT and "did you mean 'configs/demo.py'" in refused.stderr
    assert "gsm8k_qwen2_5_1_5b" in refused.stderr and not (tmp_path / "run").exists()


def test_it_is_in_no_checkout(python, tmp_path):
    assert ", not in a git checkout" in call(python, "-m", "tba_jax", "version", at=tmp_path).stdout


def test_the_demo_runs_by_its_name(python, tmp_path):
    small = {"learner.steps": 3, "learner.warmup_steps": 0, "warm_start.steps": 10, "evaluation.queries": 8}
    flags = [f"--config.{name}={value}" for name, value in small.items()]
    done = call(python, "-m", "tba_jax.main", "--config=demo", "--workdir=run", *flags, at=tmp_path)
    assert done.returncode == 0 and "demo: accuracy" in done.stdout, done.stdout + done.stderr
    shown = call(python, "-m", "tba_jax", "show", "--workdir=run", "--count=1", at=tmp_path)
    assert shown.returncode == 0 and "reward" in shown.stdout, shown.stderr


def test_small_recipes_find_their_models_and_data(python, tmp_path):
    dry = ("--workdir=run", "--dry_run")
    done = call(python, "-m", "tba_jax.main", "--config=configs/gsm8k_qwen2_5_1_5b.py:small", *dry, at=tmp_path)
    assert done.returncode == 0 and "trainer" in done.stdout, done.stderr


def test_a_recipe_of_ones_own_begins_with_the_defaults(python, tmp_path):
    text = "from configs import demo\n\ndef get_config():\n    c = demo.get_config()\n    c.learner.steps = 77\n    return c\n"
    (tmp_path / "mine.py").write_text(text)
    done = call(python, "-m", "tba_jax.main", "--config=mine.py", "--workdir=run", "--dry_run=full", at=tmp_path)
    assert done.returncode == 0 and '"steps": 77' in done.stdout, done.stderr


def test_a_dry_run_compiles_by_the_name_of_a_recipe(python, tmp_path):
    flags = ("--config=demo", "--workdir=run", "--dry_run", "--role=evaluator", "--topology=v5e:1x1")
    done = call(python, "-m", "tba_jax.main", *flags, at=tmp_path, timeout=600)
    if importlib.util.find_spec("libtpu") is None:
        assert done.returncode == processes.BAD_INPUT and "extra `tpu`" in done.stderr, done.stderr
    else:
        assert done.returncode == 0 and "evaluator  fits: " in done.stdout, done.stderr
