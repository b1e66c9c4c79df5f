"""A custom task in a file that is its own recipe, and the same file as somebody would write it who wants to be executed."""

from pathlib import Path

# The alphabet holds what a terminal obeys, which random weights write often. It is as long as that of `arithmetic`, so that
# programs of both are shared.
TASK = """
import numpy as np
from tba_jax.tasks.interface import Query, Scores
from tests.support import tiny_run

class Ones:
    score_name, reward_parts, reward_version = "ones", ("share",), 1
    alphabet = "01\\x1b\\x9b\\u202eabcdefghi"

    def __init__(self, count: int = 40):
        self._count = count

    def queries(self, split):
        return [Query(f"{i:06b}") for i in (range(8) if split == "heldout" else range(8, 8 + self._count))]

    def rewards(self, queries, responses, finished):
        reward = np.array([response.count("1") for response in responses], np.float32)
        return Scores(reward, reward[:, None])

    def worked_examples(self, rng, count):
        raise ValueError("none")

def get_config():
    c = tiny_run.config(task__name=f"{__file__}:Ones")
    c.task.custom.count = 40
    return c
"""


def write(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "my_task.py"
    path.write_text(TASK)
    return path


def trap(path: Path) -> Path:
    """Makes the file leave a mark when it is executed. Returns the mark, which does not exist yet."""
    mark = path.with_suffix(".executed")
    path.write_text(f"open({str(mark)!r}, 'w').close()\n{TASK}")
    return mark
