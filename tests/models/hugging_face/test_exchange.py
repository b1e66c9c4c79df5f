"""The import by two processes: the parameters of one process, and each reads its share of the files."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from tba_jax import sharding
from tba_jax.models import parameters
from tba_jax.models.hugging_face import load
from tba_jax.models.hugging_face.architectures import ARCHITECTURES
from tests.support import tiny_run
from tests.support import trainer_processes as trainers

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"

LOADING = """
import json, logging, sys
import jax
import numpy as np

folder, output, process, port, mesh = *sys.argv[1:5], json.loads(sys.argv[5])
logging.basicConfig(level=logging.INFO)
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(process), local_device_ids=[0])
jax.config.update("jax_enable_compilation_cache", False)

from tba_jax import sharding
from tba_jax.models import parameters
from tba_jax.models.hugging_face import load
from tba_jax.models.hugging_face.architectures import ARCHITECTURES

config = load.read_config(folder, compute_dtype="float32")
shardings = ARCHITECTURES[config.architecture].define(config).shardings(sharding.make_mesh(tuple(mesh), setting="test"))
params = parameters.flatten(load.load_params(folder, config, shardings))
held = {name: np.full(array.shape, np.nan, np.float32) for name, array in params.items()}
for name, array in params.items():
    for shard in array.addressable_shards:
        held[name][shard.index] = np.asarray(shard.data, np.float32)
np.savez(output, **held)
"""


def loaded(folder: Path, tmp_path: Path, mesh: tuple[int, int, int]) -> tuple[dict[str, np.ndarray], list[str]]:
    """The parameters, put together from the shards of two processes; and what these said."""
    port = str(trainers.free_port())
    started = [
        subprocess.Popen(
            [sys.executable, "-c", LOADING, str(folder), str(tmp_path / f"{name}.npz"), name, port, json.dumps(mesh)],
            env=tiny_run.environment(),
            cwd=tiny_run.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in ("0", "1")
    ]
    ended = trainers.wait(started)
    assert [each.code for each in ended] == [0, 0], [each.text for each in ended]
    first, second = (np.load(tmp_path / f"{name}.npz") for name in ("0", "1"))
    whole = {path: np.where(np.isnan(first[path]), second[path], first[path]) for path in first.files}
    return whole, [each.text for each in ended]


@pytest.mark.parametrize("name", ["tiny_llama_untied", "tiny_gpt_neox", "tiny_qwen2"])
@pytest.mark.parametrize("mesh", [(1, 2, 1), (1, 1, 2), (2, 1, 1)], ids=str)
def test_two_processes_load_what_one_loads_and_read_half_of_it_each(tmp_path, name, mesh):
    folder = FIXTURES / name
    found, said = loaded(folder, tmp_path, mesh)
    config = load.read_config(folder, compute_dtype="float32")
    one = sharding.make_mesh((1, 1, 1), setting="test", devices=jax.devices()[:1])
    expected = parameters.flatten(
        load.load_params(folder, config, ARCHITECTURES[config.architecture].define(config).shardings(one))
    )
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], np.asarray(array), err_msg=path)
    for text in said:
        read, whole = map(int, re.search(r"read (\d+) of the (\d+) bytes", text).groups())
        assert whole == sum(array.nbytes for array in expected.values())
        assert read <= 1.1 * whole / 2
