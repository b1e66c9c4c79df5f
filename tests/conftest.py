"""Settings of the test process: eight fake CPU devices, PyTorch where it is installed, and the folder of real data."""

import gc
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before jax starts. GPU tests: JAX_PLATFORMS=cuda pytest -m gpu.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# Half of the time to compile. Processes that tests start inherit it (tiny_run.environment).
QUICK = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
if QUICK not in os.environ["XLA_FLAGS"] and importlib.util.find_spec("libtpu") is None:
    # XLA ends a process whose flags it does not know, and flags come and go. The TPU's compiler reads them too, and knows fewer.
    asked = [sys.executable, "-c", "import jax; jax.devices()"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK}
    if subprocess.run(asked, env=environment, capture_output=True, check=False).returncode == 0:
        os.environ["XLA_FLAGS"] += f" {QUICK}"

REPOSITORY = Path(__file__).resolve().parent.parent
# No LLVM optimisation, which is half of the time to compile: models are tiny here and programs many.
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# The same small programs are compiled by many tests, and by the processes they start.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPOSITORY / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Tracing makes many objects that stay: to look for garbage among them so often takes a tenth of the time.
gc.set_threshold(100_000, 50, 50)

import jax  # noqa: E402 (the settings above must come first)
import pytest  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

pytest.register_assert_rewrite("tests.support")
from tests.support import shared_programs  # noqa: E402

shared_programs.share()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity", action="store_true", help="run the tests that compare with PyTorch, and no others")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.parity and importlib.util.find_spec("torch") is None:
        raise pytest.UsageError("--parity needs torch, which this environment lacks: make parity runs it in one that has it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long ones first, so that no worker of xdist ends by them alone. With PyTorch compares what asks for the fixture `torch`."""
    items.sort(key=lambda item: "whole_runs" not in item.path.parts)
    if config.option.parity:
        kept = [item for item in items if "torch" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")  # None in a worker of xdist
    if session.config.option.parity and reporter and exitstatus == 0 and not reporter.stats.get("passed"):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED  # all were skipped


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A role that ran in the tests' process would take the next test's SIGINT for its own, and end the process without a word."""
    numbers = signal.SIGINT, signal.SIGTERM
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def root_log() -> Iterator[None]:
    """Commands that run in the tests' process set the handlers of the root log; they would write to a stream that is closed."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True, scope="module")
def ended_leases() -> Iterator[None]:
    """Who takes a lease ends its thread, also where a run fails: the thread would go on within the tests of other modules."""
    yield
    assert "epoch-lease" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """A compiled program takes some mappings of memory, of which Linux lets a process have 65,530: then LLVM crashes."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def own_programs() -> None:
    """For tests that count what is traced or compiled: what others made is forgotten."""
    shared_programs.forget()


@pytest.fixture(autouse=True, scope="module")
def cached_programs() -> Iterator[None]:
    """A mesh of several CPU devices ends the use of the compilation cache in its process: here, until the end of its module."""
    yield
    if not jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


@pytest.fixture
def torch() -> Iterator[Any]:
    """PyTorch, without gradients."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: make parity runs the tests that compare with PyTorch")
    import torch

    with torch.no_grad():
        yield torch


@pytest.fixture
def data_dir() -> Path:
    """Real models and data sets: TBA_JAX_TEST_DATA, default ../shared/data of the repository."""
    folder = Path(os.environ.get("TBA_JAX_TEST_DATA", REPOSITORY / "../shared/data"))
    if not folder.is_dir():
        pytest.skip(f"the real test data is not at {folder}: set TBA_JAX_TEST_DATA to its folder")
    return folder


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roles take all devices of their process; the tests have eight, the roles of a small run one."""
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)


@pytest.fixture(scope="module")
def one_device_throughout() -> Iterator[None]:
    """The same for all tests of a file, and for what they share."""
    first = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: first)
        yield


@pytest.fixture(scope="session")
def frozen(tmp_path_factory) -> Any:
    """A function that makes a workdir whose log nobody writes to any more; settings that it had before cost only a copy."""
    from tests.support import frozen_runs

    return frozen_runs.copies(tmp_path_factory)


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Any:
    """A run of six steps in turn on one device, evaluated at 0 and 6, with too small a window; who changes it copies it."""
    from tba_jax.experiment import jobs
    from tests.support import tiny_run

    settings = {"schedule__mode": "interleaved", "task__missing_eos_reward": -1.0}
    settings |= {"learner__steps": 6, "replay__capacity": 40, "sampling__explore_top_p_probability": 0.5}
    first = jax.local_devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: first)
        made = tiny_run.settings(tmp_path_factory.mktemp("finished") / "run", tiny_run.config(**settings))
        assert jobs.everything(made)() == 0
    return made
