"""From a config to what roles work with: tokenizer, task, queries, contract, and the initial reference policy."""

import contextlib
import dataclasses
import difflib
import importlib.util
import logging
import math
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import config_dict

from tba_jax import sharding
from tba_jax.decoding import sizes
from tba_jax.experiment import checks, other_runs
from tba_jax.learner.optimizer import SCHEDULES
from tba_jax.models import parameters
from tba_jax.models.config import FREE_FIELDS, DecoderConfig
from tba_jax.models.hugging_face import load
from tba_jax.models.lora import LoraConfig
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.models.presets import PRESETS
from tba_jax.objectives import OBJECTIVES
from tba_jax.replay.selection import STRATEGIES
from tba_jax.rewards import embeddings, models
from tba_jax.roles import evaluator
from tba_jax.run import contract as contract_lib
from tba_jax.run import layout, places, snapshots
from tba_jax.supervised import fine_tuning
from tba_jax.tasks import EXTRAS, TASKS, own
from tba_jax.tasks.interface import SPLITS, EncodedQuery, Query, Shortens, Task
from tba_jax.text import prompts, vocabulary
from tba_jax.text.tokenizers import CharacterTokenizer, HuggingFaceTokenizer, Tokenizer

log = logging.getLogger(__name__)

_NAMES: dict[str, Sequence[str]] = {
    "task.name": list(TASKS),
    "learner.objective": list(OBJECTIVES),
    "learner.schedule": list(SCHEDULES),
    "replay.strategy": list(STRATEGIES),
    "model.preset": ["", *PRESETS],
}

# How a task's settings end that say where its data is and how its rewards are computed here, not which: the roles of a run need
# not agree on them.
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


def build(config: Any, *, reward_models: Mapping[str, str] | None = None) -> Experiment:
    """Checks the whole config and builds what it names, without compiling or writing anything.

    Args: reward_models: of the contract, where the run has them already and the models need not be here; None: of the models.

    Raises:
      ValueError: one sentence about the first thing that is wrong.
    """
    config = with_later_settings(config)
    checks.check(config)
    config = _with_absolute_paths(config)
    leaves = contract_lib.flatten(config.to_dict())
    for name, known in _NAMES.items():
        if leaves[name] not in known and not (name == "task.name" and own.is_named(leaves[name])):
            close = difflib.get_close_matches(leaves[name], known, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"{name}={leaves[name]!r} is not one of {known}{hint}")
    _check_package(config.task.name)
    policy, tokenizer = policy_and_tokenizer(config)
    model = policy.model
    _check_kernel(model)
    _check_mesh_sizes(config, policy)
    vocabulary.check_stop_strings(config.task.stop_strings, tokenizer, model.vocab)
    vocabulary.check_stop_strings(config.task.step_ends, tokenizer, model.vocab, setting="task.step_ends", special=False)
    total = config.task.prompt_length + config.task.response_length
    if total > model.max_positions:
        raise ValueError(
            f"task.prompt_length={config.task.prompt_length} + task.response_length={config.task.response_length} = {total} "
            f"exceed the model's {model.max_positions} positions"
        )
    task, settings = _make_task(config.task)
    if task.score_name in evaluator.REPORTED:
        raise ValueError(
            f"the task's score_name={task.score_name!r} is that of another figure of evaluation reports; call it otherwise"
        )
    _check_task_devices(config, task)
    template = prompts.template(tokenizer, chat_template=config.task.chat_template, system_prompt=config.task.system_prompt)
    encoded = {
        split: prompts.encode(
            _queries(config.task.name, task, split),
            tokenizer,
            template=template,
            limit=config.task.prompt_length,
            long_prompts=config.task.long_prompts,
            split=split,
            shorten=task.shortened if isinstance(task, Shortens) else None,
        )
        for split in SPLITS
    }
    if config.learner.queries > len(encoded["train"][0]):
        raise ValueError(
            f"learner.queries={config.learner.queries} is more than the {len(encoded['train'][0])} train queries of the task"
        )
    contract = contract_lib.Contract(
        model={k: v for k, v in dataclasses.asdict(model).items() if k not in FREE_FIELDS},
        lora={} if policy.lora is None else dataclasses.asdict(policy.lora),
        tokenizer=tokenizer.fingerprint,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        banned_tokens=vocabulary.banned_tokens(config.task, tokenizer, model.vocab),
        prompt_length=config.task.prompt_length,
        response_length=config.task.response_length,
        scoring_temperature=config.sampling.scoring_temperature,
        task_name=own.short(config.task.name) if own.is_named(config.task.name) else config.task.name,
        task={name: value for name, value in settings.items() if not name.endswith(_OF_A_PLACE)},
        missing_eos_reward=config.task.missing_eos_reward,
        reward_parts=task.reward_parts,
        reward_version=task.reward_version,
        warm_start=config.warm_start.to_dict(),
        embedding=embeddings.describe(config.task.embedding_path) if config.task.embedding_path else {},
        min_response_length=config.task.min_response_length,
        stop_strings=tuple(sorted(set(config.task.stop_strings))),
        step_ends=tuple(sorted(set(config.task.step_ends))),
        chat_template=template,
        reward_models=models.digests(task) if reward_models is None else dict(reward_models),
    )
    return Experiment(
        config=config,
        contract=contract,
        tokenizer=tokenizer,
        task=task,
        policy=policy,
        queries={split: queries for split, (queries, _) in encoded.items()},
        skipped={split: skipped for split, (_, skipped) in encoded.items()},
    )


def rebuild(stored: Mapping[str, Any], *, called: str, config: Any = None) -> Experiment:
    """What the config of a run means.

    Args:
      stored: see run_config.read_run; called: what messages call the run; config: its config with other settings, if any.

    Raises:
      ValueError: as `build`, or that is a run of another contract now.
    """
    experiment = build(config_dict.ConfigDict(stored["config"]) if config is None else config)
    there, here = contract_lib.complete(stored["contract"]), experiment.contract.to_json()
    if different := contract_lib.differences(there, here):
        raise ValueError(f"{called} is a run of another contract; " + "; ".join(different))
    return experiment


def with_later_settings(config: Any) -> Any:
    """The config, or a copy where it is one of an earlier version that lacks settings."""
    missing = {
        section: {name: value for name, value in settings.items() if name not in config[section]}
        for section, settings in contract_lib.LATER.items()
    }
    if not any(missing.values()):
        return config
    config = config.copy_and_resolve_references()
    for section, settings in missing.items():
        config[section].update(settings)
    return config


def _with_absolute_paths(config: Any) -> Any:
    """The config, or a copy where a folder of replay.mount or the file of the task depends on the working directory."""
    mounts = tuple(places.absolute(folder) for folder in config.replay.mount)
    task = own.absolute(config.task.name) if own.is_named(config.task.name) else config.task.name
    if (mounts, task) == (tuple(config.replay.mount), config.task.name):
        return config
    config = config.copy_and_resolve_references()
    config.replay.mount, config.task.name = mounts, task
    return config


def _queries(name: str, task: Task, split: str) -> Sequence[Query]:
    """Raises ValueError where a task of one's own gives none, or something else."""
    with own.blamed(name, f"queries({split!r})") if own.is_named(name) else contextlib.nullcontext():
        queries = list(task.queries(split))
    if not queries:
        raise ValueError(f"task.name={name!r}: queries({split!r}) gave none")
    for query in queries:
        if not (isinstance(query, Query) and isinstance(query.prompt, str) and isinstance(query.answer, str) and query.prompt):
            raise ValueError(
                f"task.name={name!r}: queries({split!r}) must give Query(prompt, answer), texts, the first not empty; it gave "
                f"{repr(query)[:100]}"
            )
    return queries


def _task_class(name: str) -> Callable[..., Task]:
    return own.load(name) if own.is_named(name) else TASKS[name]


def _make_task(config: Any) -> tuple[Task, dict[str, Any]]:
    """The task that config.task names, and its settings."""
    custom = config.custom.to_dict()
    if own.is_named(config.name):
        with own.blamed(config.name, "its constructor"):
            return own.make(_task_class(config.name), custom, section="task.custom"), custom
    if custom:
        raise ValueError(
            f"task.custom.{min(custom)} is of a task of one's own, FILE.py:CLASS, and task.name={config.name!r} is none"
        )
    settings = config[config.name].to_dict() if config.name in config else {}
    return TASKS[config.name](**settings), settings


def _check_package(task: str) -> None:
    """Raises ValueError where the task's package is an extra that is not installed."""
    if task not in EXTRAS:
        return
    package, extra = EXTRAS[task]
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"task.name={task!r} needs the package {package}, which is not installed; it is the extra `{extra}`: "
            f"`make {extra}` installs it, and so does pip install -e '.[{extra}]'"
        )


def _check_task_devices(config: Any, task: Task) -> None:
    for section in ("searchers", "evaluation"):
        devices = config[section].task_devices
        if devices and not models.uses(task):
            raise ValueError(
                f"{section}.task_devices={devices} would not be used: task.name={config.task.name!r} scores without models"
            )


def _check_kernel(model: DecoderConfig) -> None:
    """What cuDNN's flash attention takes."""
    if model.attention != "cudnn":
        return
    if model.compute_dtype != "bfloat16":
        raise ValueError(f"model.attention=cudnn needs model.compute_dtype=bfloat16, not {model.compute_dtype}")
    if model.head_size % 8 or model.head_size > 128:
        raise ValueError(f"model.attention=cudnn takes heads of a multiple of 8 up to 128, the model's are {model.head_size}")


def _check_mesh_sizes(config: Any, policy: Policy) -> None:
    """The sizes that parameters are split by, which need no devices to be known."""
    for section in ("learner", "searchers", "evaluation"):
        mesh = config[section].mesh
        for name, size in mesh.items():
            if size < 1 and (name, size) != ("data", -1):
                also = ", or -1 for all devices that are left" if name == "data" else ""
                raise ValueError(f"{section}.mesh.{name}={size} must be at least 1{also}")
        try:
            parameters.check_divides({"data": 1, "fsdp": mesh.fsdp, "tensor": mesh.tensor}, policy.model_specs)
        except ValueError as error:
            raise ValueError(f"{section}.mesh: {error}") from error


def policy_and_tokenizer(config: Any) -> tuple[Policy, Tokenizer]:
    """What config.model, config.lora and config.task.name say of the policy.

    Raises:
      ValueError: the checkpoint cannot be used, or policy, adapters and tokenizer do not go together.
    """
    if config.model.path:
        with load.named("model.path", config.model.path):
            folder = load.resolve_folder(config.model.path)
            model = load.read_config(
                folder, compute_dtype=config.model.compute_dtype, attention=config.model.attention, head="language_model"
            )
            tokenizer: Tokenizer = HuggingFaceTokenizer(folder)
    else:
        alphabet = getattr(_task_class(config.task.name), "alphabet", "")
        if not alphabet:
            raise ValueError(f"task.name={config.task.name!r} needs a pretrained model: set model.path to its folder")
        tokenizer = CharacterTokenizer(alphabet)
        model = _model_from_shape(config, tokenizer.vocab_size)
    if tokenizer.vocab_size > model.vocab:
        raise ValueError(
            f"model.path={config.model.path!r}: the tokenizer has {tokenizer.vocab_size} ids, the embedding only {model.vocab}"
        )
    policy = Policy(model=model, lora=_lora(config))
    _ = policy.trained_specs  # refuses targets that the model does not have
    return policy, tokenizer


def _lora(config: Any) -> LoraConfig | None:
    c = config.lora
    return LoraConfig(rank=c.rank, alpha=c.alpha, targets=tuple(c.targets)) if c.rank else None


def _model_from_shape(config: Any, vocab: int) -> DecoderConfig:
    m = config.model
    if m.preset:
        return dataclasses.replace(PRESETS[m.preset], compute_dtype=m.compute_dtype, attention=m.attention)
    return DecoderConfig(
        layers=m.layers,
        width=m.width,
        heads=m.heads,
        kv_heads=m.kv_heads,
        head_size=m.head_size,
        ffn=m.ffn,
        vocab=vocab,
        max_positions=config.task.prompt_length + config.task.response_length,
        tied_embedding=m.tied_embedding,
        compute_dtype=m.compute_dtype,
        attention=m.attention,
    )


def check_initial_policy(experiment: Experiment, run: layout.RunDir, *, init_from: str = "") -> None:
    """Raises ValueError where the initial policy still has to be imported and its checkpoint is not whole, or what is taken
    from other runs (other_runs) does not go with this one."""
    config = experiment.config
    if config.model.path and not (init_from or config.replay.mount or places.exists(run.initial_reference)):
        with load.named("model.path", config.model.path):
            load.check_weights(config.model.path, experiment.policy.model)


def ensure_reference(experiment: Experiment, run: layout.RunDir, *, report: Callable[[int, float], None]) -> str:
    """The id of the policy that step 0 starts from; makes it if the run has none.

    It is the reference policy of the runs that are mounted; else the snapshot that --init_from named; else imported,
    warm-started or random, as the config says.

    Args:
      report: of the warm start, see fine_tuning.warm_start.

    Returns:
      16 hex digits, a hash of the weights; `run.reference(id)` holds them as a snapshot.
    """
    if places.exists(run.initial_reference):
        return layout.read_json(run.initial_reference)["id"]
    config, policy = experiment.config, experiment.policy
    init_from = contract_lib.read(run).get("init_from", "")
    mesh = sharding.make_mesh(tuple(config.learner.mesh.values()), setting="learner.mesh")
    beside = run.references if isinstance(run.references, Path) else run.root
    draft = beside / f".draft-{uuid.uuid4().hex[:8]}"
    if config.replay.mount:
        other_runs.copy_reference(config.replay.mount[0], draft)
    else:
        made = other_runs.load_policy(init_from, policy, mesh) if init_from else _initial_params(experiment, mesh, report)
        snapshots.save(draft, made, snapshots.SnapshotInfo(step=0, epoch=0), dtype="float32")
        del made
    reference_id = snapshots.fingerprint(draft)
    if places.exists(run.reference(reference_id) / snapshots.COMMIT):
        shutil.rmtree(draft)
    else:
        snapshots.adopt(draft, run.reference(reference_id))
    if init_from:
        reference = run.reference(reference_id)
        other_runs.take_optimizer(init_from, run, config, experiment.contract, policy=policy, reference=reference, mesh=mesh)
    layout.write_json(run.initial_reference, {"id": reference_id})
    log.info("reference policy %s: %d parameters", reference_id, parameters.count(policy.model_specs))
    return reference_id


def _initial_params(experiment: Experiment, mesh: Any, report: Callable[[int, float], None]) -> Params:
    config, model = experiment.config, experiment.policy.model
    shardings = experiment.policy.model_shardings(mesh)
    if config.model.path:
        return load.load_params(load.resolve_folder(config.model.path), model, shardings)
    if not config.warm_start.steps:
        return jax.jit(experiment.policy.base.init, out_shardings=shardings)(jax.random.key(config.seed))
    w = config.warm_start
    return fine_tuning.warm_start(
        experiment.task,
        experiment.tokenizer,
        config=model,
        mesh=mesh,
        seed=config.seed,
        prompt_length=config.task.prompt_length,
        response_length=config.task.response_length,
        steps=w.steps,
        batch_size=w.batch_size,
        learning_rate=w.learning_rate,
        warmup_steps=w.warmup_steps,
        report_every_steps=w.report_every_steps,
        report=report,
    )


def check_devices(experiment: Experiment, *, role: str, devices: int | None) -> None:
    """Raises ValueError where a role's mesh does not make up its devices, or does not divide its rows or parameters.

    Args: devices: of the role; None where they are not known: as few as its mesh can make up.
    """
    config = experiment.config
    batch = config.learner.micro_batch_rows or config.learner.queries * config.learner.completions
    warm = config.warm_start.batch_size if config.warm_start.steps else batch
    rows_of_learner = "learner.micro_batch_rows or learner.queries × learner.completions"
    rows_of_searcher = "searchers.queries_per_batch × searchers.samples_per_query"
    section, settings = {
        "trainer": ("learner", {rows_of_learner: batch, "warm_start.batch_size": warm}),
        "searcher": ("searchers", {rows_of_searcher: config.searchers.queries_per_batch * config.searchers.samples_per_query}),
        "evaluator": ("evaluation", {"evaluation.batch_size": config.evaluation.batch_size}),
    }[role]
    own = config[section].task_devices if role != "trainer" else 0
    mesh = tuple(config[section].mesh.values())
    if devices is None:
        devices = own + math.prod(max(size, 1) for size in mesh)
    if own >= devices:
        raise ValueError(f"{section}.task_devices={own} leaves the policy none of the {devices} devices of this role")
    shape = sharding.mesh_shape(mesh, devices - own, setting=f"{section}.mesh")
    for what, rows in settings.items():
        sharding.check_ways(rows, shape[0] * shape[1], what=what)
    _check_slots(config, role, ways=shape[0])
    mesh_sizes = dict(zip(sharding.MESH_AXES, shape, strict=True))
    parameters.check_divides(mesh_sizes, experiment.policy.model_specs)


def _check_slots(config: Any, role: str, *, ways: int) -> None:
    """Raises ValueError where the slots of a role that decodes cannot be divided over the data ways of its mesh."""
    s = config.searchers
    batch = s.queries_per_batch * s.samples_per_query
    if role == "searcher":
        what = f"searchers.slots={s.slots}" if s.slots else f"searchers.slots=0 (queries_per_batch × samples_per_query = {batch})"
        sizes.arrange(s.slots or batch, s.samples_per_query, ways, what=what)
    elif role == "evaluator":
        size = config.evaluation.batch_size
        sizes.arrange(size, 1, ways, what=f"evaluation.batch_size={size}")


def heldout_queries(experiment: Experiment) -> list[EncodedQuery]:
    """The first `evaluation.queries` held-out queries (all, if there are fewer)."""
    return experiment.queries["heldout"][: experiment.config.evaluation.queries]
