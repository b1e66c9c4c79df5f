"""The tiny checkpoints of tests/fixtures (make_fixtures.py): loading them, editing copies of them, and running them."""

import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tba_jax import sharding
from tba_jax.models import kv_cache
from tba_jax.models.config import DecoderConfig
from tba_jax.models.hugging_face import load as load_lib
from tests.support import applied

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
LANGUAGE_MODELS = (
    *("llama_untied", "llama_tied", "llama_biased", "mistral", "mistral_window", "qwen2", "qwen2_window", "qwen3"),
    *("gpt2", "gpt_neox", "gemma3", "qwen3_moe", "gpt_oss", "olmo2"),
)
ENCODERS = ("bert_embedding", "roberta_embedding", "bert_classifier", "roberta_classifier")
REAL_MODELS = ("TinyStories-656K", "stories260K-hf")


def path_of(name: str) -> Path:
    return FIXTURES / f"tiny_{name}"


def copy_of(name: str, folder: Path) -> Path:
    """A copy within the folder, to be edited."""
    return Path(shutil.copytree(path_of(name), folder / "model"))


def make_mesh(sizes: tuple[int, int, int]) -> jax.sharding.Mesh:
    return sharding.make_mesh(sizes, setting="trainer.mesh", devices=jax.devices()[: int(np.prod(sizes))])


def load(folder: Path, sizes: tuple[int, int, int] = (1, 1, 1), fresh: jax.Array | None = None, **asked: Any) -> tuple[Any, Any]:
    """config and params. asked: further arguments of read_config."""
    config = load_lib.read_config(folder, compute_dtype="float32", **asked)
    shardings = applied.shardings(config, make_mesh(sizes))
    return config, load_lib.load_params(folder, config, shardings, fresh=fresh)


def edit_config(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def edit_weights(folder: Path, edit: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def fuse(tensors: dict[str, np.ndarray]) -> None:
    """Puts the experts of each layer of qwen3_moe into two tensors, as transformers 5 does with save_original_format=False."""
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([tensors.pop(f"{name}.{i}.{kind}_proj.weight") for i in range(6)]) for kind in ("gate", "up", "down")
        )
        tensors |= {f"{name}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{name}.down_proj": down}


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


def assert_same_params(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@functools.partial(jax.jit, static_argnames="config")
def logits(params: Any, tokens: jax.Array, mask: jax.Array, config: DecoderConfig) -> jax.Array:
    """float32[B, T, V] of rows that are padded on either side; those of padding mean nothing."""
    begin, T = jnp.argmax(mask, axis=1)[:, None], tokens.shape[1]
    hidden = applied.hidden_states(params, _shifted(tokens, begin), config=config, remat="none")
    found = applied.logits_of(params, hidden.reshape(-1, config.width), config=config).reshape(*tokens.shape, -1)
    return jnp.take_along_axis(found, ((jnp.arange(T) - begin) % T)[..., None], axis=1)


@functools.partial(jax.jit, static_argnames="config")
def scores(params: Any, tokens: jax.Array, mask: jax.Array, config: DecoderConfig) -> jax.Array:
    """float32[B, labels] of rows that are padded on either side."""
    tokens = _shifted(tokens, jnp.argmax(mask, axis=1)[:, None])
    return applied.sequence_scores(params, tokens, jnp.sum(mask, axis=1), config=config, remat="none")


def _shifted(tokens: jax.Array, begin: jax.Array) -> jax.Array:
    """Rows that begin with their first real token, which stood at `begin`, int32[B, 1]."""
    T = tokens.shape[1]
    return jnp.take_along_axis(tokens, (jnp.arange(T) + begin) % T, axis=1)


_unstack = jax.jit(kv_cache.unstack, static_argnames="config")
_prefill = jax.jit(applied.prefill, static_argnames="config")
_step = jax.jit(applied.decode_step, static_argnames="config")


def greedy(params: Any, config: DecoderConfig, prompt: np.ndarray, count: int) -> list[int]:
    """The greedy continuation by prefill and cached steps."""
    P = len(prompt)
    params = _unstack(params, config=config)
    logits, shared = _prefill(params, prompt[None], np.array([P], np.int32), config=config)
    own = jax.tree.map(lambda x: np.zeros((1, x.shape[1], count, x.shape[3]), x.dtype), shared)
    tokens = []
    for t in range(count):
        tokens.append(int(np.argmax(logits)))
        masks = kv_cache.Masks(prompt=np.ones((1, 1, P), bool), own=np.arange(count)[None] <= t)
        prompt_age, own_age = P + t - np.arange(P), t - np.arange(count)
        local = kv_cache.within_window(masks, config.window, prompt_age=prompt_age, own_age=own_age) if config.window else None
        token, position = np.array([tokens[-1]], np.int32), np.array([P + t], np.int32)
        logits, own = _step(params, token, position, np.int32(t), shared, own, masks, local, config=config)
    return tokens


def token_logprobs(logits: Any, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """float64[pairs]: log-probs of real tokens that follow real tokens, the softmax in NumPy."""
    logits = np.asarray(logits, np.float64)[:, :-1]
    normalizer = np.log(np.exp(logits).sum(-1))
    logprobs = np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0] - normalizer
    return logprobs[mask[:, 1:] & mask[:, :-1]]


def save_tokenizer(folder: Path, backend: Tokenizer, **settings: Any) -> Path:
    """Writes the files of a tokenizer of the `tokenizers` package. settings: of tokenizer_config.json. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def byte_level(pieces: Sequence[str], merges: Sequence[tuple[str, str]] = ()) -> Tokenizer:
    """A byte-level BPE whose tokens are these pieces, in the order of their ids."""
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=list(merges)))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return backend


def write_byte_bpe(folder: Path, *, eos: str | None = "<|end|>") -> Path:
    """A tokenizer without merges: one id a byte, then two added tokens (<|end|> special, <tool> not)."""
    backend = byte_level(sorted(pre_tokenizers.ByteLevel.alphabet()))
    backend.add_special_tokens(["<|end|>"])
    backend.add_tokens(["<tool>"])
    return save_tokenizer(folder, backend, model_max_length=4, **({"eos_token": eos} if eos else {}))


def write_letters(folder: Path, letters: str) -> Path:
    """A tokenizer of one id a letter that drops all other characters, as BPE does where it has no token for them."""
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(["<|end|>", *letters])}, merges=[]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<|end|>"])
    return save_tokenizer(folder, backend, eos_token="<|end|>")


_loaded = functools.cache(load)


def last_logits(folder, prompts: list[list[int]]) -> np.ndarray:
    """float32[n, V]: the logits after each prompt, each in a row of its own."""
    config, params = _loaded(folder)
    length = np.array([len(prompt) for prompt in prompts])
    padded = np.array([prompt + [0] * (64 - len(prompt)) for prompt in prompts], np.int32)
    found = logits(params, padded, np.arange(64) < length[:, None], config)
    return np.array(found)[np.arange(len(prompts)), length - 1]
