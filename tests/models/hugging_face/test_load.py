"""Import of Hugging Face checkpoints: parity with torch's transformers, exact sharded reads, heads that are new.

tests/fixtures holds torch's results in float64 (make_fixtures.py), so parity is checked without torch as well. What is refused:
test_models_hugging_face_refusals.py.
"""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tba_jax.models import parameters
from tba_jax.models.config import DecoderConfig, RopeScaling
from tba_jax.models.hugging_face import files
from tba_jax.models.hugging_face import load as load_lib
from tests.support import applied
from tests.support import tiny_checkpoints as tiny
from tests.support.tiny_checkpoints import LANGUAGE_MODELS, REAL_MODELS, assert_same_params, load, path_of

REAL_GOLDEN = tiny.FIXTURES / "real_models.npz"
# Those of make_fixtures.MODELS, which cannot be imported without torch.
VARIANTS = (
    *LANGUAGE_MODELS,
    "qwen2_untied",
    "qwen3_biased",
    "gpt2_relu",
    "gpt_neox_sequential",
    "llama_reward",
    "qwen3_classifier",
    "gpt2_classifier",
    "gpt_neox_reward",
    "gemma3_reward",
    "llama_linear",
)


def copy_of(name: str, tmp_path: Path) -> Path:
    """A writable copy of a tiny model."""
    return Path(shutil.copytree(path_of(name), tmp_path / "model"))


def assert_logprobs_close(found: np.ndarray, expected: np.ndarray) -> None:
    """1e-5, absolute plus relative to the log-prob.

    The relative part is needed because the real models' logits reach 24, where float32 itself is 2e-6 apart: torch's own
    float32 log-probs are up to 1.9e-5 from its float64 ones there (ours up to 1.5e-5).
    """
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


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
    if config.head == "language_model":
        assert tiny.greedy(params, config, golden["tokens"][0], 32) == golden["greedy"].tolist()


@pytest.mark.parametrize("name", REAL_MODELS)
def test_real_models_equal_the_golden_results(data_dir, name):
    config, params = load(data_dir / "models" / name)
    golden = np.load(REAL_GOLDEN)
    tokens = golden[f"{name}/tokens"]
    mask = np.ones_like(tokens, bool)
    found = tiny.token_logprobs(tiny.logits(params, tokens, mask, config), tokens, mask)
    assert_logprobs_close(found, golden[f"{name}/logprobs"].reshape(-1))
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


def test_every_variant_is_compared(torch):
    from tests.fixtures import make_fixtures

    assert set(VARIANTS) == set(make_fixtures.MODELS)


@pytest.mark.parametrize("name", REAL_MODELS)
def test_real_models_equal_torch(torch, data_dir, name):
    from transformers import LlamaForCausalLM

    config, params = load(data_dir / "models" / name)
    model = LlamaForCausalLM.from_pretrained(data_dir / "models" / name).eval()
    tokens = np.load(REAL_GOLDEN)[f"{name}/tokens"]
    mask = np.ones_like(tokens, bool)
    expected = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    exact = model.double()(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    logits = tiny.logits(params, tokens, mask, config)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert_logprobs_close(tiny.token_logprobs(logits, tokens, mask), tiny.token_logprobs(exact, tokens, mask))


@pytest.mark.parametrize("name", ["llama_untied", "gpt2"])
@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (4, 2, 1), (1, 4, 2)], ids=str)
def test_every_mesh_reads_the_same_parameters(name, sizes):
    config, expected = load(path_of(name))
    _, found = load(path_of(name), sizes)
    assert_same_params(found, expected)
    assert jax.tree.map(lambda p: p.sharding, found) == applied.shardings(config, tiny.make_mesh(sizes))
    assert {p.dtype for p in jax.tree.leaves(found)} == {np.dtype("float32")}


@pytest.mark.parametrize("name", ["llama_untied", "gpt_neox"])
def test_devices_read_only_their_slices(monkeypatch, name):
    read = []
    copy = files.copy
    monkeypatch.setattr(files, "copy", lambda target, source: read.append(source.size) or copy(target, source))
    _, params = load(path_of(name), (1, 4, 2))
    assert sum(read) == sum(shard.data.size for p in jax.tree.leaves(params) for shard in unique_shards(p))
    assert sum(read) < 1.25 * sum(p.size for p in jax.tree.leaves(params))


def unique_shards(array: jax.Array) -> list:
    """One shard for each index; but every device has its own where not all of them have the same."""
    return (
        list(array.addressable_shards)
        if len({str(s.index) for s in array.addressable_shards}) > 1
        else [array.addressable_shards[0]]
    )


def test_on_a_cpu_the_filled_buffers_are_the_arrays(monkeypatch):
    """Not copies of them: the peak of an import is its result."""
    if jax.default_backend() != "cpu":
        pytest.skip("accelerators have memory of their own")
    filled = []
    empty = parameters.aligned_empty
    monkeypatch.setattr(parameters, "aligned_empty", lambda *arguments: filled.append(empty(*arguments)) or filled[-1])
    _, params = load(path_of("gpt2"))
    assert {p.unsafe_buffer_pointer() for p in jax.tree.leaves(params)} == {buffer.ctypes.data for buffer in filled}
    expected = jax.tree.map(np.array, params)
    moved = jax.jit(lambda tree: jax.tree.map(lambda p: p + 1, tree), donate_argnums=0)(params)
    jax.tree.map(lambda p, e: np.testing.assert_array_equal(p, e + 1), moved, expected)


def test_copies_in_blocks_are_whole(monkeypatch):
    monkeypatch.setattr(files, "COPIED_BYTES", 100)
    source = np.random.default_rng(0).normal(size=(5, 7, 3)).astype(np.float32)
    for axes in [(0, 1, 2), (2, 0, 1), (1, 2, 0)]:
        target = np.zeros_like(source.transpose(axes))
        files.copy(target, source.transpose(axes))
        np.testing.assert_array_equal(target, source.transpose(axes))


def test_half_precision_and_shards(tmp_path):
    import ml_dtypes

    folder = copy_of("llama_untied", tmp_path)
    _, expected = load(folder)

    def edit(tensors):
        name = "model.layers.1.self_attn.q_proj.weight"
        tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float16)

    tiny.edit_weights(folder, edit)
    tiny.shard_weights(folder)
    _, found = load(folder)
    query, norm = found["layers"]["attention"]["query"]["weight"], found["final_norm"]["scale"]
    assert query.dtype == norm.dtype == np.float32
    rounded = np.asarray(expected["layers"]["attention"]["query"]["weight"][1]).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(query[1], rounded)
    np.testing.assert_array_equal(query[0], expected["layers"]["attention"]["query"]["weight"][0])
    np.testing.assert_array_equal(norm, np.asarray(expected["final_norm"]["scale"]).astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(found["layers"]["attention"]["key"]["weight"], expected["layers"]["attention"]["key"]["weight"])


@pytest.mark.parametrize("name", ["llama_untied", "bert_embedding"])
def test_json_may_begin_with_a_byte_order_mark(tmp_path, name):
    folder = copy_of(name, tmp_path)
    tiny.shard_weights(folder)
    for path in folder.rglob("*.json"):
        path.write_text(path.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert_same_params(load(folder)[1], load(path_of(name))[1])


@pytest.mark.parametrize(
    "name, buffers",
    [
        ("llama_tied", ["model.layers.0.self_attn.rotary_emb.inv_freq"]),
        ("gpt2", ["transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias"]),
        ("gpt_neox", ["gpt_neox.layers.1.attention.bias", "gpt_neox.layers.0.attention.rotary_emb.inv_freq"]),
    ],
)
def test_buffers_of_old_versions_are_ignored(tmp_path, name, buffers):
    folder = copy_of(name, tmp_path)
    tiny.edit_weights(folder, lambda t: t.update(dict.fromkeys(buffers, np.ones(3, np.float32))))
    assert_same_params(load(folder)[1], load(path_of(name))[1])


@pytest.mark.parametrize("name, prefix", [("gpt2", "transformer."), ("qwen2", "model."), ("gpt_neox", "gpt_neox.")])
def test_names_without_the_prefix_of_the_base_model(tmp_path, name, prefix):
    folder = copy_of(name, tmp_path)

    def strip(tensors):
        for tensor in list(tensors):
            tensors[tensor.removeprefix(prefix)] = tensors.pop(tensor)

    tiny.edit_weights(folder, strip)
    assert all(not tensor.startswith(prefix) for tensor in load_file(folder / "model.safetensors"))
    assert_same_params(load(folder)[1], load(path_of(name))[1])


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
    tiny.edit_weights(folder, lambda t: t.update({"model.embed_tokens.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(ValueError, match=differs):
        load(folder)


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
    other = load(path_of("gpt_neox"), fresh=jax.random.key(4), **asked)[1]["score"]["weight"]
    assert not np.array_equal(score, other)


def test_a_stored_score_head_is_read_not_initialised():
    config, params = load(path_of("gpt_neox_reward"), fresh=jax.random.key(0))
    weight = load_file(path_of("gpt_neox_reward") / "model.safetensors")["score.weight"]
    np.testing.assert_array_equal(params["score"]["weight"], weight.T)
    assert (config.head, config.labels) == ("score", 1)


def test_configs_of_both_generations():
    untied = load_lib.read_config(path_of("llama_untied"), compute_dtype="bfloat16", attention="xla")
    tied = load_lib.read_config(path_of("llama_tied"), compute_dtype="float32")
    sizes = {"layers": 2, "width": 16, "heads": 4, "ffn": 24, "vocab": 48, "max_positions": 64}
    assert untied == DecoderConfig(
        **sizes,
        kv_heads=2,
        head_size=8,
        rope_theta=500.0,
        tied_embedding=False,
        compute_dtype="bfloat16",
        attention="xla",
    )
    assert tied == DecoderConfig(**sizes, kv_heads=1, head_size=4, rope_theta=10_000.0, tied_embedding=True)


def test_rotary_settings_of_transformers_4(tmp_path):
    """rope_scaling beside rope_theta gives what rope_parameters gives; so do rotary_pct and rotary_emb_base."""
    llama = copy_of("llama_biased", tmp_path)
    expected = load_lib.read_config(llama, compute_dtype="float32")
    scaling = RopeScaling(factor=4.0, low_frequency=1.0, high_frequency=4.0, original_positions=32)
    assert (expected.rope_theta, expected.rope_scaling) == (50.0, scaling)
    rope = json.loads((llama / "config.json").read_text())["rope_parameters"]
    tiny.edit_config(llama, rope_parameters=None, rope_theta=rope.pop("rope_theta"), rope_scaling=rope)
    assert load_lib.read_config(llama, compute_dtype="float32") == expected

    neox = shutil.copytree(path_of("gpt_neox"), tmp_path / "neox")
    expected = load_lib.read_config(neox, compute_dtype="float32")
    assert (expected.rotary_size, expected.rope_theta) == (2, 1000.0)
    tiny.edit_config(neox, rope_parameters=None, rotary_pct=0.25, rotary_emb_base=1000)
    assert load_lib.read_config(neox, compute_dtype="float32") == expected
    tiny.edit_config(neox, rotary_pct=1.0)
    assert load_lib.read_config(neox, compute_dtype="float32").rotary_size == 0


@pytest.mark.parametrize(
    "model_type, needed, expected",
    [
        ("llama", "llama_untied", {"kv_heads": 4, "head_size": 4, "max_positions": 2048, "norm_epsilon": 1e-6}),
        ("qwen3", "qwen3", {"kv_heads": 32, "head_size": 128, "max_positions": 32768, "qkv_bias": False}),
        ("gpt2", "gpt2", {"ffn": 64, "max_positions": 1024, "activation": "gelu_tanh", "tied_embedding": True}),
        ("gpt_neox", "gpt_neox", {"rotary_size": 4, "rope_theta": 10_000.0, "parallel_residual": True, "out_bias": True}),
    ],
)
def test_absent_settings_have_the_values_of_transformers(tmp_path, model_type, needed, expected):
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "n_embd", "n_layer", "n_head")
    values = json.loads((path_of(needed) / "config.json").read_text())
    values = {key: values[key] for key in keys if key in values} | {"model_type": model_type}
    if model_type != "gpt2":
        values["num_attention_heads"] = {"qwen3": 32, "gpt_neox": 1}.get(model_type, 4)
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = load_lib.read_config(tmp_path, compute_dtype="float32")
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    "name, settings, window, local",
    [
        ("mistral", {}, 0, (False, False)),
        ("mistral", {"sliding_window": "absent"}, 4096, (True, True)),
        ("qwen2_window", {"layer_types": None}, 4, (False, True, True)),
        ("qwen2_window", {"layer_types": None, "max_window_layers": 0}, 4, (True, True, True)),
        ("qwen2_window", {"layer_types": None, "max_window_layers": "absent"}, 0, (False, False, False)),
        ("qwen2_window", {"layer_types": None, "use_sliding_window": False}, 0, (False, False, False)),
        ("qwen2_window", {"layer_types": None, "sliding_window": None}, 0, (False, False, False)),
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


def test_labels_of_a_classifier(tmp_path):
    folder = copy_of("gpt_neox_reward", tmp_path)
    for settings, labels in [({"id2label": None}, 2), ({"id2label": {"0": "a", "1": "b", "2": "c"}}, 3), ({"num_labels": 5}, 5)]:
        tiny.edit_config(folder, **settings)
        assert load_lib.read_config(folder, compute_dtype="float32").labels == labels


def test_a_tied_checkpoint_with_lm_head_gets_a_score_head(tmp_path):
    folder = copy_of("llama_tied", tmp_path)
    expected = load(folder)[1]
    tiny.edit_weights(folder, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    _, params = load(folder, head="score", fresh=jax.random.key(0))
    assert params.pop("score")["weight"].shape == (16, 1)
    assert_same_params(params, expected)
