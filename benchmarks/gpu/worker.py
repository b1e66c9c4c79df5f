"""What the workers of the suite share: their flags, the shapes of models, and the rows that they write."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from tba_jax.models.config import PRESETS, DecoderConfig

PRESET = flags.DEFINE_string("preset", "qwen2.5-0.5b", "The model's shape, a name of models/config.py.", allow_override=True)
ANSWER = flags.DEFINE_string("answer", "", "The file for the rows.")
TINY = flags.DEFINE_bool("tiny", False, "The model and the rows as small as they can be.")
REPEATS = flags.DEFINE_integer("repeats", 5, "Of each time; medians are told.", lower_bound=1, allow_override=True)


def shape(dtype: str) -> DecoderConfig:
    """The model that is measured. Args: dtype: that it computes in."""
    model = PRESETS[PRESET.value]
    if TINY.value:
        heads: dict[str, Any] = dict(heads=2, kv_heads=1 if model.kv_heads < model.heads else 2, head_size=16)
        sizes: dict[str, Any] = dict(layers=2, width=32, ffn=48, vocab=256, rotary_size=4 if model.rotary_size else 0)
        model = dataclasses.replace(model, **heads, **sizes)
    return dataclasses.replace(model, compute_dtype=dtype)


def row(figure: str, value: str, beside: str = "") -> dict[str, str]:
    """The fields of suite.Row but for the case."""
    return {"figure": figure, "value": value, "beside": beside}


def write(rows: Sequence[dict[str, str]]) -> None:
    written = Path(f"{ANSWER.value}.new")
    written.write_text(json.dumps(rows), encoding="utf-8")
    written.replace(ANSWER.value)
