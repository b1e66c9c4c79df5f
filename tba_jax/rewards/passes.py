"""Forward passes over texts of any length: texts of similar length share a pass, and passes have few shapes."""

from collections.abc import Callable, Sequence

import numpy as np

# Tokens of the shortest pass.
_SHORTEST = 16


def padded_length(longest: int, limit: int) -> int:
    """The length of a pass whose longest text has `longest` tokens: a multiple of 1/8 of the next power of two, at most `limit`.

    A long pass is then less than 1.25 times as long as its longest text, and each doubling of lengths compiles four programs.
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
    """float32[n, ...]: the scores of n texts, in the order of the texts.

    Args:
      encoded: token ids of n texts, n at least 1, each of at most `limit` tokens.
      score: one pass, (tokens int32[rows, T], right-padded; length int32[rows]) -> float32[rows, ...].
      rows: texts of a pass. The last pass is filled up with copies of its last text.
    """
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
