"""A run that exists, as its config.json tells it: config, policy, tokenizer, and the schedule, which its trainer may change.

Nothing that config.json names is executed here: no task is imported, and no code of a checkpoint. The schedule is what decides
about an update: the seed and the sections learner, replay, publish and schedule, without settings with free=True in the schema.
It is that of all roles; the run's trainer alone may change it.
"""

import contextlib
import dataclasses
import datetime
import functools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tba_jax.experiment.schema import SCHEMA
from tba_jax.learner.update import HELD_REFERENCES
from tba_jax.models import attention
from tba_jax.models.config import FREE_FIELDS, PRESETS, QWEN3_MOE, DecoderConfig
from tba_jax.models.hugging_face import load
from tba_jax.models.policy import LoraConfig, Policy
from tba_jax.objectives import OBJECTIVES
from tba_jax.schemas import Mistakes, flatten, hint, nearest, require
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout, places
from tba_jax.storage.places import Place
from tba_jax.text.tokenizers import CharacterTokenizer, HuggingFaceTokenizer, Tokenizer, check_stop_strings

log = logging.getLogger(__name__)

# A dry run waits no longer for a place. A role waits until the place answers: storage may come back.
DRY_RUN_SECONDS = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredRun:
    """What a reader of rows and weights works with."""

    config: Any
    contract: contract_lib.Contract
    policy: Policy
    tokenizer: Tokenizer


def read(run: layout.RunDir, *, called: str) -> StoredRun:
    """The run in a folder. Args: called: what messages call it.

    Raises ValueError: there is no run, its config.json is damaged, or the checkpoint at its model.path is gone or another one
    now.
    """
    stored = contract_lib.read_run(run, called=called)
    config = config_of(stored, called=called)
    contract = contract_lib.of(stored, called=called)
    policy, tokenizer = policy_and_tokenizer(config, alphabet=contract.alphabet)
    model = {name: value for name, value in dataclasses.asdict(policy.model).items() if name not in FREE_FIELDS}
    here = contract_lib.plain({"model": model, "tokenizer": tokenizer.fingerprint})
    if different := contract_lib.differences({name: stored["contract"][name] for name in here}, here):
        told = contract_lib.in_words(different)
        raise ValueError(f"model.path={config.model.path!r} is not what {called} was made with; {told}")
    return StoredRun(config=config, contract=contract, policy=policy, tokenizer=tokenizer)


def config_of(stored: Mapping[str, Any], *, called: str) -> Any:
    """The config that a config.json holds, locked, with settings of the schema's types.

    Args: stored: see contract.read_run.

    Raises ValueError: it is not the config of a run of this version; names a setting.
    """
    config = SCHEMA.defaults()
    try:
        there = {name for name in flatten(stored["config"]) if not name.startswith("task.custom.")}
        if odd := sorted(there ^ SCHEMA.rules.keys()):
            raise ValueError(f"{called}: its config.json and this version of tba_jax differ in the setting {odd[0]}")
        config.update(with_tuples(stored["config"]))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{called}: the config in its config.json is damaged: {error}") from error
    return config


def with_tuples(tree: Any) -> Any:
    """The tree with tuples in place of lists: JSON has made lists of the config's tuples."""
    if isinstance(tree, Mapping):
        return {name: with_tuples(value) for name, value in tree.items()}
    return tuple(map(with_tuples, tree)) if isinstance(tree, list) else tree


def with_settings(config: Any, values: Mapping[str, Any]) -> Any:
    """A config with other values of settings, by dotted names, as config.json holds them."""
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict(with_tuples(values))
    return config


def policy_and_tokenizer(config: Any, *, alphabet: str, weights: bool = True, date: str = "") -> tuple[Policy, Tokenizer]:
    """The policy that config.model and config.lora name, and its tokenizer. No code of the checkpoint or of a task is executed.

    Args: alphabet: without model.path, the characters of the tokenizer, which the task defines; "" where it defines none.
    weights: False: those of model.path need not be there; and model.preset, where it is given, says the shape in its place. date:
    see HuggingFaceTokenizer.

    Raises ValueError: the checkpoint cannot be used, or policy, adapters and tokenizer do not go together.
    """
    if config.model.path:
        with load.named("model.path", config.model.path):
            folder = load.resolve_folder(config.model.path, weights=weights)
            if config.model.preset:
                model = _model_from_shape(config, vocab=0)
            else:
                dtype, kernel = config.model.compute_dtype, config.model.attention
                model = load.read_config(folder, compute_dtype=dtype, attention=kernel, head="language_model")
            tokenizer: Tokenizer = HuggingFaceTokenizer(folder, vocab=model.vocab, date=date)
    else:
        if not alphabet:
            tokenizer_of = "; beside model.preset, a dry run takes only the tokenizer from there" if config.model.preset else ""
            raise ValueError(
                f"task.name={config.task.name!r} needs a pretrained model: set model.path to its folder{tokenizer_of}"
            )
        tokenizer = CharacterTokenizer(alphabet)
        model = _model_from_shape(config, tokenizer.vocab_size)
    lora = config.lora
    adapters = LoraConfig(rank=lora.rank, alpha=lora.alpha, targets=tuple(lora.targets)) if lora.rank else None
    policy = Policy(model=model, lora=adapters)
    _ = policy.trained_specs  # refuses targets that the model does not have
    return policy, tokenizer


def _model_from_shape(config: Any, vocab: int) -> DecoderConfig:
    m = config.model
    if m.preset:
        return dataclasses.replace(PRESETS[m.preset], compute_dtype=m.compute_dtype, attention=m.attention)
    shape = {name: value for name, value in m.items() if name not in ("path", "preset")} | (QWEN3_MOE if m.experts else {})
    return DecoderConfig(vocab=vocab, max_positions=config.task.prompt_length + config.task.response_length, **shape)


def check_policy(config: Any, policy: Policy, tokenizer: Tokenizer, found: Mistakes) -> None:
    """Adds to `found` where kernel, stop strings or lengths do not go with the policy or the tokenizer."""
    task, model = config.task, policy.model
    if (coefficient := config.learner.router_aux_loss_coef) and not model.experts:
        found.add([f"learner.router_aux_loss_coef={coefficient} balances experts, and the model has none: leave it at 0.0"])
    elif coefficient and policy.lora is not None:
        found.add(
            [f"learner.router_aux_loss_coef={coefficient} trains routers, which adapters leave as they are: leave it at 0.0"]
        )
    if model.attention == "cudnn":
        found.require(
            model.compute_dtype == "bfloat16",
            f"model.attention=cudnn needs model.compute_dtype=bfloat16, not {model.compute_dtype}",
        )
        heads = f"model.attention=cudnn takes heads of a multiple of 8 up to 128, the model's are {model.head_size}"
        found.require(attention.cudnn_takes(model.head_size), heads)
    found.attempt(check_stop_strings, task.stop_strings, tokenizer)
    found.attempt(check_stop_strings, task.step_ends, tokenizer, setting="task.step_ends", special=False)
    total = task.prompt_length + task.response_length
    lengths = f"task.prompt_length={task.prompt_length} + task.response_length={task.response_length}"
    found.require(total <= model.max_positions, f"{lengths} = {total} exceed the model's {model.max_positions} positions")


def named_places(config: Any, *, init_from: str = "") -> list[tuple[str, Place]]:
    """(setting or flag, place) of the run of --init_from, of the runs of replay.mount, and of whatever settings name by a path;
    one may be a name on the hub. Args: init_from: see initial_policy.parse_init_from."""
    named = [("--init_from", init_from.rpartition("@")[0]), *(("replay.mount", each) for each in config.replay.mount)]
    named += [(name, value) for name, value in flatten(config.to_dict()).items() if name.endswith(("_path", ".path"))]
    found = []
    for name, text in named:
        with contextlib.suppress(ValueError):  # it names no place, and other checks say so
            if text and isinstance(text, str):
                found.append((name, places.place(text)))
    return found


def check_answers(named: Iterable[tuple[str, Place]], *, limit: float = math.inf) -> None:
    """Returns once each place has answered, and says every ten seconds for which one it waits: asked before anything else touches
    storage, which might wait for ever. Args: limit: seconds for each place.

    Raises ValueError: a place has not answered within the limit, or is in no bucket. OSError: a store refuses.
    """
    for setting, place in dict.fromkeys(named):
        told = f"{setting}={place} has not answered"
        report = functools.partial(log.warning, "%s for %.1f s; still trying", told)
        try:
            places.check_answers(place, report=report, limit=limit)
        except TimeoutError as error:
            raise ValueError(f"{told} within {limit:g} s, and is not waited for any longer") from error


# Changes of the schedule

Changes = dict[str, tuple[Any, Any]]  # setting -> (there, here): its value in config.json, and in the config of this process

_SECTIONS = ("seed", "learner", "replay", "publish", "schedule")
_SCHEDULE = [name for name, rule in SCHEMA.rules.items() if name.split(".")[0] in _SECTIONS and not rule.free]
# Settings that decide which state a checkpoint holds: setting -> value -> that state. A log Z is of the objective that learned
# it: in nats, or in nats per token.
_STATEFUL: dict[str, dict[str, object]] = {
    "learner.objective": {name: (name if made.log_z_head else "", made.value_head) for name, made in OBJECTIVES.items()},
    "learner.reference.kind": dict.fromkeys(HELD_REFERENCES, "reference"),
}


def schedule_changes(run: layout.RunDir, config: Any) -> Changes:
    """Settings of the schedule that differ between the run and `config`."""
    theirs, ours = flatten(contract_lib.read(run)["config"]), flatten(contract_lib.plain(config.to_dict()))
    return {name: (theirs[name], ours[name]) for name in _SCHEDULE if theirs[name] != ours[name]}


def changes_in_words(changes: Changes) -> str:
    return "; ".join(f"{name}: {there!r} there, {here!r} here" for name, (there, here) in changes.items())


def with_schedule_of(run: layout.RunDir, config: Any) -> tuple[Any, Changes]:
    """A config with the schedule of the run, for a role that does not decide about it; and what `config` says otherwise."""
    changes = schedule_changes(run, config)
    return with_settings(config, {name: there for name, (there, _) in changes.items()}), changes


def check_no_changes(run: layout.RunDir, config: Any, *, role: str) -> None:
    """Raises ValueError where flags of a joining role ask for another schedule. Args: config: the run's, changed by flags."""
    if changes := schedule_changes(run, config):
        told = changes_in_words(changes)
        raise ValueError(
            f"--role={role} takes the schedule of the run in {run.shared}, which only its trainer may change; {told}"
        )


def change_schedule(run: layout.RunDir, config: Any, *, allowed: Sequence[str], step: int) -> Changes:
    """Makes the schedule of `config` that of the run from `step` on, and records in config.json what changed.

    Raises: as `check_changes`.

    At step 0 every change is allowed: nothing is trained yet, and a searcher may have come first with another schedule.
    """
    changes = check_changes(run, config, allowed=allowed, step=step)
    if changes:
        stored = contract_lib.read(run)
        now = datetime.datetime.now(datetime.UTC).isoformat()
        entry = {"step": step, "time": now, "settings": contract_lib.plain(changes)}
        stored |= {"config": contract_lib.plain(config.to_dict()), "changes": [*stored["changes"], entry]}
        layout.write_json(run.config, stored)
    return changes


def _check_checkpointed(changes: Changes) -> None:
    """Refuses changes that the state or the replay index of a checkpoint does not go with."""
    for name, state in _STATEFUL.items():
        there, here = changes.get(name, ("", ""))
        if state.get(there) != state.get(here):
            raise ValueError(
                f"{name} of a run cannot change from {there!r} to {here!r}: its checkpoints hold another state; "
                "begin a new run from this one's policy with --init_from"
            )
    there, here = changes.get("replay.mount", ((), ()))
    if gone := sorted(set(there) - set(here)):
        raise ValueError(f"replay.mount of a run can only grow: its journal names rows of {gone[0]!r}, which is not among {here}")
    for name, (there, here) in changes.items():
        if SCHEMA.rules[name].fixed:
            raise ValueError(f"{name} of a run cannot change: {there!r} there, {here!r} here")


def check_changes(run: layout.RunDir, config: Any, *, allowed: Sequence[str], step: int) -> Changes:
    """The changes that `change_schedule` would make; writes nothing.

    Raises ValueError: a setting differs that is not in `allowed`, or that no run can change, or `allowed` names no setting.
    """
    settings = flatten(config.to_dict())
    if unknown := sorted(set(allowed) - settings.keys()):
        told = hint(nearest(unknown[0], settings))
        raise ValueError(f"--allow_change={','.join(allowed)}: there is no setting {unknown[0]}{told}")
    changes = schedule_changes(run, config)
    steps = config.learner.steps
    require(steps >= step, f"learner.steps={steps} is less than the {step} steps that the run has done")
    if step or (run.checkpoints.is_dir() and any(run.checkpoints.iterdir())):
        _check_checkpointed(changes)
    refused = {name: values for name, values in changes.items() if name not in allowed}
    if "none" in refused.get("learner.reference.kind", ()):
        del refused["learner.reference.kind"]  # the contract refuses it, and nothing can allow it
    if step and refused:
        allow = f"to change it, add --allow_change={','.join(sorted(refused))}"
        raise ValueError(f"the run has another schedule; {changes_in_words(refused)}; {allow}")
    return changes


def past_schedules(run: layout.RunDir, *, after: int) -> list[tuple[int, dict[str, Any]]]:
    """Settings that had other values in steps after `after`: (last step with these values, setting -> value then), in order.

    learner.non_finite is left out, because the journal says whether the run went on after a step.
    """
    changes = contract_lib.read(run)["changes"]
    found = []
    for step in sorted({entry["step"] for entry in changes if entry["step"] > after}):
        values: dict[str, Any] = {}
        for entry in reversed([entry for entry in changes if entry["step"] >= step]):
            values |= {name: there for name, (there, _) in entry["settings"].items()}
        values.pop("learner.non_finite", None)
        if values:
            found.append((step, with_tuples(values)))
    return found
