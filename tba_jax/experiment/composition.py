"""From a config to what every role works with: task, queries, policy, tokenizer and contract."""

import contextlib
import dataclasses
import datetime
from collections.abc import Mapping
from typing import Any

from tba_jax import sharding
from tba_jax.experiment import checks, meshes, named_policy, named_task
from tba_jax.experiment.mistakes import Mistakes
from tba_jax.models.config import FREE_FIELDS
from tba_jax.models.policy import Policy
from tba_jax.rewards import embeddings, task_models
from tba_jax.run import contract as contract_lib
from tba_jax.run import layout
from tba_jax.tasks import custom_task
from tba_jax.tasks.interface import EncodedQuery, Task, private_files
from tba_jax.text import prompts, vocabulary
from tba_jax.text.tokenizers import Tokenizer

# How names of task settings end that say where data is and how rewards are computed here. Such settings do not change what a
# reward is, and the roles of a run need not agree on them.
_OF_A_PLACE = ("path", "time_limit", "retries", "concurrency", "batch_rows")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """What a config means. queries: split -> queries that fit; skipped: split -> number of queries left out as too long."""

    config: Any
    contract: contract_lib.Contract
    tokenizer: Tokenizer
    task: Task
    policy: Policy
    queries: dict[str, prompts.EncodedQueries]
    skipped: dict[str, int]

    def on_device(self, device: Any) -> "Experiment":
        """The experiment of a role whose devices are of this kind, see Policy.on_device."""
        return dataclasses.replace(self, policy=self.policy.on_device(device))


@dataclasses.dataclass(frozen=True)
class _Named:
    """What a config names, as far as it can be had."""

    config: Any
    policy: Policy
    tokenizer: Tokenizer


def build(
    config: Any, *, reward_models: Mapping[str, str] | None = None, date: str = "", weights: bool = True, new: bool = False
) -> Experiment:
    """Checks the whole config and builds what it names, without compiling or writing anything.

    Args:
      reward_models: of the contract, if the run exists and its models need not be here; None: they are read.
      date: of the contract, if the run exists; "": the run is a new one.
      weights: False: for a dry run, which fetches no weights from the hub, see named_policy.policy_and_tokenizer.
      new: see checks.gather.

    Raises:
      ValueError: a sentence about each thing that is wrong, as far as it can be told beside the others.
    """
    found = Mistakes()
    experiment = gather(config, found, reward_models=reward_models, date=date, weights=weights, new=new)
    found.end()
    assert experiment is not None
    return experiment


def gather(
    config: Any, found: Mistakes, *, reward_models: Mapping[str, str] | None = None, date: str = "", weights: bool, new: bool
) -> Experiment | None:
    """`build` for a start that checks more: adds what is wrong to `found`.

    Returns:
      what the config means, with the default in the place of a setting that breaks its own rule; None where it cannot be made.
    """
    config, can_be_made = checks.gather(config, found, weights=weights, new=new)
    if not can_be_made:
        return None
    date = date or _new_date(config)
    alphabet = "" if config.model.path else found.attempt(named_task.alphabet, config.task.name)
    named = None if alphabet is None else found.attempt(_policy, config, alphabet, weights=weights, date=date)
    template, banned = None, None
    if named is not None:
        named_policy.check(config, named.policy, named.tokenizer, found)
        for role in meshes.roles_of(config):
            _check_mesh(named, role, found)
        template = found.attempt(_template, config.task, named.tokenizer)
        banned = found.attempt(vocabulary.banned_tokens, config.task, named.tokenizer, named.policy.model.vocab)
    made = found.attempt(named_task.make, config)
    queries = None
    if made is not None:
        if named is not None and template is not None:
            queries = found.attempt(named_task.encode_queries, config, made[0], named.tokenizer)
        if reward_models is None:
            reward_models = found.attempt(task_models.digests, made[0], fetch=weights)
    embedding = found.attempt(_embedding, config.task.embedding_path, fetch=weights)
    if not (named and made and queries) or None in (alphabet, template, banned, reward_models, embedding):
        return None
    (task, settings), (encoded, skipped) = made, queries
    contract = _contract(
        named,
        task,
        settings,
        alphabet=alphabet,
        date=date,
        banned_tokens=banned,
        chat_template=template,
        embedding=embedding,
        reward_models=dict(reward_models or {}),
    )
    return Experiment(**vars(named), contract=contract, task=task, queries=encoded, skipped=skipped)


def _check_mesh(named: _Named, role: str, found: Mistakes) -> None:
    """Checks a role's mesh without its devices. A mesh that is refused here is not told again by the check with devices."""
    mesh = f"{meshes.SECTIONS[role]}.mesh"
    if not found.accepts(meshes.check, named, role=role, devices=None):
        found.silence([mesh, *(f"{mesh}.{axis}" for axis in sharding.MESH_AXES)])


def _new_date(config: Any) -> str:
    """The date of a new run: that of the first run that it mounts, whose prompts are those of its own; else today's."""
    for folder in config.replay.mount[:1]:
        with contextlib.suppress(ValueError, KeyError):  # check_mounts says what is wrong with it
            return str(contract_lib.read_run(layout.open_run_dir(folder))["contract"]["date"])
    return datetime.date.today().isoformat()


def _policy(config: Any, alphabet: str, **given: Any) -> _Named:
    return _Named(config, *named_policy.policy_and_tokenizer(config, alphabet=alphabet, **given))


def _template(task: Any, tokenizer: Tokenizer) -> dict[str, str]:
    return prompts.template(tokenizer, chat_template=task.chat_template, system_prompt=task.system_prompt)


def _embedding(path: str, *, fetch: bool) -> dict[str, Any]:
    return embeddings.describe(path, fetch=fetch) if path else {}


def _contract(named: _Named, task: Task, settings: Mapping[str, Any], **of_builders: Any) -> contract_lib.Contract:
    """settings: of the task; of_builders: fields of the contract that need no more than their builder."""
    config, policy, tokenizer = named.config, named.policy, named.tokenizer
    c = config.task
    return contract_lib.Contract(
        model={name: value for name, value in dataclasses.asdict(policy.model).items() if name not in FREE_FIELDS},
        lora={} if policy.lora is None else dataclasses.asdict(policy.lora),
        tokenizer=tokenizer.fingerprint,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        prompt_length=c.prompt_length,
        response_length=c.response_length,
        min_response_length=c.min_response_length,
        force_eos=c.force_eos,
        stop_strings=tuple(sorted(set(c.stop_strings))),
        step_ends=tuple(sorted(set(c.step_ends))),
        scoring_temperature=config.sampling.scoring_temperature,
        task_name=custom_task.short(c.name) if custom_task.is_named(c.name) else c.name,
        task={name: value for name, value in settings.items() if not name.endswith(_OF_A_PLACE)},
        missing_eos_reward=c.missing_eos_reward,
        reward_parts=task.reward_parts,
        reward_version=task.reward_version,
        warm_start=config.warm_start.to_dict(),
        private_files=private_files(task),
        reference="none" if config.learner.reference.kind == "none" else "initial",
        **of_builders,
    )


def rebuild(stored: Mapping[str, Any], config: Any, *, called: str) -> Experiment:
    """What the config of an existing run means. Its task is constructed: where that is a file, somebody has to trust it.

    Args:
      stored: config.json, see contract.read_run; config: its config, perhaps with other settings; called: what messages call
        the run.

    Raises:
      ValueError: as `build`, or the run's contract is another one now.
    """
    experiment = build(config, date=stored["contract"].get("date", ""))
    if different := contract_lib.differences(stored["contract"], experiment.contract.to_json()):
        raise ValueError(f"{called} is a run of another contract; " + contract_lib.in_words(different))
    return experiment


def heldout_queries(experiment: Experiment) -> list[EncodedQuery]:
    """The first `evaluation.queries` held-out queries; all, if that is 0 or there are fewer."""
    return experiment.queries["heldout"][: experiment.config.evaluation.queries or None]
