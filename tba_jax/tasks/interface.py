"""The interface of tasks: queries, rewards and worked examples, optional methods, and the models with which a task scores; and
custom tasks, which are classes in a user's Python file, named FILE.py:CLASS."""

import contextlib
import dataclasses
import inspect
import logging
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from tba_jax import trajectory
from tba_jax.run import user_code

log = logging.getLogger(__name__)

SPLITS = ("train", "heldout")


@dataclasses.dataclass(frozen=True)
class Query:
    """A prompt as text, and the text that the reward compares with, such as a gold answer ("" if it needs none)."""

    prompt: str
    answer: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedQuery:
    """A query and the token ids of its prompt, without padding."""

    query: Query
    prompt: tuple[int, ...]

    @property
    def name(self) -> str:
        """The query's id and the beginning of its prompt, for messages."""
        return f"{trajectory.query_id(self.prompt):016x} ({self.query.prompt[:60]!r})"


@dataclasses.dataclass(frozen=True)
class Scores:
    """reward: float32[n], NaN for a response that could not be scored; parts: float32[n, M], the values from which the task made
    the reward, in the order of reward_parts; failure: why the first such response could not be scored, "" if unknown."""

    reward: np.ndarray
    parts: np.ndarray
    failure: str = ""

    @classmethod
    def of_one(cls, reward: np.ndarray, failure: str = "") -> "Scores":
        """Scores whose only part is the reward. Args: reward: [n], numbers or bool."""
        reward = np.asarray(reward, np.float32)
        return cls(reward=reward, parts=reward[:, None], failure=failure)


class Task(Protocol):
    """A task. Its constructor takes the task's own settings by name.

    score_name: name of the mean reward of greedy responses to held-out queries ("accuracy" for a reward of 0 or 1).
    reward_parts: names of the M parts. reward_version: a number to increase when the definition of the reward changes.
    Optional: `alphabet`, all characters of prompts and responses (no pretrained model is needed then); `private_files`, whether
    only the owner may read files of runs; `reward_range`, (lowest, highest) reward, perhaps infinite, which some settings limit.
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
        """Scores of response i, a text without special tokens, to query i. finished: bool[n], ended before the length limit.

        Several threads may call this at once, beside the decoder (searchers.reward_batches).
        """
        ...

    def worked_examples(self, rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        """(prompt, response) pairs for a supervised warm start. Raises ValueError if the task has none."""
        ...


class SplitTask:
    """Base of the package's tasks, whose constructors make all queries. The attributes suit a reward of 1 for a right answer."""

    score_name = "accuracy"
    reward_parts: tuple[str, ...] = ("correct",)
    reward_range = (0.0, 1.0)
    reward_version = 1
    _splits: dict[str, list[Query]]

    def queries(self, split: str) -> Sequence[Query]:
        """All queries of "train" or "heldout", in a fixed order. Raises ValueError if there is no such split."""
        if split not in SPLITS:
            raise ValueError(f"split {split!r} is not one of {SPLITS}")
        return self._splits[split]


def private_files(task: object) -> bool:
    """Whether only their owner may read the files of runs of a task, or of a class of tasks."""
    return bool(getattr(task, "private_files", False))


def reward_range(task: object) -> tuple[float, float] | None:
    """The lowest and the highest reward of a task, None if it states none. Raises ValueError unless these are two numbers."""
    found = getattr(task, "reward_range", None)
    match found:
        case None:
            return None
        case (numbers.Real() as lowest, numbers.Real() as highest) if lowest <= highest:  # NaN is not
            return float(lowest), float(highest)
    raise ValueError(
        f"reward_range={found!r} of the task ({type(task).__name__}) must be two numbers, the lowest and the highest reward"
    )


# What a task may offer besides; a role asks with isinstance.


@runtime_checkable
class CountsGrades(Protocol):
    @property
    def grades(self) -> int:
        """How many responses have been graded so far, by which a searcher sees that slow rewards come."""
        ...


@runtime_checkable
class Closable(Protocol):
    def close(self) -> None:
        """Ends the task's processes or connections. A role that ends without an error calls it once."""
        ...


@runtime_checkable
class HasFinalAnswer(Protocol):
    def final_answer(self, response: str) -> str:
        """The response's answer in a form that equal answers share, for majority votes; "" if it has none."""
        ...


@runtime_checkable
class Shortens(Protocol):
    def shortened(self, query: Query, fits: Callable[[str], bool]) -> Query | None:
        """A query whose prompt exceeds task.prompt_length, with as much of its prompt as fits; None if no part of it does."""
        ...


@runtime_checkable
class HasMeasures(Protocol):
    def measures(
        self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray, rewards: np.ndarray
    ) -> dict[str, float | np.ndarray]:
        """Name -> measurement of all n responses of an evaluation, first the greedy ones, then the sampled ones: one number, or
        float[n], of which reports have the mean and its standard error over what is not NaN. Args: see Task.rewards."""
        ...


class SequenceScorer(Protocol):
    """A loaded sequence classifier or reward model. labels: names of the columns of `scores`."""

    labels: tuple[str, ...]

    def scores(self, texts: Sequence[str], *, ended: Sequence[bool] | np.ndarray | None = None) -> np.ndarray:
        """float32[n, labels]: the logits of n texts. Raises FloatingPointError naming the text if a logit is not finite.

        Args: ended: the texts after which the end-of-sequence token is appended; None: no text.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratorSettings:
    """How a frozen language model replies to texts: with `samples` replies to each, drawn at temperature (0: greedy) and top_p.

    template: holds {attack} once; "": the tokenizer's chat template, with system_prompt. prompt_length, reply_length: most tokens
    of a prompt, template included, whose text is cut at its end, and of a reply, end of sequence included.
    """

    template: str
    system_prompt: str
    samples: int
    temperature: float
    top_p: float
    prompt_length: int
    reply_length: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnsafeTokenSettings:
    """How a causal language model judges exchanges of an attack and a reply: by the verdict `token`, such as "unsafe".

    template: holds {attack} and {reply} once each; "": the tokenizer's chat template, with messages of user and assistant.
    ending: the text between template and verdict. length: most tokens of all this; a longer reply is cut at its end.
    """

    token: str
    template: str
    ending: str
    length: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelUse:
    """A model with which a task scores. Several threads may call a loaded model at once.

    name: its name in reports; setting: the setting that holds `path`, its folder or hub id (a file if kind is "linear").
    kind: what it is, and what the task gets when it is loaded:
      "sequence": a SequenceScorer;
      "unsafe_token": (attacks, replies) -> float32[n], nats: log-probability of the verdict `judge.token`;
      "generator": (texts, seed) -> list[str], `generator.samples` replies to each text;
      "embedder": texts -> float32[n, E], vectors of length 1;
      "linear": texts -> float32[n], nats: log P(label | text).
    roles: the roles that load it. Models that searchers load define the reward and are part of the contract.
    labels: the number of labels that a sequence classifier must have, 0 for any; ends: whether it is told which texts ended.
    compute_dtype: "float32" or "bfloat16". length: tokens of the longest text, 0 for the run's prompt and response.
    rows: texts of one pass on a device, or replies decoded at the same time; rows_setting: its setting, "" if there is none.
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
    rows_setting: str = ""
    generator: GeneratorSettings | None = None
    judge: UnsafeTokenSettings | None = None
    roles: tuple[str, ...] = ("searcher", "evaluator")

    def __post_init__(self) -> None:
        if (self.kind == "generator" and self.generator is None) or (self.kind == "unsafe_token" and self.judge is None):
            raise ValueError(
                f"the model {self.name!r} of {self.setting}={self.path!r} is of kind {self.kind!r}: its ModelUse needs "
                "`generator`, or `judge`"
            )


@runtime_checkable
class UsesModels(Protocol):
    def models(self) -> Sequence[ModelUse]:
        """All models with which the task scores. The list is known before `start`."""
        ...

    def start(self, load: Callable[[ModelUse], Any]) -> None:
        """Loads the models that rewards need. Each process that scores calls this once, before the first rewards.

        Args: load: loads a model, or only checks it, so `start` must not call the models. The task may keep it for other models.
        """
        ...


_NEEDED = ("score_name", "reward_parts", "reward_version", "queries", "rewards", "worked_examples")


def is_custom(name: str) -> bool:
    """Whether a task's name has the form FILE.py:CLASS."""
    return ".py:" in name


def short_name(name: str) -> str:
    """The name of a task, without folders, which may differ between the machines of a run."""
    return Path(name).name if is_custom(name) else name


def custom_class(name: str) -> Callable[..., Task]:
    """The class of FILE.py:CLASS. Raises ValueError if the file cannot be imported, or has no such class that is a task."""
    file, _, attribute = name.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"task.name={name!r}: there is no file {file}")
    module = user_code.load(path, f"tba_jax_task_{path.stem}", called=f"task.name={name!r}")
    found = vars(module).get(attribute)
    if not inspect.isclass(found):
        own = sorted(key for key, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__)
        raise ValueError(f"task.name={name!r}: {file} has no class {attribute!r}; it has {', '.join(own) or 'none'}")
    abstract = found.__dict__.get("__abstractmethods__", frozenset())
    if missing := [needed for needed in _NEEDED if needed in abstract or not hasattr(found, needed)]:
        raise ValueError(f"task.name={name!r}: {attribute} lacks {', '.join(missing)} (tba_jax/tasks/interface.py, Task)")
    return cast(Callable[..., Task], found)


def make_custom(factory: Callable[..., Task], settings: Mapping[str, Any]) -> Task:
    """The task with the settings under task.custom. Raises ValueError if its constructor lacks one, or takes no such setting."""
    signature = inspect.signature(factory)
    try:
        signature.bind(**settings)
    except TypeError as error:
        raise ValueError(f"task.custom: the task's constructor takes {signature}: {error}") from error
    return factory(**settings)


@contextlib.contextmanager
def named_errors(name: str, what: str) -> Iterator[None]:
    """Turns any error or exit of a custom task but a ValueError into a ValueError of one sentence, and logs the traceback.

    Args: what: the code that runs, such as "its constructor".
    """
    try:
        yield
    except ValueError:
        raise
    except (Exception, SystemExit) as error:
        log.info("%s of task.name=%r", what, name, exc_info=True)
        raise ValueError(f"task.name={name!r}: {what} raised {user_code.told(error, Path(name.rpartition(':')[0]))}") from error
