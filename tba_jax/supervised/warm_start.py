"""The warm start of a run: random weights are trained on worked examples of the task, which makes a policy to begin with."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from tba_jax import sharding, trajectory
from tba_jax.learner import optimizer as optimizer_lib
from tba_jax.models.config import DecoderConfig
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.programs import Program, shaped
from tba_jax.supervised import examples, objectives
from tba_jax.tasks.interface import Task
from tba_jax.text.prompts import encode_pair
from tba_jax.text.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """model and mesh of the policy, and the settings of warm_start. learning_rate: peak of a linear schedule."""

    model: DecoderConfig
    mesh: Mesh
    seed: int
    prompt_length: int
    response_length: int
    steps: int
    batch_size: int
    learning_rate: float
    warmup_steps: int
    report_every_steps: int


def encode_examples(
    pairs: list[tuple[str, str]], tokenizer: Tokenizer, *, prompt_length: int, response_length: int
) -> objectives.Batch:
    """Tokenises (prompt, response) pairs; end of sequence is added to the responses.

    Raises:
      ValueError: a prompt or a response with its end does not fit; names the setting.
    """
    encoded = [tuple(np.array(ids, np.int32) for ids in encode_pair(*pair, tokenizer)) for pair in pairs]
    lengths = dict(prompt_length=prompt_length, response_length=response_length)
    return examples.make_batch(encoded, rows=len(pairs), **lengths, pad_id=tokenizer.pad_id)


def _jitted(s: Settings) -> tuple[sharding.OnMesh, sharding.OnMesh, optimizer_lib.TrainState]:
    """The programs () -> state and (state, Examples) -> (state, measurements), and the state as jax.ShapeDtypeStruct."""
    schedule = optimizer_lib.linear(peak=s.learning_rate, steps=s.steps, warmup_steps=s.warmup_steps)
    optimizer = optimizer_lib.adamw(schedule, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.01, clip_norm=1.0)
    optimizers, policy = {"policy": optimizer}, Policy(model=s.model)
    sizes = dict(R=s.response_length, micro_batch_rows=s.batch_size, logit_bytes=1 << 30)
    config = objectives.StepConfig(objective=objectives.likelihood, **sizes, remat="none")
    update, shapes = objectives.jitted(policy, s.mesh, optimizers=optimizers, config=config)

    def init() -> optimizer_lib.TrainState:
        return optimizer_lib.init_state(policy, policy.base.init(jax.random.key(s.seed)), optimizers)

    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    return sharding.on_mesh(s.mesh, jax.jit(init, out_shardings=shardings)), update, shapes


def programs(s: Settings) -> dict[str, Program]:
    """Name -> the programs of `warm_start`. Nothing else is on the devices then."""
    init, update, state = _jitted(s)
    lengths = dict(prompt_length=s.prompt_length, response_length=s.response_length, pad_id=0)
    columns = trajectory.token_columns([[0]] * s.batch_size, [[]] * s.batch_size, **lengths)
    batch = shaped(objectives.Examples(**columns), sharding.rows_sharding(s.mesh))
    room = {"temporaries": ("warm_start.batch_size",), "arguments": ("learner.mesh.fsdp",)}
    return {
        "init of the warm start": Program(function=init, arguments=(), room=room),
        "update of the warm start": Program(function=update, arguments=(state, batch), room=room),
    }


def warm_start(task: Task, tokenizer: Tokenizer, s: Settings, *, report: Callable[[int, float], None]) -> Params:
    """Trains random parameters on fresh worked examples of a task and returns them.

    Args: report: called as report(step, mean loss since the last report, nats per response token).
    """
    init, update, _ = _jitted(s)
    state, rng, losses = init(), np.random.default_rng([s.seed, 1]), list[jax.Array]()
    for step in range(1, s.steps + 1):
        pairs = task.worked_examples(rng, s.batch_size)
        batch = encode_examples(pairs, tokenizer, prompt_length=s.prompt_length, response_length=s.response_length)
        state, measurements = update(state, sharding.put_rows(s.mesh, batch))
        losses.append(measurements["loss"])
        if step % s.report_every_steps == 0 or step == s.steps:
            report(step, float(np.mean(losses)))
            losses.clear()
    return state.params["policy"]
