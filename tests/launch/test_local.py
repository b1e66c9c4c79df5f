"""launch/local.sh: searchers of one machine share its GPUs."""

import os
import subprocess
from pathlib import Path

import pytest

LOCAL = Path(__file__).parent.parent.parent / "launch" / "local.sh"


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, {"0,2 0.90", "1 0.90"}),
        ({"GPUS": "4,5,6,7"}, {"4,6 0.90", "5,7 0.90"}),
        ({"CUDA_VISIBLE_DEVICES": "3"}, {"3 0.45"}),
        ({"JAX_PLATFORMS": "cpu"}, {"- -"}),
    ],
    ids=lambda value: ",".join(sorted(value)),
)
def test_searchers_of_a_machine_are_dealt_its_gpus(tmp_path, environment, expected):
    driver, python = tmp_path / "nvidia-smi", tmp_path / "python"
    driver.write_text("#!/bin/sh\n[ \"$*\" = '--query-gpu=index --format=csv,noheader' ] && printf '0\\n1\\n2\\n'\n")
    python.write_text('#!/bin/sh\necho "${CUDA_VISIBLE_DEVICES--} ${XLA_CLIENT_MEM_FRACTION--}" >> "$DEALT"\n')
    for script in (driver, python):
        script.chmod(0o755)
    known = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")}
    told = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(python), "DEALT": str(tmp_path / "dealt")}
    subprocess.run([LOCAL, "2", f"--workdir={tmp_path}"], env=known | told | environment, check=True, timeout=60)
    assert set((tmp_path / "dealt").read_text().splitlines()) == expected
