"""Settings of the test process: eight fake CPU devices, and the folder of real data."""

import os
from pathlib import Path

# Before jax starts. GPU tests: JAX_PLATFORMS=cuda pytest -m gpu.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def data_dir() -> Path:
    """Real models and data sets: TBA_JAX_TEST_DATA, default ../shared/data of the repository."""
    folder = Path(os.environ.get("TBA_JAX_TEST_DATA", REPOSITORY / "../shared/data"))
    if not folder.is_dir():
        pytest.skip(f"the real test data is not at {folder}: set TBA_JAX_TEST_DATA to its folder")
    return folder
