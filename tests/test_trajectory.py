"""Rows are laid out as training reads them: prompt, response, padding."""

import numpy as np
import pytest

from tba_jax import trajectory


def test_rows_hold_prompt_response_and_padding():
    lengths = dict(prompt_length=3, response_length=2, pad_id=9)
    rows = trajectory.token_columns([[1, 2, 3], [4], [5, 6]], [[7], [8, 7], []], **lengths)
    assert list(rows) == ["tokens", "prompt_length", "response_length"]
    np.testing.assert_array_equal(rows["tokens"], [[1, 2, 3, 7, 9], [4, 8, 7, 9, 9], [5, 6, 9, 9, 9]])
    assert rows["prompt_length"].tolist() == [3, 1, 2] and rows["response_length"].tolist() == [1, 2, 0]
    assert {column.dtype for column in rows.values()} == {np.dtype(np.int32)}
    assert [trajectory.response(rows, i).tolist() for i in range(3)] == [[7], [8, 7], []]
    padded = trajectory.response_tokens(rows | {"policy_step": np.zeros((3, 2), np.int32)})
    np.testing.assert_array_equal(padded, [[7, 9], [8, 7], [9, 9]])


@pytest.mark.parametrize(
    "prompt, response, sentence",
    [
        ([1] * 4, [1], r"prompt 1 has 4 tokens.*task\.prompt_length"),
        ([], [1], r"prompt 1 has 0 tokens.*task\.prompt_length"),
        ([1], [1] * 3, r"response 1 has 3 tokens.*task\.response_length"),
    ],
)
def test_what_does_not_fit_names_the_setting(prompt, response, sentence):
    with pytest.raises(ValueError, match=sentence):
        trajectory.token_columns([[1], prompt], [[1], response], prompt_length=3, response_length=2, pad_id=0)
