"""The supported Hugging Face architectures, each described once for import and export, in the language of files.py."""

import functools
from typing import Any

from tba_jax.models import decoder
from tba_jax.models.config import CLAMPED, CLAMPED_GAIN, CLAMPED_LIMIT, DecoderConfig, RopeScaling
from tba_jax.models.hugging_face import encoders, files
from tba_jax.models.hugging_face.files import Architecture, Key, Settings, Stored, Tensors

_WINDOW = 4096  # transformers' value of an absent sliding_window, whatever the architecture
_LETTERS = {"full_attention": "g", "sliding_attention": "l"}
# Kind of scaling -> the keys of RopeScaling.low_frequency and high_frequency.
_FREQUENCIES = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
_GEMMA_ACTIVATION = "gelu_pytorch_tanh"


def _read_rotary(settings: Settings, fields: dict[str, Any], *, theta_key: str = "rope_theta") -> dict[str, Any]:
    """rope_theta and rope_scaling: transformers 4 has both and a rope_scaling, transformers 5 has rope_parameters."""
    key = "rope_scaling" if settings.table("rope_scaling") else "rope_parameters"
    rope = Settings(settings.path, settings.table(key))
    theta = rope.number("rope_theta", settings.number(theta_key, 10_000.0))
    return {"rope_theta": theta, "rope_scaling": _read_scaling(settings, key, rope)}


def _read_scaling(settings: Settings, key: str, rope: Settings) -> RopeScaling | None:
    """Args: rope: the rotary settings, which are the value of `key` or a part of it."""
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    further = ("truncate", "attention_factor", "mscale", "mscale_all_dim")
    as_gpt_oss = kind == "yarn" and not any({"truncate": True, **rope.values}.get(name) for name in further)
    if kind not in ("default", "linear", "llama3") and not as_gpt_oss:
        yarn = f"rope_type='yarn' with truncate=False and without {', '.join(further[1:])}"
        settings.refuse(key, f"rope_type='default', rope_type='linear', rope_type='llama3' and {yarn}")
    if kind == "default":
        return None

    def required(name: str) -> float:
        if name not in rope.values:
            raise ValueError(f"{rope.path}: {key}={dict(rope.values)!r} does not give {name}")
        return rope.number(name, 0.0)

    if kind == "linear":
        return RopeScaling(factor=required("factor"))
    low, high = _FREQUENCIES[kind]
    scaling = RopeScaling(
        factor=required("factor"),
        low_frequency=required(low) if kind == "llama3" else rope.number(low, 1.0),
        high_frequency=required(high) if kind == "llama3" else rope.number(high, 32.0),
        original_positions=rope.size("original_max_position_embeddings", settings.size("max_position_embeddings", 2048)),
        yarn=kind == "yarn",
    )
    if scaling.low_frequency >= scaling.high_frequency:
        raise ValueError(f"{settings.path}: {key}={rope.values!r}: {low} must be below {high}")
    return scaling


def _write_rotary(config: DecoderConfig) -> dict[str, Any]:
    """The keys of transformers 4 and of transformers 5."""
    of = config.rope_scaling
    values: dict[str, Any] = {}
    if of is not None:
        kind = "yarn" if of.yarn else "llama3" if of.original_positions else "linear"
        values = {"rope_type": kind, "factor": of.factor} | ({"truncate": False} if of.yarn else {})
        if of.original_positions:
            values |= dict(zip(_FREQUENCIES[kind], (of.low_frequency, of.high_frequency), strict=True))
            values |= {"original_max_position_embeddings": of.original_positions}
    parameters = {"rope_type": "default", **values, "rope_theta": config.rope_theta}
    return {"rope_theta": config.rope_theta, "rope_scaling": values or None, "rope_parameters": parameters}


def _read_windows(settings: Settings, *, absent: str, window: int | None) -> dict[str, Any]:
    """layer_pattern and window. absent: the letters without layer_types; window: of local layers; None: the file gives none."""
    types = settings.names("layer_types")
    if other := sorted(set(types) - set(_LETTERS)):
        raise ValueError(f"{settings.path}: layer_types holds {other}; the model code computes {', '.join(_LETTERS)} only")
    if types and len(types) != len(absent):
        raise ValueError(f"{settings.path}: layer_types has {len(types)} entries for num_hidden_layers={len(absent)}")
    letters = "".join(_LETTERS[name] for name in types) or absent
    if "l" not in letters:
        return {}
    if window is None:
        raise ValueError(f"{settings.path}: layer_types holds 'sliding_attention', but the file gives no sliding_window in use")
    # The shortest pattern that repeats to the letters, so that equal models have equal configs.
    period = next(n for n in range(1, len(letters) + 1) if (letters[:n] * len(letters))[: len(letters)] == letters)
    return {"layer_pattern": letters[:period], "window": window}


def _window(settings: Settings, absent: int = _WINDOW) -> int | None:
    """sliding_window; None where the file says null."""
    return None if settings.values.get("sliding_window", absent) is None else settings.size("sliding_window", absent)


def _write_windows(config: DecoderConfig) -> dict[str, Any]:
    full, sliding = _LETTERS
    types = [sliding if local else full for local in config.local_layers]
    return {"layer_types": types, "sliding_window": config.window or None}


def _read_gated(settings: Settings, fields: dict[str, Any]) -> dict[str, Any]:
    rotated = settings.table("rope_scaling" if settings.table("rope_scaling") else "rope_parameters").get("partial_rotary_factor")
    if rotated not in (None, 1.0):
        raise ValueError(f"{settings.path}: partial_rotary_factor={rotated!r} is not supported; whole heads are rotated (1.0)")
    return _read_rotary(settings, fields)


def _read_mistral(settings: Settings, fields: dict[str, Any]) -> dict[str, Any]:
    window = _window(settings)
    absent = ("l" if window else "g") * fields["layers"]
    return _read_gated(settings, fields) | _read_windows(settings, absent=absent, window=window)


def _read_qwen(settings: Settings, fields: dict[str, Any]) -> dict[str, Any]:
    """With windows, the layers from max_window_layers on are local."""
    layers, window = fields["layers"], None
    if settings.flag("use_sliding_window", False):
        window = _window(settings)
    whole = layers
    if window is not None:
        whole = 0 if settings.values.get("max_window_layers") == 0 else min(layers, settings.size("max_window_layers", 28))
    absent = "g" * whole + "l" * (layers - whole)
    return _read_gated(settings, fields) | _read_windows(settings, absent=absent, window=window)


def _write_qwen(config: DecoderConfig) -> dict[str, Any]:
    values = _write_rotary(config) | {"use_sliding_window": config.window > 0}
    if not config.window:
        return values
    # max_window_layers is for versions of transformers that do not know layer_types.
    return values | {"max_window_layers": config.local_layers.index(True)} | _write_windows(config)


def _read_gpt_oss(settings: Settings, fields: dict[str, Any]) -> dict[str, Any]:
    """transformers scales rotary positions where the file does not say how; here it has to say so."""
    if not settings.table("rope_scaling") and not settings.table("rope_parameters"):
        settings.refuse("rope_parameters", "rotary settings that the file has, as rope_parameters or rope_scaling,")
    absent, others = "lg" * fields["layers"], {"rope_theta": 150_000.0, "max_position_embeddings": fields["max_positions"]}
    settings = Settings(settings.path, {**others, **settings.values})
    windows = _read_windows(settings, absent=absent[: fields["layers"]], window=_window(settings, 128))
    return _read_gated(settings, fields) | windows


def _read_gemma3(settings: Settings, fields: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 has rope_parameters for each type of layer; before, rope_theta, rope_scaling and rope_local_base_freq."""
    kinds = Settings(settings.path, settings.table("rope_parameters"))
    if set(kinds.values) - set(_LETTERS):
        settings.refuse("rope_parameters", "rotary settings of full_attention and of sliding_attention")
    whole = Settings(settings.path, kinds.table("full_attention") | settings.table("rope_scaling"))
    local = Settings(settings.path, kinds.table("sliding_attention"))
    if _read_scaling(settings, "rope_parameters", local) is not None:
        settings.refuse("rope_parameters", "rope_type='default' of sliding_attention")
    scalar, every = settings.size("query_pre_attn_scalar", 256), settings.size("sliding_window_pattern", 6)
    pattern = "".join("l" if (layer + 1) % every else "g" for layer in range(fields["layers"]))
    return {
        "rope_theta": whole.number("rope_theta", settings.number("rope_theta", 1e6)),
        "rope_scaling": _read_scaling(settings, "rope_scaling", whole),
        "local_rope_theta": local.number("rope_theta", settings.number("rope_local_base_freq", 1e4)),
        "query_scalar": 0 if scalar == fields["head_size"] else scalar,
        **_read_windows(settings, absent=pattern, window=_window(settings)),
    }


def _write_gemma3(config: DecoderConfig) -> dict[str, Any]:
    rope, local = _write_rotary(config), {"rope_type": "default", "rope_theta": config.local_rope_theta}
    return {
        **rope,
        **_write_windows(config),
        "rope_local_base_freq": config.local_rope_theta,
        "rope_parameters": {"full_attention": rope["rope_parameters"], "sliding_attention": local},
        "hidden_activation": _GEMMA_ACTIVATION,
        "query_pre_attn_scalar": config.query_scalar or config.head_size,
    }


def _gated_tensors(config: DecoderConfig) -> Tensors:
    c = config
    layer = "model.layers.{layer}"
    tensors: Tensors = {"model.embed_tokens.weight": (Stored("embedding.weight", "V D", "V D"),)}
    if c.norm_place != "after":
        tensors |= files.norm(f"{layer}.input_layernorm", "layers.attention_norm")
    tensors |= files.linear(f"{layer}.self_attn.q_proj", "layers.attention.query", ("(N H) D", "D N H", "(N H)"), c.qkv_bias)
    tensors |= files.linear(f"{layer}.self_attn.k_proj", "layers.attention.key", ("(G H) D", "D G H", "(G H)"), c.qkv_bias)
    tensors |= files.linear(f"{layer}.self_attn.v_proj", "layers.attention.value", ("(G H) D", "D G H", "(G H)"), c.qkv_bias)
    tensors |= files.linear(f"{layer}.self_attn.o_proj", "layers.attention.out", ("D (N H)", "N H D", "D"), c.out_bias)
    if c.qk_norm:
        query, key = ("(N H)", "(G H)") if c.qk_norm == "token" else ("H", "H")
        tensors |= files.norm(f"{layer}.self_attn.q_norm", "layers.attention.query_norm", query)
        tensors |= files.norm(f"{layer}.self_attn.k_norm", "layers.attention.key_norm", key)
    if c.norm_place == "before":
        tensors |= files.norm(f"{layer}.post_attention_layernorm", "layers.feed_forward_norm")
    else:
        tensors |= files.norm(f"{layer}.post_attention_layernorm", "layers.attention_post_norm")
        tensors |= files.norm(f"{layer}.post_feedforward_layernorm", "layers.feed_forward_post_norm")
    if c.norm_place == "both":
        tensors |= files.norm(f"{layer}.pre_feedforward_layernorm", "layers.feed_forward_norm")
    if c.experts:
        tensors[f"{layer}.mlp.gate.weight"] = (Stored("layers.feed_forward.router.weight", "e D", "D e"),)
        expert = f"{layer}.mlp.experts.{{expert}}"
        tensors[f"{expert}.gate_proj.weight"] = (Stored("layers.feed_forward.gate.weight", "f D", "D f"),)
        tensors[f"{expert}.up_proj.weight"] = (Stored("layers.feed_forward.up.weight", "f D", "D f"),)
        tensors[f"{expert}.down_proj.weight"] = (Stored("layers.feed_forward.down.weight", "D f", "f D"),)
    else:
        tensors |= files.linear(f"{layer}.mlp.gate_proj", "layers.feed_forward.gate", ("F D", "D F", "F"), c.ffn_bias)
        tensors |= files.linear(f"{layer}.mlp.up_proj", "layers.feed_forward.up", ("F D", "D F", "F"), c.ffn_bias)
        tensors |= files.linear(f"{layer}.mlp.down_proj", "layers.feed_forward.down", ("D F", "F D", "D"), c.ffn_bias)
    tensors |= files.norm("model.norm", "final_norm")
    return tensors | files.head(c.head, c.tied_embedding, "lm_head.weight")


def _fused_experts(config: DecoderConfig) -> Tensors:
    """The tensors of a checkpoint that holds the experts of a layer in two tensors, as transformers 5 does in memory."""
    path, experts = "layers.feed_forward", "model.layers.{layer}.mlp.experts"
    gate, up = (Stored(f"{path}.{name}.weight", "e (2 f) D", "e D f", part) for part, name in enumerate(("gate", "up")))
    tensors: Tensors = {name: parts for name, parts in _gated_tensors(config).items() if "{expert}" not in name}
    down = Stored(f"{path}.down.weight", "e D f", "e f D")
    return tensors | {f"{experts}.gate_up_proj": (gate, up), f"{experts}.down_proj": (down,)}


def _gpt_oss_tensors(config: DecoderConfig) -> Tensors:
    """The experts of a layer lie in one tensor, columns of gate and up by turns."""
    path, layer = "layers.feed_forward", "model.layers.{layer}"
    tensors: Tensors = {name: parts for name, parts in _gated_tensors(config).items() if ".mlp." not in name}
    tensors[f"{layer}.self_attn.sinks"] = (Stored("layers.attention.sinks", "N", "N"),)
    tensors |= files.linear(f"{layer}.mlp.router", f"{path}.router", ("e D", "D e", "e"), True)
    for of, end, axes in (("weight", "", "D "), ("bias", "_bias", "")):
        parts = (Stored(f"{path}.{name}.{of}", f"e {axes}(f 2)", f"e {axes}f", part) for part, name in enumerate(("gate", "up")))
        tensors[f"{layer}.mlp.experts.gate_up_proj{end}"] = tuple(parts)
    tensors[f"{layer}.mlp.experts.down_proj"] = (Stored(f"{path}.down.weight", "e f D", "e f D"),)
    tensors[f"{layer}.mlp.experts.down_proj_bias"] = (Stored(f"{path}.down.bias", "e D", "e D"),)
    return tensors


def _read_gpt_neox(settings: Settings, fields: dict[str, Any]) -> dict[str, Any]:
    head_size = settings.head_size("hidden_size", "num_attention_heads")
    settings.only("head_dim", None, head_size)
    rope = Settings(settings.path, settings.table("rope_scaling") or settings.table("rope_parameters"))
    of, key = (settings, "rotary_pct") if rope.values.get("partial_rotary_factor") is None else (rope, "partial_rotary_factor")
    factor = of.number(key, 0.25)
    if not 1 <= head_size * factor <= head_size:
        raise ValueError(f"{settings.path}: {key}={factor!r} of heads of {head_size} elements rotates {head_size * factor:g}")
    rotary_size = int(head_size * factor)
    sizes = {"head_size": head_size, "rotary_size": 0 if rotary_size == head_size else rotary_size}
    return sizes | _read_rotary(settings, fields, theta_key="rotary_emb_base")


def _write_gpt_neox(config: DecoderConfig) -> dict[str, Any]:
    factor = (config.rotary_size or config.head_size) / config.head_size
    rope = _write_rotary(config)
    rope["rope_parameters"] = rope["rope_parameters"] | {"partial_rotary_factor": factor}
    return rope | {"rotary_pct": factor, "rotary_emb_base": config.rope_theta}


def _gpt_neox_tensors(config: DecoderConfig) -> Tensors:
    c = config
    layer = "gpt_neox.layers.{layer}"
    tensors: Tensors = {"gpt_neox.embed_in.weight": (Stored("embedding.weight", "V D", "V D"),)}
    tensors |= files.norm(f"{layer}.input_layernorm", "layers.attention_norm", bias=True)
    tensors |= files.fused(f"{layer}.attention.query_key_value", ("(N 3 H) D", "D N H"), "(N 3 H)", c.qkv_bias)
    tensors |= files.linear(f"{layer}.attention.dense", "layers.attention.out", ("D (N H)", "N H D", "D"), c.out_bias)
    tensors |= files.norm(f"{layer}.post_attention_layernorm", "layers.feed_forward_norm", bias=True)
    tensors |= files.linear(f"{layer}.mlp.dense_h_to_4h", "layers.feed_forward.up", ("F D", "D F", "F"), True)
    tensors |= files.linear(f"{layer}.mlp.dense_4h_to_h", "layers.feed_forward.down", ("D F", "F D", "D"), True)
    tensors |= files.norm("gpt_neox.final_layer_norm", "final_norm", bias=True)
    return tensors | files.head(c.head, c.tied_embedding, "embed_out.weight")


def _gpt2_tensors(config: DecoderConfig) -> Tensors:
    layer = "transformer.h.{layer}"
    tensors: Tensors = {
        "transformer.wte.weight": (Stored("embedding.weight", "V D", "V D"),),
        "transformer.wpe.weight": (Stored("position_embedding.weight", "S D", "S D"),),
    }
    tensors |= files.norm(f"{layer}.ln_1", "layers.attention_norm", bias=True)
    tensors |= files.fused(f"{layer}.attn.c_attn", ("D (3 N H)", "D N H"), "(3 N H)", True)
    tensors |= files.linear(f"{layer}.attn.c_proj", "layers.attention.out", ("(N H) D", "N H D", "D"), True)
    tensors |= files.norm(f"{layer}.ln_2", "layers.feed_forward_norm", bias=True)
    tensors |= files.linear(f"{layer}.mlp.c_fc", "layers.feed_forward.up", ("D F", "D F", "F"), True)
    tensors |= files.linear(f"{layer}.mlp.c_proj", "layers.feed_forward.down", ("F D", "F D", "D"), True)
    tensors |= files.norm("transformer.ln_f", "final_norm", bias=True)
    return tensors | files.head(config.head, config.tied_embedding, "lm_head.weight")


def _gated_keys(*, kv_heads: int = 0, head_size: int = 0, max_positions: int, tied: bool = False) -> dict[str, Key]:
    """The keys that Llama, Mistral, Qwen and Gemma share. Args: transformers' values of absent keys; 0: other keys say."""

    def absent_kv_heads(settings: Settings) -> int:
        is_null = "num_key_value_heads" in settings.values
        return settings.size("num_attention_heads") if is_null or not kv_heads else kv_heads

    def absent_head_size(settings: Settings) -> int:
        return head_size or settings.head_size("hidden_size", "num_attention_heads")

    return {
        "hidden_size": Key("width"),
        "intermediate_size": Key("ffn"),
        "num_hidden_layers": Key("layers"),
        "num_attention_heads": Key("heads"),
        "num_key_value_heads": Key("kv_heads", absent=absent_kv_heads),
        "head_dim": Key("head_size", absent=absent_head_size),
        "vocab_size": Key("vocab"),
        "max_position_embeddings": Key("max_positions", absent=max_positions),
        "rms_norm_eps": Key("norm_epsilon", Settings.number, 1e-6),
        "tie_word_embeddings": Key("tied_embedding", Settings.flag, tied),
    }


_ACTIVATION = {"hidden_act": Key("activation", Settings.activation, "silu")}
_BIAS = {"attention_bias": Key("qkv_bias out_bias", Settings.flag, False)}
_EXPERTS = {
    "intermediate_size": Key("ffn", absent=6144),  # of layers without experts, of which there are none
    # transformers 5 writes num_local_experts.
    "num_experts": Key("experts", absent=lambda settings: settings.size("num_local_experts", 128)),
    "num_experts_per_tok": Key("experts_per_token", absent=8),
    "moe_intermediate_size": Key("ffn", absent=768),
    "norm_topk_prob": Key("norm_top_k", Settings.flag, False),
}
_DECODER = functools.partial(Architecture, config=DecoderConfig, define=decoder.define)


def _gated(
    name: str, *, reward_model: str = "", only: dict[str, tuple[Any, ...]], tensors: Any = _gated_tensors, **of_family: Any
) -> Architecture:
    """An architecture with the classes of Llama. Args: name: begins them; others: see Architecture."""
    return _DECODER(
        heads={f"{name}ForCausalLM": "language_model", reward_model or f"{name}ForSequenceClassification": "score"},
        only={"quantization_config": (None,), "partial_rotary_factor": (1.0, 1, None)} | only,
        tensors=tensors,
        prefix="model.",
        lm_head="lm_head.weight",
        ignored=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
        **of_family,
    )


# model_type of config.json -> its description.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": _gated(
        "Llama",
        only={"sliding_window": (None,)},
        fixed=dict(),
        keys=_gated_keys(max_positions=2048) | _ACTIVATION | _BIAS | {"mlp_bias": Key("ffn_bias", Settings.flag, False)},
        read_more=_read_gated,
        write_more=_write_rotary,
    ),
    "mistral": _gated(
        "Mistral",
        only={"attention_bias": (False,), "mlp_bias": (False,), "layer_types": (None,)},
        fixed=dict(),
        keys=_gated_keys(kv_heads=8, max_positions=131072) | _ACTIVATION,
        read_more=_read_mistral,
        write_more=lambda config: _write_rotary(config) | {"sliding_window": config.window or None},
    ),
    "qwen2": _gated(
        "Qwen2",
        only={"use_mrope": (False, None)},
        fixed=dict(qkv_bias=True),
        keys=_gated_keys(kv_heads=32, max_positions=32768) | _ACTIVATION,
        read_more=_read_qwen,
        write_more=_write_qwen,
    ),
    "qwen3": _gated(
        "Qwen3",
        only={"use_mrope": (False, None)},
        fixed=dict(qk_norm="head"),
        keys=_gated_keys(kv_heads=32, head_size=128, max_positions=32768) | _ACTIVATION | _BIAS,
        read_more=_read_qwen,
        write_more=_write_qwen,
    ),
    "qwen3_moe": _gated(
        "Qwen3Moe",
        only={
            "use_mrope": (False, None),
            "use_sliding_window": (False, None),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([], None),
        },
        fixed=dict(qk_norm="head"),
        keys=_gated_keys(kv_heads=4, max_positions=32768) | _ACTIVATION | _BIAS | _EXPERTS,
        read_more=_read_gated,
        write_more=_write_rotary,
        others=_fused_experts,
    ),
    "gpt_oss": _gated(
        "GptOss",
        only={"hidden_act": ("silu",), "swiglu_alpha": (CLAMPED_GAIN,), "swiglu_limit": (CLAMPED_LIMIT,)},
        fixed=dict(norm_top_k=True, activation=CLAMPED, ffn_bias=True, sinks=True),
        keys=_gated_keys(kv_heads=8, head_size=64, max_positions=131072)
        | {
            "rms_norm_eps": Key("norm_epsilon", Settings.number, 1e-5),
            "attention_bias": Key("qkv_bias out_bias", Settings.flag, True),
            "num_local_experts": Key("experts", absent=128),
            "num_experts_per_tok": Key("experts_per_token", absent=4),
        },
        read_more=_read_gpt_oss,
        write_more=lambda config: _write_rotary(config) | _write_windows(config),
        tensors=_gpt_oss_tensors,
    ),
    "olmo2": _gated(
        "Olmo2",
        only={"layer_types": (None,), "sliding_window": (None,)},
        fixed=dict(norm_place="after", qk_norm="token"),
        keys=_gated_keys(max_positions=2048) | {"rms_norm_eps": Key("norm_epsilon", Settings.number, 1e-5)} | _ACTIVATION | _BIAS,
        read_more=_read_gated,
        write_more=_write_rotary,
    ),
    "gemma3_text": _gated(
        "Gemma3",
        reward_model="Gemma3TextForSequenceClassification",
        only={
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (False, None),
            "hidden_activation": (_GEMMA_ACTIVATION,),
        },
        fixed=dict(activation="gelu_tanh", norm="offset_rms", norm_place="both", qk_norm="head", scaled_embedding=True),
        keys=_gated_keys(kv_heads=4, head_size=256, max_positions=131072, tied=True) | _BIAS,
        read_more=_read_gemma3,
        write_more=_write_gemma3,
    ),
    "gpt2": _DECODER(
        heads={"GPT2LMHeadModel": "language_model", "GPT2ForSequenceClassification": "score"},
        only={
            "quantization_config": (None,),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "reorder_and_upcast_attn": (False,),
            "add_cross_attention": (False,),
        },
        fixed=dict(positions="learned", norm="layer", gated=False, qkv_bias=True, out_bias=True, ffn_bias=True),
        keys={
            "n_embd": Key("width"),
            "n_inner": Key("ffn", absent=lambda settings: 4 * settings.size("n_embd")),
            "n_layer": Key("layers"),
            "n_head": Key("heads kv_heads"),
            "vocab_size": Key("vocab"),
            "n_positions": Key("max_positions", absent=1024),
            "layer_norm_epsilon": Key("norm_epsilon", Settings.number, 1e-5),
            "activation_function": Key("activation", Settings.activation, "gelu_new"),
            "tie_word_embeddings": Key("tied_embedding", Settings.flag, True),
        },
        read_more=lambda settings, fields: {"head_size": settings.head_size("n_embd", "n_head")},
        write_more=lambda config: {},
        tensors=_gpt2_tensors,
        prefix="transformer.",
        lm_head="lm_head.weight",
        ignored=r"h\.\d+\.attn\.(bias|masked_bias)",
    ),
    "gpt_neox": _DECODER(
        heads={"GPTNeoXForCausalLM": "language_model", "GPTNeoXForSequenceClassification": "score"},
        only={"quantization_config": (None,)},
        fixed=dict(norm="layer", gated=False, ffn_bias=True),
        keys={
            "hidden_size": Key("width"),
            "intermediate_size": Key("ffn"),
            "num_hidden_layers": Key("layers"),
            "num_attention_heads": Key("heads kv_heads"),
            "vocab_size": Key("vocab"),
            "max_position_embeddings": Key("max_positions", absent=2048),
            "layer_norm_eps": Key("norm_epsilon", Settings.number, 1e-5),
            "use_parallel_residual": Key("parallel_residual", Settings.flag, True),
            "hidden_act": Key("activation", Settings.activation, "gelu"),
            "attention_bias": Key("qkv_bias out_bias", Settings.flag, True),
            "tie_word_embeddings": Key("tied_embedding", Settings.flag, False),
        },
        read_more=_read_gpt_neox,
        write_more=_write_gpt_neox,
        tensors=_gpt_neox_tensors,
        prefix="gpt_neox.",
        lm_head="embed_out.weight",
        ignored=r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    ),
    **encoders.ENCODERS,
}

# model_type that is not supported -> what to load instead.
INSTEAD = {"gemma3": "it also reads images; load a text-only checkpoint instead (model_type='gemma3_text', Gemma3ForCausalLM)"}
