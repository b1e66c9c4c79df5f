"""Grants: a trainer that waits for rows and has no newer weights lets those searchers go on that wait for a newer snapshot.

`grant.json` holds {"number", "step"}: how many grants the run has had, and the trainer's step at the last. A searcher takes a
grant that is given while it waits as it would take a newer snapshot (see roles/searcher/stream.py).
"""

import json

from tba_jax.storage import layout


def number(run: layout.RunDir) -> int:
    """How many grants the run has had; -1 where the file is torn, which is another number than whoever waits has seen.

    Raises: OSError where the storage refuses, ValueError where the file holds something else.
    """
    try:
        return int(json.loads(layout.read_file(run.grant))["number"])
    except FileNotFoundError:
        return 0
    except (UnicodeDecodeError, json.JSONDecodeError):
        return -1
    except (KeyError, TypeError) as error:
        raise ValueError(f"{run.grant} holds no number of grants") from error


def give(run: layout.RunDir, *, step: int) -> None:
    """Gives one more grant; only the trainer that holds the lease calls this."""
    layout.write_json(run.grant, {"number": number(run) + 1, "step": step})
