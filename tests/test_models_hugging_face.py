"""Import of Hugging Face checkpoints: parity with torch's transformers, exact sharded reads, and every refusal.

tests/fixtures holds torch's results in float64 (tests/make_fixtures.py), so parity is checked without torch as well.
"""

import functools
import importlib.util
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save_file

from tba_jax import mesh as mesh_lib
from tba_jax.models import decoder, hugging_face

FIXTURES = Path(__file__).resolve().parent / "fixtures"
TINY_MODELS = ("tiny_llama_untied", "tiny_llama_tied")
REAL_MODELS = ("TinyStories-656K", "stories260K-hf")
QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def torch():
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: run make test PARITY=1")
    import torch

    return torch


@pytest.fixture
def folder(tmp_path) -> Path:
    """A writable copy of the untied tiny model."""
    return Path(shutil.copytree(FIXTURES / "tiny_llama_untied", tmp_path / "model"))


def load(folder: Path, sizes: tuple[int, int, int] = (8, 1, 1)) -> tuple[decoder.DecoderConfig, decoder.Params]:
    config = hugging_face.read_config(folder, compute_dtype="float32")
    shardings = decoder.param_shardings(config, mesh_lib.make_mesh(sizes, setting="trainer.mesh"))
    return config, hugging_face.load_params(folder, config, shardings)


def edit_config(folder: Path, **settings) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def edit_weights(folder: Path, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard_weights(folder: Path, count: int = 2) -> list[Path]:
    """Rewrites model.safetensors as `count` shards with an index, tensors in turn."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    weight_map = {name: names[i % count] for i, name in enumerate(sorted(tensors))}
    for shard in names:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return [folder / name for name in names]


@functools.partial(jax.jit, static_argnames="config")
def logits_of_whole(params: decoder.Params, tokens: jax.Array, config: decoder.DecoderConfig) -> jax.Array:
    hidden = decoder.hidden_states(params, tokens, tokens >= 0, config=config, remat=False)
    return decoder.logits_of(params, hidden, config=config)


def token_logprobs(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """float64[B, T - 1] log-probs of tokens 1..T-1, the softmax in NumPy."""
    logits = np.asarray(logits, np.float64)[:, :-1]
    normalizer = np.log(np.exp(logits).sum(-1))
    return np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0] - normalizer


def greedy(params: decoder.Params, config: decoder.DecoderConfig, prompt: np.ndarray, count: int) -> list[int]:
    """The greedy continuation by prefill and cached steps."""
    P = len(prompt)
    prefill = jax.jit(decoder.prefill, static_argnames=("cache_length", "config"))
    step = jax.jit(decoder.decode_step, static_argnames="config")
    logits, cache = prefill(params, prompt[None], np.ones((1, P), bool), cache_length=P + count, config=config)
    tokens = []
    for t in range(count):
        tokens.append(int(np.argmax(logits)))
        cache_mask = np.arange(P + count)[None] <= P + t
        token, position = np.array([tokens[-1]], np.int32), np.array([P + t], np.int32)
        logits, cache = step(params, token, position, np.int32(P + t), cache, cache_mask, config=config)
    return tokens


def assert_logprobs_close(found: np.ndarray, expected: np.ndarray) -> None:
    """1e-5, absolute plus relative to the log-prob.

    The relative part is needed because the real models' logits reach 24, where float32 itself is 2e-6 apart: torch's own
    float32 log-probs are up to 1.9e-5 from its float64 ones there (ours up to 1.5e-5).
    """
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_tiny_models_equal_the_golden_results(name):
    config, params = load(FIXTURES / name)
    golden = np.load(FIXTURES / name / "golden.npz")
    logits = logits_of_whole(params, golden["tokens"], config)
    np.testing.assert_allclose(logits, golden["logits"], atol=1e-4)
    np.testing.assert_allclose(
        token_logprobs(logits, golden["tokens"]), token_logprobs(golden["logits"], golden["tokens"]), atol=1e-5
    )
    assert greedy(params, config, golden["tokens"][0], 32) == golden["greedy"].tolist()


@pytest.mark.parametrize("name", REAL_MODELS)
def test_real_models_equal_the_golden_results(data_dir, name):
    config, params = load(data_dir / "models" / name)
    golden = np.load(FIXTURES / "real_models.npz")
    tokens = golden[f"{name}/tokens"]
    assert_logprobs_close(token_logprobs(logits_of_whole(params, tokens, config), tokens), golden[f"{name}/logprobs"])
    assert greedy(params, config, golden[f"{name}/prompt"], 32) == golden[f"{name}/greedy"].tolist()


@pytest.mark.parametrize("settings", ["grouped, untied", "multi-head, tied"])
def test_random_models_equal_torch(torch, tmp_path, settings):
    from make_fixtures import tiny_llama

    grouped = settings == "grouped, untied"
    model = tiny_llama(7, num_key_value_heads=2 if grouped else 4, tie_word_embeddings=not grouped, rope_theta=1000.0)
    model.save_pretrained(tmp_path)
    config, params = load(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 48, (4, 24)).astype(np.int32)
    with torch.no_grad():
        expected = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
        continuation = model.generate(
            torch.tensor(tokens[:1, :8], dtype=torch.long), max_new_tokens=32, do_sample=False, eos_token_id=None
        )
    logits = logits_of_whole(params, tokens, config)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    np.testing.assert_allclose(token_logprobs(logits, tokens), token_logprobs(expected, tokens), atol=1e-5)
    assert greedy(params, config, tokens[0, :8], 32) == continuation[0, 8:].tolist()


@pytest.mark.parametrize("name", REAL_MODELS)
def test_real_models_equal_torch(torch, data_dir, name):
    from transformers import LlamaForCausalLM

    config, params = load(data_dir / "models" / name)
    model = LlamaForCausalLM.from_pretrained(data_dir / "models" / name).eval()
    tokens = np.load(FIXTURES / "real_models.npz")[f"{name}/tokens"]
    with torch.no_grad():
        expected = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
        exact = model.double()(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    logits = logits_of_whole(params, tokens, config)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert_logprobs_close(token_logprobs(logits, tokens), token_logprobs(exact, tokens))


def assert_same_params(found: decoder.Params, expected: decoder.Params) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("sizes", [(1, 8, 1), (4, 2, 1)], ids=str)
def test_every_mesh_reads_the_same_parameters(name, sizes):
    config, expected = load(FIXTURES / name)
    _, found = load(FIXTURES / name, sizes)
    assert_same_params(found, expected)
    shardings = decoder.param_shardings(config, mesh_lib.make_mesh(sizes, setting="trainer.mesh"))
    assert jax.tree.map(lambda p: p.sharding, found) == shardings
    assert {p.dtype for p in jax.tree.leaves(found)} == {np.dtype("float32")}


def test_devices_read_only_their_slices(monkeypatch):
    expected = load(FIXTURES / "tiny_llama_untied")[1]
    read: dict[str, set[int]] = {}
    opened = safetensors.safe_open

    class Recorder:
        """A safetensors slice that notes how many elements each read returns."""

        def __init__(self, name, tensor):
            self.name, self.tensor = name, tensor
            self.get_shape, self.get_dtype = tensor.get_shape, tensor.get_dtype

        def __getitem__(self, index):
            block = self.tensor[index]
            read.setdefault(self.name, set()).add(block.size)
            return block

    class RecordingFile:
        def __init__(self, *args, **kwargs):
            self.file = opened(*args, **kwargs)
            self.keys = self.file.keys

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def get_slice(self, name):
            return Recorder(name, self.file.get_slice(name))

    monkeypatch.setattr(safetensors, "safe_open", RecordingFile)
    _, found = load(FIXTURES / "tiny_llama_untied", (1, 4, 2))
    assert_same_params(found, expected)
    sizes = {name: np.prod(tensor.shape) for name, tensor in load_file(FIXTURES / "tiny_llama_untied/model.safetensors").items()}
    assert set(read) == set(sizes)
    for name, blocks in read.items():
        assert blocks == {sizes[name] // (4 if "norm" in name else 8)}, name


def test_half_precision_shards_and_ignored_buffers(folder):
    import ml_dtypes

    _, expected = load(folder)

    def edit(tensors):
        tensors[QUERY] = tensors[QUERY].astype(ml_dtypes.bfloat16)
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float16)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    edit_weights(folder, edit)
    shard_weights(folder)
    _, found = load(folder)
    assert found["layers"]["query"].dtype == np.float32
    np.testing.assert_allclose(found["layers"]["query"], expected["layers"]["query"], rtol=2**-8)
    np.testing.assert_allclose(found["final_norm"], expected["final_norm"], rtol=2**-11)
    np.testing.assert_array_equal(found["layers"]["key"], expected["layers"]["key"])


def test_tied_embeddings_under_either_name_or_both(tmp_path, monkeypatch):
    _, expected = load(FIXTURES / "tiny_llama_tied")
    folder = Path(shutil.copytree(FIXTURES / "tiny_llama_tied", tmp_path / "model"))
    edit_weights(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert_same_params(load(folder)[1], expected)
    monkeypatch.setattr(hugging_face, "_COMPARED_ROWS", 5)  # 48 rows: the last block is a part
    assert_same_params(load(folder)[1], expected)
    edit_weights(folder, lambda t: t["lm_head.weight"].__setitem__((47, 15), 9.0))
    with pytest.raises(
        ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight, but .* tie_word_embeddings=true"
    ):
        load(folder)
    edit_weights(folder, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    assert_same_params(load(folder)[1], expected)
    edit_weights(folder, lambda t: t.update({"model.embed_tokens.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(
        ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight, but .* tie_word_embeddings=true"
    ):
        load(folder)


def test_configs_of_both_generations():
    untied = hugging_face.read_config(FIXTURES / "tiny_llama_untied", compute_dtype="bfloat16")
    tied = hugging_face.read_config(FIXTURES / "tiny_llama_tied", compute_dtype="float32")
    sizes = {"layers": 3, "width": 16, "heads": 4, "ffn": 24, "vocab": 48, "max_positions": 64, "norm_epsilon": 1e-5}
    assert untied == decoder.DecoderConfig(
        **sizes, kv_heads=2, head_size=8, rope_theta=500.0, tied_embedding=False, compute_dtype="bfloat16"
    )
    assert tied == decoder.DecoderConfig(**sizes, kv_heads=1, head_size=4, rope_theta=10_000.0, tied_embedding=True)


def test_absent_settings_have_the_values_of_llama(folder):
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | {key: values[key] for key in needed}))
    config = hugging_face.read_config(folder, compute_dtype="float32")
    assert (config.kv_heads, config.head_size, config.rope_theta) == (4, 4, 10_000.0)
    assert (config.norm_epsilon, config.tied_embedding) == (1e-6, False)


@pytest.mark.parametrize(
    "settings, sentence",
    [
        (
            {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
            r"model_type='mamba' .*supported: llama \(LlamaForCausalLM\)",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            r"architectures=\['LlamaForSequenceClassification'\] is not supp.*llama",
        ),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; the decoder computes hidden_act='silu' only"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling={'type': 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "rope_parameters={'rope_type': 'llama3'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"hidden_size": None}, "hidden_size=None must be a positive integer"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers='3' must be a positive integer"),
        ({"hidden_size": 18, "head_dim": None}, "hidden_size=18 is not divisible by num_attention_heads=4"),
        ({"num_key_value_heads": 3}, r"model\.heads=4 is not divisible by model\.kv_heads=3"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_the_decoder_does_not_compute_are_refused(folder, settings, sentence):
    edit_config(folder, **settings)
    with pytest.raises(ValueError, match=sentence) as refusal:
        hugging_face.read_config(folder, compute_dtype="float32")
    assert "\n" not in str(refusal.value)


def test_default_rope_scaling_is_allowed(folder):
    edit_config(folder, rope_scaling={"rope_type": "default"}, sliding_window=None, pretraining_tp=2)
    hugging_face.read_config(folder, compute_dtype="float32")


def test_missing_folders_and_files_are_named(folder, tmp_path, monkeypatch):
    def refuse(name, **_):
        raise FileNotFoundError(f"no network for {name}\nand more lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    cases = {
        tmp_path / "missing": f"model folder {tmp_path}/missing does not exist, and is not a hub id",
        "org/name": r"model org/name is not a local folder and could not be fetched from the hub: no network for org/name$",
        "org/name/more": "model folder org/name/more does not exist, and is not a hub id",
        folder / "config.json": "config.json is a file; give the folder",
        tmp_path: f"{tmp_path}/config.json does not exist; a model folder holds config.json and model.safetensors",
    }
    for name, sentence in cases.items():
        with pytest.raises(ValueError, match=sentence):
            hugging_face.read_config(name, compute_dtype="float32")
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        hugging_face.read_config(folder, compute_dtype="float32")


def test_hub_ids_are_fetched(folder, monkeypatch):
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or str(folder))
    assert hugging_face.read_config("org/tiny-llama.v1", compute_dtype="float32").layers == 3
    assert asked == ["org/tiny-llama.v1"]


def test_weights_that_are_not_there_or_pickled_are_refused(folder):
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


@pytest.mark.parametrize("length", [0, 5, 2000, -100])
def test_truncated_files_are_named(folder, length):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=rf"{path} is damaged or not whole \(.*\); fetch it again"):
        load(folder)


def test_shards_that_are_missing_overlap_or_lie_are_named(folder):
    first, second = shard_weights(folder)
    whole = second.read_bytes()
    second.unlink()
    with pytest.raises(
        ValueError, match=rf"model\.safetensors\.index\.json names \['{second.name}'\], which {folder} does not hold"
    ):
        load(folder)
    second.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=rf"{second} is damaged"):
        load(folder)
    tensors = load_file(first)
    name = min(tensors)
    save_file(load_file(FIXTURES / "tiny_llama_untied/model.safetensors"), second)
    with pytest.raises(ValueError, match=rf"tensor {name} is in two files: {first} and {second}"):
        load(folder)
    second.write_bytes(whole)
    save_file({key: value for key, value in tensors.items() if key != name}, first)
    with pytest.raises(ValueError, match=rf"names tensors that are not in their files: {name} \({first.name}\)"):
        load(folder)


@pytest.mark.parametrize(
    "edit, sentence",
    [
        (lambda t: t.pop(QUERY), rf"1 of 30 tensors are missing from the weights: {QUERY}"),
        (lambda t: t.pop("lm_head.weight"), r"missing from the weights: lm_head\.weight"),
        (
            lambda t: t.update({"model.layers.3.mlp.up_proj.weight": t[QUERY]}),
            r"1 tensors .* unknown .*: model\.layers\.3\.mlp\.up_",
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
