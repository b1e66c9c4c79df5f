"""From a config to what every role works with: task, queries, policy, tokenizer and contract."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tba_jax.experiment import checks, named_policy, named_task
from tba_jax.models.config import FREE_FIELDS
from tba_jax.models.policy import Policy
from tba_jax.rewards import embeddings, task_models
from tba_jax.run import contract as contract_lib
from tba_jax.run import places
from tba_jax.tasks import custom_task
from tba_jax.tasks.interface import EncodedQuery, Task
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


def build(config: Any, *, reward_models: Mapping[str, str] | None = None, weights: bool = True) -> Experiment:
    """Checks the whole config and builds what it names, without compiling or writing anything.

    Args:
      reward_models: of the contract, if the run exists and its models need not be here; None: they are read.
      weights: False: for a dry run, where those of model.path need not be here, see named_policy.policy_and_tokenizer.

    Raises:
      ValueError: one sentence about the first thing that is wrong.
    """
    checks.check(config, weights=weights)
    config = _with_absolute_paths(config)
    named_task.check_package(config.task.name)
    alphabet = "" if config.model.path else named_task.alphabet(config.task.name)
    policy, tokenizer = named_policy.policy_and_tokenizer(config, alphabet=alphabet, weights=weights)
    named_policy.check(config, policy, tokenizer)
    task, settings = named_task.make(config)
    template = prompts.template(tokenizer, chat_template=config.task.chat_template, system_prompt=config.task.system_prompt)
    queries, skipped = named_task.encode_queries(config, task, tokenizer, template=template)
    contract = _contract(
        config,
        policy,
        tokenizer,
        task,
        settings,
        alphabet=alphabet,
        template=template,
        reward_models=task_models.digests(task) if reward_models is None else reward_models,
    )
    return Experiment(
        config=config, contract=contract, tokenizer=tokenizer, task=task, policy=policy, queries=queries, skipped=skipped
    )


def _contract(
    config: Any,
    policy: Policy,
    tokenizer: Tokenizer,
    task: Task,
    settings: Mapping[str, Any],
    *,
    alphabet: str,
    template: str,
    reward_models: Mapping[str, str],
) -> contract_lib.Contract:
    """settings: of the task; alphabet: see Contract; template: of prompts; reward_models: digests, see task_models.digests."""
    c = config.task
    return contract_lib.Contract(
        model={name: value for name, value in dataclasses.asdict(policy.model).items() if name not in FREE_FIELDS},
        lora={} if policy.lora is None else dataclasses.asdict(policy.lora),
        tokenizer=tokenizer.fingerprint,
        alphabet=alphabet,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        banned_tokens=vocabulary.banned_tokens(c, tokenizer, policy.model.vocab),
        prompt_length=c.prompt_length,
        response_length=c.response_length,
        min_response_length=c.min_response_length,
        stop_strings=tuple(sorted(set(c.stop_strings))),
        step_ends=tuple(sorted(set(c.step_ends))),
        scoring_temperature=config.sampling.scoring_temperature,
        task_name=custom_task.short(c.name) if custom_task.is_named(c.name) else c.name,
        task={name: value for name, value in settings.items() if not name.endswith(_OF_A_PLACE)},
        missing_eos_reward=c.missing_eos_reward,
        reward_parts=task.reward_parts,
        reward_version=task.reward_version,
        warm_start=config.warm_start.to_dict(),
        embedding=embeddings.describe(c.embedding_path) if c.embedding_path else {},
        chat_template=template,
        reward_models=dict(reward_models),
    )


def rebuild(stored: Mapping[str, Any], config: Any, *, called: str) -> Experiment:
    """What the config of an existing run means. Its task is constructed: where that is a file, somebody has to trust it.

    Args:
      stored: config.json, see contract.read_run; config: its config, perhaps with other settings; called: what messages call
        the run.

    Raises:
      ValueError: as `build`, or the run's contract is another one now.
    """
    experiment = build(config)
    if different := contract_lib.differences(stored["contract"], experiment.contract.to_json()):
        raise ValueError(f"{called} is a run of another contract; " + "; ".join(different))
    return experiment


def _with_absolute_paths(config: Any) -> Any:
    """The config, or a copy if a folder of replay.mount or the file of the task depends on the working directory."""
    mounts = tuple(places.absolute(folder) for folder in config.replay.mount)
    task = custom_task.absolute(config.task.name) if custom_task.is_named(config.task.name) else config.task.name
    if (mounts, task) == (tuple(config.replay.mount), config.task.name):
        return config
    config = config.copy_and_resolve_references()
    config.replay.mount, config.task.name = mounts, task
    return config


def heldout_queries(experiment: Experiment) -> list[EncodedQuery]:
    """The first `evaluation.queries` held-out queries (all, if there are fewer)."""
    return experiment.queries["heldout"][: experiment.config.evaluation.queries]
