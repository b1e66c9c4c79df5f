"""Valid rows with random content, for benchmarks of the replay log."""

import numpy as np

from tba_jax.trajectory import RowShape, response_mask

VOCAB = 50_000


def make_rows(shape: RowShape, first: int, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Valid rows `first` to `first + count - 1`, 16 of each query, with values as random as those of a run."""
    rows = {name: np.zeros((count, *row), dtype) for name, (dtype, row) in shape.columns().items()}
    rows["row"] = np.arange(first, first + count)
    rows["query_id"] = (rows["row"] // 16).astype(np.uint64)
    rows["reward"] = rng.normal(size=count).astype(np.float32)
    rows["key"] = rng.integers(0, 1 << 32, rows["key"].shape, np.uint32)
    R = shape.response_length
    rows["prompt_length"][:] = shape.prompt_length
    rows["response_length"] = rng.integers(R // 2, R + 1, count, np.int32)
    mask = response_mask(rows["response_length"], R)
    rows["tokens"] = rng.integers(0, VOCAB, rows["tokens"].shape, np.int32)
    rows["tokens"][:, shape.prompt_length :][~mask] = 0
    for name in ("ref_logprobs", "policy_logprobs", "behavior_logprobs"):
        rows[name] = np.where(mask, -rng.exponential(size=mask.shape), 0).astype(np.float32)
    rows["policy_step"] = np.where(mask, 7, -1).astype(np.int32)
    return rows
