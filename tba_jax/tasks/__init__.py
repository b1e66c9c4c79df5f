"""The tasks by name. Each constructor takes the settings under `config.task.<name>` by keyword."""

from collections.abc import Callable

from tba_jax.tasks.arithmetic import Arithmetic
from tba_jax.tasks.interface import Task
from tba_jax.tasks.story_sentiment import StorySentiment

TASKS: dict[str, Callable[..., Task]] = {
    "arithmetic": Arithmetic,
    "story_sentiment": StorySentiment,
}
