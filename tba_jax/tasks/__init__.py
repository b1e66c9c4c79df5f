"""The tasks by name. Each constructor takes the settings under `config.task.<name>` by keyword."""

from collections.abc import Callable

from tba_jax.tasks.arithmetic import Arithmetic
from tba_jax.tasks.countdown import Countdown
from tba_jax.tasks.guess import Guess
from tba_jax.tasks.interface import Task
from tba_jax.tasks.mathematics import GSM8K, Math
from tba_jax.tasks.open_env import OpenEnv
from tba_jax.tasks.prompts import Prompts
from tba_jax.tasks.reasoning_gym import ReasoningGym
from tba_jax.tasks.red_team import RedTeam
from tba_jax.tasks.story_sentiment import StorySentiment
from tba_jax.tasks.text_arena import TextArena
from tba_jax.tasks.tldr import TLDR

TASKS: dict[str, Callable[..., Task]] = {
    "arithmetic": Arithmetic,
    "countdown": Countdown,
    "guess": Guess,
    "story_sentiment": StorySentiment,
    "gsm8k": GSM8K,
    "math": Math,
    "red_team": RedTeam,
    "prompts": Prompts,
    "tldr": TLDR,
    "reasoning_gym": ReasoningGym,
    "text_arena": TextArena,
    "open_env": OpenEnv,
}

# Tasks that need a package outside of requirements.txt: name -> (the package's module, the extra of pyproject.toml with it).
EXTRAS = {
    "story_sentiment": ("vaderSentiment", "stories"),
    "reasoning_gym": ("reasoning_gym", "reasoning-gym"),
    "text_arena": ("textarena", "text-arena"),
    "open_env": ("openenv", "open-env"),
}
