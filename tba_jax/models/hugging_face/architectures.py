"""The supported Hugging Face architectures: their classes, config.json in both directions, and their tensors.

Each architecture is described once, for import and export. A new one is an entry here, written in the language of files.py.
"""

from typing import Any

from tba_jax.models import decoder
from tba_jax.models.config import DecoderConfig
from tba_jax.models.hugging_face import encoders, gemma, gpt_family, llama_family
from tba_jax.models.hugging_face.files import Architecture

_DECODER: dict[str, Any] = {"config": DecoderConfig, "define": decoder.define}
_GATED: dict[str, Any] = _DECODER | {
    "tensors": llama_family.tensors,
    "prefix": "model.",
    "lm_head": "lm_head.weight",
    "ignored": r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
}

# model_type of config.json -> its description.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        heads={"LlamaForCausalLM": "language_model", "LlamaForSequenceClassification": "score"},
        read=llama_family.read_llama,
        write=llama_family.write_llama,
        **_GATED,
    ),
    "mistral": Architecture(
        heads={"MistralForCausalLM": "language_model", "MistralForSequenceClassification": "score"},
        read=llama_family.read_mistral,
        write=llama_family.write_mistral,
        **_GATED,
    ),
    "qwen2": Architecture(
        heads={"Qwen2ForCausalLM": "language_model", "Qwen2ForSequenceClassification": "score"},
        read=llama_family.read_qwen2,
        write=llama_family.write_qwen2,
        **_GATED,
    ),
    "qwen3": Architecture(
        heads={"Qwen3ForCausalLM": "language_model", "Qwen3ForSequenceClassification": "score"},
        read=llama_family.read_qwen3,
        write=llama_family.write_qwen3,
        **_GATED,
    ),
    "gemma3_text": Architecture(
        heads={"Gemma3ForCausalLM": "language_model", "Gemma3TextForSequenceClassification": "score"},
        read=gemma.read_gemma3,
        write=gemma.write_gemma3,
        **_GATED,
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
