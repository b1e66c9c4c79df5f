"""The tasks of reasoning-gym (Stojanovski et al. 2025): generated questions, and a verifier for each of them."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import numpy as np

from tba_jax.tasks import data
from tba_jax.tasks.graders import GradedTask
from tba_jax.tasks.interface import SPLITS, Query

_END = "</answer>"


@dataclasses.dataclass(frozen=True)
class Question(Query):
    """A question of a data set, which workers make again. dataset: its name; parameters: JSON of its settings."""

    dataset: str = ""
    parameters: str = "{}"
    seed: int = 0
    size: int = 0
    index: int = 0
    tagged: bool = True


def grade(query: Query, response: str) -> float:
    """The verifier's score of the answer: the text within the last <answer> </answer>, or the whole response."""
    assert isinstance(query, Question)
    answer: str | None = response.strip()
    if query.tagged:
        _, found, rest = response.rpartition("<answer>")
        answer = rest.partition(_END)[0].strip() if found and _END in rest else None
    if answer is None:
        return 0.0
    made = _dataset(query.dataset, query.parameters, query.seed, query.size)
    entry = made[query.index]
    try:
        return float(made.score_answer(answer, entry))
    except Exception:  # some verifiers read right answers alone
        return 0.0


@functools.cache
def _dataset(name: str, parameters: str, seed: int, size: int) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **{**json.loads(parameters), "seed": seed, "size": size})


class ReasoningGym(GradedTask):
    """Questions of one data set; the two splits share none.

    The characters of a policy without a tokenizer are those of ASCII that can be printed, and the new line.
    """

    score_name = "score"
    reward_parts: tuple[str, ...] = ("score",)
    reward_range = (0.0, 1.0)
    alphabet = "".join(map(chr, range(32, 127))) + "\n"

    def __init__(
        self,
        *,
        dataset: str,
        parameters: str,
        prompt: str,
        tagged: bool,
        train_queries: int,
        heldout_queries: int,
        seed: int,
        time_limit: float,
        retries: int,
        concurrency: int,
    ):
        """Args: parameters: JSON of settings of the data set; prompt: a text with {question} once; tagged: whether the answer
        stands within <answer> </answer>.

        Raises ValueError: there is no such data set, it refuses its settings, or has not as many questions.
        """
        super().__init__(time_limit=time_limit, retries=retries, concurrency=concurrency)
        from reasoning_gym.factory import DATASETS

        named = f"task.reasoning_gym.dataset={dataset!r}"
        if dataset not in DATASETS:
            version = metadata.version("reasoning-gym")
            raise ValueError(f"{named} is not one of reasoning-gym {version}: {', '.join(sorted(DATASETS))}")
        if prompt.count("{question}") != 1:
            raise ValueError(f"task.reasoning_gym.prompt={prompt[:60]!r} must hold {{question}} once")
        size = train_queries + heldout_queries
        try:
            entries = [*_dataset(dataset, parameters, seed, size)]
        except Exception as error:  # of settings, or of files that it fetches
            told = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ValueError(f"{named} with task.reasoning_gym.parameters={parameters} gives no questions: {told}") from error
        questions = [
            Question(
                prompt=prompt.replace("{question}", entry["question"]),
                answer=str(entry["answer"]),
                dataset=dataset,
                parameters=parameters,
                seed=seed,
                size=size,
                index=index,
                tagged=tagged,
            )
            for index, entry in enumerate(entries)
        ]
        heldout = questions[:heldout_queries]
        asked = {question.prompt for question in heldout}
        self._splits = {"heldout": heldout, "train": [each for each in questions[heldout_queries:] if each.prompt not in asked]}
        if not self._splits["train"]:
            raise ValueError(f"{named} has no further questions beside the {len(asked)} of the held-out split")

    grade = staticmethod(grade)

    def queries(self, split: str) -> Sequence[Query]:
        if split not in SPLITS:
            raise ValueError(f"split {split!r} is not one of {SPLITS}")
        return self._splits[split]

    def worked_examples(self, rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        """Questions of the train split with the answers of their data set."""
        chosen = data.in_epochs(self._splits["train"], rng, count)
        return [(each.prompt, f"<answer>{each.answer}{_END}" if each.tagged else each.answer) for each in chosen]
