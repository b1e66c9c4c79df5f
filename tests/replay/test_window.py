"""Which rows are invalid, and why; the nearest response of a query, by edits and by embedding, against comparing with all."""

import numpy as np

from tba_jax.replay.window import REJECTIONS, NearByEdits, NearByEmbedding, validate_rows
from tests.support.tiny_log import make_rows


def test_invalid_values_are_told_apart():
    rows = make_rows(0, 10)
    rows["prompt_length"][1] = 5
    rows["response_length"][2] = -1
    rows["tokens"][3, 2] = 50
    rows["tokens"][4, 8] = -1
    rows["reward"][5] = np.nan
    rows["reward_parts"][6, 1] = np.inf
    rows["behavior_logprobs"][7, 3] = -np.inf
    rows["ref_logprobs"][8, 5] = np.nan
    reasons = [REJECTIONS[reason] for reason in validate_rows(rows, vocab_size=50)]
    assert reasons == [
        *("valid", "prompt_length", "response_length", "tokens", "tokens"),
        *("reward", "reward", "logprobs", "logprobs", "valid"),
    ]


def edit_distance(a, b) -> int:
    table = np.zeros((len(a) + 1, len(b) + 1), int)
    table[:, 0], table[0] = np.arange(len(a) + 1), np.arange(len(b) + 1)
    for i in range(len(a)):
        for j in range(len(b)):
            table[i + 1, j + 1] = min(table[i, j] + (a[i] != b[j]), table[i, j + 1] + 1, table[i + 1, j] + 1)
    return int(table[-1, -1])


def as_row(tokens) -> dict[str, np.ndarray]:
    lengths = {"prompt_length": np.array([1]), "response_length": np.array([len(tokens)])}
    return {"tokens": np.array([[0, *tokens]], np.int32), **lengths}


def test_the_nearest_is_the_one_that_comparing_all_finds():
    rng = np.random.default_rng(0)
    for share in (0.07, 0.3):
        near, texts, found = NearByEdits(slots=120, share=share), [], 0
        for slot in range(120):
            # Copies of earlier texts with a few tokens replaced, and texts of their own.
            text = rng.integers(0, 300, rng.integers(0, 40))
            if slot > 20 and rng.random() < 0.7:
                text = texts[rng.integers(slot)].copy()
                changed = rng.random(len(text)) < rng.choice([0.05, 0.2, 0.5])
                text[changed] = rng.integers(0, 300, changed.sum())
                text = np.delete(text, np.flatnonzero(rng.random(len(text)) < 0.05))
            texts.append(text)
            near.put(slot, as_row(text), 0)
            if slot % 4:
                continue
            distances = [edit_distance(text, other) for other in texts[:-1]]
            within = [d for d, other in zip(distances, texts, strict=False) if d < share * (len(text) + len(other))]
            nearest = near.nearest(slot, rng.permutation(slot), np.arange(120))
            assert (nearest is None) == (not within)
            if within:
                found += 1
                assert distances[nearest] == min(within)
        assert found >= 3
    # The limit itself is no duplicate: 1 edit of 2 + 2 tokens is not below a quarter of 4.
    for share, other in ((0.25, None), (0.2501, 0)):
        near = NearByEdits(slots=2, share=share)
        near.put(0, as_row([1, 2]), 0)
        near.put(1, as_row([1, 3]), 0)
        assert near.nearest(1, np.array([0]), np.arange(2)) == other


def test_the_nearest_embedding_is_that_of_comparing_all():
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(200, 4))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    near = NearByEmbedding(slots=200, distance=0.05, embedding_size=4)
    for slot in range(200):
        near.put(slot, {"embedding": vectors}, slot)
    found = []
    for slot in range(1, 200):
        distances = 1 - vectors[:slot].astype(float) @ vectors[slot].astype(float)
        best = int(np.argmin(distances))
        found.append(near.nearest(slot, rng.permutation(slot), np.arange(200)))
        assert found[-1] == (best if distances[best] <= 0.05 else None)
    assert 0 < found.count(None) < 199
    near.put(0, {"embedding": vectors}, 5)
    near.put(1, {"embedding": vectors}, 5)
    assert near.nearest(5, np.array([1, 0]), np.array([7, 3, 0, 0, 0, 0])) == 1  # of equally near ones the older
