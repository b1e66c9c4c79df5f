"""Adapters as PEFT folders: their products are what merging adds to the checkpoint's weights, and peft computes the same."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tba_jax.models import parameters
from tba_jax.models.hugging_face import export
from tba_jax.models.policy import LoraConfig, Policy, merge_lazily
from tests.support.tiny_checkpoints import load, logits, path_of

MODELS = ("llama_untied", "qwen2", "qwen3", "gpt2", "gpt_neox", "gemma3")
FUSED = ("gpt2", "gpt_neox")
EVERYWHERE = LoraConfig(rank=2, alpha=3.0, targets=("*",))
TWO_OF_THREE = LoraConfig(rank=3, alpha=3.0, targets=("layers.attention.query", "layers.attention.value"))


def adapted(name: str, lora: LoraConfig) -> tuple[Policy, dict, dict]:
    """The policy, its base, and adapters whose B is not zero."""
    config, base = load(path_of(name))
    policy = Policy(model=config, lora=lora)
    drawn = parameters.flatten(policy.initial(base, jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(drawn))
    moved = {path: leaf + 0.1 * jax.random.normal(key, leaf.shape) for key, (path, leaf) in zip(keys, drawn.items(), strict=True)}
    return policy, base, parameters.unflatten(moved)


def saved(folder: Path, name: str, lora: LoraConfig) -> tuple[Policy, dict]:
    """Writes the folder `adapter` and the folder `merged`; returns the policy and its merged weights."""
    policy, base, trained = adapted(name, lora)
    export.save_adapters(folder / "adapter", policy.model, trained, lora, base=str(path_of(name)), dtype="float32")
    merged = merge_lazily(base, trained, lora)
    export.save(folder / "merged", policy.model, merged, dtype="float32", source=path_of(name))
    return policy, jax.jit(policy.merged)(trained, base)


@pytest.mark.parametrize(
    "name, lora",
    [
        ("llama_untied", EVERYWHERE),
        ("gemma3", TWO_OF_THREE),
        ("gpt2", TWO_OF_THREE),
        ("gpt_neox", EVERYWHERE),
    ],
    ids=["llama", "gemma3", "gpt2", "gpt_neox"],
)
def test_products_are_what_merging_adds(tmp_path, name, lora):
    saved(tmp_path, name, lora)
    values = json.loads((tmp_path / "adapter" / export.ADAPTER_CONFIG).read_text())
    if name in FUSED and lora is TWO_OF_THREE:  # one adapter of summed rank where three maps lie in one tensor
        (target,) = values["target_modules"]
        assert values["rank_pattern"] == {target: 6} and values["alpha_pattern"] == {target: 6.0}
    tensors = load_file(tmp_path / "adapter" / export.ADAPTER_WEIGHTS)
    merged, base = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", path_of(name)))
    changed = {tensor for tensor in base if not np.array_equal(base[tensor], merged[tensor])}
    modules = {tensor.removesuffix(".lora_A.weight") for tensor in tensors if tensor.endswith(".lora_A.weight")}
    assert {f"base_model.model.{tensor.removesuffix('.weight')}" for tensor in changed} == modules
    for module in modules:
        a, b = tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"]
        target = next(target for target in values["target_modules"] if module.endswith(f".{target}"))
        rank, alpha = values["rank_pattern"].get(target, values["r"]), values["alpha_pattern"].get(target, values["lora_alpha"])
        assert a.shape[0] == b.shape[1] == rank
        update = alpha / rank * b @ a
        tensor = module.removeprefix("base_model.model.") + ".weight"
        added = merged[tensor] - base[tensor]
        np.testing.assert_allclose(update.T if values["fan_in_fan_out"] else update, added, atol=1e-6)


@pytest.mark.parametrize("lora", [EVERYWHERE, TWO_OF_THREE], ids=["everywhere", "query and value"])
@pytest.mark.parametrize("name", MODELS)
def test_peft_computes_the_same(torch, tmp_path, name, lora):
    peft = pytest.importorskip("peft", reason="peft is not installed: it is in the extra `parity`, which make parity installs")
    from transformers import AutoModelForCausalLM

    policy, merged = saved(tmp_path, name, lora)
    tokens = np.random.default_rng(0).integers(0, policy.model.vocab, (2, 12)).astype(np.int32)
    base = AutoModelForCausalLM.from_pretrained(path_of(name), dtype=torch.float32)
    before = base(torch.tensor(tokens)).logits.detach().numpy()
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    found = model(torch.tensor(tokens)).logits.detach().numpy()
    expected = np.asarray(logits(merged, tokens, np.ones_like(tokens, bool), policy.model))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(found - before).max() > 1e-2


def test_adapters_that_cannot_be_written_leave_no_folder(tmp_path):
    policy, _, trained = adapted("llama_tied", EVERYWHERE)
    settings = dict(base="base", dtype="float32")
    trained["layers"]["attention"]["query"]["lora_b"] = trained["layers"]["attention"]["query"]["lora_b"].at[0].set(np.inf)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj\.lora_B.* not finite in float32"):
        export.save_adapters(tmp_path / "adapter", policy.model, trained, EVERYWHERE, **settings)
    with pytest.raises(ValueError, match="dtype='int8' of the export"):
        export.save_adapters(tmp_path / "adapter", policy.model, trained, EVERYWHERE, **settings | {"dtype": "int8"})
    assert not list(tmp_path.iterdir())
