"""Rows of TL;DR."""

import json
from collections.abc import Iterable
from pathlib import Path

ROWS = [
    {"query": f"SUBREDDIT: r/cats\n\nTITLE: Cat {i}\n\nPOST: My cat sleeps {i} hours.\n\nTL;DR:", "summary": f" Cat sleeps {i}h."}
    for i in range(5)
]


def write_rows(path: Path, rows: Iterable[dict]) -> str:
    """A file of a JSON object a line. Returns its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
