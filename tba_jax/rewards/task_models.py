"""Rewards of responses, and the frozen models with which a task scores: checks, digests, loading, memory and programs."""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tba_jax import sharding
from tba_jax.models import kv_cache, parameters
from tba_jax.models.hugging_face import load as load_lib
from tba_jax.programs import Program, with_beside
from tba_jax.rewards import language_models, scorers
from tba_jax.tasks.interface import Closable, EncodedQuery, ModelUse, Query, Scores, Task, UsesModels
from tba_jax.text.tokenizers import Tokenizer


def response_texts(
    responses: Sequence[np.ndarray | Sequence[int]], queries: Sequence[EncodedQuery], tokenizer: Tokenizer
) -> list[str]:
    """The texts of B responses, token ids without padding, one response for each of B queries."""
    pairs = zip(queries, responses, strict=True)
    return [tokenizer.decode_continuation(query.prompt, np.asarray(response).tolist()) for query, response in pairs]


def reward_texts(
    texts: Sequence[str],
    finished: np.ndarray,
    queries: Sequence[EncodedQuery],
    *,
    task: Task,
    missing_eos_reward: float | None,
) -> Scores:
    """Scores of B responses. Raises TypeError or ValueError where the task returned anything else.

    Args: finished: bool[B], whether a response ended before the length limit; missing_eos_reward replaces the reward of others,
      unless that is NaN; None: the task's reward is kept. Reward parts are always the task's.
    """
    scores = _checked(task, [query.query for query in queries], texts, finished)
    if missing_eos_reward is None:
        return scores
    penalised = ~finished & ~np.isnan(scores.reward)
    reward = np.where(penalised, np.float32(missing_eos_reward), scores.reward)
    return dataclasses.replace(scores, reward=reward)


def _checked(task: Task, queries: Sequence[Query], texts: Sequence[str], finished: np.ndarray) -> Scores:
    """The task's scores in float32. Their type and shapes are checked, since a custom task may return anything."""
    method, n = f"rewards() of task {type(task).__name__}", len(texts)
    try:
        scores = task.rewards(queries, texts, finished)
    except SystemExit as error:
        raise RuntimeError(f"{method} raised SystemExit: {error}") from error
    if not isinstance(scores, Scores):
        raise TypeError(f"{method} must return Scores, not {type(scores).__name__}")
    found, shapes = (np.shape(scores.reward), np.shape(scores.parts)), ((n,), (n, len(task.reward_parts)))
    if found != shapes:
        raise ValueError(
            f"{method} returned a reward of shape {found[0]} and parts of shape {found[1]}; for {n} responses they must have "
            f"shapes {shapes[0]} and {shapes[1]}"
        )
    return Scores(np.asarray(scores.reward, np.float32), np.asarray(scores.parts, np.float32), str(scores.failure))


def uses(task: Task, *, role: str = "") -> Sequence[ModelUse]:
    """The models of a task; with a role, only the models that this role loads."""
    return [use for use in task.models() if not role or role in use.roles] if isinstance(task, UsesModels) else []


def away(task: Task, *, role: str = "") -> list[ModelUse]:
    """The models whose weights are not on this machine, of hub ids that nobody has fetched. Args, Raises: as `uses`, `check`."""
    found = []
    for use in uses(task, role=role):
        if use.kind != "linear":
            with load_lib.named(use.setting, use.path):
                found += [] if load_lib.holds_weights(use.path) else [use]
    return found


def read_config(use: ModelUse) -> Any:
    """A model's config; None for a linear classifier, which has none. Raises ValueError if the model is of another kind."""
    if use.kind == "linear":
        scorers.LinearScorer(use.path, setting=use.setting)
        return None
    if use.kind == "sequence":
        return scorers.classifier_config(use)
    if use.kind == "embedder":
        return scorers.encoder_config(use.path, setting=use.setting)
    return language_models.read_config(use.path, setting=use.setting, compute_dtype=use.compute_dtype)


def load(use: ModelUse, *, mesh: Mesh, date: str = "", weights: bool = True) -> Any:
    """Loads a model onto a mesh (n, 1, 1); see ModelUse.kind for what it is. Raises ValueError if it cannot be used.

    Args: date: of the run's contract. weights: False checks what loading checks; the model that it returns cannot be called.
    """
    match use.kind:
        case "sequence":
            return scorers.SequenceClassifier(use, mesh, load=weights)
        case "unsafe_token":
            return language_models.UnsafeTokenScorer(use, mesh, date=date, load=weights)
        case "generator":
            return language_models.TextGenerator(use, mesh, date=date, load=weights)
        case "embedder":
            return scorers.ResponseEmbedder(use.path, mesh, setting=use.setting)
        case _:
            return scorers.LinearScorer(use.path, setting=use.setting)


def check(task: Task, *, role: str, fetch: bool = True) -> None:
    """Raises ValueError if a model that the role will load cannot be used: kind, labels, names and shapes of weights, tokenizer,
    prompt template, lengths. Loads no weights.

    Args: fetch: whether the weights of hub ids are fetched; where not, of those that are away the kind is checked alone.
    """
    mine = uses(task, role=role)
    if not mine:
        return
    gone = [] if fetch else away(task, role=role)
    once = functools.cache(functools.partial(load, mesh=sharding.task_mesh(0), weights=False))
    for use in mine:
        config = read_config(use)
        if config is not None and use not in gone:
            with load_lib.named(use.setting, use.path):
                load_lib.check_weights(use.path, config)
            if use.kind == "sequence":  # perhaps one that the task loads later
                once(use)
    if not gone and isinstance(task, UsesModels):
        task.start(once)


def digests(task: Task, *, fetch: bool = True) -> dict[str, str]:
    """setting -> digest of each model that computes rewards, for the contract. Raises ValueError if one cannot be used.

    Args: fetch: whether the weights of hub ids are fetched; where not, models whose weights are away are left out.
    """
    found: dict[str, str] = {}
    gone = [] if fetch else away(task, role="searcher")
    for use in uses(task, role="searcher"):
        if read_config(use) is None:
            found[use.setting] = hashlib.blake2b(Path(use.path).read_bytes(), digest_size=8).hexdigest()
        elif use not in gone:
            found[use.setting] = scorers.digest(use.path)
    return found


@contextlib.contextmanager
def started(task: Task, task_devices: int, *, date: str) -> Iterator[None]:
    """Loads a task's models, if it has any, on the devices of sharding.task_mesh; ends the task's processes at the end. Each
    process that scores enters this once, before its first rewards. Raises ValueError where a model cannot be used.

    Args: date: of the run's contract.
    """
    if isinstance(task, UsesModels):
        task.start(functools.partial(load, mesh=sharding.task_mesh(task_devices), date=date))
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
    padded = scorers.padded_length(length, scorers.most_tokens(config))
    if use.kind == "generator":
        row = 2 * config.layers * length * config.kv_heads * config.head_size * size + 4 * config.vocab
    else:
        row = padded * (4 * config.width + 3 * config.ffn) * size + padded * padded * config.heads * 4
    return parameters.count(scorers.definition(config).specs) * size + use.rows * row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
    """Frozen models on the same devices.

    held: name of a model -> its arrays that stay on the devices, as trees of jax.ShapeDtypeStruct.
    loading: name -> a program that runs before the role has anything but models, with what lies beside it.
    scoring: name -> a program that runs beside all that the role has; `held` is not yet beside it.
    room: see programs.with_beside, of the names of `held`.
    """

    held: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    loading: Mapping[str, Program] = dataclasses.field(default_factory=dict)
    scoring: Mapping[str, Program] = dataclasses.field(default_factory=dict)
    room: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    def __or__(self, other: "Models") -> "Models":
        fields = (field.name for field in dataclasses.fields(self))
        return Models(**{name: {**getattr(self, name), **getattr(other, name)} for name in fields})

    def alone(self) -> dict[str, Program]:
        """Name -> all programs, on devices that have nothing but these models."""
        return {**self.loading, **with_beside(self.scoring, self.held, self.room)}


def of_task(task: Task, mesh: Mesh, *, role: str, length: int, section: str = "") -> Models:
    """The models with which a task scores in a role, but for linear classifiers. Raises ValueError naming the setting of one that
    cannot be used.

    Args: mesh: see sharding.task_mesh. length: tokens of the run's prompt and response. section: of the role's settings, where
      the devices have other things as well, "" where they have not.
    """
    found = Models()
    for use in (use for use in uses(task, role=role) if use.kind != "linear"):
        made = _generator(use, mesh) if use.kind == "generator" else _of_pass(use.name, _pass(use, mesh, use.length or length))
        less = (*([f"{section}.task_devices"] if section else []), use.setting)
        room = {"temporaries": (use.rows_setting or use.setting,), "arguments": less}
        scoring = {name: dataclasses.replace(program, room=room) for name, program in made.scoring.items()}
        # Models are loaded one after the other.
        of_model = dict.fromkeys(("arguments", "temporaries", use.name), less)
        loading = with_beside(made.loading, found.held, {**found.room, **of_model})
        found |= dataclasses.replace(made, scoring=scoring, loading=loading, room={use.name: less})
    return found


def sentence_encoder(path: str, mesh: Mesh, *, length: int) -> Models:
    """The encoder of task.embedding_path. Args: mesh: of the policy; length: tokens of a response."""
    use = ModelUse(name="sentence encoder", setting="task.embedding_path", path=path, rows=0, kind="embedder")
    made = _of_pass(use.name, dataclasses.replace(_pass(use, mesh, length), room={"temporaries": (use.setting,)}))
    return dataclasses.replace(made, room={use.name: (use.setting,)})


def _of_pass(name: str, program: Program) -> Models:
    return Models(held={name: program.arguments[0]}, scoring={f"pass of the {name}": program})


def _pass(use: ModelUse, mesh: Mesh, length: int) -> Program:
    """The pass of a model, over texts of `length` tokens."""
    config, rows = read_config(use), use.rows * mesh.size
    if use.kind == "embedder":
        rows, length = scorers.encoder_rows(mesh), scorers.padded_length(length, config.position_limit)
        return scorers.Pass(config, scorers.embed, mesh).program(rows=rows, length=length)
    config = scorers.on_device(config, mesh, setting=use.setting)
    if use.kind == "sequence":
        length = scorers.padded_length(length, scorers.most_tokens(config))
        return scorers.Pass(config, scorers.score, mesh).program(rows=rows, length=length)
    # Which token is the verdict makes no difference to memory, and needs a tokenizer.
    verdict = functools.partial(language_models.verdict_logprobs, token=0)
    return scorers.Pass(config, verdict, mesh).program(rows=rows, length=scorers.padded_length(length, length))


def _generator(use: ModelUse, mesh: Mesh) -> Models:
    """Its caches are made by the first call, and stay."""
    made = language_models.programs(use, mesh)
    weights, prompts, slots, *_ = made["decode"].arguments
    unstack = made.pop("weights as decoded with")
    (one,) = unstack.arguments
    stacked = language_models.weights(scorers.on_device(read_config(use), mesh, setting=use.setting), mesh)
    rest = kv_cache.others(stacked, one)
    del made["caches"]  # as large as what the others take
    return Models(
        held={use.name: (weights, prompts, slots)},
        loading={f"a parameter of the {use.name}": dataclasses.replace(unstack, beside={use.name: rest})},
        scoring={f"{name} of the {use.name}": program for name, program in made.items()},
    )
