"""What searchers and evaluators sample with: the decoding engine on a mesh, fed with published snapshots, and the reference."""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from tba_jax import sharding
from tba_jax.decoding.engine import Engine
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.roles.reference import ReferencePolicy
from tba_jax.run import contract as contract_lib
from tba_jax.run import layout, snapshots
from tba_jax.text import stop_strings
from tba_jax.text.stop_strings import StopStrings
from tba_jax.text.tokenizers import Tokenizer


def automaton(texts: Sequence[str], tokenizer: Tokenizer, *, vocab: int) -> StopStrings | None:
    """Recognises the first of `texts` in a response; None where there are no texts, whatever the tokenizer can tell."""
    return stop_strings.build(tokenizer.token_bytes(), texts, vocab=vocab) if texts else None


class Sampler:
    """A decoding engine that takes its weights from the snapshots of a run, beside the reference policy on the same mesh.

    Attributes: engine; reference; step: of the snapshot that the engine was handed last, -1 before the first.
    """

    def __init__(
        self,
        contract: contract_lib.Contract,
        run: layout.RunDir,
        *,
        policy: Policy,
        tokenizer: Tokenizer,
        reference: ReferencePolicy,
        weights: str,
        **engine: Any,
    ):
        """
        Args:
          reference: its mesh is the sampler's.
          weights: precision of the sampled weights, one of kv_cache.WEIGHTS.
          engine: further arguments of Engine: slots, samples, prompt_length, given_length, swap, chunk, lockstep.
        """
        self._policies, self.reference = run.policies, reference
        self.engine = Engine(
            policy.model,
            contract.response_space(),
            reference.mesh,
            response_length=contract.response_length,
            pad_id=contract.pad_id,
            stop_strings=automaton(contract.stop_strings, tokenizer, vocab=policy.model.vocab),
            weights=weights,
            **engine,
        )
        self._snapshot: dict[str, Any] = dict(
            specs=policy.trained_specs, shardings=policy.trained_shardings(reference.mesh), dtype=policy.snapshot_dtype
        )
        # Where the sampled weights are the snapshot itself, they may take its memory.
        donated = (0,) if policy.lora is None and weights == "full" else ()
        for_sampling = functools.partial(policy.for_sampling, weights=weights)
        self._for_sampling = sharding.on_mesh(reference.mesh, jax.jit(for_sampling, donate_argnums=donated))
        self.step = -1

    def load_newest(self) -> bool:
        """Hands the newest snapshot to the engine if it is newer than the last one. Returns whether there was one.

        May be called from a thread beside the one that decodes: the engine takes the weights up while it runs.
        """
        if not self.engine.swapped:  # the memory holds one snapshot that waits to be taken up, not two
            return False
        newest = snapshots.load_latest(self._policies, **self._snapshot, newer_than=self.step)
        if newest is not None:
            self._hand_over(*newest)
        return newest is not None

    def load_step(self, step: int) -> None:
        """Hands the snapshot of exactly this trainer step to the engine. Raises FileNotFoundError where it was pruned."""
        self._hand_over(step, snapshots.load_step(self._policies, step, **self._snapshot))

    def _hand_over(self, step: int, snapshot: Params) -> None:
        weights = self._for_sampling(snapshot, self.reference.params)
        self.engine.swap(self.engine.prepare(weights, consume=True), step)
        self.step = step
