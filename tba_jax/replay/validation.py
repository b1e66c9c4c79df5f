"""What is wrong with the values of a row that a searcher wrote."""

import numpy as np

from tba_jax.trajectory import Rows

# Why a row is not trained on; `validate_rows` returns indices into this tuple, 0 = valid.
REJECTIONS = (
    "valid",
    "prompt_length",
    "response_length",
    "tokens",
    "reward",
    "logprobs",
    "embedding",
    "state_values",
    "reference",
)


def validate_rows(rows: Rows, *, vocab_size: int, reference_id: int | None = None) -> np.ndarray:
    """Checks the values of rows that a searcher wrote.

    Args:
      rows: of a valid schema, see `check_rows`.
      vocab_size: V; every token, padding included, must be in [0, V).
      reference_id: of the policy that ref_logprobs must be of, None: of any.

    Returns:
      int8[B], the first of REJECTIONS that holds; 0 where the row is valid.
    """
    finite = {name: np.isfinite(rows[name]) for name in ("ref_logprobs", "policy_logprobs", "behavior_logprobs")}
    R = rows["policy_step"].shape[1]
    P = rows["tokens"].shape[1] - R
    nothing = np.zeros(len(rows["row"]), bool)
    failed = np.stack(
        [
            (rows["prompt_length"] < 0) | (rows["prompt_length"] > P),
            (rows["response_length"] < 0) | (rows["response_length"] > R),
            ((rows["tokens"] < 0) | (rows["tokens"] >= vocab_size)).any(1),
            ~np.isfinite(rows["reward"]) | ~np.isfinite(rows["reward_parts"]).all(1),
            ~np.logical_and.reduce([column.all(1) for column in finite.values()]),
            ~np.isfinite(rows["embedding"]).all(1) if "embedding" in rows else nothing,
            # NaN elsewhere says that a state was not valued.
            np.isinf(rows["state_values"]).any(1) | np.isnan(rows["state_values"][:, 0]) if "state_values" in rows else nothing,
            nothing if reference_id is None else rows["reference_id"] != np.uint64(reference_id),
        ],
        axis=1,
    )
    return np.where(failed.any(1), failed.argmax(1) + 1, 0).astype(np.int8)
