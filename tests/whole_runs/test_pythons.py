"""tba_jax on the other Pythons that it is tested with, as far as this machine has them, with the tested versions of packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.constraints import resolve as pythons
from tests.support import tiny_run

pytestmark = pytest.mark.slow

OTHERS = [version for version in pythons.VERSIONS if version != ".".join(map(str, sys.version_info[:2]))]
PACKAGES = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "vaderSentiment")
# Fast tests of every kind: settings and their checks, mathematics, storage, text, an update, a run in one process.
QUICK = (
    "tests/test_schemas.py",
    "tests/test_trajectory.py",
    "tests/experiment/test_checks.py",
    "tests/objectives/test_trajectory_balance.py",
    "tests/objectives/test_identities.py",
    "tests/packing",
    "tests/replay/test_log.py",
    "tests/replay/test_journal.py",
    "tests/replay/test_selection.py",
    "tests/run/test_user_code.py",
    "tests/tasks/test_interface.py",
    "tests/text/test_visible.py",
)
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


def call(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    # XLA_FLAGS: those of this Python's XLA may end a newer one.
    ours = ("PYTHONPATH", "VIRTUAL_ENV", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "XLA_FLAGS")
    seen = {name: value for name, value in tiny_run.environment().items() if name not in ours}
    return subprocess.run(arguments, cwd=tiny_run.ROOT, env=seen, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture(scope="module", params=OTHERS)
def python(request, tmp_path_factory) -> str:
    """The interpreter of a new environment with requirements.txt and what the tests need."""
    interpreter = pythons.find(request.param)
    if not interpreter:
        pytest.skip(f"Python {request.param} is not on this machine: nothing here says whether tba_jax runs on it")
    folder = Path(tmp_path_factory.mktemp("pythons") / "venv")
    subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    constraints = str(pythons.constraints_of(request.param))
    install = [python, "-m", "pip", "install", "--quiet", "--no-compile", "-c", constraints]
    probe = call(*install, "--retries=1", "--timeout=15", "absl-py")
    if probe.returncode and not os.environ.get("REQUIRE_PACKAGES"):
        pytest.skip(f"packages cannot be fetched here: {' '.join(probe.stderr.split())[-200:]}")
    done = call(*install, "-r", "requirements.txt", *PACKAGES, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout, end="")  # versions that the index lacks
    return python


def test_everything_imports(python):
    done = call(python, "-c", IMPORT_ALL)
    assert done.returncode == 0 and int(done.stdout) > 100, done.stdout + done.stderr


def test_fast_tests_pass(python):
    done = call(python, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "--dist", "worksteal", *QUICK)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


def test_the_demo_learns_for_a_few_steps(python, tmp_path):
    small = {"learner.steps": 2, "learner.warmup_steps": 0, "warm_start.steps": 5, "evaluation.queries": 8}
    flags = [f"--config.{name}={value}" for name, value in small.items()]
    command = ["-m", "tba_jax.main", "--config=demo", f"--workdir={tmp_path / 'run'}", "--config.schedule.mode=interleaved"]
    done = call(python, *command, *flags)
    assert done.returncode == 0 and "demo: accuracy" in done.stdout, done.stdout + done.stderr
