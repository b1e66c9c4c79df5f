"""Tokens of a row for people: the text of each, and two colours, by log π_θ/π_ref and by the policy step that sampled it.

A colour is the name of a CSS class and never a style attribute, so that a page may forbid inline styles.
"""

import codecs
import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tba_jax.text.tokenizers import Tokenizer
from tba_jax.text.visible import visible
from tba_jax.trajectory import Rows, response

# Upper limits of |log π_θ/π_ref| in nats for the colours 0 (none) to 4; what is above the last has the colour 5.
RATIO_LIMITS = (0.05, 0.25, 0.75, 1.5, 3.0)
STEP_COLOURS = 8
# Red: the policy likes the token more than the reference does; blue: less. Text stays dark on each of them.
_MORE = ("#fde5d9", "#fbc9b0", "#f7a688", "#f0845f", "#e2633c")
_LESS = ("#dfeaf6", "#bfd6ee", "#98bde2", "#70a3d6", "#4f8cca")
_STEPS = ("#f3f0fa", "#e2ecd8", "#cfe8c4", "#b3dfbb", "#96d3ba", "#7ec4bf", "#72b1c4", "#7a9cc6")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Token:
    """One token of a response.

    text: what it adds to the response, without control characters; special: whether `text` is a name in place of text.
    policy_logprob, ref_logprob, behavior_logprob: nats. policy_step: of the weights that sampled it.
    ratio_colour, step_colour: names of CSS classes.
    """

    text: str
    special: bool
    policy_logprob: float
    ref_logprob: float
    behavior_logprob: float
    policy_step: int
    ratio_colour: str
    step_colour: str

    @property
    def log_ratio(self) -> float:
        """log π_θ/π_ref in nats."""
        return self.policy_logprob - self.ref_logprob

    @property
    def told(self) -> str:
        """All figures in one line."""
        return (
            f"log π_θ/π_ref {self.log_ratio:+.2f} nats (log π_θ {self.policy_logprob:.2f}, log π_ref {self.ref_logprob:.2f}), "
            f"policy step {self.policy_step}"
        )


class Pieces:
    """Splits token ids into the texts that they add, without a vocabulary's markers of spaces and bytes."""

    def __init__(self, tokenizer: Tokenizer | None):
        """Args: tokenizer: None: the run's cannot be read here, and a token's text is its number."""
        self._bytes = [] if tokenizer is None else tokenizer.token_bytes()
        self._special = frozenset(() if tokenizer is None else tokenizer.special_ids)
        self._names = {} if tokenizer is None else {tokenizer.pad_id: "⟨padding⟩", tokenizer.eos_id: "⟨end⟩"}

    def texts(self, ids: Sequence[int]) -> list[tuple[str, bool]]:
        """(text, special) of each id. The token that completes a character has its text, where several share it."""
        decoder, found = codecs.getincrementaldecoder("utf-8")("replace"), []
        for each in map(int, ids):
            content = self._bytes[each] if 0 <= each < len(self._bytes) else None
            if each in self._special or content is None:
                name = self._names.get(each) or ("" if content is None else content.decode(errors="replace")) or f"⟨{each}⟩"
                # A character that a special token interrupts stays unfinished.
                found.append((decoder.decode(b"", final=True) + visible(name), True))
                decoder.reset()
            else:
                found.append((visible(decoder.decode(content)), False))
        if rest := decoder.decode(b"", final=True):
            found[-1] = (found[-1][0] + rest, found[-1][1])
        return found


def tokens(rows: Rows, i: int, pieces: Pieces, *, newest_step: int, limit: int = 0) -> list[Token]:
    """The tokens of the response of row i.

    Args:
      rows: see trajectory.Rows.
      newest_step: of the run's policies: the colours of steps divide [0, newest_step] evenly.
      limit: at most so many tokens, from the first on; 0: all.
    """
    ids = response(rows, i)[: limit or None][: rows["policy_step"].shape[1]]  # a trainer refuses rows whose length is wrong
    found = []
    for t, (text, special) in enumerate(pieces.texts(ids.tolist())):
        policy_logprob, ref_logprob = float(rows["policy_logprobs"][i, t]), float(rows["ref_logprobs"][i, t])
        step = int(rows["policy_step"][i, t])
        found.append(
            Token(
                text=text,
                special=special,
                policy_logprob=policy_logprob,
                ref_logprob=ref_logprob,
                behavior_logprob=float(rows["behavior_logprobs"][i, t]),
                policy_step=step,
                ratio_colour=ratio_colour(policy_logprob - ref_logprob),
                step_colour=step_colour(step, newest_step),
            )
        )
    return found


def ratio_colour(log_ratio: float) -> str:
    """The class of log π_θ/π_ref, nats: m1 (a little more than the reference) to m5, l1 (less) to l5, or r0."""
    if not math.isfinite(log_ratio):
        return "r0"
    level = int(np.searchsorted(RATIO_LIMITS, abs(log_ratio), side="right"))
    return f"{'m' if log_ratio > 0 else 'l'}{level}" if level else "r0"


def step_colour(step: int, newest_step: int) -> str:
    """The class of a policy step, s0 (the first) to s7 (the newest)."""
    return f"s{min(STEP_COLOURS - 1, max(0, step) * STEP_COLOURS // max(1, newest_step + 1))}"


def style() -> str:
    """The CSS of these classes: an element `.by-ratio` colours the `.tok` inside it by ratio, `.by-step` by policy step."""
    ratios = [f".by-ratio .m{n}{{background:{colour}}}" for n, colour in enumerate(_MORE, 1)]
    ratios += [f".by-ratio .l{n}{{background:{colour}}}" for n, colour in enumerate(_LESS, 1)]
    steps = [f".by-step .s{n}{{background:{colour}}}" for n, colour in enumerate(_STEPS)]
    shared = ".tok{white-space:pre-wrap;border-radius:2px;unicode-bidi:isolate}.tok.special{font-style:italic}"
    return "\n".join([shared, *ratios, *steps])
