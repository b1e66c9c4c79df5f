"""What searchers and evaluators sample with: the decoding engine, fed with published snapshots, and the reference policy."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tba_jax import packing, sharding, trajectory
from tba_jax.decoding.engine import Engine
from tba_jax.decoding.served import ServedEngine
from tba_jax.models import kv_cache, parameters, scoring
from tba_jax.models.hugging_face import load
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.programs import Program, again, shaped, with_beside
from tba_jax.rewards import task_models as rewards
from tba_jax.rewards.task_models import Models
from tba_jax.roles.work import ShapesLog, Work, of_plan
from tba_jax.run import processes
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout, snapshots
from tba_jax.storage.published import Published
from tba_jax.tasks.interface import Task
from tba_jax.text.tokenizers import StopStrings, Tokenizer, stop_automaton


def policy_mesh(config: Any, section: str, *, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """The mesh of the policy in a role that samples, on the devices that the task's models leave to it.

    Args: section: of the role's settings, "searchers" or "evaluation"; devices: of the role, None: of this process.
    """
    settings = config[section]
    devices = sharding.policy_devices(settings.task_devices, devices)
    return sharding.make_mesh(tuple(settings.mesh.values()), setting=f"{section}.mesh", devices=devices)


def text_columns(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int] | np.ndarray], contract: contract_lib.Contract
) -> dict[str, np.ndarray]:
    """The columns of rows that hold prompts and responses, see trajectory.token_columns. Args: token ids, one of each a row."""
    lengths = dict(prompt_length=contract.prompt_length, response_length=contract.response_length)
    return trajectory.token_columns(prompts, responses, **lengths, pad_id=contract.pad_id)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring:
    """How a policy scores rows on a mesh. samples: consecutive rows of one prompt. Each device scores sequences of score_tokens
    at a time (packing.Limits.tokens), whose logits take at most logit_megabytes."""

    contract: contract_lib.Contract
    policy: Policy
    mesh: jax.sharding.Mesh
    samples: int = 1
    logit_megabytes: int
    score_tokens: int

    @property
    def shapes(self) -> Params:
        """The weights that score, as jax.ShapeDtypeStruct."""
        return self.policy.model_shapes(self.mesh, dtype=self.policy.model.compute_dtype)

    def program(self, temperature: float) -> Any:
        """The jitted function, see scoring.program."""
        space = dataclasses.replace(self.contract.response_space(), temperature=temperature)
        settings: dict[str, Any] = dict(graphdef=self.policy.base.graphdef, R=self.contract.response_length, space=space)
        return scoring.program(self.mesh, **settings, logit_megabytes=self.logit_megabytes)

    def limits(self, rows: int) -> packing.Limits:
        """Args: rows: of one call."""
        return packing.Limits(
            rows=rows,
            group=math.gcd(rows, self.samples),
            prompt=self.contract.prompt_length,
            response=self.contract.response_length,
            shares=scoring.shares_prompts(self.policy.model, self.mesh),
            tokens=self.score_tokens,
            ways=sharding.row_ways(self.mesh),
        )

    def programs(self, params: Params, rows: int) -> dict[str, Program]:
        """Name -> the program of `Scorer.logprobs`. Args: params: shapes of the reference; rows: of one call."""
        largest = packing.empty(self.limits(rows), self.limits(rows).sequences)
        arguments = params, shaped(largest, scoring.packed_shardings(self.mesh))
        return {
            "scoring by the reference": Program(function=self.program(self.contract.scoring_temperature), arguments=arguments)
        }


def load_reference(how: Scoring, run: layout.RunDir) -> Params:
    """The weights of the policy that the run starts from, in the compute dtype. Raises BadInput where they are damaged."""
    folder, shardings = run.reference(layout.reference_id(run)), how.policy.model_shardings(how.mesh)
    try:
        return snapshots.load(folder, how.policy.model_specs, shardings, dtype=how.policy.model.compute_dtype)
    except snapshots.Damaged as error:
        raise processes.BadInput(f"{error}. It is the policy of step 0: restore the folder from a copy of the run") from error


class Scorer:
    """Scores rows by the weights of one policy. work: of the scoring."""

    def __init__(self, how: Scoring, weights: Params, *, called: str):
        """Args: weights: plain ones of how.policy in its compute dtype; called: what the log calls the scoring."""
        self.mesh, self.work = how.mesh, Work()
        self._how, self._weights, self._scorer = how, weights, functools.cache(how.program)
        self._shapes_log = ShapesLog(called)

    def logprobs(self, rows: Mapping[str, np.ndarray], *, temperature: float | None = None) -> np.ndarray:
        """float32[B, R], nats, 0 where masked. A program is compiled for each temperature, B and number of sequences (at most 8).

        Args: rows: the columns of `text_columns`, and policy_step where an environment answers, others are ignored; temperature:
          None: the scoring temperature.
        """
        tokens, *lengths = (rows[name] for name in ("tokens", "prompt_length", "response_length"))
        trained = trajectory.trained(rows) if "environment" in rows else None
        packed, plan = packing.of_rows(tokens, *lengths, limits=self._how.limits(len(tokens)), trained=trained)
        self._shapes_log.note(plan)
        responses = int(rows["response_length"].sum())
        self.work += of_plan(plan, self._how.policy.model, responses=responses, passes=1)
        score = self._scorer(self._how.contract.scoring_temperature if temperature is None else temperature)
        return np.asarray(score(self._weights, jax.device_put(packed, scoring.packed_shardings(self.mesh))))


class ReferencePolicy(Scorer):
    """The policy of step 0 as the reference: `id` names it, `params` are its weights."""

    def __init__(self, how: Scoring, run: layout.RunDir):
        self.id, self.params = layout.reference_id(run), load_reference(how, run)
        super().__init__(how, self.params, called="scoring by the reference")


class Teacher(Scorer):
    """Another model as the reference. params: what adapters of the policy belong to, {} without them."""

    def __init__(self, how: Scoring, run: layout.RunDir, *, teacher: Policy, path: str):
        """Args: how: of the policy; path: of the teacher, a Hugging Face folder or hub id."""
        shardings, dtype = teacher.model_shardings(how.mesh), teacher.model.compute_dtype
        try:
            weights = load.load_params(load.resolve_folder(path), teacher.model, shardings, dtype=dtype)
        except ValueError as error:  # starting again would not help
            raise processes.BadInput(f"{contract_lib.TEACHER}={path!r}: {error}") from error
        super().__init__(dataclasses.replace(how, policy=teacher), weights, called="scoring by the reference")
        self.id = how.contract.reference_of_rows("")
        self.params = {} if how.policy.lora is None else load_reference(how, run)


class NoReference:
    """The reference of a run without one: log π_ref is 0 for every token. params: what adapters belong to, {} without them."""

    def __init__(self, how: Scoring, run: layout.RunDir):
        self.id, self.mesh, self.work = contract_lib.NO_REFERENCE, how.mesh, Work()
        self.params = {} if how.policy.lora is None else load_reference(how, run)
        self._response_length = how.contract.response_length

    def logprobs(self, rows: Mapping[str, np.ndarray]) -> np.ndarray:
        """float32[B, R], zeros."""
        return np.zeros((len(rows["tokens"]), self._response_length), np.float32)


Reference = ReferencePolicy | Teacher | NoReference


def check_finite(ref_logprobs: np.ndarray, queries: Sequence[str]) -> None:
    """Raises FloatingPointError where a row of float32[B, R] is not finite; names its query. Args: queries: names, one a row."""
    if (broken := ~np.isfinite(ref_logprobs).all(1)).any():
        first = queries[int(broken.argmax())]
        raise FloatingPointError(
            f"{broken.sum()} responses have reference log-probs that are not finite; the first to query {first}"
        )


def make_reference(config: Any, how: Scoring, run: layout.RunDir, *, teacher: Policy | None) -> Reference:
    """The reference of a searcher. Where the trainer scores rows by it, these have none yet. Args: how: of the policy; teacher:
    see Experiment."""
    if not (how.contract.has_reference and config.searchers.scores_reference):
        return NoReference(how, run)
    if teacher is not None:
        return Teacher(how, run, teacher=teacher, path=config.learner.reference.path)
    return ReferencePolicy(how, run)


def automaton(texts: Sequence[str], tokenizer: Tokenizer, *, vocab: int) -> StopStrings | None:
    """Recognises the first of `texts` in a response; None where there are no texts, whatever the tokenizer can tell."""
    return stop_automaton(tokenizer.token_bytes(), texts, vocab=vocab) if texts else None


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
    how: Scoring,
    *,
    tokenizer: Tokenizer,
    rows: int,
    weights: str,
    section: str,
    slots_setting: str,
    swap_memory: str,
    models: Models,
    scorer: Scoring | None,
    **engine: Any,
) -> dict[str, Program]:
    """Name -> what a role with a Sampler compiles on the devices of its policy. Nothing is loaded or allocated.

    Args: how: of the policy; scorer: of the reference, None where none scores; rows: of one call; section: of the role's
      settings; slots_setting: which says how many responses are decoded at a time; models: on the same devices; others: see
      Sampler.
    """
    policy, mesh = how.policy, how.mesh
    is_own = scorer is not None and scorer.policy is policy  # step 0 scores
    base = how.shapes if is_own or policy.lora is not None else {}
    teacher = {} if scorer is None or is_own else scorer.shapes
    published = policy.snapshot_shapes(mesh)
    specs = kv_cache.define(policy.model, weights, unstacked=False).specs
    swap = _for_sampling(policy, mesh, weights)
    sampled = shaped(swap.lower(published, base).out_info, parameters.shardings(specs, mesh))
    of_lane = _engine(how.contract, mesh, policy, tokenizer, weights=weights, **engine).programs(sampled)
    in_use, prompts, slots, *_ = of_lane["decode"].arguments
    fewer = {"temporaries": (f"{section}.score_tokens", f"{section}.logit_megabytes")}
    made = {} if scorer is None else scorer.programs(teacher or base, rows)
    scores_rows = {name: dataclasses.replace(program, room=fewer) for name, program in made.items()}
    weights_kept = "reference" if is_own else "frozen weights"
    parts = {**models.held, weights_kept: base, "teacher": teacher, "caches": (prompts, slots), "policy in use": in_use}
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
        **with_beside({**of_lane, **scores_rows, **models.scoring}, parts | next_policy, room),
    }


def _room(section: str, slots_setting: str) -> dict[str, Sequence[str]]:
    """The settings that make room for each part that a role with a Sampler holds, see programs.with_beside."""
    split = (f"{section}.mesh.tensor", f"{section}.mesh.fsdp")
    return {
        "temporaries": (slots_setting, f"{section}.mesh.tensor"),
        "caches": (slots_setting, f"{section}.mesh.tensor", "task.response_length"),
        **dict.fromkeys(("arguments", "reference", "teacher", "frozen weights", "policy in use"), split),
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

    Attributes: engine; reference; snapshots: of the run; step: of the snapshot that the engine was handed last, −1 before
    the first.
    """

    def __init__(
        self,
        contract: contract_lib.Contract,
        run: layout.RunDir,
        *,
        policy: Policy,
        tokenizer: Tokenizer,
        reference: Reference,
        weights: str,
        swap_memory: str = "beside",
        served: ServedEngine | None = None,
        **engine: Any,
    ):
        """Args: reference: its mesh is the sampler's. served: a server that draws, in place of an Engine. weights: precision of
        the sampled weights, "full" or "int8". swap_memory: see Engine; in_place loads snapshots into host memory, and is not for
        adapters or rounded weights. engine: further arguments of Engine.
        """
        self.snapshots, self.reference = Published(run.policies, shares=True), reference
        shardings = policy.trained_shardings(reference.mesh)
        if swap_memory == "in_place":
            shardings = jax.tree.map(lambda x: x.with_memory_kind(sharding.PINNED_HOST), shardings)
        self.engine: Engine | ServedEngine
        if served is not None:
            self.engine = served
        else:
            self.engine = _engine(contract, reference.mesh, policy, tokenizer, weights=weights, swap_memory=swap_memory, **engine)
        self._snapshot: dict[str, Any] = dict(specs=policy.trained_specs, shardings=shardings, dtype=policy.snapshot_dtype)
        self._as_it_is = swap_memory == "in_place" or served is not None
        self._for_sampling = _for_sampling(policy, reference.mesh, weights)
        self.step = -1

    def load_newest(self, *, lag: int) -> bool:
        """Hands the newest whole snapshot to the engine if it is newer than the last one. Returns whether there was one.

        May be called from a thread beside the one that decodes. Args: lag: see published.lagging.
        """
        if not self.engine.swapped:  # the memory holds one snapshot that waits to be taken up, not two
            return False
        newest = self.snapshots.load_newest(**self._snapshot, newer_than=self.step, lag=lag)
        if newest is not None:
            self._hand_over(*newest)
        return newest is not None

    @property
    def work(self) -> Work:
        """The work of the decoder and the reference so far."""
        usage = self.engine.usage
        return Work(usage.useful, usage.slot_steps, usage.flops + self.reference.work.flops, usage.bytes)

    @property
    def useful_token_share(self) -> float:
        """The share of prompts and rows in all tokens that prefill and reference have computed."""
        usage, scored = self.engine.usage, self.reference.work
        return (usage.prompt_tokens + scored.tokens) / (usage.prefilled + scored.computed)

    @property
    def damage(self) -> str:
        """A sentence about a damaged snapshot that is newer than the last one, "" where there is none."""
        return self.snapshots.damage_above(self.step)

    def load_step(self, step: int) -> None:
        """Hands the snapshot of exactly this trainer step to the engine. Raises FileNotFoundError where it was pruned, and
        snapshots.Damaged where it is damaged."""
        self._hand_over(step, self.snapshots.load(step, **self._snapshot))

    def _hand_over(self, step: int, snapshot: Params) -> None:
        weights = snapshot if self._as_it_is else self._for_sampling(snapshot, self.reference.params)
        prepared: Any = self.engine.prepare(weights, consume=True)
        self.engine.swap(prepared, step)
        self.step = step
