"""What stands in for settings that a kind of device does not have; such devices are described, not needed."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from tba_jax.models import attention, hardware
from tba_jax.models.config import DecoderConfig
from tba_jax.models.policy import Policy

T4 = SimpleNamespace(platform="gpu", device_kind="Tesla T4", compute_capability="7.5")
A100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0")
AMD = SimpleNamespace(platform="gpu", device_kind="AMD Instinct MI300X", compute_capability="gfx942")
TPU = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
CPU = jax.devices()[0]


def model(compute_dtype: str, attention: str) -> DecoderConfig:
    sizes = dict(layers=1, width=8, heads=1, kv_heads=1, head_size=8, ffn=8, vocab=8, max_positions=8)
    return DecoderConfig(**sizes, compute_dtype=compute_dtype, attention=attention)


@pytest.mark.parametrize(
    "device, asked, gets, said",
    [
        (T4, ("bfloat16", "auto"), ("float32", "xla"), ["model.compute_dtype=bfloat16"]),
        (T4, ("bfloat16", "cudnn"), ("float32", "xla"), ["model.compute_dtype=bfloat16", "model.attention=cudnn"]),
        (A100, ("bfloat16", "cudnn"), ("bfloat16", "cudnn"), []),
        (AMD, ("bfloat16", "cudnn"), ("bfloat16", "xla"), ["model.attention=cudnn"]),
        (TPU, ("bfloat16", "splash"), ("bfloat16", "splash"), []),
        (CPU, ("bfloat16", "xla"), ("bfloat16", "xla"), []),
    ],
    ids=str,
)
def test_a_device_computes_with_what_it_has_and_the_log_says_so(device, asked, gets, said, caplog):
    found = Policy(model=model(*asked)).on_device(device)
    assert (found.model.compute_dtype, found.model.attention) == gets and found.snapshot_dtype == gets[0]
    sentences = [record.getMessage() for record in caplog.records]
    assert [sentence.split(":")[0] for sentence in sentences] == said
    for name, sentence in zip(said, sentences, strict=True):
        assert device.device_kind in sentence and gets[name.startswith("model.attention")] in sentence


@pytest.mark.parametrize("device, kernel", [(CPU, "splash"), (A100, "splash"), (CPU, "cudnn"), (TPU, "cudnn")], ids=str)
def test_a_kernel_of_another_platform_is_refused(device, kernel):
    with pytest.raises(ValueError, match=rf"^model\.attention={kernel} needs an? [\w ]+; JAX found {device.platform} \("):
        hardware.on_device(model("bfloat16", kernel), device, section="model")


def test_attention_is_the_tables_where_the_device_takes_it():
    half = jnp.dtype("bfloat16")
    assert [attention.fastest(platform, half, 64) for platform in ("cpu", "gpu", "tpu")] == ["xla", "cudnn", "splash"]
    assert {attention.fastest("gpu", *no) for no in ((jnp.dtype("float32"), 64), (half, 256), (half, 12))} == {"xla"}
