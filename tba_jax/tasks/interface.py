"""What a task is: queries, a reward, and worked examples if it offers a warm start."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from tba_jax import trajectory

if TYPE_CHECKING:  # tasks themselves need no JAX
    from jax.sharding import Mesh

SPLITS = ("train", "heldout")


@dataclasses.dataclass(frozen=True)
class Query:
    """A prompt as text, and what the reward needs to know about it (the gold answer, say; may be empty)."""

    prompt: str
    answer: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedQuery:
    """A query and its prompt's token ids (without padding)."""

    query: Query
    prompt: tuple[int, ...]

    @property
    def name(self) -> str:
        """How messages call the query: its id and how its prompt begins."""
        return f"{trajectory.query_id(self.prompt):016x} ({self.query.prompt[:60]!r})"


@dataclasses.dataclass(frozen=True)
class Scores:
    """reward: float32[n], what the objective sees, NaN where a response could not be scored; parts: float32[n, M], what it was
    made of, in reward_parts' order."""

    reward: np.ndarray
    parts: np.ndarray


class Task(Protocol):
    """One file under tasks/ implements this; its constructor takes the task's own settings by name.

    score_name: what the mean held-out greedy reward is called ("accuracy" for a 0/1 reward).
    reward_parts: names of the M parts. reward_version: counts up when the reward's definition changes.
    A class whose prompts and responses are made of few characters may do without a pretrained model: `alphabet` holds them.
    """

    @property
    def score_name(self) -> str: ...

    @property
    def reward_parts(self) -> tuple[str, ...]: ...

    @property
    def reward_version(self) -> int: ...

    def queries(self, split: str) -> Sequence[Query]:
        """All queries of "train" or "heldout", in a fixed order."""
        ...

    def rewards(self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray) -> Scores:
        """Scores response i, the decoded text without special tokens, for query i; finished: bool[n], it ended by itself.

        Several threads may call it at a time, beside the decoder (searchers.reward_batches).
        """
        ...

    def worked_examples(self, rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        """(prompt, response) pairs for a supervised warm start. Raises ValueError where the task has none."""
        ...


@runtime_checkable
class Closable(Protocol):
    """What a task may offer besides: an end to processes or connections of its own."""

    def close(self) -> None:
        """Called once, when its role ends in good order."""
        ...


@runtime_checkable
class HasFinalAnswer(Protocol):
    """What a task may offer besides: the answer that a response comes to, by which responses are put to the vote."""

    def final_answer(self, response: str) -> str:
        """The answer of a response in a form that is equal for equal answers, as far as the task can tell; "" if it has none."""
        ...


class SequenceScorer(Protocol):
    """A sequence classifier or a reward model on the mesh of a task. Several threads may call it at a time."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the columns of `scores`."""
        ...

    def scores(self, texts: Sequence[str], *, ended: Sequence[bool] | np.ndarray | None = None) -> np.ndarray:
        """float32[n, labels]: the logits of n texts; of a reward model, which has one label, the rewards.

        Args: ended: which texts the end-of-sequence token follows; None: none of them.

        Raises:
          FloatingPointError: a logit is not finite; names the text.
        """
        ...

    def label(self, name: str) -> int:
        """The column of a label. Raises ValueError where there is none of that name; names those there are."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Makers:
    """What loads the models of tasks onto a mesh: tba_jax.rewards has them, tasks are below it.

    sequence_scorer(folder or hub id, mesh, *, setting, compute_dtype, batch_rows, ends): see scorers.sequence.SequenceScorer.
    unsafe_scorer(folder or hub id, mesh, *, ...): see scorers.unsafe_token.UnsafeTokenScorer.
    generator(folder or hub id, mesh, *, ...): see scorers.generator.TextGenerator.
    embedder(folder or hub id, mesh, *, setting): see decoding.embeddings.ResponseEmbedder.
    linear_scorer(file, *, setting): see scorers.linear.LinearScorer.
    """

    sequence_scorer: Callable[..., SequenceScorer]
    unsafe_scorer: Callable[..., Callable[[Sequence[str], Sequence[str]], np.ndarray]]
    generator: Callable[..., Callable[[Sequence[str], int], list[str]]]
    embedder: Callable[..., Callable[[Sequence[str]], np.ndarray]]
    linear_scorer: Callable[..., Callable[[Sequence[str]], np.ndarray]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelUse:
    """A model that a task scores with: what the contract and --dry_run say of it, without loading it.

    name: how people call it; setting: the one that holds `path`, its folder or hub id; kind: "sequence", "unsafe_token",
    "generator", "embedder" or "linear" (a file), what Makers loads it by; roles: those that load it. What searchers load defines
    the reward, and is part of the contract.
    labels: so many a sequence classifier must have, 0: any number; ends: whether it is told which texts ended;
    compute_dtype: "float32" or "bfloat16"; rows: texts of one pass on a device; length: tokens of the longest text, 0: prompt and
    response of the run.
    """

    name: str
    setting: str
    path: str
    rows: int
    compute_dtype: str = "float32"
    length: int = 0
    kind: str = "sequence"
    labels: int = 0
    ends: bool = False
    roles: tuple[str, ...] = ("searcher", "evaluator")


@runtime_checkable
class Shortens(Protocol):
    """What a task may offer besides: shorter prompts in the place of those that are longer than task.prompt_length."""

    def shortened(self, query: Query, fits: Callable[[str], bool]) -> Query | None:
        """The query with as much of its prompt as fits; None where none does."""
        ...


@runtime_checkable
class UsesModels(Protocol):
    """What a task may offer besides: models that it scores with."""

    def models(self) -> Sequence[ModelUse]:
        """All of them. Known before `start`."""
        ...

    def start(self, mesh: "Mesh", makers: Makers) -> None:
        """Loads the models that rewards need onto a mesh; called once in each process that scores, before the first rewards.

        Called before that with makers that check what they are given and load nothing: it must not ask the models yet.
        """
        ...


@runtime_checkable
class HasMeasures(Protocol):
    """What a task may offer besides: further figures of an evaluation."""

    def measures(
        self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray, rewards: np.ndarray
    ) -> dict[str, float]:
        """Figures of all greedy responses of an evaluation, and once more of all sampled ones; reports call them greedy_NAME and
        sampled_NAME.

        Args: as of `rewards`; several responses to a query may be among them. rewards: float32[n], NaN where there is none.
        """
        ...
