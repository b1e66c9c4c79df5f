"""Import of checkpoints: parity with torch's float64 results in tests/fixtures (make_fixtures.py), sharded reads;
and models and data sets of the hub while it cannot be reached: a copy that was fetched before is taken, with one warning."""

import json
import shutil
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from tba_jax.models.config import DecoderConfig
from tba_jax.models.hugging_face import export, files
from tba_jax.models.hugging_face import load as load_lib
from tba_jax.tasks import data
from tests.support import applied
from tests.support import tiny_checkpoints as tiny
from tests.support.tiny_checkpoints import LANGUAGE_MODELS, REAL_MODELS, assert_same_params, copy_of, load, path_of

REAL_GOLDEN = tiny.FIXTURES / "real_models.npz"
# Those of make_fixtures.MODELS, which cannot be imported without torch.
VARIANTS = (
    *(
        *LANGUAGE_MODELS,
        "qwen2_untied",
        "qwen3_biased",
        "qwen3_moe_plain",
        "gpt_oss_plain",
        "olmo2_biased",
        "gpt2_relu",
        "gpt_neox_sequential",
        "llama_linear",
    ),
    *("llama_reward", "qwen3_classifier", "gpt2_classifier", "gpt_neox_reward", "gemma3_reward"),
)


def assert_same_outputs(config: DecoderConfig, params: dict, tokens: np.ndarray, mask: np.ndarray, expected) -> None:
    """expected: logits [B, T, V], or scores [B, labels]."""
    if config.head == "score":
        assert expected.shape == (3, config.labels)
        np.testing.assert_allclose(tiny.scores(params, tokens, mask, config), expected, atol=1e-4)
        return
    logits = tiny.logits(params, tokens, mask, config)
    np.testing.assert_allclose(np.asarray(logits)[mask], expected[mask], atol=1e-4)
    found, wanted = (tiny.token_logprobs(x, tokens, mask) for x in (logits, expected))
    assert len(found) == 11 + 7 + 6
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("name", [*LANGUAGE_MODELS, "gpt_neox_reward"])
def test_tiny_models_equal_the_golden_results(name):
    config, params = load(path_of(name))
    golden = np.load(path_of(name) / "golden.npz")
    expected = golden["scores" if config.head == "score" else "logits"]
    assert_same_outputs(config, params, golden["tokens"], golden["mask"], expected)
    if name == "gemma3":
        assert tiny.greedy(params, config, golden["tokens"][0], 32) == golden["greedy"].tolist()


@pytest.mark.parametrize("name", REAL_MODELS)
def test_real_models_equal_the_golden_results(data_dir, name):
    config, params = load(data_dir / "models" / name)
    golden = np.load(REAL_GOLDEN)
    tokens = golden[f"{name}/tokens"]
    mask = np.ones_like(tokens, bool)
    found = tiny.token_logprobs(tiny.logits(params, tokens, mask, config), tokens, mask)
    # Logits reach 24, where float32 itself is 2e-6 apart: torch's own float32 log-probs are up to 1.9e-5 from its float64 ones.
    np.testing.assert_allclose(found, golden[f"{name}/logprobs"].reshape(-1), atol=1e-5, rtol=1e-5)
    assert tiny.greedy(params, config, golden[f"{name}/prompt"], 32) == golden[f"{name}/greedy"].tolist()


@pytest.mark.parametrize("name", VARIANTS)
def test_random_models_equal_torch(torch, tmp_path, name):
    from tests.fixtures import make_fixtures

    model, tokens, mask = make_fixtures.decisive_model(name, 1000)
    model.save_pretrained(tmp_path)
    config, params = load(tmp_path)
    assert_same_outputs(config, params, tokens, mask, make_fixtures.outputs(model, tokens, mask))
    if config.head == "language_model":
        assert tiny.greedy(params, config, tokens[0], 32) == make_fixtures.greedy(model, tokens[0], 32)[0].tolist()


@pytest.mark.parametrize(
    "name, sizes",
    [("llama_untied", (1, 4, 2)), ("gpt2", (4, 2, 1)), ("qwen3_moe", (1, 4, 2)), ("gpt_oss", (1, 2, 2)), ("olmo2", (1, 2, 2))],
    ids=str,
)
def test_every_mesh_reads_the_same_parameters(name, sizes):
    config, expected = load(path_of(name))
    _, found = load(path_of(name), sizes)
    assert_same_params(found, expected)
    assert jax.tree.map(lambda p: p.sharding, found) == applied.shardings(config, tiny.make_mesh(sizes))
    assert {p.dtype for p in jax.tree.leaves(found)} == {np.dtype("float32")}


def test_devices_read_only_their_slices(monkeypatch):
    read = []
    copy = files.copy
    monkeypatch.setattr(files, "copy", lambda target, source: read.append(source.size) or copy(target, source))
    _, params = load(path_of("gpt_neox"), (1, 4, 2))
    assert sum(read) < 1.25 * sum(p.size for p in jax.tree.leaves(params))


def test_the_host_holds_its_shards_and_little_else(tmp_path):
    config = DecoderConfig(layers=4, width=256, heads=4, kv_heads=4, head_size=64, ffn=1024, vocab=8000, max_positions=64)
    stored = applied.random(applied.specs(config), scale=0.1)
    export.save(tmp_path / "model", config, stored, dtype="bfloat16")
    tracemalloc.start()
    try:
        _, params = load(tmp_path / "model")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    shards = sum(p.nbytes for p in jax.tree.leaves(params))
    assert shards <= peak < 1.2 * shards  # one embedding or stack more would not fit
    assert_same_params(params, jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16).astype(np.float32), stored))


def test_fused_experts_are_read(tmp_path):
    folder, (_, expected) = copy_of("qwen3_moe", tmp_path), load(path_of("qwen3_moe"))
    tiny.edit_weights(folder, tiny.fuse)
    tiny.edit_config(folder, num_local_experts=None, num_experts=6)  # the name on the hub
    assert_same_params(load(folder, (1, 2, 2))[1], expected)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_a_router_in_half_precision_is_read_as_float32(tmp_path, dtype):
    name = "model.layers.1.mlp.gate.weight"
    folder, (_, expected) = copy_of("qwen3_moe", tmp_path), load(path_of("qwen3_moe"))
    tiny.edit_weights(folder, lambda tensors: tensors.update({name: tensors[name].astype(dtype)}))
    found = load(folder)[1]["layers"]["feed_forward"]["router"]["weight"]
    rounded = np.array(expected["layers"]["feed_forward"]["router"]["weight"])
    rounded[1] = rounded[1].astype(dtype)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, rounded)


def test_half_precision_and_shards(tmp_path):
    folder = copy_of("llama_untied", tmp_path)
    _, expected = load(folder)

    def edit(tensors):
        name = "model.layers.1.self_attn.q_proj.weight"
        tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float16)

    tiny.edit_weights(folder, edit)
    tiny.shard_weights(folder)
    _, found = load(folder)
    of_query, norm = expected["layers"]["attention"]["query"], np.array(expected["final_norm"]["scale"])
    of_query["weight"] = np.array(of_query["weight"])
    of_query["weight"][1] = of_query["weight"][1].astype(ml_dtypes.bfloat16)
    expected["final_norm"]["scale"] = norm.astype(np.float16).astype(np.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype("float32")}
    assert_same_params(found, expected)


@pytest.mark.parametrize(
    "name, buffers, prefix",
    [
        ("llama_tied", ["model.layers.0.self_attn.rotary_emb.inv_freq"], "model."),
        ("gpt2", ["transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias"], "transformer."),
        ("gpt_neox", ["gpt_neox.layers.1.attention.bias", "gpt_neox.layers.0.attention.rotary_emb.inv_freq"], "gpt_neox."),
    ],
)
def test_other_files_of_the_same_parameters(tmp_path, name, buffers, prefix):
    folder, (_, expected) = copy_of(name, tmp_path), load(path_of(name))
    tiny.edit_weights(folder, lambda t: t.update(dict.fromkeys(buffers, np.ones(3, np.float32))))
    assert_same_params(load(folder)[1], expected)
    tiny.edit_weights(folder, lambda t: [t.update({key.removeprefix(prefix): t.pop(key)}) for key in list(t)])
    assert not any(tensor.startswith(prefix) for tensor in load_file(folder / "model.safetensors"))
    tiny.shard_weights(folder)
    for path in folder.glob("*.json"):
        path.write_text(path.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert_same_params(load(folder)[1], expected)


def test_tied_embeddings_under_either_name_or_both(tmp_path, monkeypatch):
    _, expected = load(path_of("llama_tied"))
    folder = copy_of("llama_tied", tmp_path)
    differs = r"lm_head\.weight differs from model\.embed_tokens\.weight, but .* tie_word_embeddings=true"
    tiny.edit_weights(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert_same_params(load(folder)[1], expected)
    monkeypatch.setattr(load_lib, "COMPARED_ROWS", 5)  # 48 rows: the last block is a part
    assert_same_params(load(folder)[1], expected)
    tiny.edit_weights(folder, lambda t: t["lm_head.weight"].__setitem__((47, 15), 9.0))
    with pytest.raises(ValueError, match=differs):
        load(folder)
    tiny.edit_weights(folder, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    assert_same_params(load(folder)[1], expected)
    _, params = load(folder, head="score", fresh=jax.random.key(0))
    assert params.pop("score")["weight"].shape == (16, 1)
    assert_same_params(params, expected)


def test_a_new_head_on_a_language_model():
    _, expected = load(path_of("gpt_neox"))
    asked = {"head": "score", "sizes": (1, 2, 1)}
    config, params = load(path_of("gpt_neox"), fresh=jax.random.key(3), **asked)
    assert (config.head, config.labels) == ("score", 1)
    score = params.pop("score")["weight"]
    del expected["lm_head"]
    assert_same_params(params, expected)
    assert score.shape == (16, 1) and 0.005 < np.std(score) < 0.05
    assert score.sharding == applied.shardings(config, tiny.make_mesh((1, 2, 1)))["score"]["weight"]
    stored = load_file(path_of("gpt_neox_reward") / "model.safetensors")["score.weight"]
    np.testing.assert_array_equal(load(path_of("gpt_neox_reward"), fresh=jax.random.key(3))[1]["score"]["weight"], stored.T)


@pytest.mark.parametrize(
    "name, heads, expected",
    [
        ("llama_untied", 4, {"kv_heads": 4, "head_size": 4, "max_positions": 2048, "norm_epsilon": 1e-6}),
        ("qwen3", 32, {"kv_heads": 32, "head_size": 128, "max_positions": 32768, "qkv_bias": False}),
        ("gpt2", 4, {"ffn": 64, "max_positions": 1024, "activation": "gelu_tanh", "tied_embedding": True}),
        ("gpt_neox", 1, {"rotary_size": 4, "rope_theta": 10_000.0, "parallel_residual": True, "out_bias": True}),
        ("gpt_neox_reward", 1, {"labels": 2}),
    ],
)
def test_absent_settings_have_the_values_of_transformers(tmp_path, name, heads, expected):
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "n_embd", "n_layer", "n_head")
    values = json.loads((path_of(name) / "config.json").read_text())
    values = {key: values[key] for key in (*keys, "model_type", "architectures") if key in values}
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_attention_heads": heads}))
    config = load_lib.read_config(tmp_path, compute_dtype="float32")
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    "name, settings, window, local",
    [
        ("mistral", {}, 0, (False, False)),
        ("mistral", {"sliding_window": "absent"}, 4096, (True, True)),
        ("qwen2_window", {"layer_types": None}, 4, (False, True, True)),
        ("qwen2_window", {"layer_types": None, "max_window_layers": 0}, 4, (True, True, True)),
        ("qwen2_window", {"layer_types": None, "use_sliding_window": False}, 0, (False, False, False)),
        ("qwen2_window", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, 4, (True, False, True)),
        ("gemma3", {"layer_types": None}, 5, (True, True, True)),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 2, "sliding_window": "absent"}, 4096, (True, False, True)),
    ],
    ids=str,
)
def test_local_layers_are_those_of_transformers(tmp_path, name, settings, window, local):
    import transformers

    values = json.loads((path_of(name) / "config.json").read_text()) | settings
    values = {key: value for key, value in values.items() if value != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = load_lib.read_config(tmp_path, compute_dtype="float32")
    assert (config.window, config.local_layers) == (window, local)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    if name == "mistral":
        assert theirs.sliding_window == (window or None)
    else:
        assert tuple(kind == "sliding_attention" for kind in theirs.layer_types) == local


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    return tmp_path


def read(setting: str) -> list[data.Row]:
    return data.read("org/rows", fields={"q": str}, setting=setting, split="train")


def test_a_model_that_was_fetched_before_is_taken(home, caplog):
    repository = home / "hub" / "models--org--tiny"
    folder = Path(shutil.copytree(path_of("llama_tied"), repository / "snapshots" / COMMIT))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    assert load_lib.resolve_folder("org/tiny") == folder
    assert caplog.text.count("the hub cannot be reached") == 1 and "model org/tiny" in caplog.text


def test_a_data_set_that_was_fetched_before_is_taken(home, caplog):
    source = home / "rows" / "train.jsonl"
    source.parent.mkdir()
    source.write_text(json.dumps({"q": "one"}) + "\n")
    # A data set that is read from a folder has the same tables under the folder's name: they are put under the hub's.
    datasets.load_dataset(str(source.parent), split="train")
    (made,) = (home / "datasets").glob("*/default*/0.0.0/*/dataset_info.json")
    target = Path(shutil.copytree(made.parent, home / "datasets" / "org___rows" / "default" / "0.0.0" / COMMIT))
    for table in target.glob("*-train.arrow"):
        table.rename(target / "rows-train.arrow")
    information = json.loads((target / "dataset_info.json").read_text())
    (target / "dataset_info.json").write_text(json.dumps(information | {"dataset_name": "rows", "config_name": "default"}))
    assert read("task.x.path") == [{"q": "one"}]
    assert caplog.text.count("the hub cannot be reached") == 1 and "task.x.path='org/rows'" in caplog.text


@pytest.mark.parametrize(
    "setting, advice",
    [
        ("model.path", "FOLDER (with make: MODEL=FOLDER)"),
        (
            "task.gsm8k.train_path",
            "FILE.jsonl (with make: DATA=FOLDER, with train.jsonl and test.jsonl)",
        ),
    ],
)
def test_without_a_copy_one_sentence_says_so(home, setting, advice):
    with pytest.raises(ValueError, match=rf"^{setting}='org/") as error, load_lib.named(setting, "org/tiny"):
        read(setting) if "train_path" in setting else load_lib.resolve_folder("org/tiny")
    sentence = str(error.value)
    assert (
        "the hub cannot be reached" in sentence
        and "cache" in sentence
        and sentence.endswith(f"needs no hub: --config.{setting}={advice}")
    )


class Answered(Exception):
    def __init__(self, status: int):
        self.response = SimpleNamespace(status_code=status)


def test_what_counts_as_away():
    assert all(map(load_lib.is_away, (ConnectionRefusedError(), TimeoutError(), Answered(503), Answered(429))))
    assert not any(map(load_lib.is_away, (Answered(404), Answered(401), ValueError("no such split"), FileNotFoundError(2, "x"))))
