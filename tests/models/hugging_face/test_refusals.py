"""Hugging Face checkpoints that are refused, and the sentence that says why: file, key or tensor, and value."""

import functools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tba_jax.models.hugging_face import load as load_lib
from tests.support.tiny_checkpoints import edit_config, edit_weights, load, path_of, shard_weights

INFINITY = float("inf")
QUERY = "model.layers.1.self_attn.q_proj.weight"
read_config = functools.partial(load_lib.read_config, compute_dtype="float32")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A writable copy of the untied tiny model."""
    return Path(shutil.copytree(path_of("llama_untied"), tmp_path / "model"))


@pytest.mark.parametrize(
    "name, settings, sentence",
    [
        (
            "llama_untied",
            {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
            r"model_type='mamba' with architectures=\['MambaForCausalLM'\] is not supported; supported: llama, mistral, qwen2",
        ),
        (
            "llama_untied",
            {"architectures": ["LlamaForTokenClassification"]},
            r"architectures=\['LlamaForTokenClassification'\] is not supported; of llama: LlamaForCausalLM, LlamaForSeq",
        ),
        ("llama_untied", {"hidden_act": "quick_gelu"}, "hidden_act='quick_gelu' is not supported; .*hidden_act='silu' or"),
        ("llama_untied", {"sliding_window": 4096}, "sliding_window=4096"),
        ("llama_untied", {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
        ("llama_untied", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling={'type': 'dynamic'"),
        ("llama_untied", {"rope_scaling": {"type": "linear"}}, "rope_scaling={'type': 'linear'} does not give factor"),
        ("gemma3", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping=30\.0"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50\.0"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3", {"hidden_activation": "silu"}, "hidden_activation='silu'"),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers=3"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 3}, r"layer_types holds \['chunked_attention'\]"),
        ("gemma3", {"sliding_window": None}, "layer_types holds 'sliding_attention', but the file gives no sliding_window"),
        ("gemma3", {"sliding_window": -1}, "sliding_window=-1 must be a positive integer"),
        ("gemma3", {"rope_parameters": {"rope_theta": 10.0}}, "rope_parameters={'rope_theta': 10.0} is not supported"),
        ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2}}}, "of sliding_attention only"),
        ("gemma3", {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling={'rope_type': 'yarn'} is not supported"),
        (
            "gemma3",
            {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]},
            r"Gemma3ForConditionalGeneration'\] is not supported; .*load a text-only checkpoint .*Gemma3ForCausalLM",
        ),
        (
            "llama_untied",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "rope_parameters={'rope_type': 'yarn'.*llama3",
        ),
        ("llama_untied", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "llama3.* does not give low_freq_factor"),
        ("llama_untied", {"rope_parameters": "default"}, "rope_parameters='default'"),
        ("llama_untied", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama_untied", {"hidden_size": None}, "hidden_size=None must be a positive integer"),
        ("llama_untied", {"num_hidden_layers": "3"}, "num_hidden_layers='3' must be a positive integer"),
        ("llama_untied", {"hidden_size": 18, "head_dim": None}, "hidden_size=18 is not divisible by num_attention_heads=4"),
        ("llama_untied", {"num_key_value_heads": 3}, r"model\.heads=4 is not divisible by model\.kv_heads=3"),
        ("llama_untied", {"rms_norm_eps": -1}, "rms_norm_eps=-1 must be a positive number"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0 must be a positive integer"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types="),
        ("mistral", {"attention_bias": True}, "attention_bias=True"),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window=1 must be true or false"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": -1},
            "max_window_layers=-1 must be a positive integer",
        ),
        ("qwen2", {"use_mrope": True}, "use_mrope=True"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "the file gives no sliding_window in use"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 2}, r"layer_types holds \['chunked_attention'\]"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn=True"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("gpt2", {"activation_function": "tanh"}, "activation_function='tanh'"),
        ("gpt_neox", {"rope_parameters": None, "rotary_pct": 1.5}, "rotary_pct=1.5 of heads of 8 elements rotates 12"),
        ("gpt_neox", {"rope_parameters": None, "rotary_pct": 0.4}, "rotary_size=3 must be even"),
        ("gpt_neox", {"rope_parameters": None, "rotary_pct": 1e308}, "rotary_pct=1e\\+308 of heads of 8 elements rotates inf"),
        ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 2}}, "partial_rotary_factor=2.0 of heads of 8 elements"),
        ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": [1]}}, r"partial_rotary_factor=\[1\] must be a positive num"),
        ("llama_untied", {"rope_parameters": None, "rope_theta": INFINITY}, "rope_theta=inf must be a positive number, and fin"),
        ("llama_untied", {"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta=nan must be a positive number"),
        ("llama_untied", {"rope_parameters": None, "rope_theta": 10**400}, "rope_theta=1000*0 must be a positive number"),
        ("llama_untied", {"rope_parameters": None, "rope_theta": "1e4"}, "rope_theta='1e4' must be a positive number"),
        ("llama_untied", {"rope_parameters": [1]}, r"rope_parameters=\[1\] must be an object"),
        ("llama_untied", {"rope_scaling": 8}, "rope_scaling=8 must be an object"),
        ("llama_untied", {"rope_parameters": {"rope_type": ["llama3"]}}, r"rope_parameters={'rope_type': \['llama3'\]} is not"),
        ("llama_untied", {"hidden_act": ["silu"]}, r"hidden_act=\['silu'\] is not supported"),
        ("llama_untied", {"hidden_act": None}, "hidden_act=None is not supported"),
        ("llama_untied", {"hidden_size": True}, "hidden_size=True must be a positive integer"),
        ("llama_untied", {"hidden_size": 16.0}, r"hidden_size=16\.0 must be a positive integer"),
        ("llama_untied", {"attention_bias": 1}, "attention_bias=1 must be true or false"),
        ("llama_untied", {"partial_rotary_factor": True}, "partial_rotary_factor=True is not supported"),
        ("llama_untied", {"architectures": 3}, "architectures=3 must be a list of names"),
        ("llama_untied", {"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM' must be a list of names"),
        ("llama_untied", {"architectures": [["LlamaForCausalLM"]]}, r"architectures=\[\['Llama.*'\]\] must be a list of names"),
        ("llama_untied", {"model_type": ["llama"]}, r"model_type=\['llama'\] with"),
        ("qwen2", {"layer_types": 3}, "layer_types=3 must be a list of names"),
        ("gpt2", {"scale_attn_weights": 1}, "scale_attn_weights=1 is not supported; .* scale_attn_weights=True only"),
        ("gpt_neox_reward", {"id2label": 3}, "id2label=3 must be an object"),
        ("gpt_neox_reward", {"id2label": ["a"]}, r"id2label=\['a'\] must be an object"),
        ("gpt_neox_reward", {"num_labels": "1"}, "num_labels='1' must be a positive integer"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_are_not_computed(tmp_path, name, settings, sentence):
    folder = Path(shutil.copytree(path_of(name), tmp_path / "model"))
    read_config(folder)
    edit_config(folder, **settings)
    with pytest.raises(ValueError, match=sentence) as refusal:
        read_config(folder)
    assert str(refusal.value).startswith(f"{folder / 'config.json'}: ")
    assert "\n" not in str(refusal.value)


def test_infinite_weights_and_missing_layers_are_named(folder):
    name = "model.layers.1.mlp.up_proj.weight"
    for value in (np.nan, np.inf, -np.inf):
        edit_weights(folder, lambda t, v=value: t[name].__setitem__((3, 5), v))
        with pytest.raises(ValueError, match=rf"model\.safetensors: {name} holds numbers that are not finite"):
            load(folder)
    edit_config(folder, num_hidden_layers=10**12)
    with pytest.raises(ValueError, match=r"config\.json says 1000000000000 layers, the weights hold 21 tensors in all"):
        load(folder)


def test_settings_that_change_nothing_are_allowed(folder):
    expected = read_config(folder)
    edit_config(folder, rope_scaling=None, sliding_window=None, pretraining_tp=2, attention_dropout=0.1, use_cache=False)
    assert read_config(folder) == expected


def test_heads_that_a_checkpoint_does_not_have(folder):
    with pytest.raises(ValueError, match=r"architectures=.*GPTNeoXForSequenceClass.* cannot generate text"):
        read_config(path_of("gpt_neox_reward"), head="language_model")
    with pytest.raises(ValueError, match="model_type='llama' cannot embed texts"):
        read_config(folder, head="embedding")
    with pytest.raises(ValueError, match=r"1 of 21 tensors are missing from the weights: score\.weight"):
        load(folder, head="score")
    config = read_config(folder, head="score")
    with pytest.raises(ValueError, match=r"missing from the weights: score\.weight"):
        load_lib.check_weights(folder, config)
    load_lib.check_weights(folder, config, new_heads=True)


def test_tensors_that_are_not_a_head_are_never_initialised(folder):
    edit_weights(folder, lambda t: t.pop(QUERY))
    with pytest.raises(ValueError, match=rf"1 of 20 tensors are missing from the weights: {QUERY}"):
        load(folder, head="score", fresh=jax.random.key(0))


def test_only_the_head_of_the_language_model_is_left_out(folder):
    edit_weights(folder, lambda t: t.update({"v_head.weight": np.zeros((1, 16), np.float32)}))
    with pytest.raises(ValueError, match=r"1 tensors .* unknown .*: v_head\.weight"):
        load(folder, head="score", fresh=jax.random.key(0))


def test_labels_of_another_number(tmp_path):
    folder = Path(shutil.copytree(path_of("gpt_neox_reward"), tmp_path / "model"))
    edit_config(folder, id2label={"0": "a", "1": "b", "2": "c"})
    with pytest.raises(
        ValueError, match=r"model\.safetensors: score\.weight has shape \[1, 16\], config.json makes it \[3, 16\]"
    ):
        load(folder)
    edit_weights(folder, lambda t: t.pop("score.weight"))
    with pytest.raises(ValueError, match=r"missing from the weights: score\.weight"):
        load(folder)


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
    for text, sentence in {"{": r"config\.json is not valid JSON", "[]": r"config\.json holds a JSON list"}.items():
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match=sentence):
            read_config(folder)


def test_hub_ids_are_fetched(folder, monkeypatch):
    asked = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or str(folder))
    assert read_config("org/tiny-llama.v1").layers == 2
    assert asked == ["org/tiny-llama.v1"]


def test_a_download_of_weights_is_told(folder, monkeypatch, caplog):
    caplog.set_level("INFO", logger="tba_jax")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(folder))
    read_config("org/not-in-the-cache")  # no weights are asked for
    assert not caplog.records
    load_lib.resolve_folder("org/not-in-the-cache")
    assert "downloading the weights of org/not-in-the-cache from the hub" in caplog.text


def test_weights_that_are_not_there_or_pickled(folder):
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(
        ValueError, match=rf"{folder} holds no weights: neither model\.safetensors nor model\.safetensors\.index\.json"
    ):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(
        ValueError, match=r"only pickled weights \(pytorch_model\.bin\).*save_pretrained\(folder, safe_serial.*=True\)"
    ):
        load(folder)


def test_names_of_a_wrapped_model_are_named(folder):
    edit_weights(folder, lambda t: [t.update({f"module.{name}": t.pop(name)}) for name in list(t)])
    with pytest.raises(ValueError, match=r"21 of 21 tensors are missing.* unknown ones are there: module\.lm_head\.weight"):
        load(folder)


@pytest.mark.parametrize("kept", [(), ("config.json",)], ids=str)
@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_alone_is_said_to_be_one(folder, file, kept):
    for path in folder.iterdir():
        if path.name not in kept:
            path.unlink()
    (folder / file).write_bytes(b"{}")
    with pytest.raises(ValueError, match=rf"^{folder} holds {file}, an adapter of PEFT without the model.*merge_and_unload\(\)"):
        load(folder)


@pytest.mark.parametrize("length", [0, 5, 2000, -100])
def test_truncated_files_are_named(folder, length):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=rf"{path} is damaged or not whole \(.*\); fetch it again"):
        load(folder)


@pytest.mark.parametrize(
    "weight_map, sentence",
    [
        (["model.safetensors"], r"weight_map=\['model\.safetensors'\] must be an object"),
        ("model.safetensors", r"weight_map='model\.safetensors' must be an object"),
        ({QUERY: 3}, r"weight_map names 3, which must be a file of this folder"),
        (None, r"weight_map names no file"),
        ({QUERY: "../m.safetensors"}, r"weight_map names '\.\./m\.safetensors', which must be a file of this folder"),
        ({QUERY: "/etc/passwd"}, r"weight_map names '/etc/passwd', which must be a file of this folder"),
    ],
    ids=str,
)
def test_an_index_of_another_form_is_named(folder, weight_map, sentence):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=rf"^{folder}/model\.safetensors\.index\.json: {sentence}"):
        load(folder)


@pytest.mark.parametrize("content", ["[" * 200_000, '{"a":' * 200_000, '{"vocab_size": ' + "9" * 10_000 + "}", "\xff"], ids=len)
def test_a_monstrous_config_is_one_sentence(folder, content):
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"{folder}/config\.json is not valid JSON: "):
        load(folder)


@pytest.mark.parametrize(
    "settings", [{"num_hidden_layers": 10**9}, {"vocab_size": 10**12}, {"intermediate_size": 2**40}], ids=str
)
def test_sizes_that_the_weights_do_not_have_reserve_no_memory(folder, settings):
    edit_config(folder, **settings)
    with pytest.raises(ValueError, match=r"config\.json (says|makes it)"):
        load(folder)


def test_shards_that_are_missing_overlap_or_lie_are_named(folder):
    first, second = shard_weights(folder)
    whole = second.read_bytes()
    second.unlink()
    with pytest.raises(
        ValueError, match=rf"model\.safetensors\.index\.json names \['{second.name}'\], which {folder} does not hold"
    ):
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
    "edit, sentence",
    [
        (lambda t: t.pop(QUERY), rf"1 of 21 tensors are missing from the weights: {QUERY}"),
        (lambda t: t.pop("lm_head.weight"), r"missing from the weights: lm_head\.weight"),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": t[QUERY]}),
            r"1 tensors .* unknown .*: model\.layers\.2\.mlp\.up_",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": t[QUERY][0]}),
            r"unknown .* model\.layers\.0\.self_attn\.q_proj\.bias",
        ),
        (
            lambda t: t.update({QUERY: t[QUERY][:-1]}),
            rf"model\.safetensors: {QUERY} has shape \[31, 16\], config.json makes it \[32, 16\]",
        ),
        (
            lambda t: t.update({QUERY: t[QUERY].astype(np.int8)}),
            rf"model\.safetensors: {QUERY} is stored as I8; supported: F32, F16, BF16",
        ),
    ],
    ids=["missing", "missing head", "unknown layer", "unknown bias", "mis-shaped", "dtype"],
)
def test_tensors_that_do_not_fit_are_named(folder, edit, sentence):
    edit_weights(folder, edit)
    with pytest.raises(ValueError, match=sentence):
        load(folder)


def test_fused_tensors_that_do_not_fit_are_named(tmp_path):
    folder = Path(shutil.copytree(path_of("gpt2"), tmp_path / "model"))
    name = "transformer.h.1.attn.c_attn.weight"
    edit_weights(folder, lambda t: t.update({name: np.ascontiguousarray(t[name].T)}))
    with pytest.raises(ValueError, match=rf"{name} has shape \[48, 16\], config.json makes it \[16, 48\]"):
        load(folder)
