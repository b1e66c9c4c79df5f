"""The compiler's account of memory against what real calls take on the CPU, each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tba_jax import programs
from tests.support import measured_memory, tiny_run


@pytest.mark.slow
@pytest.mark.parametrize("program", measured_memory.PROGRAMS)
def test_a_real_call_takes_what_the_compiler_says(program, tmp_path):
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the system does not say how much memory a process has taken since some moment: Linux does")
    command = [sys.executable, "-m", "tests.support.measured_memory", program, str(tmp_path / "run")]
    # As in a run: with all optimisations.
    own = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")}
    done = subprocess.run(command, cwd=tiny_run.ROOT, env=own, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    told = {name: f"{size / 2**20:.1f} MiB" for name, size in found.items()}
    assert found["live"] == pytest.approx(found["resting"], rel=0.1), told
    assert found["live"] + found["rise"] == pytest.approx(found["resting"] + found["more"], rel=0.1), told


def test_sizes_in_what_the_compiler_says():
    told = "required for HLO temporaries (32.50G) exceeds available HBM (15.75G). HLO"
    assert programs.sizes_in(told) == [int(32.5 * 2**30), int(15.75 * 2**30)]
    assert programs.sizes_in("Used 2.00T of 95.73G hbm. Exceeded") == [2 << 40, int(95.73 * 2**30)]
    assert programs.sizes_in("error E1000 in module jit_update") == []
