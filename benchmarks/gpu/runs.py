"""Other commands of the project as cases of the suite: the GPU tests, and a small run on GSM8K.

python -m benchmarks.gpu.runs --run=tests|gsm8k --answer=FILE [--workdir=DIR] [-- SETTINGS of the run]
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from benchmarks.gpu import worker
from benchmarks.gpu.worker import row

_RUN = flags.DEFINE_enum("run", None, ["tests", "gsm8k"], "What is run.", required=True)
_WORKDIR = flags.DEFINE_string("workdir", "", "The folder of the run.", allow_override=True)
_ONLY_COUNTED = flags.DEFINE_bool("only_counted", False, "Tests are counted and not run, as where there is no GPU.")


def files_with_gpu_tests() -> list[str]:
    """The test files that have such tests: others would need packages and devices that a machine with one GPU may lack."""
    return sorted(str(file) for file in Path("tests").rglob("test_*.py") if "@pytest.mark.gpu" in file.read_text("utf-8"))


def tests() -> list[dict[str, str]]:
    """What pytest says at its end of the tests that need a GPU."""
    options = ["-o", "addopts=--import-mode=importlib -q", "-m", "gpu", *(["--collect-only"] if _ONLY_COUNTED.value else [])]
    # Without a platform, tests run on CPUs (tests/conftest.py).
    platform = {} if _ONLY_COUNTED.value else {"JAX_PLATFORMS": "cuda,cpu"}
    command = [sys.executable, "-m", "pytest", *files_with_gpu_tests(), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | platform)
    print(done.stdout, done.stderr, sep="\n")
    said = [line.strip("= ") for line in done.stdout.splitlines() if re.search(r"passed|failed|error|collected|no tests", line)]
    if not said:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["pytest said nothing"]
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return [row("counted, not run" if _ONLY_COUNTED.value else "pytest", said[-1], ", ".join(failed))]


def gsm8k(settings: Sequence[str]) -> list[dict[str, str]]:
    """The recipe's small run; its processes share the device by the memory that they need."""
    workdir = Path(_WORKDIR.value)
    shutil.rmtree(workdir, ignore_errors=True)
    recipe = "--config=configs/gsm8k_qwen2_5_1_5b.py:small"
    begin = time.monotonic()
    code = subprocess.run([sys.executable, "-m", "tba_jax.main", recipe, f"--workdir={workdir}", *settings]).returncode
    took = time.monotonic() - begin
    if code:
        sys.exit(f"error: the run ended with exit status {code} after {took:.0f} s")
    roles = {file.parent.name: file for file in sorted(workdir.glob("metrics/*/metrics.jsonl"))}
    searchers = sum(name.startswith("searcher") for name in roles)
    steps = json.loads(roles["trainer"].read_text(encoding="utf-8").splitlines()[-1])["step"]
    return [row(f"{steps} steps, {searchers} searchers", f"{took:.0f} s", "ended well")]


def main(argv: Sequence[str]) -> None:
    worker.write(tests() if _RUN.value == "tests" else gsm8k(argv[1:]))


if __name__ == "__main__":
    app.run(main)
