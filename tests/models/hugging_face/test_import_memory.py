"""Import streams: the host holds its shards and little else, however large the checkpoint."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

MIB = 1 << 20
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 8192,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
}
REPOSITORY = Path(__file__).resolve().parent.parent.parent.parent

LOADING = """
import sys
import jax
from tba_jax import sharding
from tba_jax.models import decoder
from tba_jax.models.hugging_face import load

config = load.read_config(sys.argv[1], compute_dtype="float32")
shardings = decoder.define(config).shardings(sharding.make_mesh((1, 1, 1), setting="trainer.mesh"))
jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))
print("ready", flush=True)
sys.stdin.readline()
params = jax.block_until_ready(load.load_params(sys.argv[1], config, shardings))
print(sum(p.nbytes for p in jax.tree.leaves(params)), flush=True)
sys.stdin.readline()
for name, value in (("query", 0.25), ("down", 0.5)):
    weight = params["layers"][name]["weight"]
    assert (weight == value).all(), name
assert (params["embedding"]["weight"] == 2.0).all()
"""


def write_checkpoint(folder: Path) -> tuple[int, int]:
    """A bfloat16 Llama, one file a layer. Returns bytes in the files, and of the largest tensor."""
    D, F, L, V = (SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": True, **SIZES}))

    def full(value: float, *shape: int) -> np.ndarray:
        return np.full(shape, value, ml_dtypes.bfloat16)

    files = [{"model.embed_tokens.weight": full(2.0, V, D), "model.norm.weight": full(1.0, D)}]
    layer = {f"self_attn.{name}_proj.weight": full(0.25, D, D) for name in "qkvo"}
    layer |= {
        "mlp.gate_proj.weight": full(0.5, F, D),
        "mlp.up_proj.weight": full(0.5, F, D),
        "mlp.down_proj.weight": full(0.5, D, F),
    }
    layer |= {"input_layernorm.weight": full(1.0, D), "post_attention_layernorm.weight": full(1.0, D)}
    files += [{f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()} for i in range(L)]
    weight_map = {}
    for i, tensors in enumerate(files):
        name = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(t.nbytes for f in files for t in f.values()), max(t.nbytes for f in files for t in f.values())


def anonymous(pid: int) -> int:
    """Bytes of resident memory that no file backs."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(r"^Anonymous:\s+(\d+) kB", rollup, re.MULTILINE)[1]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="anonymous memory is read from Linux' smaps_rollup")
def test_the_host_holds_its_shards_and_one_tensor(tmp_path):
    stored_bytes, largest = write_checkpoint(tmp_path)
    assert stored_bytes >= 1 << 30
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    loading = subprocess.Popen(
        [sys.executable, "-c", LOADING, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=env | {"JAX_PLATFORMS": "cpu"},
    )
    try:
        assert loading.stdout.readline() == "ready\n"
        baseline = peak = anonymous(loading.pid)
        os.set_blocking(loading.stdout.fileno(), False)
        start = time.monotonic()
        print(file=loading.stdin, flush=True)
        while not (line := loading.stdout.readline()):
            assert loading.poll() is None
            peak = max(peak, anonymous(loading.pid))
            time.sleep(0.01)
        seconds, local_shards, peak = time.monotonic() - start, int(line), max(peak, anonymous(loading.pid))
        print(file=loading.stdin, flush=True)
        assert loading.wait() == 0
    finally:
        loading.kill()
        loading.wait()
    print(
        f"files {stored_bytes / MIB:.0f} MiB, shards {local_shards / MIB:.0f} MiB, largest tensor {largest / MIB:.0f} MiB, "
        f"peak above baseline {(peak - baseline) / MIB:.0f} MiB, {seconds:.1f} s"
    )
    assert local_shards >= 2 * stored_bytes
    assert peak - baseline >= 0.95 * local_shards  # else nothing was measured
    assert peak - baseline <= local_shards + largest + 300 * MIB
