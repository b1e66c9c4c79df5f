"""Writes tests/fixtures: what torch's transformers computes, so that the default tests need no torch.

Run again only when a fixture's content is to change (needs `pip install torch==2.13.0`):

    python tests/make_fixtures.py [folder of the real models]

- fixtures/tiny_<name>/ for each name of FIXTURES: a random model with perturbed norms and biases, and golden.npz:
  tokens int32[3, 12] and mask bool[3, 12] (row 0 whole, row 1 padded on the left, row 2 on the right); of a language model
  logits float32[3, 12, V] (0 at padding) and greedy int32[32] (the greedy continuation of tokens[0]); of a model with a score
  head scores float32[3, labels]. tiny_llama_tied has the keys of transformers 4 in its config.json, the others those of 5.
- fixtures/real_models.npz, for each real model: tokens int32[4, 64], logprobs float32[4, 63] of tokens 1..63, prompt
  int32[8] and greedy int32[32].

Everything is computed in float64 and stored in float32.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel

FOLDER = Path(__file__).resolve().parent / "fixtures"
REAL_MODELS = ("TinyStories-656K", "stories260K-hf")

_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GPT2_SIZES = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _rope(theta: float, **more: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


# Name -> (class, settings).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_untied": ("LlamaForCausalLM", {"num_key_value_heads": 2, "head_dim": 8, **_rope(500.0)}),
    "llama_tied": ("LlamaForCausalLM", {"num_key_value_heads": 1, "tie_word_embeddings": True, **_rope(10_000.0)}),
    "llama_biased": (
        "LlamaForCausalLM",
        {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "head_dim": 8, "rope_parameters": _LLAMA3},
    ),
    "llama_reward": ("LlamaForSequenceClassification", {"num_key_value_heads": 2, "num_labels": 1, **_rope(1000.0)}),
    "mistral": ("MistralForCausalLM", {"num_key_value_heads": 2, "sliding_window": None, **_rope(1000.0)}),
    "qwen2": ("Qwen2ForCausalLM", {"num_key_value_heads": 2, "tie_word_embeddings": True, **_rope(1000.0)}),
    "qwen2_untied": ("Qwen2ForCausalLM", {"num_key_value_heads": 4, **_rope(1000.0)}),
    "qwen3": ("Qwen3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8, **_rope(1000.0)}),
    "qwen3_biased": ("Qwen3ForCausalLM", {"num_key_value_heads": 1, "head_dim": 8, "attention_bias": True, **_rope(100.0)}),
    "qwen3_classifier": ("Qwen3ForSequenceClassification", {"num_key_value_heads": 2, "head_dim": 8, "num_labels": 3}),
    "gpt2": ("GPT2LMHeadModel", {"n_inner": 24}),
    "gpt2_relu": ("GPT2LMHeadModel", {"activation_function": "relu", "tie_word_embeddings": False}),
    "gpt2_classifier": ("GPT2ForSequenceClassification", {"num_labels": 2}),
    "gpt_neox": ("GPTNeoXForCausalLM", {"num_attention_heads": 2, **_rope(1000.0, partial_rotary_factor=0.25)}),
    "gpt_neox_sequential": (
        "GPTNeoXForCausalLM",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "gelu_new",
            "tie_word_embeddings": True,
            **_rope(100.0, partial_rotary_factor=1.0),
        },
    ),
    "gpt_neox_reward": (
        "GPTNeoXForSequenceClassification",
        {"num_attention_heads": 2, "num_labels": 1, **_rope(1000.0, partial_rotary_factor=0.5)},
    ),
}
FIXTURES = (
    "llama_untied",
    "llama_tied",
    "llama_biased",
    "mistral",
    "qwen2",
    "qwen3",
    "gpt2",
    "gpt_neox",
    "gpt_neox_reward",
)


def tiny_model(name: str, seed: int) -> PreTrainedModel:
    """A random model of MODELS, float32, with norms away from 1, biases away from 0, and attention that is not uniform.

    Tensors that are initialised small stay so in transformers (GPT-2's c_proj), so all of them are drawn here.
    """
    class_name, settings = MODELS[name]
    model_class = getattr(transformers, class_name)
    sizes = _GPT2_SIZES if class_name.startswith("GPT2") else _SIZES
    ids = {"pad_token_id": 0 if "num_labels" in settings else None, "bos_token_id": None, "eos_token_id": None}
    model = model_class(model_class.config_class(vocab_size=48, **{**sizes, **ids, **settings})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            mean = 1.0 if parameter.ndim == 1 and parameter_name.endswith("weight") else 0.0
            parameter.copy_(mean + (0.3 if parameter.ndim == 1 else 0.25) * noise)
    return model


def padded_rows(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """tokens int32[3, 12] and mask bool[3, 12], as in golden.npz. Real tokens are not 0."""
    tokens = np.random.default_rng(seed).integers(1, 48, (3, 12)).astype(np.int32)
    mask = np.ones((3, 12), bool)
    mask[1, :4] = mask[2, 7:] = False
    return np.where(mask, tokens, 0).astype(np.int32), mask


def outputs(model: PreTrainedModel, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """logits [B, T, V], 0 at padding; or scores [B, labels]. Positions count from the first real token."""
    positions = np.maximum(np.cumsum(mask, 1) - 1, 0)
    found = model(
        torch.tensor(tokens, dtype=torch.long),
        attention_mask=torch.tensor(mask, dtype=torch.long),
        position_ids=torch.tensor(positions, dtype=torch.long),
    ).logits.numpy()
    return found if found.ndim == 2 else np.where(mask[..., None], found, 0.0)


def greedy(model: PreTrainedModel, prompt: np.ndarray, count: int) -> tuple[np.ndarray, float]:
    """The `count` greedy tokens after `prompt` int[P], without a cache, and the smallest lead that one had over the second."""
    tokens = torch.tensor(prompt[None], dtype=torch.long)
    lead = np.inf
    for _ in range(count):
        best = model(tokens).logits[0, -1].topk(2)
        lead = min(lead, float(best.values[0] - best.values[1]))
        tokens = torch.cat([tokens, best.indices[None, :1]], dim=1)
    return tokens[0, len(prompt) :].numpy().astype(np.int32), lead


def decisive_model(name: str, seed: int) -> tuple[PreTrainedModel, np.ndarray, np.ndarray]:
    """A model, rows and mask, of the first seed from `seed` on whose greedy continuation of row 0 has no near-ties."""
    while True:
        model, (tokens, mask) = tiny_model(name, seed), padded_rows(seed)
        if "num_labels" in MODELS[name][1] or greedy(model, tokens[0], 32)[1] > 1e-2:
            return model, tokens, mask
        seed += 100


def write_tiny(name: str, seed: int) -> None:
    folder = FOLDER / f"tiny_{name}"
    model, tokens, mask = decisive_model(name, seed)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if name == "llama_tied":
        config = json.loads((folder / "config.json").read_text())
        config |= {
            "rope_theta": config.pop("rope_parameters")["rope_theta"],
            "rope_scaling": None,
            "torch_dtype": config.pop("dtype"),
        }
        config.pop("head_dim", None)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    model = model.double()
    golden = {"tokens": tokens, "mask": mask}
    found = outputs(model, tokens, mask).astype(np.float32)
    if found.ndim == 2:
        golden["scores"] = found
    else:
        golden |= {"logits": found, "greedy": greedy(model, tokens[0], 32)[0]}
    np.savez_compressed(folder / "golden.npz", **golden)


def write_real(models: Path) -> None:
    stories = json.loads((models / "../tinystories/tinystories_1000.json").read_text())
    golden = {}
    for name in REAL_MODELS:
        model = LlamaForCausalLM.from_pretrained(models / name).double().eval()
        tokenizer = AutoTokenizer.from_pretrained(models / name)
        tokens = np.array([tokenizer.encode(story)[:64] for story in stories[:4]])
        logprobs = torch.log_softmax(model(torch.tensor(tokens)).logits, -1)[:, :-1]
        logprobs = logprobs.gather(-1, torch.tensor(tokens[:, 1:, None]))[..., 0].numpy()
        golden[f"{name}/tokens"] = tokens.astype(np.int32)
        golden[f"{name}/logprobs"] = logprobs.astype(np.float32)
        golden[f"{name}/prompt"] = tokens[0, :8].astype(np.int32)
        golden[f"{name}/greedy"] = greedy(model, tokens[0, :8], 32)[0]
    np.savez_compressed(FOLDER / "real_models.npz", **golden)


if __name__ == "__main__":
    with torch.no_grad():
        for index, fixture in enumerate(FIXTURES):
            write_tiny(fixture, index)
        if len(sys.argv) > 1:
            write_real(Path(sys.argv[1]))
