"""What a mixture of experts costs on CPUs: updates and decoding, beside a dense model with as many weights for each token.

    python -m benchmarks.experts [--repeats=5]

32 experts of width 256 in each of six layers of width 384, of which a token goes through four; the dense model's feed-forward is
1,024 wide. An update has 32 rows of 128 tokens, a generation 64 rows of 64. The update is also made with a loop in which every
expert computes all tokens. Repeats are interleaved; times are medians, with the least and the largest.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import decode, pieces, summary
from tba_jax.models import experts
from tba_jax.models.config import QWEN3_MOE

EXPERTS, CHOSEN, WIDTH, VOCAB = 32, 4, 256, 4096
MOE: dict[str, Any] = {"experts": EXPERTS, "experts_per_token": CHOSEN, "ffn": WIDTH}
DENSE: dict[str, Any] = {"ffn": CHOSEN * WIDTH}
LENGTHS = np.full(64, 64, np.int32)
Here = Callable[..., jax.Array]


def _loop(
    x: jax.Array, weights: jax.Array, chosen: jax.Array, own: jax.Array, *maps: jax.Array, activation: Callable, **_: Any
) -> jax.Array:
    """What `experts._here` returns: each expert in turn computes all tokens, and counts for those that chose it."""

    def add(y: jax.Array, each: Any) -> tuple[jax.Array, None]:
        number, gate, up, down = each
        weight = jnp.sum(jnp.where(chosen == number, weights, 0.0), axis=1)
        return y + weight[:, None] * ((activation(x @ gate) * (x @ up)) @ down), None

    return jax.lax.scan(add, jnp.zeros_like(x), (own, *maps))[0][None]


def _timed(form: Here, make: Callable[[], pieces.Piece]) -> Callable[[], float]:
    """A call that returns seconds. Args: form: of the experts' products, whenever the piece is traced."""
    with mock.patch.object(experts, "_here", form):
        piece = make()

    def run() -> float:
        with mock.patch.object(experts, "_here", form):
            return piece.run()["seconds"]

    return run


def main(argv: Sequence[str]) -> None:
    del argv
    repeats = flags.FLAGS.repeats  # of benchmarks.decode
    shipped = experts._here
    forms: dict[str, Here] = {
        "experts": shipped,
        "experts, a loop": _loop,
    }
    of_moe = {f"model.{name}": value for name, value in MOE.items()}
    both = {"dense": DENSE, "experts": QWEN3_MOE | MOE}
    dense = functools.partial(pieces.update_piece, {"model.ffn": DENSE["ffn"]}, VOCAB)
    runs = {("update", "dense"): _timed(shipped, dense)}
    runs |= {
        ("update", name): _timed(form, functools.partial(pieces.update_piece, of_moe, VOCAB)) for name, form in forms.items()
    }
    for name, fields in both.items():
        model = dataclasses.replace(decode.SMALL, **fields)
        runs["decode", name] = _timed(shipped, functools.partial(pieces.decode_piece, LENGTHS, model=model))
    seconds = {each: list[float]() for each in runs}
    for _ in range(repeats):
        for each, run in runs.items():
            seconds[each].append(run())
    summary.table("what", "model", "seconds", "least to largest", "× dense")
    for (what, name), times in seconds.items():
        middle, of_dense = np.median(times), np.median(seconds[what, "dense"])
        summary.row(what, name, f"{middle:.2f}", f"{min(times):.2f} to {max(times):.2f}", f"{middle / of_dense:.2f}")
    tokens = LENGTHS.sum()
    told = (f"{tokens / np.median(times):,.0f} ({name})" for (what, name), times in seconds.items() if what == "decode")
    print(f"\ntokens decoded a second: {', '.join(told)}; {repeats} repeats")


if __name__ == "__main__":
    app.run(main)
