"""The frozen models with which a task scores: their digests for the contract, checks before a run, loading, and memory."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from tba_jax import sharding
from tba_jax.models import parameters
from tba_jax.models.hugging_face import load
from tba_jax.models.hugging_face.architectures import ARCHITECTURES
from tba_jax.rewards import CHECKERS, LOADERS, embeddings, language_model, linear, passes, sequence
from tba_jax.tasks.interface import Closable, ModelUse, Task, UsesModels

# Kind of a model -> the function that reads its config and refuses models of another kind, see sequence.read_config.
_CONFIGS: dict[str, Callable[..., Any]] = {
    "sequence": sequence.read_config,
    "unsafe_token": language_model.read_config,
    "generator": language_model.read_config,
    "embedder": lambda path, *, setting, compute_dtype: embeddings.read_config(path, setting=setting),
}


def uses(task: Task, *, role: str = "") -> Sequence[ModelUse]:
    """The models of a task; with a role, only the models that this role loads."""
    return [use for use in task.models() if not role or role in use.roles] if isinstance(task, UsesModels) else []


def away(task: Task, *, role: str = "") -> list[ModelUse]:
    """The models whose weights are not on this machine, of hub ids that nobody has fetched. Args, Raises: as `uses`, `check`."""
    found = []
    for use in uses(task, role=role):
        if use.kind != "linear":
            with load.named(use.setting, use.path):
                found += [] if load.holds_weights(use.path) else [use]
    return found


def check(task: Task, *, role: str, fetch: bool = True) -> None:
    """Raises ValueError if a model that the role will load cannot be used; loads no weights.

    It checks the model's kind and labels, the names and shapes of its weights, its tokenizer, prompt template and lengths.

    Args: fetch: whether the weights of hub ids are fetched; where not, and where they are away, it checks the kinds of models.
    """
    mine = uses(task, role=role)
    gone = [] if fetch else away(task, role=role)
    for use in mine:
        config = read_config(use)
        if config is None or use in gone:
            continue
        try:
            load.check_weights(use.path, config)
        except ValueError as error:
            raise ValueError(f"{use.setting}: {error}") from error
        if use.kind == "sequence":
            _check_sequence(use)
    if mine and not gone and isinstance(task, UsesModels):
        task.start(sharding.task_mesh(0), CHECKERS)


def _check_sequence(use: ModelUse) -> None:
    labels = CHECKERS.sequence_scorer(use.path, None, setting=use.setting, ends=use.ends).labels
    if use.labels and len(labels) != use.labels:
        what = "one label, as a reward model has" if use.labels == 1 else f"{use.labels} labels"
        raise ValueError(f"{use.setting}={use.path!r} must have {what}; it has {len(labels)}, {', '.join(labels)}")


def digests(task: Task, *, fetch: bool = True) -> dict[str, str]:
    """setting -> digest of each model that computes rewards, for the contract. Raises ValueError if one cannot be used.

    Args: fetch: whether the weights of hub ids are fetched; where not, models whose weights are away are left out.
    """
    found: dict[str, str] = {}
    gone = [] if fetch else away(task, role="searcher")
    for use in uses(task, role="searcher"):
        config = read_config(use)
        if use in gone:
            continue
        found[use.setting] = linear.digest(use.path) if config is None else sequence.digest(use.path)
    return found


def read_config(use: ModelUse) -> Any:
    """A model's config; None for a linear classifier, which has none. Raises ValueError if the model is of another kind."""
    if use.kind == "linear":
        linear.LinearScorer(use.path, setting=use.setting)
        return None
    return _CONFIGS[use.kind](use.path, setting=use.setting, compute_dtype=use.compute_dtype)


@contextlib.contextmanager
def started(task: Task, task_devices: int, *, date: str) -> Iterator[None]:
    """Loads a task's models, if it has any, on the devices of sharding.task_mesh; ends the task's processes at the end.

    Each process that scores enters this once, before its first rewards.

    Args: date: of the run's contract.

    Raises:
      ValueError: a model cannot be used.
    """
    if isinstance(task, UsesModels):
        dated = {name: functools.partial(getattr(LOADERS, name), date=date) for name in ("unsafe_scorer", "generator")}
        task.start(sharding.task_mesh(task_devices), dataclasses.replace(LOADERS, **dated))
    try:
        yield
    finally:
        if isinstance(task, Closable):
            task.close()


def memory(use: ModelUse, *, length: int) -> int:
    """Bytes of a model on each device: all of its weights, and its KV cache or the activations of one forward pass.

    Args: length: tokens of the run's prompt and response, see ModelUse.length.
    """
    config = read_config(use)
    if config is None:
        return 0  # a linear classifier is small and in host memory
    size, length = jnp.dtype(use.compute_dtype).itemsize, use.length or length
    padded = passes.padded_length(length, sequence.most_tokens(config))
    if use.kind == "generator":
        row = 2 * config.layers * length * config.kv_heads * config.head_size * size + 4 * config.vocab
    else:
        row = padded * (4 * config.width + 3 * config.ffn) * size + padded * padded * config.heads * 4
    return parameters.count(ARCHITECTURES[config.architecture].define(config).specs) * size + use.rows * row
