"""Export to Hugging Face folders: read again they compute the same, and adapters are what merging adds."""

import dataclasses
import json
import shutil
import string
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import tensorstore
from safetensors.numpy import load_file

from tba_jax.models.hugging_face import export
from tba_jax.models.hugging_face import load as load_lib
from tba_jax.models.policy import LoraConfig, Policy, merge_lazily
from tba_jax.text.tokenizers import CharacterTokenizer, HuggingFaceTokenizer
from tests.support import applied
from tests.support import tiny_checkpoints as tiny
from tests.support.tiny_checkpoints import LANGUAGE_MODELS, assert_same_params, load, path_of

MODELS = (*LANGUAGE_MODELS, "gpt_neox_reward")


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def save(folder: Path, config, params, **settings) -> None:
    export.save(folder, config, params, **{"dtype": "float32"} | settings)


def assert_same_tensors(found: dict, expected: dict) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


@pytest.mark.parametrize(
    "name", ["llama_untied", "qwen2_window", "gpt2", "gpt_neox_reward", "gemma3", "qwen3_moe", "gpt_oss", "olmo2"]
)
def test_export_gives_the_imported_files_back(tmp_path, name):
    config, params = load(path_of(name), (1, 2, 2) if name in ("llama_untied", "gpt2", "qwen3_moe") else (1, 1, 1))
    original = json.loads((path_of(name) / "config.json").read_text())
    (tmp_path / "ours").mkdir()  # an empty folder is filled
    for folder, source in ((tmp_path / "kept", path_of(name)), (tmp_path / "ours", None)):
        save(folder, config, params, source=source, more=[lambda partial: (partial / "more").write_text("")])
        assert (folder / "more").is_file()
        assert_same_tensors(tensors_of(folder), tensors_of(path_of(name)))
        assert load_lib.read_config(folder, compute_dtype="float32") == config
        values = json.loads((folder / "config.json").read_text())
        assert values["architectures"] == original["architectures"] and (values == original or source is None)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_with_an_exported_folder(torch, tmp_path, name):
    import transformers

    from tests.fixtures import make_fixtures

    config, params = load(path_of(name))
    save(tmp_path / "model", config, params, token_ids={"pad_token_id": 0} if config.head == "score" else None)
    model_class = getattr(transformers, json.loads((path_of(name) / "config.json").read_text())["architectures"][0])
    golden = np.load(path_of(name) / "golden.npz")
    model, report = model_class.from_pretrained(tmp_path / "model", output_loading_info=True)
    found = make_fixtures.outputs(model.double().eval(), golden["tokens"], golden["mask"])
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    np.testing.assert_allclose(found, golden["scores" if config.head == "score" else "logits"], atol=1e-6)


def test_arrays_in_storage_and_shards(tmp_path):
    config, params = load(path_of("gpt_neox"))
    stored = jax.tree.map(lambda leaf: tensorstore.array(np.asarray(leaf)), params)
    save(tmp_path / "model", config, stored, max_shard_bytes=8000)
    expected = tensors_of(path_of("gpt_neox"))
    assert_same_tensors(tensors_of(tmp_path / "model"), expected)
    paths = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(paths) > 2 and paths[0].name == f"model-00001-of-{len(paths):05d}.safetensors"
    assert all(sum(tensor.nbytes for tensor in load_file(path).values()) <= 8000 for path in paths)
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert_same_params(load(tmp_path / "model")[1], params)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(tmp_path, dtype):
    config, params = load(path_of("llama_tied"))
    (tmp_path / "source").mkdir()
    shutil.copy(path_of("llama_tied") / "config.json", tmp_path / "source")
    (tmp_path / "source/generation_config.json").write_text('{"eos_token_id": 3}', encoding="utf-8-sig")
    save(tmp_path / "model", config, params, dtype=dtype, source=tmp_path / "source")
    rounded = {name: tensor.astype(np.dtype(dtype)) for name, tensor in tensors_of(path_of("llama_tied")).items()}
    found = tensors_of(tmp_path / "model")
    assert {tensor.dtype for tensor in found.values()} == {np.dtype(getattr(ml_dtypes, dtype, dtype))}
    assert_same_tensors(found, rounded)
    assert json.loads((tmp_path / "model/config.json").read_text())["torch_dtype"] == dtype
    assert (tmp_path / "model/generation_config.json").read_text() == '{"eos_token_id": 3}'


def test_a_reward_model_made_of_a_language_model(tmp_path):
    source = Path(shutil.copytree(path_of("qwen3"), tmp_path / "source"))
    tiny.edit_config(source, num_labels=5)
    config, params = load(source, fresh=jax.random.key(0), head="score")
    save(tmp_path / "model", config, params, source=source)
    values = json.loads((tmp_path / "model/config.json").read_text())
    assert values["architectures"] == ["Qwen3ForSequenceClassification"]
    assert values["id2label"] == {"0": "LABEL_0"} and "num_labels" not in values
    found_config, found = load(tmp_path / "model")
    assert found_config == config
    assert_same_params(found, params)


@pytest.mark.parametrize("characters", ["ab <>os\n\té中", string.printable + "⟨⟩"], ids=["few", "all forms"])
def test_character_tokenizer(tmp_path, characters):
    from transformers import AutoTokenizer

    ours = CharacterTokenizer(characters)
    ids = {"pad_id": ours.pad_id, "bos_id": ours.bos_id, "eos_id": ours.eos_id}
    export.write_character_tokenizer(tmp_path, characters, **ids)
    auto, theirs = AutoTokenizer.from_pretrained(tmp_path), HuggingFaceTokenizer(tmp_path)
    texts = ["", " ", "  a\n\n b", "<bos>", "<|pad|> <eos>", "⟨bos⟩", "<pad>a</s>", "é中ab\t "]
    for text in ("".join(c for c in text if c in characters) for text in texts):
        expected = ours.encode(text)
        assert auto.encode(text) == auto(text)["input_ids"] == theirs.encode(text) == expected
        assert auto.decode([*expected, ours.eos_id, ours.pad_id], skip_special_tokens=True) == text
        assert theirs.decode([*expected, ours.eos_id]) == ours.decode(expected) == text
    assert (theirs.eos_id, theirs.pad_id, theirs.special_ids) == (ours.eos_id, ours.pad_id, ours.special_ids)
    assert (auto.bos_token_id, auto.eos_token_id, auto.pad_token_id) == (1, 2, 0)
    assert theirs.vocab_size == len(auto) == ours.vocab_size
    prompt = ours.encode("a ")
    assert theirs.decode_continuation(prompt, [3, 5]) == ours.decode_continuation(prompt, [3, 5]) == characters[0] + characters[2]


def test_tokenizers_are_copied(tmp_path, data_dir):
    source = shutil.copytree(data_dir / "models/stories260K-hf", tmp_path / "source")
    content = (source / "tokenizer.json").read_text(encoding="utf-8")
    (source / "tokenizer.json").write_text(content, encoding="utf-8-sig")
    (tmp_path / "copy").mkdir()
    export.copy_tokenizer(source, tmp_path / "copy")
    original = HuggingFaceTokenizer(data_dir / "models/stories260K-hf")
    assert HuggingFaceTokenizer(tmp_path / "copy").fingerprint == original.fingerprint
    assert {path.suffix for path in (tmp_path / "copy").iterdir()} <= {".json", ".model", ".txt", ".jinja"}
    with pytest.raises(ValueError, match="holds no tokenizer"):
        export.copy_tokenizer(path_of("gpt2"), tmp_path)


LARGE = np.full(16, 1e6)


@pytest.mark.parametrize(
    "changes, scale, settings, sentence",
    [
        ({}, None, {"dtype": "int8"}, "dtype='int8' of the export is not one of float32, float16, bfloat16"),
        ({}, None, {"folder": "full"}, "full exists and is not an empty folder"),
        ({}, np.ones(8), {}, r"final_norm\.scale has shape \[8\], the config makes it \[16\]"),
        ({}, LARGE, {"dtype": "float16"}, r"final_norm\.scale .*not finite in float16"),
        ({"qkv_bias": True}, None, {}, r"cannot be said in .* of model_type='llama': out_bias=False \(it gives True\)"),
        ({"rope_theta": 5.0}, None, {"source": path_of("llama_tied")}, r"differ from .*: rope_theta=5\.0 \(it gives 10000\.0\)"),
    ],
    ids=str,
)
def test_what_cannot_be_exported(tmp_path, changes, scale, settings, sentence):
    config, params = load(path_of("llama_tied"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    if scale is not None:
        params["final_norm"]["scale"] = scale
    with pytest.raises(ValueError, match=sentence):
        save(tmp_path / settings.pop("folder", "new"), dataclasses.replace(config, **changes), params, **settings)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_other_parameters_than_the_models_are_named(tmp_path):
    config, params = load(path_of("llama_tied"))
    with pytest.raises(ValueError, match=r"no name for: final_norm\.lora_a"):
        save(tmp_path / "new", config, params | {"final_norm": params["final_norm"] | {"lora_a": np.ones(16)}})
    del params["final_norm"]
    with pytest.raises(ValueError, match=r"not given: final_norm\.scale"):
        save(tmp_path / "new", config, params)


FUSED = ("gpt2", "gpt_neox")
EVERYWHERE = LoraConfig(rank=2, alpha=3.0, targets=("layers.*",))
WITH_HEAD = LoraConfig(rank=2, alpha=3.0, targets=("layers.attention.out", "lm_head"))
TWO_OF_THREE = LoraConfig(rank=3, alpha=3.0, targets=("layers.attention.query", "layers.attention.value"))


def adapted(name: str, lora: LoraConfig) -> tuple[Policy, dict, dict]:
    """The policy, its base, and adapters whose B is not zero."""
    config, base = load(path_of(name))
    policy = Policy(model=config, lora=lora)
    return policy, base, applied.random(policy.trained_specs, scale=0.2)


def saved(folder: Path, name: str, lora: LoraConfig) -> tuple[Policy, dict, dict]:
    """Writes the folder `adapter` and the folder `merged`; returns what `adapted` does."""
    policy, base, trained = adapted(name, lora)
    export.save_adapters(folder / "adapter", policy.model, trained, lora, base=str(path_of(name)), dtype="float32")
    merged = merge_lazily(base, trained, lora)
    export.save(folder / "merged", policy.model, merged, dtype="float32", source=path_of(name))
    return policy, base, trained


@pytest.mark.parametrize(
    "name, lora",
    [
        ("llama_untied", EVERYWHERE),
        ("gemma3", TWO_OF_THREE),
        ("gpt2", TWO_OF_THREE),
        ("gpt_neox", EVERYWHERE),
        ("gpt_neox", WITH_HEAD),
        ("qwen3_moe", EVERYWHERE),
    ],
    ids=["llama", "gemma3", "gpt2", "gpt_neox", "head of gpt_neox", "qwen3_moe"],
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
    in_checkpoint = {"base_model.model.lm_head": "embed_out.weight"} if name == "gpt_neox" else {}  # transformers 5 renames it
    in_checkpoint |= {f"base_model.model.{name.removesuffix('.weight')}": name for name in changed - set(in_checkpoint.values())}
    assert in_checkpoint.keys() & modules == modules and {in_checkpoint[module] for module in modules} == changed
    for module in modules:
        a, b = tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"]
        target = next(target for target in values["target_modules"] if module.endswith(f".{target}"))
        rank, alpha = values["rank_pattern"].get(target, values["r"]), values["alpha_pattern"].get(target, values["lora_alpha"])
        assert a.shape[0] == b.shape[1] == rank
        update = alpha / rank * b @ a
        tensor = in_checkpoint[module]
        added = merged[tensor] - base[tensor]
        np.testing.assert_allclose(update.T if values["fan_in_fan_out"] else update, added, atol=1e-6)


@pytest.mark.parametrize(
    "name, lora",
    [
        (name, lora)
        for name in ("llama_untied", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "olmo2", "gpt2", "gpt_neox", "gemma3")
        for lora in (EVERYWHERE, TWO_OF_THREE)
    ]
    + [("llama_untied", WITH_HEAD), ("gpt_neox", WITH_HEAD)],
)
def test_peft_computes_the_same(torch, tmp_path, name, lora):
    peft = pytest.importorskip("peft", reason="peft is not installed: it is in the extra `parity`, which make parity installs")
    from transformers import AutoModelForCausalLM

    policy, weights, trained = saved(tmp_path, name, lora)
    tokens = np.random.default_rng(0).integers(0, policy.model.vocab, (2, 12)).astype(np.int32)
    base = AutoModelForCausalLM.from_pretrained(path_of(name), dtype=torch.float32)
    before = base(torch.tensor(tokens)).logits.detach().numpy()
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    found = model(torch.tensor(tokens)).logits.detach().numpy()
    merged = jax.jit(policy.merged)(trained, weights)
    expected = np.asarray(tiny.logits(merged, tokens, np.ones_like(tokens, bool), policy.model))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(found - before).max() > 1e-2


def test_adapters_that_cannot_be_written_leave_no_folder(tmp_path):
    policy, _, trained = adapted("llama_tied", EVERYWHERE)
    trained["layers"]["attention"]["query"]["lora_b"][0] = np.inf
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj\.lora_B.* not finite in float32"):
        export.save_adapters(tmp_path / "adapter", policy.model, trained, EVERYWHERE, base="base", dtype="float32")
    assert not list(tmp_path.iterdir())
