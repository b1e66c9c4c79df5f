"""Requests that an engine refuses."""

import numpy as np
import pytest

from tests.support.tiny_engine import EOS, make_request, plain_sampling, row_keys


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(prompt=[]), r"query q: 0 tokens of prompt \(with 0 of the response\) do not fit the cache, which holds 1 to 64"),
        (dict(prompt=[3] * 65), r"query q: 65 tokens of prompt .* holds 1 to 64"),
        (dict(prompt=[3] * 60, beginning=[3] * 5), r"query q: 65 tokens of prompt \(with 5 of the response\) .* 1 to 64"),
        (dict(beginning=[3] * 12), "query q: 12 given response tokens leave none of response_length=12"),
        (dict(beginning=[3, EOS]), f"query q: the given response tokens hold {EOS}, which ends a response or is banned"),
        (dict(prompt=[3, 11]), "query q: token 11 is not an id of the vocabulary of 11"),
        (dict(prompt="12"), "query q: token '1' is not an id"),
        (dict(keys=np.zeros((2, 2))), r"query q: keys are float64\[2, 2\], not uint32\[2, 2\]"),
        (dict(limit=np.array([3])), r"query q: limits have shape \[1\], the samples are 2"),
        (dict(limit=np.array([3, 13])), "query q: limits 3 to 13 must be within 1 to 12 response tokens"),
        (dict(limit=np.array([0, 3])), "query q: limits 0 to 3 must be within 1 to 12 response tokens"),
        (dict(limit=np.array([2, 3]), beginning=[3, 4]), "limits 2 to 3 must be within 3 to 12"),
        (dict(keys=row_keys(0), sampling=plain_sampling(0)), "query q: no samples are asked for"),
        (dict(sampling=plain_sampling(3)), r"query q: sampling.temperature has shape \(3,\), the samples are 2"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ",".join(value),
)
def test_requests_that_cannot_be_answered_are_refused(grouped, changes, message):
    with pytest.raises(ValueError, match=message):
        grouped.submit(make_request([3, 4], 2, **changes) if "prompt" not in changes else make_request(samples=2, **changes))


@pytest.mark.parametrize(
    "setting, value, message",
    [
        ("temperature", -1.0, "temperature=-1.0 must be at least 0"),
        ("temperature", np.nan, "temperature=nan must be at least 0"),
        ("temperature", np.inf, "temperature=inf must be"),
        ("top_k", -1, "top_k=-1 must be at least 0"),
        ("top_p", 0.0, r"top_p=0.0 must be within \(0, 1\]"),
        ("top_p", 1.1, r"top_p=1.1\d* must be within \(0, 1\]"),
        ("min_p", 1.0, r"min_p=1.0 must be within \[0, 1\)"),
        ("min_p", -0.5, r"min_p=-0.5 must be within \[0, 1\)"),
    ],
)
def test_sampling_settings_out_of_range_are_refused(grouped, setting, value, message):
    sampling = plain_sampling(3)
    getattr(sampling, setting)[1] = value
    with pytest.raises(ValueError, match=f"query q: {message}"):
        grouped.submit(make_request([3, 4], 3, sampling=sampling))
