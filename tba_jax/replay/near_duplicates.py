"""Finds the resident response that another is merged with: an identical one, or the nearest by edits or by embeddings.

The Levenshtein distance d of two responses with n_a and n_b tokens has a cheap lower bound: with L1 the distance of their
token counts, d >= (L1 + |n_a − n_b|) / 2. Two weaker bounds are cheaper: L1 of counts in 128 buckets, and the number of buckets
that only one of the two responses uses, which two words of bits tell. Two vectorised passes, the bits first, leave the few
responses whose distance has to be computed.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from rapidfuzz.distance import Levenshtein

from tba_jax.trajectory import Rows, response

_BUCKETS = 128


class NearByEdits:
    """The responses in the slots of an index.

    _counts: uint8[slots, 128], tokens whose id is the bucket modulo 128, at most 255. _present: uint64[2, slots], a bit for each
    bucket that has any. _lengths: int32[slots], tokens.
    """

    def __init__(self, *, slots: int, share: float):
        """Args: share: in (0, 1). Responses of n and m tokens are near if their edit distance is below share · (n + m)."""
        self._share = share
        self._texts: dict[int, str] = {}  # tokens as the characters of a string, which compares fastest
        self._counts = np.zeros((slots, _BUCKETS), np.uint8)
        self._present = np.zeros((_BUCKETS // 64, slots), np.uint64)
        self._lengths = np.zeros(slots, np.int32)

    def put(self, slot: int, rows: Rows, i: int) -> None:
        """Takes the response of row i for a slot; whatever the slot held is forgotten."""
        tokens = response(rows, i)
        self._texts[slot] = "".join(map(chr, tokens.tolist()))
        self._counts[slot] = np.minimum(np.bincount(tokens % _BUCKETS, minlength=_BUCKETS), 255)
        self._present[:, slot] = np.packbits(self._counts[slot] > 0).view(np.uint64)
        self._lengths[slot] = len(tokens)

    def nearest(self, slot: int, others: np.ndarray, arrival: np.ndarray) -> int | None:
        """The slot among `others` whose response is nearest to that of `slot`; None where none is within the share.

        Args:
          others: int[n], slots; arrival: int64[slots], which makes ties fall the same way in every order of `others`.
        """
        # take() gathers several times faster than an index; `others` may be all rows of a run.
        length, lengths = self._lengths[slot], self._lengths.take(others)
        # limits[n_b]: the largest distance d < share · (n_a + n_b). The small term keeps d = 29 of 100 out of a share of 0.29.
        possible = np.arange(max(int(lengths.max(initial=0)), int(length)) + 1)
        limits = np.ceil(self._share * (possible + length) - 1e-9).astype(np.int32) - 1
        differences = np.abs(possible - length).astype(np.int32)
        near, bounds = others, differences.take(lengths)
        for L1 in (self._differing_buckets, self._differing_counts):
            kept = np.flatnonzero(bounds <= limits.take(lengths))
            near, lengths = near.take(kept), lengths.take(kept)
            bounds = (L1(slot, near) + differences.take(lengths) + 1) // 2
        kept = bounds <= limits.take(lengths)
        near, lengths, bounds = near[kept], lengths[kept], bounds[kept]
        order = np.lexsort((arrival[near], bounds))

        text, found, best = self._texts[slot], None, 0
        candidates = zip(near[order].tolist(), bounds[order].tolist(), limits[lengths[order]].tolist(), strict=True)
        for other, bound, limit in candidates:
            if found is not None and bound >= best:
                break
            cutoff = limit if found is None else min(limit, best - 1)
            distance = Levenshtein.distance(text, self._texts[other], score_cutoff=cutoff)
            if distance <= cutoff:
                found, best = other, distance
        return found

    def _differing_buckets(self, slot: int, others: np.ndarray) -> np.ndarray:
        """int32[n]: buckets that only one of a response and that of `slot` has."""
        return sum(np.bitwise_count(words.take(others) ^ words[slot]).astype(np.int32) for words in self._present)

    def _differing_counts(self, slot: int, others: np.ndarray) -> np.ndarray:
        """int32[n]: the L1 distance of the counts of a response and of that of `slot`."""
        counts, own = self._counts.take(others, axis=0), self._counts[slot]
        return (np.maximum(counts, own) - np.minimum(counts, own)).sum(axis=1, dtype=np.int32)


class NearByEmbedding:
    """The embeddings of the responses in the slots of an index. _embeddings: float32[slots, E], of length 1."""

    def __init__(self, *, slots: int, distance: float, embedding_size: int):
        """Args: distance: in (0, 2), the cosine distance 1 − e_a · e_b up to which two responses count as the same."""
        self._distance = distance
        self._embeddings = np.zeros((slots, embedding_size), np.float32)

    def put(self, slot: int, rows: Rows, i: int) -> None:
        """Takes the embedding of row i for a slot."""
        self._embeddings[slot] = rows["embedding"][i]

    def nearest(self, slot: int, others: np.ndarray, arrival: np.ndarray) -> int | None:
        """As NearByEdits.nearest."""
        own = self._embeddings[slot]
        # BLAS results vary by machine and number of threads, so candidates are computed again in float64.
        near = others[self._embeddings[others] @ own >= 1 - self._distance - 1e-4]
        distances = np.round(1.0 - (self._embeddings[near].astype(np.float64) * own).sum(axis=1), 6)
        near, distances = near[distances <= self._distance], distances[distances <= self._distance]
        return int(near[np.lexsort((arrival[near], distances))[0]]) if len(near) else None


class MergedResponses:
    """The responses in the slots of an index that have been merged with the older ones of their query."""

    def __init__(self, near: NearByEdits | NearByEmbedding | None):
        """Args: near: finds the response nearest to another one; None where only identical responses are merged."""
        self._near = near
        # Query id and digest of the response -> slot, and the reverse.
        self._slots: dict[tuple[int, bytes], int] = {}
        self._keys: dict[int, tuple[int, bytes]] = {}

    def put(self, slot: int, query_id: int, rows: Rows, i: int) -> None:
        """Takes the response of row i for a free slot."""
        self._keys[slot] = _key(query_id, rows, i)
        self._slots[self._keys[slot]] = slot
        if self._near is not None:
            self._near.put(slot, rows, i)

    def remove(self, slot: int) -> None:
        """Frees a slot; one that is free stays so."""
        if (key := self._keys.pop(slot, None)) is not None:
            del self._slots[key]

    def same(self, slot: int, query_id: int, rows: Rows, i: int, *, members: Sequence[int], arrival: np.ndarray) -> int | None:
        """The slot of the response that that of row i is merged with, None where there is none.

        Args:
          slot: of row i, which is free here. members: all slots of its query. arrival: int64[slots], of the index; rows that
            came before this one have all been merged.
        """
        found = self._slots.get(_key(query_id, rows, i))
        if found is not None or self._near is None:
            return found
        self._near.put(slot, rows, i)
        others = np.array(members, np.int32)
        return self._near.nearest(slot, others[arrival[others] < arrival[slot]], arrival)


def _key(query_id: int, rows: Rows, i: int) -> tuple[int, bytes]:
    """128 bits stand for a response's tokens: equal digests are taken as equal responses."""
    return query_id, hashlib.blake2b(response(rows, i).tobytes(), digest_size=16).digest()
