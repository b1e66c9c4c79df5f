"""The models that a task scores with: told to the contract, checked before anything runs, and loaded onto their mesh."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from tba_jax import sharding
from tba_jax.models import parameters
from tba_jax.models.config import EncoderConfig
from tba_jax.models.hugging_face import load
from tba_jax.models.hugging_face.architectures import ARCHITECTURES
from tba_jax.rewards import CHECKS, MAKERS, embeddings, language_model, linear, passes, sequence
from tba_jax.tasks.interface import ModelUse, Task, UsesModels

_BYTES = {"float32": 4, "bfloat16": 2}
# Kind of a model -> what reads its config (as sequence.read_config), and refuses another kind of model.
_CONFIGS: dict[str, Callable[..., Any]] = {
    "sequence": sequence.read_config,
    "unsafe_token": language_model.read_config,
    "generator": language_model.read_config,
    "embedder": lambda path, *, setting, compute_dtype: embeddings.read_config(path, setting=setting),
}


def uses(task: Task, *, role: str = "") -> Sequence[ModelUse]:
    """Models of a task; role: that this role loads, "" for all."""
    return [use for use in task.models() if not role or role in use.roles] if isinstance(task, UsesModels) else []


def check(task: Task, *, role: str) -> None:
    """Raises ValueError where a model that a role will load cannot be used: its kind, labels, names and shapes of weights, or a
    tokenizer, template or length that does not go with it. Loads no weights."""
    mine = uses(task, role=role)
    for use in mine:
        config = _read_config(use)
        if config is None:
            continue
        try:
            load.check_weights(use.path, config)
        except ValueError as error:
            raise ValueError(f"{use.setting}: {error}") from error
        if use.kind == "sequence":
            _check_sequence(use)
    if mine and isinstance(task, UsesModels):
        task.start(sharding.task_mesh(0), CHECKS)


def _check_sequence(use: ModelUse) -> None:
    labels = CHECKS.sequence_scorer(use.path, None, setting=use.setting, ends=use.ends).labels
    if use.labels and len(labels) != use.labels:
        what = "one label, as a reward model has" if use.labels == 1 else f"{use.labels} labels"
        raise ValueError(f"{use.setting}={use.path!r} must have {what}; it has {len(labels)}, {', '.join(labels)}")


def digests(task: Task) -> dict[str, str]:
    """What the contract says of the models that rewards come from: setting -> digest. Raises: as read_config."""
    found = {}
    for use in uses(task, role="searcher"):
        config = _read_config(use)
        found[use.setting] = linear.digest(use.path) if config is None else sequence.digest(use.path)
    return found


def _read_config(use: ModelUse) -> Any:
    """A model's shape; None of a linear classifier, which is a file and was read. Raises ValueError where it cannot be used for
    what it is to do."""
    if use.kind == "linear":
        linear.LinearScorer(use.path, setting=use.setting)
        return None
    return _CONFIGS[use.kind](use.path, setting=use.setting, compute_dtype=use.compute_dtype)


def start(task: Task, mesh: Mesh) -> None:
    """Loads a task's models, if it has any. Once in a process that scores, before its first rewards."""
    if isinstance(task, UsesModels):
        task.start(mesh, MAKERS)


def memory(use: ModelUse, *, length: int) -> int:
    """Bytes that a model takes on each device, whole, with one pass or with the caches of its slots.

    Args: length: tokens of prompt and response of the run, see ModelUse.length.
    """
    shape = _read_config(use)
    if shape is None:
        return 0  # in host memory, and small
    size, length = _BYTES[use.compute_dtype], use.length or length
    padded = passes.padded_length(length, shape.position_limit if isinstance(shape, EncoderConfig) else shape.max_positions)
    if use.kind == "generator":
        row = 2 * shape.layers * length * shape.kv_heads * shape.head_size * size + 4 * shape.vocab
    else:
        row = padded * (4 * shape.width + 3 * shape.ffn) * size + padded * padded * shape.heads * 4
    return parameters.count(ARCHITECTURES[shape.architecture].define(shape).specs) * size + use.rows * row
