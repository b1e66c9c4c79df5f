"""The programs of frozen models on the devices of a role: those with which a task scores, and the sentence encoder.

They are made from configs alone, by the functions with which the models make them when they are loaded.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from tba_jax.models import hardware, kv_cache
from tba_jax.programs import Program, with_beside
from tba_jax.rewards import embeddings, generator, passes, sequence, task_models, unsafe_token
from tba_jax.tasks.interface import ModelUse, Task


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
    """The models with which a task scores in a role. A linear classifier is not among them: it computes on the host.

    Args:
      mesh: see sharding.task_mesh. length: tokens of the run's prompt and response.
      section: of the role's settings, where the devices have other things as well, "" where they have not.

    Raises:
      ValueError: a model cannot be used; names the setting.
    """
    found = Models()
    for use in (use for use in task_models.uses(task, role=role) if use.kind in _MAKERS):
        made = _MAKERS[use.kind](use, mesh, use.length or length)
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
    program = _embedding(path, mesh, length, setting="task.embedding_path")
    made = _of_pass("sentence encoder", dataclasses.replace(program, room={"temporaries": ("task.embedding_path",)}))
    return dataclasses.replace(made, room={"sentence encoder": ("task.embedding_path",)})


def _of_pass(name: str, program: Program) -> Models:
    return Models(held={name: program.arguments[0]}, scoring={f"pass of the {name}": program})


def _embedding(path: str, mesh: Mesh, length: int, *, setting: str) -> Program:
    config = embeddings.read_config(path, setting=setting)
    length = passes.padded_length(length, config.position_limit)
    return embeddings.forward(config, mesh).program(rows=embeddings.rows_of_pass(mesh), length=length)


def _config(use: ModelUse, mesh: Mesh) -> Any:
    """The model's config as its devices compute it."""
    return hardware.on_device(task_models.read_config(use), mesh.devices.flat[0], section=use.setting.rpartition(".")[0])


def _sequence(use: ModelUse, mesh: Mesh, length: int) -> Models:
    config = _config(use, mesh)
    length = passes.padded_length(length, sequence.most_tokens(config))
    return _of_pass(use.name, sequence.forward(config, mesh).program(rows=use.rows * mesh.size, length=length))


def _unsafe_token(use: ModelUse, mesh: Mesh, length: int) -> Models:
    # Which token is the verdict makes no difference to memory, and needs a tokenizer.
    forward = unsafe_token.forward(_config(use, mesh), mesh, token=0)
    return _of_pass(use.name, forward.program(rows=use.rows * mesh.size, length=passes.padded_length(length, length)))


def _embedder(use: ModelUse, mesh: Mesh, length: int) -> Models:
    return _of_pass(use.name, _embedding(use.path, mesh, length, setting=use.setting))


def _generator(use: ModelUse, mesh: Mesh, length: int) -> Models:
    """Its caches are made by the first call, and stay."""
    del length
    if use.generator is None:
        raise ValueError(f"the model {use.name!r} of {use.setting}={use.path!r} replies to texts: its ModelUse needs `generator`")
    made = generator.programs(use.path, mesh, use.generator, setting=use.setting)
    weights, prompts, slots, *_ = made["decode"].arguments
    unstack = made.pop("weights as decoded with")
    (one,) = unstack.arguments
    stacked = generator.weights(_config(use, mesh), mesh)
    rest = kv_cache.others(stacked, one)
    del made["caches"]  # as large as what the others take
    return Models(
        held={use.name: (weights, prompts, slots)},
        loading={f"a parameter of the {use.name}": dataclasses.replace(unstack, beside={use.name: rest})},
        scoring={f"{name} of the {use.name}": program for name, program in made.items()},
    )


_MAKERS: dict[str, Callable[[ModelUse, Mesh, int], Models]] = {
    "sequence": _sequence,
    "unsafe_token": _unsafe_token,
    "generator": _generator,
    "embedder": _embedder,
}
