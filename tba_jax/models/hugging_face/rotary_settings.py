"""Rotary positions in config.json: rope_theta and rope_scaling of transformers 4, rope_parameters of transformers 5."""

from typing import Any

from tba_jax.models.config import DecoderConfig, RopeScaling
from tba_jax.models.hugging_face.files import Settings


def read(settings: Settings, *, theta: float, theta_key: str = "rope_theta") -> tuple[dict[str, Any], float | None]:
    """rope_theta and rope_scaling of our config, and the partial_rotary_factor of the rotary settings or None."""
    key = "rope_scaling" if settings.table("rope_scaling") else "rope_parameters"
    values = settings.table(key)
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ("default", "llama3"):
        settings.refuse(key, "rope_type='default' and rope_type='llama3'")
    rope = Settings(settings.path, values)
    scaling = None
    if kind == "llama3":
        scaling = RopeScaling(
            factor=_required(rope, key, "factor"),
            low_frequency=_required(rope, key, "low_freq_factor"),
            high_frequency=_required(rope, key, "high_freq_factor"),
            original_positions=rope.size("original_max_position_embeddings", settings.size("max_position_embeddings", 2048)),
        )
        if scaling.low_frequency >= scaling.high_frequency:
            raise ValueError(f"{settings.path}: {key}={values!r}: low_freq_factor must be below high_freq_factor")
    theta = rope.number("rope_theta", settings.number(theta_key, theta))
    rotated = None if values.get("partial_rotary_factor") is None else rope.number("partial_rotary_factor", 1.0)
    return {"rope_theta": theta, "rope_scaling": scaling}, rotated


def _required(rope: Settings, key: str, name: str) -> float:
    if name not in rope.values:
        raise ValueError(f"{rope.path}: {key}={dict(rope.values)!r} does not give {name}")
    return rope.number(name, 0.0)


def write(config: DecoderConfig) -> dict[str, Any]:
    """The keys of transformers 4 and of transformers 5."""
    if config.rope_scaling is None:
        return {
            "rope_theta": config.rope_theta,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        }
    scaling = {
        "rope_type": "llama3",
        "factor": config.rope_scaling.factor,
        "low_freq_factor": config.rope_scaling.low_frequency,
        "high_freq_factor": config.rope_scaling.high_frequency,
        "original_max_position_embeddings": config.rope_scaling.original_positions,
    }
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": scaling | {"rope_theta": config.rope_theta},
    }
