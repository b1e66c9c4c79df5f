"""Hugging Face checkpoints that are refused, and the sentence that says why: file, key or tensor, and value."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tba_jax.models.hugging_face import load as load_lib
from tba_jax.models.hugging_face.architectures import ARCHITECTURES
from tba_jax.models.hugging_face.files import Settings
from tests.support.tiny_checkpoints import copy_of, edit_config, edit_weights, fuse, load, path_of, shard_weights

INFINITY = float("inf")
QUERY = "model.layers.1.self_attn.q_proj.weight"
NEW_HEAD = {"head": "score", "fresh": jax.random.key(0)}
read_config = functools.partial(load_lib.read_config, compute_dtype="float32")


@pytest.fixture
def folder(tmp_path) -> Path:
    return copy_of("llama_untied", tmp_path)


def refused(folder: Path, settings: dict, sentence: str) -> None:
    """config.json with these settings is refused by one sentence that begins with the file."""
    edit_config(folder, **settings)
    with pytest.raises(ValueError, match=sentence) as refusal:
        read_config(folder)
    assert str(refusal.value).startswith(f"{folder / 'config.json'}: ") and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "name",
    [
        "llama_untied",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "gpt_oss",
        "olmo2",
        "gemma3",
        "gpt2",
        "gpt_neox",
        "bert_classifier",
    ],
)
def test_every_key_is_checked(tmp_path, name):
    folder = copy_of(name, tmp_path)
    original = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[original["model_type"]]
    wrong = {key: ["other", 0.5, [computed[0]]] for key, computed in architecture.only.items()}
    kinds = {Settings.size: [0, True, 16.0, "16"], Settings.number: [-1, INFINITY, float("nan"), 10**400, "1", [1]]}
    kinds |= {Settings.flag: [1, "true"], Settings.activation: ["quick_gelu", None, ["silu"]]}
    wrong |= {key: kinds[description.read] for key, description in architecture.keys.items()}
    for key, values in wrong.items():
        for value in values:
            refused(folder, {key: value}, rf"{key}=")
            (folder / "config.json").write_text(json.dumps(original))


@pytest.mark.parametrize(
    "name, settings, sentence",
    [
        ("llama_untied", {"model_type": "mamba"}, r"model_type='mamba' .*is not supported; supported: llama, mistral, qwen2"),
        ("llama_untied", {"architectures": ["LlamaForTokenClassification"]}, "is not supported; of llama: LlamaForCausalLM, "),
        ("llama_untied", {"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM' must be a list of names"),
        ("llama_untied", {"rope_scaling": {"type": "linear"}}, "rope_scaling={'type': 'linear'} does not give factor"),
        ("llama_untied", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "{'rope_type': 'yarn'.*llama3"),
        ("llama_untied", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "llama3.* does not give low_freq_factor"),
        ("llama_untied", {"rope_parameters": None, "rope_theta": "1e4"}, "rope_theta='1e4' must be a positive number"),
        ("llama_untied", {"hidden_size": 18, "head_dim": None}, "hidden_size=18 is not divisible by num_attention_heads=4"),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers=3"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 3}, r"layer_types holds \['chunked_attention'\]"),
        ("gemma3", {"sliding_window": None}, "layer_types holds 'sliding_attention', but the file gives no sliding_window"),
        ("gemma3", {"sliding_window": -1}, "sliding_window=-1 must be a positive integer"),
        ("gemma3", {"rope_parameters": {"rope_theta": 10.0}}, "rope_parameters={'rope_theta': 10.0} is not supported"),
        ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2}}}, "of sliding_attention only"),
        ("gemma3", {"model_type": "gemma3"}, r"is not supported; .*load a text-only checkpoint .*Gemma3ForCausalLM"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "the file gives no sliding_window in use"),
        ("gpt_neox", {"rope_parameters": None, "rotary_pct": 1.5}, "rotary_pct=1.5 of heads of 8 elements rotates 12"),
        ("gpt_neox", {"rope_parameters": None, "rotary_pct": 0.4}, "rotary_size=3 must be even"),
        ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 2}}, "partial_rotary_factor=2.0 of heads of 8 elements"),
        (
            "qwen3_moe",
            {"decoder_sparse_step": 2},
            "decoder_sparse_step=2 is not supported; .* computes decoder_sparse_step=1 only",
        ),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported; .* computes mlp_only_layers=\[\] only"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ("qwen3_moe", {"num_experts": 3_000_000}, "experts=3000000 must be 2 to 4096"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "experts=6 .* 1 to 6, not model.experts_per_token=7"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0 is not supported; .* computes swiglu_limit=7.0 only"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config={'quant_method': 'mxfp4'} is not"),
        ("gpt_oss", {"rope_parameters": None}, "rope_parameters=None is not supported; .* rotary settings that the file has"),
        ("gpt_oss", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn' with truncate=False"),
        ("gpt_neox_reward", {"id2label": ["a"]}, r"id2label=\['a'\] must be an object"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_are_not_computed(tmp_path, name, settings, sentence):
    refused(copy_of(name, tmp_path), settings, sentence)


def test_heads_that_a_checkpoint_does_not_have(folder):
    with pytest.raises(ValueError, match=r"architectures=.*GPTNeoXForSequenceClass.* cannot generate text"):
        read_config(path_of("gpt_neox_reward"), head="language_model")
    with pytest.raises(ValueError, match="model_type='llama' cannot embed texts"):
        read_config(folder, head="embedding")
    config = read_config(folder, head="score")
    with pytest.raises(ValueError, match=r"1 of 21 tensors are missing from the weights: score\.weight"):
        load_lib.check_weights(folder, config)
    load_lib.check_weights(folder, config, new_heads=True)


def test_missing_folders_and_files_are_named(folder, tmp_path, monkeypatch):
    def refuse(name, **_):
        raise FileNotFoundError(f"no network for {name}\nand more lines")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the hub itself is not asked
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    cases = {
        tmp_path / "missing": f"model folder {tmp_path}/missing does not exist, and is not a hub id",
        "org/name": r"there is no local folder org/name, and the hub did not give it: no network for org/name$",
        "org/name/more": "model folder org/name/more does not exist, and is not a hub id",
        folder / "config.json": "config.json is a file; give the folder",
        tmp_path: f"{tmp_path}/config.json does not exist; a model folder holds config.json and model.safetensors",
    }
    for name, sentence in cases.items():
        with pytest.raises(ValueError, match=sentence):
            read_config(name)


INDEX = "model.safetensors.index.json"
INVALID = r"/config\.json is not valid JSON: "


@pytest.mark.parametrize(
    "file, content, sentence",
    [
        ("config.json", b"[]", r"/config\.json holds a JSON list"),
        ("config.json", b"\xff", INVALID),
        ("model.safetensors", b"", r"/model\.safetensors is damaged or not whole \(.*\); fetch it again"),
        ("model.safetensors", path_of("llama_untied").joinpath("model.safetensors").read_bytes()[:-100], r".* is damaged or not"),
        (INDEX, {"weight_map": "model.safetensors"}, rf"/{INDEX}: weight_map='model\.safetensors' must be an object"),
        (INDEX, {"weight_map": {QUERY: 3}}, rf"/{INDEX}: weight_map names 3, which must be a file of this folder"),
        (INDEX, {"weight_map": None}, rf"/{INDEX}: weight_map names no file"),
        (INDEX, {"weight_map": {QUERY: "../m"}}, rf"/{INDEX}: weight_map names '\.\./m', which must be a file of this folder"),
        ("other.safetensors", b"", rf" holds no weights: neither model\.safetensors nor {INDEX}"),
        ("pytorch_model.bin", b"", r" holds only pickled weights \(pytorch_model\.bin\).*save_pretrained\(folder, safe"),
        ("adapter_config.json", b"{}", r" holds adapter_config.json, an adapter of PEFT without the model.*merge_and_unload\(\)"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 30 else "",
)
def test_files_of_another_form_are_named(folder, file, content, sentence):
    if file != "config.json":
        (folder / "model.safetensors").unlink()
    (folder / file).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(ValueError, match=f"^{folder}{sentence}"):
        load(folder)


def test_shards_that_are_missing_overlap_or_lie_are_named(folder):
    first, second = shard_weights(folder)
    whole = second.read_bytes()
    second.unlink()
    with pytest.raises(ValueError, match=rf"index\.json names \['{second.name}'\], which {folder} does not hold"):
        load(folder)
    tensors = load_file(first)
    name = sorted(tensors)[0]
    save_file(load_file(path_of("llama_untied") / "model.safetensors"), second)
    with pytest.raises(ValueError, match=rf"tensor {name} is in two files: {first} and {second}"):
        load(folder)
    second.write_bytes(whole)
    save_file({key: value for key, value in tensors.items() if key != name}, first)
    with pytest.raises(ValueError, match=rf"1 of 21 tensors are missing from the weights: {name}"):
        load(folder)


@pytest.mark.parametrize(
    "edit, settings, asked, sentence",
    [
        (lambda t: t.pop(QUERY), {}, NEW_HEAD, rf"1 of 20 tensors are missing from the weights: {QUERY}"),
        (lambda t: t.update({"v_head.weight": t[QUERY]}), {}, NEW_HEAD, r"1 tensors .* unknown .*: v_head\.weight"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": t[QUERY]}), {}, {}, r"unknown .* model\.layers\.2\.mlp\.up_"),
        (lambda t: t.update({QUERY: t[QUERY][:-1]}), {}, {}, rf"{QUERY} has shape \[31, 16\], config.json makes it \[32, 16\]"),
        (lambda t: t.update({QUERY: t[QUERY].astype(np.int8)}), {}, {}, rf"{QUERY} is stored as I8; supported: F32, F16, BF16"),
        (lambda t: t[QUERY].__setitem__((3, 5), np.nan), {}, {}, rf"{QUERY} holds numbers that are not finite"),
        (lambda t: t[QUERY].__setitem__((3, 5), -np.inf), {}, {}, rf"{QUERY} holds numbers that are not finite"),
        # Sizes that the weights do not have reserve no memory.
        (None, {"num_hidden_layers": 10**12}, {}, r"config\.json says 1000000000000 layers, the weights hold 21 tensors in all"),
        (None, {"vocab_size": 10**12}, {}, r"config\.json makes it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_weights_that_do_not_fit_are_named(folder, edit, settings, asked, sentence):
    if edit:
        edit_weights(folder, edit)
    edit_config(folder, **settings)
    with pytest.raises(ValueError, match=sentence):
        load(folder, **asked)


EXPERTS = "model.layers.1.mlp.experts"


def transpose(tensors: dict[str, np.ndarray]) -> None:
    fuse(tensors)
    for name in [name for name in tensors if name.startswith(EXPERTS)]:
        tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))


def part_fused(tensors: dict[str, np.ndarray]) -> None:
    apart = {name: tensor for name, tensor in tensors.items() if name.startswith(EXPERTS)}
    fuse(tensors)
    tensors |= apart
    del tensors[f"{EXPERTS}.down_proj"]


@pytest.mark.parametrize(
    "edit, sentence",
    [
        (transpose, rf"{EXPERTS}\.gate_up_proj has shape \[6, 16, 24\], config\.json makes it \[6, 24, 16\]"),
        (part_fused, rf"missing from the weights: {EXPERTS}\.down_proj; unknown ones are there: {EXPERTS}\.0\.down_proj\.weight"),
        (lambda t: t.pop(f"{EXPERTS}.5.up_proj.weight"), rf"1 of 57 tensors are missing .*: {EXPERTS}\.5\.up_proj\.weight"),
    ],
)
def test_experts_that_do_not_fit_are_named(tmp_path, edit, sentence):
    folder = copy_of("qwen3_moe", tmp_path)
    edit_weights(folder, edit)
    with pytest.raises(ValueError, match=sentence):
        load(folder)
