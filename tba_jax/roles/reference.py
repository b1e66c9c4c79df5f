"""The run's reference policy on the mesh of a role that samples: its weights, and the log-probs of responses under it."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tba_jax import sharding, trajectory
from tba_jax.models import scoring
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.packing import row_layout, row_packing
from tba_jax.programs import Program, shaped
from tba_jax.roles import work
from tba_jax.roles.work import ShapesLog, Work
from tba_jax.run import processes
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout, snapshots


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
    return trajectory.token_columns(
        prompts,
        responses,
        prompt_length=contract.prompt_length,
        response_length=contract.response_length,
        pad_id=contract.pad_id,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring:
    """How the reference scores rows on a mesh.

    samples: so many consecutive rows have one prompt, usually. Each device scores sequences of score_tokens at a time
    (row_layout.Limits.tokens), whose logits take at most logit_megabytes.
    """

    contract: contract_lib.Contract
    policy: Policy
    mesh: jax.sharding.Mesh
    samples: int = 1
    logit_megabytes: int
    score_tokens: int

    def program(self, temperature: float) -> Any:
        """The jitted function, see scoring.program."""
        space = dataclasses.replace(self.contract.response_space(), temperature=temperature)
        settings: dict[str, Any] = dict(graphdef=self.policy.base.graphdef, R=self.contract.response_length, space=space)
        return scoring.program(self.mesh, **settings, logit_megabytes=self.logit_megabytes)

    def limits(self, rows: int) -> row_layout.Limits:
        """Args: rows: of one call."""
        return row_layout.Limits(
            rows=rows,
            group=math.gcd(rows, self.samples),
            prompt=self.contract.prompt_length,
            response=self.contract.response_length,
            shares=scoring.shares_prompts(self.policy.model, self.mesh),
            tokens=self.score_tokens,
            ways=sharding.row_ways(self.mesh),
        )


def programs(
    contract: contract_lib.Contract, params: Params, *, policy: Policy, mesh: jax.sharding.Mesh, rows: int, **limits: int
) -> dict[str, Program]:
    """Name -> the program of `ReferencePolicy.logprobs`. That of another temperature takes as much.

    Args: params: shapes of the reference; rows: of one call; limits: further fields of Scoring.
    """
    how = Scoring(contract=contract, policy=policy, mesh=mesh, **limits)
    largest = row_packing.empty(how.limits(rows), how.limits(rows).sequences)
    arguments = params, shaped(largest, scoring.packed_shardings(mesh))
    return {"scoring by the reference": Program(function=how.program(contract.scoring_temperature), arguments=arguments)}


def _load(run: layout.RunDir, policy: Policy, mesh: jax.sharding.Mesh) -> Params:
    """The weights of the policy that the run starts from. Raises BadInput where they are damaged."""
    folder, shardings = run.reference(layout.reference_id(run)), policy.model_shardings(mesh)
    try:
        return snapshots.load(folder, policy.model_specs, shardings, dtype=policy.model.compute_dtype)
    except snapshots.Damaged as error:
        raise processes.BadInput(f"{error}. It is the policy of step 0: restore the folder from a copy of the run") from error


class ReferencePolicy:
    """The reference policy: `id` names it, `params` are its weights, `logprobs` scores rows with them.

    Attributes: work: tokens of the rows that were scored so far; computed: of the sequences that hold them.
    """

    def __init__(
        self, contract: contract_lib.Contract, run: layout.RunDir, *, policy: Policy, mesh: jax.sharding.Mesh, **limits: int
    ):
        """Args: limits: further fields of Scoring."""
        self.id, self.mesh, self.params = layout.reference_id(run), mesh, _load(run, policy, mesh)
        self._temperature = contract.scoring_temperature
        how = Scoring(contract=contract, policy=policy, mesh=mesh, **limits)
        self._scorer, self._limits = functools.cache(how.program), how.limits
        self.work, self._model = Work(), policy.model
        self._shapes_log = ShapesLog("scoring by the reference")

    def logprobs(self, rows: Mapping[str, np.ndarray], *, temperature: float | None = None) -> np.ndarray:
        """float32[B, R], nats, 0 where masked. A program is compiled for each temperature, B and number of sequences (at most 8).

        Args: rows: the columns of `text_columns`, others are ignored; temperature: None: the scoring temperature.
        """
        tokens, *lengths = (rows[name] for name in ("tokens", "prompt_length", "response_length"))
        packed, plan = row_packing.of_rows(tokens, *lengths, limits=self._limits(len(tokens)))
        self._shapes_log.note(plan)
        responses = int(rows["response_length"].sum())
        self.work += work.of_plan(plan, self._model, responses=responses, passes=1)
        score = self._scorer(self._temperature if temperature is None else temperature)
        return np.asarray(score(self.params, jax.device_put(packed, scoring.packed_shardings(self.mesh))))


class NoReference:
    """The reference of a run without one: log π_ref is 0 for every token. params: what adapters belong to, {} without them."""

    def __init__(self, contract: contract_lib.Contract, run: layout.RunDir, *, policy: Policy, mesh: jax.sharding.Mesh):
        self.id, self.mesh = contract_lib.NO_REFERENCE, mesh
        self.params = {} if policy.lora is None else _load(run, policy, mesh)
        self.work = Work()
        self._response_length = contract.response_length

    def logprobs(self, rows: Mapping[str, np.ndarray]) -> np.ndarray:
        """float32[B, R], zeros."""
        return np.zeros((len(rows["tokens"]), self._response_length), np.float32)


def check_finite(ref_logprobs: np.ndarray, queries: Sequence[str]) -> None:
    """Raises FloatingPointError where a row of float32[B, R] is not finite; names its query. Args: queries: names, one a row."""
    broken = ~np.isfinite(ref_logprobs).all(1)
    if broken.any():
        raise FloatingPointError(
            f"{broken.sum()} responses have reference log-probs that are not finite; the first to query "
            f"{queries[int(broken.argmax())]}"
        )


def make(
    contract: contract_lib.Contract, run: layout.RunDir, *, policy: Policy, mesh: jax.sharding.Mesh, **limits: int
) -> ReferencePolicy | NoReference:
    """The reference of the run. Args: limits: further fields of Scoring."""
    if not contract.has_reference:
        return NoReference(contract, run, policy=policy, mesh=mesh)
    return ReferencePolicy(contract, run, policy=policy, mesh=mesh, **limits)
