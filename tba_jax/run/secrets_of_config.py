"""Settings without what is secret in them, for places that other people see: trackers, and reports."""

import re
from typing import Any

HIDDEN = "(not told)"
# Parts of names of settings whose texts are hidden.
_NAME = re.compile(r"token|secret|password|credential|api_?key", re.IGNORECASE)
# User and password in an address, such as https://user:password@host.
_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def without_secrets(tree: Any, *, name: str = "") -> Any:
    """The same settings, where texts under a name that says so, and users of addresses, are HIDDEN.

    Args: tree: of dictionaries, lists and plain values; name: of the setting that `tree` is the value of.
    """
    if isinstance(tree, dict):
        return {
            key: without_secrets(value, name=f"{name}.{key}" if _NAME.search(name) else str(key)) for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [without_secrets(each, name=name) for each in tree]
    if isinstance(tree, str) and tree:
        return HIDDEN if _NAME.search(name) else _USER.sub(HIDDEN, tree)
    return tree
