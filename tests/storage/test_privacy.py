"""What other people see of a config."""

from tba_jax.storage.privacy import without_secrets


def test_secrets_are_hidden_wherever_they_stand():
    config = {
        "api_keys": ["abc", "def"],
        "tokens": {"hub": "ghi"},
        "servers": ("https://me:jkl@host/path", "http://plain/a@b"),
        "max_tokens": 12,
        "banned_tokens": (1, 2),
        "reward_token": "",
    }
    assert without_secrets(config) == {
        "api_keys": ["(not told)", "(not told)"],
        "tokens": {"hub": "(not told)"},
        "servers": ["https://(not told)@host/path", "http://plain/a@b"],
        "max_tokens": 12,
        "banned_tokens": [1, 2],
        "reward_token": "",
    }
