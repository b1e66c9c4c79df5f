"""The supported Hugging Face architectures: their classes, config.json in both directions, and their tensors.

Each architecture is described once, for import and export. A new one is an entry here, written in the language of files.py.
"""

from collections.abc import Callable
from typing import Any

from tba_jax.models import decoder
from tba_jax.models.config import DecoderConfig
from tba_jax.models.hugging_face import encoders, gpt_family, llama_family
from tba_jax.models.hugging_face.files import Architecture

_DECODER: dict[str, Any] = {"config": DecoderConfig, "define": decoder.define}


def _gated(language_model: str, reward_model: str, read: Callable[..., Any], write: Callable[..., Any]) -> Architecture:
    """An architecture with the tensors of Llama. Args: class of a language model, class of a reward model; see Architecture."""
    return Architecture(
        heads={language_model: "language_model", reward_model: "score"},
        read=read,
        write=write,
        tensors=llama_family.tensors,
        prefix="model.",
        lm_head="lm_head.weight",
        ignored=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
        **_DECODER,
    )


# model_type of config.json -> its description.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": _gated("LlamaForCausalLM", "LlamaForSequenceClassification", llama_family.read_llama, llama_family.write_llama),
    "mistral": _gated(
        "MistralForCausalLM", "MistralForSequenceClassification", llama_family.read_mistral, llama_family.write_mistral
    ),
    "qwen2": _gated("Qwen2ForCausalLM", "Qwen2ForSequenceClassification", llama_family.read_qwen2, llama_family.write_qwen2),
    "qwen3": _gated("Qwen3ForCausalLM", "Qwen3ForSequenceClassification", llama_family.read_qwen3, llama_family.write_qwen3),
    "gemma3_text": _gated(
        "Gemma3ForCausalLM", "Gemma3TextForSequenceClassification", llama_family.read_gemma3, llama_family.write_gemma3
    ),
    "gpt2": Architecture(
        heads={"GPT2LMHeadModel": "language_model", "GPT2ForSequenceClassification": "score"},
        read=gpt_family.read_gpt2,
        write=gpt_family.write_gpt2,
        tensors=gpt_family.gpt2_tensors,
        prefix="transformer.",
        lm_head="lm_head.weight",
        ignored=r"h\.\d+\.attn\.(bias|masked_bias)",
        **_DECODER,
    ),
    "gpt_neox": Architecture(
        heads={"GPTNeoXForCausalLM": "language_model", "GPTNeoXForSequenceClassification": "score"},
        read=gpt_family.read_gpt_neox,
        write=gpt_family.write_gpt_neox,
        tensors=gpt_family.gpt_neox_tensors,
        prefix="gpt_neox.",
        lm_head="embed_out.weight",
        ignored=r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
        **_DECODER,
    ),
    **encoders.ENCODERS,
}

# model_type that is not supported -> what to load instead.
INSTEAD = {"gemma3": "it also reads images; load a text-only checkpoint instead (model_type='gemma3_text', Gemma3ForCausalLM)"}
