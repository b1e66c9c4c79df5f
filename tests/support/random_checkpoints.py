"""Checkpoints with random weights, made on the spot: the architecture of a preset, tiny, with a real tokenizer."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import pre_tokenizers

from tba_jax.models.config import PRESETS
from tba_jax.models.hugging_face import export
from tba_jax.models.parameters import Params
from tba_jax.text.tokenizers import HuggingFaceTokenizer
from tests.support import applied, tiny_checkpoints

END = "<|endoftext|>"
P_END = 1 / 12


def byte_tokenizer(folder: Path) -> Path:
    """A tokenizer of one id a byte, and END. Returns the folder."""
    tokenizer = tiny_checkpoints.byte_level([END, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    tokenizer.add_special_tokens([END])
    return tiny_checkpoints.save_tokenizer(folder, tokenizer, eos_token=END)


def write(folder: Path, preset: str, tokenizer: Path, *, labels=0, seed=0, p_end=0.0, temperature=1.0, dtype="float32") -> Path:
    """A Hugging Face folder: two layers of the preset's kind, and the tokenizer's files. Returns the folder.

    labels: of a sequence classifier, one for a reward model; 0: a language model.
    p_end: about how likely a language model ends its response at any token, at that temperature; 0: as likely as any other.
    dtype: of the weights in the folder.
    """
    own = folder.parent / f"{folder.name}-tokenizer"
    shutil.copytree(tokenizer, own, ignore=shutil.ignore_patterns("model_config.json"))
    if not (own / "tokenizer_config.json").exists():
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
        own.joinpath("tokenizer_config.json").write_text(json.dumps(settings))
    read = HuggingFaceTokenizer(own)
    shape = PRESETS[preset]
    groups = 2 if shape.kv_heads < shape.heads else 1
    sizes = dict(layers=2, width=32, heads=2, kv_heads=2 // groups, head_size=16, ffn=48, max_positions=2048)
    sizes |= dict(window=min(shape.window, 8), rotary_size=4 if shape.rotary_size else 0, vocab=read.vocab_size)
    head = dict(head="score", labels=labels) if labels else {}
    model = dataclasses.replace(shape, layer_pattern=shape.layer_pattern[-2:], **sizes, **head)
    params = jax.jit(functools.partial(applied.init, config=model))(jax.random.key(seed))
    if p_end:
        end_often(params, read.eos_id, temperature * np.log(read.vocab_size * p_end / (1 - p_end)))
    ids = {"eos_token_id": read.eos_id, "pad_token_id": read.pad_id}
    export.save(folder, model, params, dtype=dtype, token_ids=ids, more=[functools.partial(export.copy_tokenizer, own)])
    return folder


def end_often(params: Params, eos_id: int, logit: float) -> None:
    """Changes params: the logits of random weights are about the same, the end's is now higher by about that much."""
    width = params["embedding"]["weight"].shape[1]
    # What all embeddings share is what the last norm leaves of every position; of mean zero, as LayerNorm subtracts means.
    shared = jnp.tile(jnp.array([1.0, -1.0]), width // 2)
    params["embedding"]["weight"] += 0.1 * shared
    name, ids = ("lm_head", (slice(None), eos_id)) if "lm_head" in params else ("embedding", (eos_id,))
    params[name]["weight"] = params[name]["weight"].at[ids].add(shared * logit / width)
