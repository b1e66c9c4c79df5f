"""tba_jax as users install it: requirements.txt and nothing else, on each Python that it is tested with, and as a wheel."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from launch.constraints import resolve as pythons
from tba_jax.commands import recipes
from tba_jax.run import processes
from tba_jax.tasks import EXTRAS
from tests.support import tiny_run

OWN = ".".join(map(str, sys.version_info[:2]))
IMPORT_ALL = """
import importlib, pkgutil, warnings
import configs, tba_jax
warnings.filterwarnings("error", category=DeprecationWarning, module=r"(tba_jax|configs)\\b")
names = [each.name for package in (tba_jax, configs) for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names))
"""
FEW_STEPS = {"learner.steps": 3, "learner.warmup_steps": 0, "warm_start.steps": 10, "evaluation.queries": 8}
DEMO = ("-m", "tba_jax.main", "--config=demo", *(f"--config.{name}={value}" for name, value in FEW_STEPS.items()))


def call(*arguments: str, at: Path = tiny_run.ROOT, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """As a user does who never heard of pytest. XLA_FLAGS: those of this Python's XLA may end a newer one."""
    ours = ("PYTHONPATH", "VIRTUAL_ENV", "XLA_FLAGS", "PYTHONDONTWRITEBYTECODE", "TRANSFORMERS_VERBOSITY")
    ours += ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "HF_DATASETS_DISABLE_PROGRESS_BARS")
    seen = {name: value for name, value in tiny_run.environment().items() if name not in ours}
    return subprocess.run(arguments, cwd=at, env=seen, capture_output=True, text=True, timeout=timeout, check=False)


def test_the_tests_have_every_extra_that_is_no_accelerators():
    extras = tomllib.loads((tiny_run.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {extra for _, extra in EXTRAS.values()} <= extras.keys()
    for name in extras.keys() - {"cuda12", "cuda13", "tpu", "parity", "verifiers", "docs", "colab"}:
        assert set(extras[name]) <= set(extras["dev"]), name


@pytest.fixture(scope="module", params=[pytest.param(each, marks=pytest.mark.xdist_group(each)) for each in pythons.VERSIONS])
def python(request, tmp_path_factory) -> str:
    """The interpreter of a new environment with requirements.txt."""
    interpreter = sys.executable if request.param == OWN else pythons.find(request.param)
    if not interpreter:
        pytest.skip(f"Python {request.param} is not on this machine: nothing here says whether tba_jax runs on it")
    folder = tmp_path_factory.mktemp("pythons") / "venv"
    subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--no-compile", "-c", str(pythons.constraints_of(request.param))]
    probe = call(*install, "--retries=1", "--timeout=15", "absl-py")
    if probe.returncode and not os.environ.get("REQUIRE_PACKAGES"):  # the gate sets it: it must not pass by skipping
        pytest.skip(f"packages cannot be fetched here: {' '.join(probe.stderr.split())[-200:]}")
    done = call(*install, "-r", "requirements.txt")
    assert done.returncode == 0, done.stdout + done.stderr
    return python


@pytest.mark.slow
def test_no_two_packages_contradict_each_other_and_everything_imports(python):
    checked, done = call(python, "-m", "pip", "check"), call(python, "-c", IMPORT_ALL)
    assert checked.returncode == 0, checked.stdout
    assert done.returncode == 0 and int(done.stdout) > 100, done.stdout + done.stderr


@pytest.mark.slow
def test_the_demo_begins_and_a_recipe_that_needs_an_extra_names_it(python, tmp_path):
    done = call(python, *DEMO, f"--workdir={tmp_path / 'run'}")
    assert done.returncode == 0 and "demo: accuracy" in done.stdout, done.stdout + done.stderr
    dry = ("-m", "tba_jax.main", f"--workdir={tmp_path / 'dry'}", "--dry_run")
    done = call(python, *dry, "--config=configs/math_qwen2_5_7b.py:small")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    done = call(python, *dry, "--config=configs/story_sentiment.py:small")
    assert done.returncode == processes.BAD_INPUT and len(done.stderr.splitlines()) == 1, done.stderr
    assert "vaderSentiment" in done.stderr and "extra `stories`" in done.stderr and ".[stories]" in done.stderr


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
def installed(wheel) -> str:
    """The interpreter of a new environment with the wheel, which sees the packages of the tests' own environment."""
    folder = wheel.parent / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    own = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", at=wheel.parent).stdout.strip())
    (own / "other.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    done = call(python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel), at=wheel.parent)
    assert done.returncode == 0, done.stderr
    where = call(python, "-c", "import tba_jax, configs; print(tba_jax.__file__, configs.__file__)", at=wheel.parent)
    assert where.stdout.split() == [str(own / name / "__init__.py") for name in ("tba_jax", "configs")], where.stdout
    return python


@pytest.mark.slow
@pytest.mark.xdist_group("wheel")
def test_the_wheel_has_every_file_of_package_and_recipes(wheel):
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith("tba_jax-")}
    files = [path for name in ("tba_jax", "configs") for path in (tiny_run.ROOT / name).rglob("*") if path.is_file()]
    assert packed == {str(path.relative_to(tiny_run.ROOT)) for path in files if "__pycache__" not in path.parts}


@pytest.mark.slow
@pytest.mark.xdist_group("wheel")
def test_a_wheel_runs_recipes_by_name_and_of_ones_own_from_any_folder(installed, tmp_path):
    shown = call(installed, "-m", "tba_jax.main", "--help", at=tmp_path)
    assert all(recipe in shown.stdout for recipe in recipes.listed()), shown.stdout + shown.stderr
    assert ", not in a git checkout" in call(installed, "-m", "tba_jax", "version", at=tmp_path).stdout
    done = call(installed, *DEMO, "--workdir=run", at=tmp_path)
    assert done.returncode == 0 and "demo: accuracy" in done.stdout, done.stdout + done.stderr
    shown = call(installed, "-m", "tba_jax", "show", "--workdir=run", "--count=1", at=tmp_path)
    assert shown.returncode == 0 and "reward" in shown.stdout, shown.stderr
    text = "from configs import demo\n\ndef get_config():\n    return demo.get_config()\n"
    (tmp_path / "mine.py").write_text(text)
    dry = ("-m", "tba_jax.main", "--workdir=dry")
    for config in ("gsm8k_qwen2_5_1_5b:small", "mine.py"):
        done = call(installed, *dry, f"--config={config}", "--dry_run", at=tmp_path)
        assert done.returncode == 0 and "trainer" in done.stdout, done.stderr
    refused = call(installed, *dry, "--config=demoo", at=tmp_path)
    assert refused.returncode == processes.BAD_INPUT and "did you mean 'configs/demo.py'" in refused.stderr
