"""Which rows are invalid, and why."""

import numpy as np

from tba_jax.replay.window import REJECTIONS, validate_rows
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
