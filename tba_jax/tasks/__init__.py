"""The tasks by name. Each constructor takes the settings under `config.task.<name>` by keyword."""

from collections.abc import Callable

from tba_jax.tasks import arithmetic, countdown
from tba_jax.tasks.arithmetic import Arithmetic
from tba_jax.tasks.countdown import Countdown
from tba_jax.tasks.interface import Task
from tba_jax.tasks.story_sentiment import StorySentiment

TASKS: dict[str, Callable[..., Task]] = {
    "arithmetic": Arithmetic,
    "countdown": Countdown,
    "story_sentiment": StorySentiment,
}

# The characters that prompts and responses are made of, of tasks that do without a pretrained model.
ALPHABETS: dict[str, str] = {
    "arithmetic": arithmetic.CHARACTERS,
    "countdown": countdown.CHARACTERS,
}
