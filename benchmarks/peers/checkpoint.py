"""The policy of all systems: a small Llama in Hugging Face's format whose responses end with a probability that is known.

Weights are random, N(0, 0.02²), but for three things. Column 0 of the embedding has one value, A, in the row of every token that
a response may hold; no layer reads or writes that component of the residual stream; and the final norm's weight is w there. The
logit of token t is therefore w·s·E[t, 0] plus what the context says, with s = √D·A/√(A² + |rest|²). As A is much larger than the
rest of the stream, s is √D, and the difference between the logits of end-of-sequence and of other tokens is w·√D·(E[eos, 0] − A)
in every context. The root mean square that the norms divide by is that of A too. So norms are linear in the rest, and their
weights are large enough for every layer to matter, and small enough for the rest not to grow from layer to layer.
"""

import json
import math
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

WIDTH, LAYERS, HEADS, HEAD_SIZE, FFN = 384, 6, 6, 64, 1024
NORM_EPSILON, ROPE_THETA, POSITIONS = 1e-6, 10_000.0, 1024
PAD, EOS = 0, 1
STD = 0.02
# A, w, and how far below A the tokens lie that no response holds.
CONSTANT, FINAL_WEIGHT, NEVER = 100.0, 0.1, -60.0
# The layers' norms bring a component of this size to 1, and those of the stream, about STD, to less. A small part of the final
# logits is left to the context.
_UNIT = 0.3
_LAYER_NORM, _FINAL_NORM = CONSTANT / (math.sqrt(WIDTH) * _UNIT), 10.0


def write(folder: Path, *, vocab: int, ends: float, seed: int = 0) -> None:
    """Writes config.json and model.safetensors (float32).

    Args: ends: probability of end-of-sequence at each token, in [0, 1); 0: less than float32 can say.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights(vocab=vocab, ends=ends, seed=seed), str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config(vocab), indent=1))


def config(vocab: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": WIDTH,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": NORM_EPSILON,
        "rope_theta": ROPE_THETA,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "torch_dtype": "float32",
    }


def weights(*, vocab: int, ends: float, seed: int) -> dict[str, np.ndarray]:
    """Name -> float32 array."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(0.0, STD, shape).astype(np.float32)

    found = {"model.embed_tokens.weight": _embedding(normal(vocab, WIDTH), ends)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        for projection in "qkv":
            found[f"{name}.self_attn.{projection}_proj.weight"] = normal(HEADS * HEAD_SIZE, WIDTH)
        found[f"{name}.self_attn.o_proj.weight"] = _keeps_component_0(normal(WIDTH, HEADS * HEAD_SIZE))
        for projection in ("gate", "up"):
            found[f"{name}.mlp.{projection}_proj.weight"] = normal(FFN, WIDTH)
        found[f"{name}.mlp.down_proj.weight"] = _keeps_component_0(normal(WIDTH, FFN))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{name}.{norm}.weight"] = _norm(component_0=0.0, others=_LAYER_NORM)
    found["model.norm.weight"] = _norm(component_0=FINAL_WEIGHT, others=_FINAL_NORM)
    return found


def _embedding(table: np.ndarray, ends: float) -> np.ndarray:
    """[V, D] with column 0 as above."""
    table[:, 0] = CONSTANT
    table[PAD, 0] = CONSTANT + NEVER
    if not ends:
        table[EOS, 0] = CONSTANT + NEVER
        return table
    # p = e^d / (e^d + V − 2), where d is the difference of logits.
    difference = math.log(ends / (1 - ends) * (len(table) - 2))
    table[EOS] = 0.0
    table[EOS, 0] = CONSTANT + difference / (FINAL_WEIGHT * math.sqrt(WIDTH))
    return table


def _keeps_component_0(matrix: np.ndarray) -> np.ndarray:
    matrix[0] = 0.0
    return matrix


def _norm(*, component_0: float, others: float) -> np.ndarray:
    norm = np.full(WIDTH, others, np.float32)
    norm[0] = component_0
    return norm
