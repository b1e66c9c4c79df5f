"""A run that exists, as its config.json tells it: config, contract, policy and tokenizer.

Whoever can write a workdir decides what its config.json names. Nothing of that is executed here: no task is imported, and no code
of a checkpoint.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tba_jax.experiment import named_policy
from tba_jax.experiment.schema import SCHEMA
from tba_jax.models.config import FREE_FIELDS
from tba_jax.models.policy import Policy
from tba_jax.run import contract as contract_lib
from tba_jax.run import layout
from tba_jax.schemas import flatten
from tba_jax.text.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredRun:
    """What a reader of rows and weights works with."""

    config: Any
    contract: contract_lib.Contract
    policy: Policy
    tokenizer: Tokenizer


def read(run: layout.RunDir, *, called: str) -> StoredRun:
    """The run in a folder. Args: called: what messages call it.

    Raises:
      ValueError: there is no run, its config.json is damaged, or the checkpoint at its model.path is gone or another one now.
    """
    stored = contract_lib.read_run(run, called=called)
    config = config_of(stored, called=called)
    contract = contract_lib.of(stored, called=called)
    policy, tokenizer = named_policy.policy_and_tokenizer(config, alphabet=contract.alphabet)
    model = {name: value for name, value in dataclasses.asdict(policy.model).items() if name not in FREE_FIELDS}
    here = contract_lib.plain({"model": model, "tokenizer": tokenizer.fingerprint})
    if different := contract_lib.differences({name: stored["contract"][name] for name in here}, here):
        told = contract_lib.in_words(different)
        raise ValueError(f"model.path={config.model.path!r} is not what {called} was made with; {told}")
    return StoredRun(config=config, contract=contract, policy=policy, tokenizer=tokenizer)


def config_of(stored: Mapping[str, Any], *, called: str) -> Any:
    """The config that a config.json holds, locked, with settings of the schema's types.

    Args: stored: see contract.read_run.

    Raises:
      ValueError: it is not the config of a run of this version; names a setting.
    """
    config = SCHEMA.defaults()
    try:
        there = {name for name in flatten(stored["config"]) if not name.startswith("task.custom.")}
        if odd := sorted(there ^ SCHEMA.rules.keys()):
            raise ValueError(f"{called}: its config.json and this version of tba_jax differ in the setting {odd[0]}")
        config.update(_with_tuples(stored["config"]))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{called}: the config in its config.json is damaged: {error}") from error
    return config


def _with_tuples(tree: Any) -> Any:
    """The tree with tuples in place of lists: JSON has made lists of the config's tuples."""
    if isinstance(tree, Mapping):
        return {name: _with_tuples(value) for name, value in tree.items()}
    return tuple(map(_with_tuples, tree)) if isinstance(tree, list) else tree
