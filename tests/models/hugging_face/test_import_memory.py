"""Import streams: the host holds its shards and little else, however large the checkpoint."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

D, F, L, V = 512, 4096, 8, 16000

LOADING = """
import resource, sys
import jax
from tba_jax import sharding
from tba_jax.models import decoder, parameters
from tba_jax.models.hugging_face import load

config = load.read_config(sys.argv[1], compute_dtype="float32")
definition = decoder.define(config)
shardings = definition.shardings(sharding.make_mesh((1, 1, 1), setting="trainer.mesh"))
jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))
before = 1024 * int(open("/proc/self/status").read().split("VmData:")[1].split()[0])
shards = 4 * parameters.count(definition.specs)
room = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_DATA, (before + shards + room,) * 2)  # private memory that no file backs
params = jax.block_until_ready(load.load_params(sys.argv[1], config, shardings))
assert (params["layers"]["attention"]["query"]["weight"] == 0.25).all() and (params["embedding"]["weight"] == 2.0).all()
print(shards)
"""


def write_checkpoint(folder: Path) -> int:
    """A bfloat16 Llama, one file a layer. Returns the bytes of its weights."""
    sizes = {"hidden_size": D, "intermediate_size": F, "num_hidden_layers": L, "num_attention_heads": 8, "vocab_size": V}
    config = {"model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 8, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {f"self_attn.{name}_proj.weight": (D, D) for name in "qkvo"} | {"mlp.down_proj.weight": (D, F)}
    shapes |= {f"mlp.{name}_proj.weight": (F, D) for name in ("gate", "up")}
    shapes |= {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
    files = [
        {f"model.layers.{i}.{name}": np.full(shape, 0.25, ml_dtypes.bfloat16) for name, shape in shapes.items()} for i in range(L)
    ]
    top = {
        "model.embed_tokens.weight": np.full((V, D), 2.0, ml_dtypes.bfloat16),
        "model.norm.weight": np.ones(D, ml_dtypes.bfloat16),
    }
    weight_map = {}
    for i, tensors in enumerate([top, *files]):
        save_file(tensors, folder / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(tensor.nbytes for tensors in (top, *files) for tensor in tensors.values())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of private memory are Linux'")
def test_the_host_holds_its_shards_and_one_tensor(tmp_path):
    stored = write_checkpoint(tmp_path)
    for room, fits in ((stored // 2, True), (-stored, False)):  # a second copy of anything large would not fit either
        command = [sys.executable, "-c", LOADING, str(tmp_path), str(room)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode == 0) == fits, done.stderr
    assert stored > 100 << 20
