"""Writes tests/fixtures: what torch's transformers computes, so that the default tests need no torch.

Run again only when a fixture's content is to change (needs `pip install torch==2.13.0`):

    python tests/make_fixtures.py [folder of the real models]

- fixtures/tiny_llama_{untied,tied}/: two random LlamaForCausalLM checkpoints with perturbed norms and golden.npz:
  tokens int32[3, 12], logits float32[3, 12, V], greedy int32[32] (the greedy continuation of tokens[0]). The untied one has
  grouped queries, a head_dim that is not D/N and the newer config keys; the tied one multi-query attention and the older keys.
- fixtures/real_models.npz, for each real model: tokens int32[4, 64], logprobs float32[4, 63] of tokens 1..63, prompt
  int32[8] and greedy int32[32].

Everything is computed in float64 and stored in float32.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

FIXTURES = Path(__file__).resolve().parent / "fixtures"
REAL_MODELS = ("TinyStories-656K", "stories260K-hf")

TINY_MODELS = {
    "tiny_llama_untied": {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False, "rope_theta": 500.0},
    "tiny_llama_tied": {"num_key_value_heads": 1, "tie_word_embeddings": True, "rope_theta": 10_000.0},
}


def tiny_llama(seed: int, **settings: object) -> LlamaForCausalLM:
    """A random LlamaForCausalLM, float32, with norms away from 1 and weights large enough that attention is not uniform."""
    torch.manual_seed(seed)
    theta = settings.pop("rope_theta")
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        **settings,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def greedy(model: LlamaForCausalLM, prompt: np.ndarray, count: int) -> np.ndarray:
    """The `count` greedy tokens after `prompt` int[P], without a cache."""
    tokens = torch.tensor(prompt[None])
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    return tokens[0, len(prompt) :].numpy().astype(np.int32)


def write_tiny(name: str, seed: int) -> None:
    folder = FIXTURES / name
    model = tiny_llama(seed, **TINY_MODELS[name])
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    (folder / "generation_config.json").unlink()
    if name == "tiny_llama_tied":
        config = json.loads((folder / "config.json").read_text())
        config |= {
            "rope_theta": config.pop("rope_parameters")["rope_theta"],
            "rope_scaling": None,
            "torch_dtype": config.pop("dtype"),
        }
        config.pop("head_dim", None)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    model = model.double()
    tokens = np.random.default_rng(seed).integers(0, 48, (3, 12))
    logits = model(torch.tensor(tokens)).logits.numpy()
    np.savez_compressed(
        folder / "golden.npz",
        tokens=tokens.astype(np.int32),
        logits=logits.astype(np.float32),
        greedy=greedy(model, tokens[0], 32),
    )


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
        golden[f"{name}/greedy"] = greedy(model, tokens[0, :8], 32)
    np.savez_compressed(FIXTURES / "real_models.npz", **golden)


if __name__ == "__main__":
    with torch.no_grad():
        for seed, name in enumerate(TINY_MODELS):
            write_tiny(name, seed)
        if len(sys.argv) > 1:
            write_real(Path(sys.argv[1]))
