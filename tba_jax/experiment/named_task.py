"""The task that a config names, and the queries of each of its splits."""

import contextlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from tba_jax.rewards import task_models
from tba_jax.roles import evaluator
from tba_jax.schemas import NO_CHARACTER, holds_surrogate
from tba_jax.tasks import EXTRAS, TASKS, custom_task
from tba_jax.tasks.interface import SPLITS, Query, Shortens, Task, private_files, reward_range
from tba_jax.text import prompts
from tba_jax.text.tokenizers import Tokenizer


def task_class(name: str) -> Callable[..., Task]:
    """The class of a task that `name`, task.name, names: of TASKS, or of the user's file.

    Raises:
      ValueError: the task's package is an extra that is not installed, or the file has no such class.
    """
    if custom_task.is_named(name):
        return custom_task.load(name)
    if name in EXTRAS:
        package, extra = EXTRAS[name]
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"task.name={name!r} needs the package {package}, which is not installed; it is the extra `{extra}`: "
                f"`make {extra}` installs it, and so does pip install -e '.[{extra}]'"
            )
    return TASKS[name]


def alphabet(name: str) -> str:
    """All characters of the prompts and responses of a task, "" if it needs a pretrained model."""
    found: str = getattr(task_class(name), "alphabet", "")
    return found


def keeps_private(name: str) -> bool:
    """Whether files of runs of a task are for their owner alone to read. Raises ValueError where its file has no such task."""
    found = custom_task.load(name) if custom_task.is_named(name) else TASKS.get(name)
    return private_files(found)


def make(config: Any) -> tuple[Task, dict[str, Any]]:
    """The task that config.task names, and its settings.

    Raises:
      ValueError: the task refuses its settings, or it does not go with the rest of the config.
    """
    task, settings = _construct(config.task)
    if task.score_name in evaluator.REPORTED:
        raise ValueError(
            f"the task's score_name={task.score_name!r} is that of another figure of evaluation reports; call it otherwise"
        )
    given = reward_range(task)
    if given is not None and config.searchers.prompt_selection == "posterior" and not 0 <= given[0] <= given[1] <= 1:
        raise ValueError(
            f"searchers.prompt_selection=posterior counts successes, so every reward must be within [0, 1], and those of "
            f"task.name={config.task.name!r} are within [{given[0]:g}, {given[1]:g}]: scale them, or set "
            "searchers.prompt_selection=uniform"
        )
    for section in ("searchers", "evaluation"):
        devices = config[section].task_devices
        if devices and not task_models.uses(task):
            raise ValueError(
                f"{section}.task_devices={devices} would not be used: task.name={config.task.name!r} scores without models"
            )
    return task, settings


def _construct(section: Any) -> tuple[Task, dict[str, Any]]:
    name, custom = section.name, section.custom.to_dict()
    if custom_task.is_named(name):
        with custom_task.named_errors(name, "its constructor"):
            return custom_task.make(task_class(name), custom, section="task.custom"), custom
    if custom:
        raise ValueError(
            f"task.custom.{min(custom)} is a setting of a custom task, FILE.py:CLASS, but task.name={name!r} is not one"
        )
    settings = section[name].to_dict() if name in section else {}
    return task_class(name)(**settings), settings


def encode_queries(config: Any, task: Task, tokenizer: Tokenizer) -> tuple[dict[str, prompts.EncodedQueries], dict[str, int]]:
    """The queries that fit task.prompt_length, and the number of queries that were left out as too long, both by split.

    Raises:
      ValueError: the task gives no queries or something else, prompts are too long, or an update needs more queries.
    """
    queries, skipped = dict[str, prompts.EncodedQueries](), dict[str, int]()
    for split in SPLITS:
        queries[split], skipped[split] = prompts.encode(
            _queries(config.task.name, task, split),
            tokenizer,
            chat_template=config.task.chat_template,
            system_prompt=config.task.system_prompt,
            limit=config.task.prompt_length,
            long_prompts=config.task.long_prompts,
            split=split,
            shorten=task.shortened if isinstance(task, Shortens) else None,
        )
    if config.learner.queries > len(queries["train"]):
        raise ValueError(
            f"learner.queries={config.learner.queries} is more than the {len(queries['train'])} train queries of the task"
        )
    return queries, skipped


def _queries(name: str, task: Task, split: str) -> Sequence[Query]:
    """What the task gives for a split. Raises ValueError where that is nothing, or anything but queries."""
    with custom_task.named_errors(name, f"queries({split!r})") if custom_task.is_named(name) else contextlib.nullcontext():
        queries = list(task.queries(split))
    if not queries:
        raise ValueError(f"task.name={name!r}: queries({split!r}) gave none")
    for query in queries:
        if not (isinstance(query, Query) and isinstance(query.prompt, str) and isinstance(query.answer, str) and query.prompt):
            raise ValueError(
                f"task.name={name!r}: queries({split!r}) must give Query(prompt, answer), texts, the first not empty; it gave "
                f"{repr(query)[:100]}"
            )
        if holds_surrogate((query.prompt, query.answer)):
            raise ValueError(f"task.name={name!r}: queries({split!r}) gave {repr(query)[:200]}, which {NO_CHARACTER}")
    return queries
