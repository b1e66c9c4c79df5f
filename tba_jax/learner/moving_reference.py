"""References that move with the policy (TBA′, TBA paper, method): reset to it every ρ updates, or its moving average.

Rows carry the log-probs of the run's initial reference, so the learner scores a batch again with the reference of its step.
"""

import dataclasses
import functools

import jax
from jax.sharding import Mesh

from tba_jax import sharding as sharding_lib
from tba_jax.learner.state import Batch
from tba_jax.learner.update import LearnerConfig, scored
from tba_jax.models import parameters
from tba_jax.models.parameters import Params
from tba_jax.packing import row_packing
from tba_jax.packing.row_packing import Packed
from tba_jax.programs import Program, shaped


def ref_logprobs(reference: Params, frozen: Params, batch: Batch, packed: Packed, *, config: LearnerConfig) -> jax.Array:
    """float32[B, R], nats at the scoring temperature, 0 where masked. reference: like what is trained of the policy."""
    policy = config.policy.for_training(reference, frozen)
    return row_packing.summed(lambda micro, _: scored(policy, None, micro, batch, config=config)[0][0], packed)


def moved(reference: Params, params: Params, *, decay: float) -> Params:
    """ref ← α·ref + (1 − α)·θ, α = decay."""
    return jax.tree.map(lambda ref, param: decay * ref + (1 - decay) * param, reference, params)


class MovingReference:
    """The moving reference of a run: weights like those that are trained, sharded as they are.

    A moving average is float32: its small steps would be lost in fewer bits. A reference that is reset to the policy is only
    computed with, and rests in the model's compute dtype, to which every use would cast it: its log-probs are the same.
    """

    def __init__(self, config: LearnerConfig, mesh: Mesh, *, every_steps: int, decay: float, offload: bool):
        """Args: every_steps: updates between two moves; decay: see `moved`, 0: reset; offload: it rests in host memory between
        uses."""
        policy = config.policy
        self._every_steps, self._resets = every_steps, decay == 0
        self._in_use = policy.trained_shardings(mesh)
        in_host_memory = jax.tree.map(lambda sharding: sharding.with_memory_kind(sharding_lib.PINNED_HOST), self._in_use)
        self._at_rest = in_host_memory if offload else self._in_use
        dtype = policy.model.compute_dtype if self._resets else "float32"
        self.shapes = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, dtype, sharding=s), parameters.shapes(policy.trained_specs), self._at_rest
        )
        self.params: Params = {}
        copy = functools.partial(jax.tree.map, lambda x: jax.numpy.array(x, dtype, copy=True))
        self._copy = jax.jit(copy, out_shardings=self._in_use)
        self._move = jax.jit(functools.partial(moved, decay=decay), out_shardings=self._in_use, donate_argnums=0)
        score = functools.partial(ref_logprobs, config=config)
        self._score = sharding_lib.on_mesh(mesh, jax.jit(score, out_shardings=sharding_lib.rows_sharding(mesh)))

    def start(self, params: Params) -> None:
        """The reference is the policy, as at step 0. Args: params: float32, not donated."""
        self.params = {}  # at a reset, the memory holds one reference, not two
        self.params = jax.device_put(self._copy(params), self._at_rest)

    def rescore(self, frozen: Params, batch: Batch, packed: Packed) -> Batch:
        """The batch with moving_ref_logprobs."""
        reference = jax.device_put(self.params, self._in_use)
        return dataclasses.replace(batch, moving_ref_logprobs=self._score(reference, frozen, batch, packed))

    def programs(self, params: Params, frozen: Params, batch: Batch, packed: Packed) -> dict[str, Program]:
        """Name -> the programs of `start`, `rescore` and `advance`. Args: shapes of what these take."""
        reference = self.shapes if self._at_rest is self._in_use else shaped(self.shapes, self._in_use)
        found = {
            "copy to the moving reference": Program(function=self._copy, arguments=(params,)),
            "scoring by the moving reference": Program(function=self._score, arguments=(reference, frozen, batch, packed)),
        }
        if not self._resets:
            found["move of the reference"] = Program(function=self._move, arguments=(reference, params))
        return found

    def advance(self, params: Params, step: int) -> bool:
        """Moves the reference if it is due after `step` updates, and returns whether it was."""
        due = step % self._every_steps == 0
        if due and self._resets:
            self.start(params)
        elif due:
            self.params = jax.device_put(self._move(jax.device_put(self.params, self._in_use), params), self._at_rest)
        return due
