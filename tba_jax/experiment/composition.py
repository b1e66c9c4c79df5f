"""From a config to what every role works with: task, queries, policy, tokenizer and contract."""

import contextlib
import dataclasses
import datetime
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tba_jax.experiment import checks, meshes, stored_run
from tba_jax.models.config import FREE_FIELDS
from tba_jax.models.hugging_face import load
from tba_jax.models.policy import Policy
from tba_jax.rewards import scorers, task_models
from tba_jax.roles import evaluator
from tba_jax.schemas import NO_CHARACTER, Mistakes, holds_surrogate, require
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout
from tba_jax.tasks import EXTRAS, TASKS, interface
from tba_jax.tasks.environments import HasEnvironment
from tba_jax.tasks.interface import SPLITS, EncodedQuery, Query, Shortens, Task, private_files, reward_range
from tba_jax.tasks.tools import ToolTask
from tba_jax.telemetry.alarms import Alarms
from tba_jax.text import prompts
from tba_jax.text.tokenizers import Tokenizer, banned_tokens
from tba_jax.text.turns import Between

log = logging.getLogger(__name__)

# Settings task.* that are fields of the contract.
_IN_CONTRACT = ("prompt_length", "response_length", "min_response_length", "force_eos", "missing_eos_reward")
# How names of task settings end that say where data is and how rewards are computed here. Such settings do not change what a
# reward is, and the roles of a run need not agree on them.
_OF_A_PLACE = ("path", "time_limit", "retries", "concurrency", "batch_rows", "url")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """What a config means. queries: split -> queries that fit; skipped: split -> number of queries left out as too long. teacher:
    the reference of searchers (learner.reference.kind=teacher); None: another one, or it was not read."""

    config: Any
    contract: contract_lib.Contract
    tokenizer: Tokenizer
    task: Task
    policy: Policy
    queries: dict[str, prompts.EncodedQueries]
    skipped: dict[str, int]
    teacher: Policy | None = None

    def on_device(self, device: Any) -> "Experiment":
        """The experiment of a role whose devices are of this kind, see Policy.on_device."""
        teacher = None if self.teacher is None else self.teacher.on_device(device)
        return dataclasses.replace(self, policy=self.policy.on_device(device), teacher=teacher)


def build(
    config: Any, *, reward_models: Mapping[str, str] | None = None, date: str = "", weights: bool = True, new: bool = False
) -> Experiment:
    """Checks the whole config and builds what it names, without compiling or writing anything.

    Args: reward_models: of the contract, if the run exists and its models need not be here; None: they are read. date: of the
    contract, if the run exists; "": the run is a new one. weights: False: for a dry run, which fetches no weights from the hub,
    see stored_run.policy_and_tokenizer. new: see checks.check.

    Raises ValueError: a sentence about each mistake of the first stage that has any.
    """
    checks.check(config, weights=weights, new=new)
    date, found = date or _new_date(config), Mistakes()
    alphabet = "" if config.model.path else found.attempt(alphabet_of, config.task.name)
    named = None
    if alphabet is not None:
        named = found.attempt(stored_run.policy_and_tokenizer, config, alphabet=alphabet, weights=weights, date=date)
    made = found.attempt(make_task, config)
    path = config.task.embedding_path
    embedding = found.attempt(scorers.describe_encoder, path, fetch=weights) if path else {}
    found.end()
    assert named is not None and made is not None and alphabet is not None and embedding is not None
    (policy, tokenizer), (task, settings) = named, made
    stored_run.check_policy(config, policy, tokenizer, found)
    c = config.task
    chat = dict(chat_template=c.chat_template, system_prompt=c.system_prompt)
    tools = task.schemas if isinstance(task, ToolTask) else []
    template = found.attempt(prompts.template, tokenizer, **chat, tools=tools)
    if isinstance(task, HasEnvironment):
        found.attempt(_between_turns, task, tokenizer, chat_template=c.chat_template, tools=tools)
    banned = found.attempt(banned_tokens, config.task, tokenizer, policy.model.vocab)
    queries = found.attempt(encode_queries, config, task, tokenizer, tools=tools)
    teacher = None
    if reward_models is None:
        reward_models = found.attempt(task_models.digests, task, fetch=weights)
        if config.learner.reference.kind == "teacher":
            teacher, digest = found.attempt(_teacher, config, policy, tokenizer, fetch=weights) or (None, {})
            reward_models = {**(reward_models or {}), **digest}
    found.end()
    assert template is not None and banned is not None and queries is not None and reward_models is not None
    contract = contract_lib.Contract(
        model={name: value for name, value in dataclasses.asdict(policy.model).items() if name not in FREE_FIELDS},
        lora={} if policy.lora is None else dataclasses.asdict(policy.lora),
        tokenizer=tokenizer.fingerprint,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        **{name: c[name] for name in _IN_CONTRACT},
        stop_strings=tuple(sorted(set(c.stop_strings))),
        step_ends=tuple(sorted(set(c.step_ends))),
        scoring_temperature=config.sampling.scoring_temperature,
        turns=task.most_turns if isinstance(task, HasEnvironment) else 0,
        task_name=interface.short_name(c.name),
        task={name: value for name, value in settings.items() if not name.endswith(_OF_A_PLACE)},
        reward_parts=task.reward_parts,
        reward_version=task.reward_version,
        warm_start=config.warm_start.to_dict(),
        private_files=private_files(task),
        reference=kind if (kind := config.learner.reference.kind) in ("none", "teacher") else "initial",
        alphabet=alphabet,
        date=date,
        banned_tokens=banned,
        chat_template=template,
        embedding=embedding,
        reward_models=dict(reward_models),
    )
    experiment = Experiment(
        config=config,
        contract=contract,
        tokenizer=tokenizer,
        task=task,
        policy=policy,
        queries=queries[0],
        skipped=queries[1],
        teacher=teacher,
    )
    for role in meshes.roles_of(config):
        found.attempt(meshes.check, experiment, role=role, devices=None)
    found.end()
    return experiment


def _teacher(config: Any, policy: Policy, tokenizer: Tokenizer, *, fetch: bool) -> tuple[Policy, dict[str, str]]:
    """The policy of a teacher, and its digest for the contract, which is left out where its weights are away and not fetched.

    Raises ValueError: it cannot be used, or is not of the policy's tokens.
    """
    path, c = config.learner.reference.path, config.task
    called = f"{contract_lib.TEACHER}={path!r}"
    _, model, theirs = scorers.language_model(path, setting=contract_lib.TEACHER, compute_dtype=config.model.compute_dtype)
    model = dataclasses.replace(model, attention=config.model.attention)
    other = (
        f"{called} has another tokenizer than the policy: a teacher scores the policy's tokens, so both must have the same one"
    )
    require(theirs.fingerprint == tokenizer.fingerprint, other)
    vocab = f"{called} has a vocabulary of {model.vocab} tokens, the policy has one of {policy.model.vocab}: they must be equal"
    # A preset is the shape of a dry run, beside a tokenizer that need not be its own.
    require(model.vocab == policy.model.vocab or bool(config.model.preset), vocab)
    rows = f"task.prompt_length + task.response_length = {c.prompt_length + c.response_length}"
    too_short = f"{called} has {model.max_positions} positions, fewer than {rows}"
    require(c.prompt_length + c.response_length <= model.max_positions, too_short)
    if not (fetch or load.holds_weights(path)):
        return Policy(model=model), {}
    with load.named(contract_lib.TEACHER, path):
        load.check_weights(path, model)
    return Policy(model=model), {contract_lib.TEACHER: scorers.digest(path)}


def _new_date(config: Any) -> str:
    """The date of a new run: that of the first run that it mounts, which has the same prompts; else today's."""
    for folder in config.replay.mount[:1]:
        with contextlib.suppress(ValueError, KeyError):  # check_mounts says what is wrong with it
            return str(contract_lib.read_run(layout.open_run_dir(folder))["contract"]["date"])
    return datetime.date.today().isoformat()


def rebuild(stored: Mapping[str, Any], config: Any, *, called: str) -> Experiment:
    """What the config of an existing run means. Its task is constructed: where that is a file, somebody has to trust it.

    Args: stored: config.json; config: its config, perhaps with other settings; called: what messages call the run.

    Raises ValueError: as `build`, or the run's contract is another one now.
    """
    experiment = build(config, date=stored["contract"].get("date", ""))
    if different := contract_lib.differences(stored["contract"], experiment.contract.to_json()):
        raise ValueError(f"{called} is a run of another contract; " + contract_lib.in_words(different))
    return experiment


def heldout_queries(experiment: Experiment) -> list[EncodedQuery]:
    """The first `evaluation.queries` held-out queries; all, if that is 0 or there are fewer."""
    return experiment.queries["heldout"][: experiment.config.evaluation.queries or None]


def task_class(name: str) -> Callable[..., Task]:
    """The class of a task that task.name names: of TASKS, or of the user's file.

    Raises ValueError: the task's package is an extra that is not installed, or the file has no such class.
    """
    if interface.is_custom(name):
        return interface.custom_class(name)
    if name in EXTRAS:
        package, extra = EXTRAS[name]
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"task.name={name!r} needs the package {package}, which is not installed; it is the extra `{extra}`: "
                f"pip install -e '.[{extra}]' installs it"
            )
    return TASKS[name]


def alphabet_of(name: str) -> str:
    """All characters of the prompts and responses of a task, "" if it needs a pretrained model."""
    return str(getattr(task_class(name), "alphabet", ""))


def keeps_private(name: str) -> bool:
    """Whether files of runs of a task are for their owner alone to read. Raises ValueError where its file has no such task."""
    return private_files(interface.custom_class(name) if interface.is_custom(name) else TASKS.get(name))


def make_task(config: Any) -> tuple[Task, dict[str, Any]]:
    """The task that config.task names, and its settings.

    Raises ValueError: the task refuses its settings, or it does not go with the rest of the config.
    """
    section, name, custom = config.task, config.task.name, config.task.custom.to_dict()
    if custom and not interface.is_custom(name):
        of_custom = f"task.custom.{min(custom)} is a setting of a custom task"
        raise ValueError(f"{of_custom}, FILE.py:CLASS, but task.name={name!r} is not one")
    if interface.is_custom(name):
        settings = custom
        with interface.named_errors(name, "its constructor"):
            task = interface.make_custom(task_class(name), settings)
    else:
        settings = section[name].to_dict() if name in section else {}
        task = task_class(name)(**settings)
    other_figure = "is that of another figure of evaluation reports; call it otherwise"
    require(task.score_name not in evaluator.REPORTED, f"the task's score_name={task.score_name!r} {other_figure}")
    given = reward_range(task)
    if given is not None and config.searchers.prompt_selection == "posterior" and not 0 <= given[0] <= given[1] <= 1:
        raise ValueError(
            f"searchers.prompt_selection=posterior counts successes, so every reward must be within [0, 1], and those of "
            f"task.name={config.task.name!r} are within [{given[0]:g}, {given[1]:g}]: scale them, or set "
            "searchers.prompt_selection=uniform"
        )
    has_environment = isinstance(task, HasEnvironment)
    values = f"task.step_ends={tuple(section.step_ends)}, by which states get values, does not go with an environment"
    require(not (has_environment and section.step_ends), f"{values}, which task.name={name!r} has")
    conversations = f"searchers.conversations={config.searchers.conversations} would not be used"
    require(has_environment or not config.searchers.conversations, f"{conversations}: task.name={name!r} has no environment")
    for section in ("searchers", "evaluation"):
        devices, why = config[section].task_devices, f"task.name={config.task.name!r} scores without models"
        require(not devices or task_models.uses(task), f"{section}.task_devices={devices} would not be used: {why}")
    return task, settings


def _between_turns(task: HasEnvironment, tokenizer: Tokenizer, *, chat_template: bool, tools: Sequence[Any]) -> None:
    """Raises ValueError: the chat template has no place for what an environment says, or for the task's tools."""
    between = Between(tokenizer, chat_template=chat_template)
    if isinstance(task, ToolTask):
        require(chat_template, "a task with tools needs task.chat_template=True: the chat template tells the policy of them")
        task.use(between.tool_format(tools))
    role = "tool" if tools else "user"
    between.encode([{"role": role, "content": ""}], after=tokenizer.eos_id)


def encode_queries(
    config: Any, task: Task, tokenizer: Tokenizer, *, tools: Sequence[Any] = ()
) -> tuple[dict[str, prompts.EncodedQueries], dict[str, int]]:
    """The queries that fit task.prompt_length, and the number of queries that were left out as too long, both by split.

    Args: tools: JSON schemas of the tools of which a chat template tells.

    Raises ValueError: the task gives no queries or something else, prompts are too long, or an update needs more queries.
    """
    queries, skipped = dict[str, prompts.EncodedQueries](), dict[str, int]()
    for split in SPLITS:
        queries[split], skipped[split] = prompts.encode(
            _queries(config.task.name, task, split),
            tokenizer,
            chat_template=config.task.chat_template,
            system_prompt=config.task.system_prompt,
            limit=config.task.prompt_length,
            long_prompts=config.task.long_prompts,
            split=split,
            tools=tools,
            shorten=task.shortened if isinstance(task, Shortens) else None,
        )
    wanted, there = config.learner.queries, len(queries["train"])
    require(wanted <= there, f"learner.queries={wanted} is more than the {there} train queries of the task")
    return queries, skipped


def _queries(name: str, task: Task, split: str) -> Sequence[Query]:
    """What the task gives for a split. Raises ValueError where that is nothing, or anything but queries."""
    with interface.named_errors(name, f"queries({split!r})") if interface.is_custom(name) else contextlib.nullcontext():
        queries = list(task.queries(split))
    if not queries:
        raise ValueError(f"task.name={name!r}: queries({split!r}) gave none")
    for query in queries:
        if not (isinstance(query, Query) and isinstance(query.prompt, str) and isinstance(query.answer, str) and query.prompt):
            raise ValueError(
                f"task.name={name!r}: queries({split!r}) must give Query(prompt, answer), texts, the first not empty; it gave "
                f"{repr(query)[:100]}"
            )
        if holds_surrogate((query.prompt, query.answer)):
            raise ValueError(f"task.name={name!r}: queries({split!r}) gave {repr(query)[:200]}, which {NO_CHARACTER}")
    return queries


KIND = "prompts_change"
PROMPTS = 256  # of each split, evenly spread: decoding a large data set takes minutes
_ADVICE = "take a model whose tokenizer has these characters, or write prompts without them (the task's prompt setting)"


def tell_changed_prompts(e: Experiment, alarms: Alarms | None = None) -> None:
    """Tells of prompts whose text the tokenizer changes: by an alarm once a run, or without `alarms` by a warning."""
    if alarms is not None and KIND in alarms.told:
        return
    changes = []
    for split in SPLITS:
        queries = e.queries[split]
        chosen = range(0, len(queries), -(-len(queries) // PROMPTS))
        count, text, read = prompts.changed_by(e.tokenizer, [queries[i].query.prompt for i in chosen])
        if count:
            of = f"{len(chosen)} {split} prompts" + (f" (of {len(queries):,})" if len(chosen) < len(queries) else "")
            changes.append(f"{count} of {of}, such as '{text}', which the policy reads as '{read}'")
    sentence = f"the tokenizer changes the text of {', and '.join(changes)}"
    if changes and alarms is None:
        log.warning("%s; what to do: %s", sentence, _ADVICE)
    elif changes and alarms:
        alarms.tell(kind=KIND, sentence=sentence, advice=_ADVICE, step=0)
