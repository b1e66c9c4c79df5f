"""Whole texts through a model that scores them: put together by length, in few shapes."""

from collections.abc import Callable, Sequence

import numpy as np

# Tokens of the shortest pass.
_SHORTEST = 16


def padded_length(longest: int, limit: int) -> int:
    """Tokens of a pass whose longest text has `longest`: a multiple of an eighth of the next power of two, at most `limit`.

    So a pass computes less than 1.25 times the tokens that it needs, and there are four programs for each doubling of lengths.
    """
    step = max(_SHORTEST, (1 << max(longest - 1, 0).bit_length()) // 8)
    return min(max(_SHORTEST, -(-longest // step) * step), limit)


def in_passes(
    encoded: Sequence[Sequence[int]],
    score: Callable[[np.ndarray, np.ndarray], np.ndarray],
    *,
    rows: int,
    limit: int,
    pad_id: int = 0,
) -> np.ndarray:
    """What `score` gives of all texts: float32[n, ...], in their order.

    Args:
      encoded: token ids of n texts, n at least 1, each of at most `limit`.
      score: (tokens int32[rows, T], right-padded; length int32[rows]) -> float32[rows, ...]. A pass that is not full has copies
        of its last text.
      rows: of a pass.
    """
    # Texts of similar length share a pass.
    order = np.argsort([len(ids) for ids in encoded], kind="stable")
    found = []
    for start in range(0, len(order), rows):
        part = order[start : start + rows]
        texts = [encoded[i] for i in (*part, *[part[-1]] * (rows - len(part)))]
        lengths = np.array([len(ids) for ids in texts], np.int32)
        tokens = np.full((rows, padded_length(int(lengths.max()), limit)), pad_id, np.int32)
        for row, ids in zip(tokens, texts, strict=True):
            row[: len(ids)] = ids
        found.append(score(tokens, lengths)[: len(part)])
    result = np.concatenate(found)
    result[order] = result.copy()
    return result
