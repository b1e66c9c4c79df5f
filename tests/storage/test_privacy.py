"""What other people see of a config."""

from tba_jax.telemetry.metrics import without_secrets


def test_secrets_are_hidden_wherever_they_stand():
    servers, keys = ("https://me:jkl@host/path", "http://plain/a@b"), ["abc", "def"]
    config = {"api_keys": keys, "tokens": {"hub": "ghi"}, "servers": servers, "banned_tokens": (1, 2), "reward_token": ""}
    assert without_secrets(config) == {
        "api_keys": ["(not told)", "(not told)"],
        "tokens": {"hub": "(not told)"},
        "servers": ["https://(not told)@host/path", "http://plain/a@b"],
        "banned_tokens": [1, 2],
        "reward_token": "",
    }
