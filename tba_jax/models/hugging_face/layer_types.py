"""Local and global layers in config.json: layer_types and sliding_window, and the rules for files without layer_types."""

from typing import Any

from tba_jax.models.config import DecoderConfig
from tba_jax.models.hugging_face.files import Settings

_WINDOW = 4096  # transformers' value of an absent sliding_window, whatever the architecture
_LETTERS = {"full_attention": "g", "sliding_attention": "l"}


def read(settings: Settings, *, absent: str, window: int | None) -> dict[str, Any]:
    """layer_pattern and window of our config.

    Args:
      absent: the letter of each layer if the file has no layer_types, see DecoderConfig.layer_pattern.
      window: of local layers; None: the file gives none.
    """
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


def window(settings: Settings) -> int | None:
    """sliding_window; None where the file says null."""
    return None if settings.values.get("sliding_window", _WINDOW) is None else settings.size("sliding_window", _WINDOW)


def write(config: DecoderConfig) -> dict[str, Any]:
    names = {letter: name for name, letter in _LETTERS.items()}
    types = [names["l" if local else "g"] for local in config.local_layers]
    return {"layer_types": types, "sliding_window": config.window or None}
