"""What searchers and evaluators sample with: the decoding engine on a mesh, fed with published snapshots, and the reference."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tba_jax import sharding
from tba_jax.decoding.engine import Engine
from tba_jax.models import kv_cache, parameters
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.programs import Program, again, shaped, with_beside
from tba_jax.rewards import task_models as rewards
from tba_jax.rewards.task_models import Models
from tba_jax.roles import reference
from tba_jax.roles.reference import NoReference, ReferencePolicy
from tba_jax.roles.work import Work
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout, snapshots
from tba_jax.storage.damaged_snapshots import DamagedSnapshots
from tba_jax.tasks.interface import Task
from tba_jax.text import stop_strings
from tba_jax.text.stop_strings import StopStrings
from tba_jax.text.tokenizers import Tokenizer


def automaton(texts: Sequence[str], tokenizer: Tokenizer, *, vocab: int) -> StopStrings | None:
    """Recognises the first of `texts` in a response; None where there are no texts, whatever the tokenizer can tell."""
    return stop_strings.build(tokenizer.token_bytes(), texts, vocab=vocab) if texts else None


def _engine(
    contract: contract_lib.Contract, mesh: jax.sharding.Mesh, policy: Policy, tokenizer: Tokenizer, *, weights: str, **engine: Any
) -> Engine:
    return Engine(
        policy.model,
        contract.response_space(),
        mesh,
        response_length=contract.response_length,
        pad_id=contract.pad_id,
        stop_strings=automaton(contract.stop_strings, tokenizer, vocab=policy.model.vocab),
        weights=weights,
        **engine,
    )


def _takes_snapshot(policy: Policy, weights: str) -> bool:
    """Whether the sampled weights are the snapshot itself, whose memory they may take."""
    return policy.lora is None and weights == "full"


def _for_sampling(policy: Policy, mesh: jax.sharding.Mesh, weights: str) -> Any:
    donated = (0,) if _takes_snapshot(policy, weights) else ()
    return sharding.on_mesh(mesh, jax.jit(functools.partial(policy.for_sampling, weights=weights), donate_argnums=donated))


def programs(
    contract: contract_lib.Contract,
    mesh: jax.sharding.Mesh,
    *,
    policy: Policy,
    tokenizer: Tokenizer,
    rows: int,
    limits: Mapping[str, int],
    weights: str,
    section: str,
    slots_setting: str,
    swap_memory: str,
    models: Models,
    scores: bool,
    **engine: Any,
) -> dict[str, Program]:
    """Name -> what a role with a Sampler compiles on the devices of its policy. Nothing is loaded or allocated.

    Args: rows, limits: see reference.programs; section: of the role's settings; slots_setting: which says how many responses are
      decoded at a time; models: on the same devices; scores: with the policy of step 0; others: see Sampler.
    """
    base = policy.model_shapes(mesh, dtype=policy.model.compute_dtype) if scores or policy.lora is not None else {}
    published = policy.snapshot_shapes(mesh)
    specs = kv_cache.define(policy.model, weights, unstacked=False).specs
    swap = _for_sampling(policy, mesh, weights)
    sampled = shaped(swap.lower(published, base).out_info, parameters.shardings(specs, mesh))
    of_lane = _engine(contract, mesh, policy, tokenizer, weights=weights, **engine).programs(sampled)
    in_use, prompts, slots, *_ = of_lane["decode"].arguments
    fewer = {"temporaries": (f"{section}.score_tokens", f"{section}.logit_megabytes")}
    made = reference.programs(contract, base, policy=policy, mesh=mesh, rows=rows, **limits) if scores else {}
    scoring = {name: dataclasses.replace(program, room=fewer) for name, program in made.items()}
    weights_kept = "reference" if scores else "frozen weights"
    parts = {**models.held, weights_kept: base, "caches": (prompts, slots), "policy in use": in_use}
    room = {**_room(section, slots_setting), **models.room}
    unstack = of_lane.pop("weights as decoded with")
    (one,) = unstack.arguments
    if swap_memory == "in_place":
        # The place of the one in use is free by then.
        rest = kv_cache.without(in_use, one, policy.model)
        swapping = with_beside({"a parameter of the next policy": unstack}, parts | {"policy in use": rest}, room)
        held: list[Any] = []
    else:
        # Another thread loads the next policy while this one decodes or scores.
        kept = [] if _takes_snapshot(policy, weights) else [published]
        loaded = {"next policy": [kv_cache.others(sampled, one), kept]}
        swapping = {
            "next policy from its snapshot": Program(function=swap, arguments=(published, base)),
            "a parameter of the next policy": dataclasses.replace(unstack, beside=loaded),
        }
        swapping = with_beside(swapping, parts, room)
        held = [in_use, one, kept]
    start = {"caches": of_lane.pop("caches")}
    next_policy = {"next policy": [again(part) for part in held]} if held else {}
    before = {name: tree for name, tree in parts.items() if name != "caches"}
    return {
        **models.loading,
        **with_beside(start, before, room),
        **swapping,
        **with_beside({**of_lane, **scoring, **models.scoring}, parts | next_policy, room),
    }


def _room(section: str, slots_setting: str) -> dict[str, Sequence[str]]:
    """The settings that make room for each part that a role with a Sampler holds, see programs.with_beside."""
    split = (f"{section}.mesh.tensor", f"{section}.mesh.fsdp")
    return {
        "temporaries": (slots_setting, f"{section}.mesh.tensor"),
        "caches": (slots_setting, f"{section}.mesh.tensor", "task.response_length"),
        **dict.fromkeys(("arguments", "reference", "frozen weights", "policy in use"), split),
        "next policy": (f"{section}.swap_memory", *split),
    }


def models_beside(config: Any, task: Task, *, role: str, section: str, devices: Sequence[jax.Device] | None = None) -> Models:
    """The models with which a task scores on the devices of a role's policy. Args: section: of the role's settings."""
    if config[section].task_devices:
        return Models()
    length = config.task.prompt_length + config.task.response_length
    return rewards.of_task(task, sharding.task_mesh(0, devices), role=role, length=length, section=section)


class Sampler:
    """A decoding engine that takes its weights from the snapshots of a run, beside the reference policy on the same mesh.

    Attributes: engine; reference; step: of the snapshot that the engine was handed last, −1 before the first.
    """

    def __init__(
        self,
        contract: contract_lib.Contract,
        run: layout.RunDir,
        *,
        policy: Policy,
        tokenizer: Tokenizer,
        reference: ReferencePolicy | NoReference,
        weights: str,
        swap_memory: str = "beside",
        **engine: Any,
    ):
        """Args: reference: its mesh is the sampler's. weights: precision of the sampled weights, "full" or "int8".
        swap_memory: see Engine; in_place loads snapshots into host memory, and is not for adapters or rounded weights. engine:
        further arguments of Engine.
        """
        self._policies, self.reference = run.policies, reference
        self._in_place, shardings = swap_memory == "in_place", policy.trained_shardings(reference.mesh)
        if self._in_place:
            shardings = jax.tree.map(lambda x: x.with_memory_kind(sharding.PINNED_HOST), shardings)
        self.engine = _engine(contract, reference.mesh, policy, tokenizer, weights=weights, swap_memory=swap_memory, **engine)
        self._snapshot: dict[str, Any] = dict(specs=policy.trained_specs, shardings=shardings, dtype=policy.snapshot_dtype)
        self._for_sampling = _for_sampling(policy, reference.mesh, weights)
        follows = "Until then this process samples with the newest whole snapshot, or waits for one"
        self._damaged = DamagedSnapshots(run.policies, follows=follows)
        self.step = -1

    @property
    def published(self) -> int:
        """The newest published step that `load_newest` has seen, −1 before the first."""
        return max(self.step, self._damaged.newest)

    def load_newest(self, *, lag: int) -> bool:
        """Hands the newest whole snapshot to the engine if it is newer than the last one. Returns whether there was one.

        May be called from a thread beside the one that decodes. Args: lag: see damaged_snapshots.lagging.
        """
        if not self.engine.swapped:  # the memory holds one snapshot that waits to be taken up, not two
            return False
        newest = self._damaged.load_newest(**self._snapshot, newer_than=self.step, lag=lag)
        if newest is not None:
            self._hand_over(*newest)
        return newest is not None

    @property
    def work(self) -> Work:
        """Of the decoder and the reference so far."""
        usage = self.engine.usage
        return Work(usage.useful, usage.slot_steps, usage.flops + self.reference.work.flops, usage.bytes)

    @property
    def useful_token_share(self) -> float:
        """Of all tokens so far that prefill and reference computed, those of prompts and rows."""
        usage, scored = self.engine.usage, self.reference.work
        return (usage.prompt_tokens + scored.tokens) / (usage.prefilled + scored.computed)

    @property
    def damage(self) -> str:
        """A sentence about a damaged snapshot that is newer than the last one, "" where there is none."""
        return self._damaged.above(self.step)

    def load_step(self, step: int) -> None:
        """Hands the snapshot of exactly this trainer step to the engine. Raises FileNotFoundError where it was pruned, and
        snapshots.Damaged where it is damaged."""
        self._hand_over(step, snapshots.load_step(self._policies, step, **self._snapshot))

    def _hand_over(self, step: int, snapshot: Params) -> None:
        weights = snapshot if self._in_place else self._for_sampling(snapshot, self.reference.params)
        self.engine.swap(self.engine.prepare(weights, consume=True), step)
        self.step = step
