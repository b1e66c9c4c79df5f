"""What is measured: models, prompts and the sizes of a step, equal for all systems."""

import dataclasses
from collections.abc import Iterable

LEARNING_RATE = 1e-5
ADAM_BETAS = (0.9, 0.999)
ADAM_EPSILON = 1e-8
CLIP_NORM = 1.0
# The coefficient of the KL term: it decides what is learned, and nothing about the seconds.
BETA = 0.04


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One step's work.

    vocab: V. queries, samples: Q and K. prompt_length: most tokens of a prompt, P; response_length: R.
    ends: probability of end-of-sequence at each token of a response; 0: responses have R tokens.
    reward_seconds: what the reward takes for a batch besides its own time.
    gsm8k: prompts are GSM8K's questions; otherwise each has exactly P tokens.
    """

    about: str
    vocab: int = 4096
    queries: int = 4
    samples: int = 8
    prompt_length: int = 64
    response_length: int = 64
    ends: float = 0.0
    reward_seconds: float = 0.0
    gsm8k: bool = False

    @property
    def rows(self) -> int:
        return self.queries * self.samples


CASES: dict[str, Case] = {
    "fixed": Case(about="prompts of 64 tokens, responses of 64, v = 4096"),
    "fixed_v32000": Case(about="prompts of 64 tokens, responses of 64, v = 32000", vocab=32_000),
    "long_tailed": Case(
        about="GSM8K questions, responses of at most 256 tokens that end at each with probability 1/64, v = 4096",
        prompt_length=192,
        response_length=256,
        ends=1 / 64,
        gsm8k=True,
    ),
    "slow_rewards": Case(about="as fixed, with a reward that takes 2 s a batch", reward_seconds=2.0),
    "long_prompts": Case(
        about="2 prompts of 512 tokens, 16 responses of 64 to each, v = 4096", queries=2, samples=16, prompt_length=512
    ),
}

SYSTEMS = ("trl", "tunix", "tba_interleaved", "tba_async")


def checked(names: list[str], known: Iterable[str], flag: str) -> list[str]:
    """The names, or all that are known for none. Raises ValueError naming the first that is unknown."""
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--{flag}={unknown[0]} is none of {', '.join(known)}")
    return list(dict.fromkeys(names)) or list(known)
