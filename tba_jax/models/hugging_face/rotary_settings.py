"""Rotary positions in config.json: rope_theta and rope_scaling of transformers 4, rope_parameters of transformers 5."""

from typing import Any

from tba_jax.models.config import DecoderConfig, RopeScaling
from tba_jax.models.hugging_face.files import Settings


def read(settings: Settings, *, theta: float, theta_key: str = "rope_theta") -> tuple[dict[str, Any], float | None]:
    """rope_theta and rope_scaling of our config, and the partial_rotary_factor of the rotary settings or None."""
    key = "rope_scaling" if settings.table("rope_scaling") else "rope_parameters"
    rope = Settings(settings.path, settings.table(key))
    scaling = _read_scaling(settings, key, rope)
    theta = rope.number("rope_theta", settings.number(theta_key, theta))
    rotated = None if rope.values.get("partial_rotary_factor") is None else rope.number("partial_rotary_factor", 1.0)
    return {"rope_theta": theta, "rope_scaling": scaling}, rotated


def read_two(settings: Settings) -> dict[str, Any]:
    """rope_theta, rope_scaling and local_rope_theta of our config, for global and local layers that rotate differently (Gemma 3).

    transformers 5 has rope_parameters for each type of layer; before, rope_theta, rope_scaling and rope_local_base_freq.
    """
    kinds = Settings(settings.path, settings.table("rope_parameters"))
    if set(kinds.values) - {"full_attention", "sliding_attention"}:
        settings.refuse("rope_parameters", "rotary settings of full_attention and of sliding_attention")
    whole = Settings(settings.path, kinds.table("full_attention") | settings.table("rope_scaling"))
    local = Settings(settings.path, kinds.table("sliding_attention"))
    if _read_scaling(settings, "rope_parameters", local) is not None:
        settings.refuse("rope_parameters", "rope_type='default' of sliding_attention")
    return {
        "rope_theta": whole.number("rope_theta", settings.number("rope_theta", 1e6)),
        "rope_scaling": _read_scaling(settings, "rope_scaling", whole),
        "local_rope_theta": local.number("rope_theta", settings.number("rope_local_base_freq", 1e4)),
    }


def _read_scaling(settings: Settings, key: str, rope: Settings) -> RopeScaling | None:
    """Args: rope: the rotary settings, which are the value of `key` or a part of it."""
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(factor=_required(rope, key, "factor"))
    if kind != "llama3":
        settings.refuse(key, "rope_type='default', rope_type='linear' and rope_type='llama3'")
    scaling = RopeScaling(
        factor=_required(rope, key, "factor"),
        low_frequency=_required(rope, key, "low_freq_factor"),
        high_frequency=_required(rope, key, "high_freq_factor"),
        original_positions=rope.size("original_max_position_embeddings", settings.size("max_position_embeddings", 2048)),
    )
    if scaling.low_frequency >= scaling.high_frequency:
        raise ValueError(f"{settings.path}: {key}={rope.values!r}: low_freq_factor must be below high_freq_factor")
    return scaling


def _required(rope: Settings, key: str, name: str) -> float:
    if name not in rope.values:
        raise ValueError(f"{rope.path}: {key}={dict(rope.values)!r} does not give {name}")
    return rope.number(name, 0.0)


def write(config: DecoderConfig) -> dict[str, Any]:
    """The keys of transformers 4 and of transformers 5."""
    scaling = _write_scaling(config.rope_scaling)
    parameters = (scaling or {"rope_type": "default"}) | {"rope_theta": config.rope_theta}
    return {"rope_theta": config.rope_theta, "rope_scaling": scaling, "rope_parameters": parameters}


def write_two(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of read_two."""
    values, local = write(config), {"rope_type": "default", "rope_theta": config.local_rope_theta}
    kinds = {"full_attention": values["rope_parameters"], "sliding_attention": local}
    return values | {"rope_local_base_freq": config.local_rope_theta, "rope_parameters": kinds}


def _write_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None or not scaling.original_positions:
        return None if scaling is None else {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_frequency,
        "high_freq_factor": scaling.high_frequency,
        "original_max_position_embeddings": scaling.original_positions,
    }
