"""Settings of a recipe with which a run fits this machine: its devices, their memory and the disk, by estimates from shapes.

Nothing is compiled and no weights are read or fetched. A setting that the user names by a flag stays as it is.
"""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from tba_jax.experiment import answer, composition, disk, flow, named_policy, prompt_check
from tba_jax.experiment.composition import Experiment
from tba_jax.roles import gpus
from tba_jax.run import layout
from tba_jax.schemas import flatten

log = logging.getLogger(__name__)

Settings = Mapping[str, Any]

# The shares of a device's memory that roles may take by estimate, by the kind of device: estimates leave out XLA's temporary
# arrays and the libraries of each process, and on a CPU a checkpoint that is being written as well.
_SHARES = {"gpu": 0.85, "other": 0.85, "cpu": 0.7}
# A tokenizer that changes more of the prompts than this is not the one for them. Fewer are an alarm of the run.
_CHANGED_PROMPTS = 0.1
# A CPU computes a hundredth of what a GPU does: short sequences, small batches and a fifth of the steps.
_AT_MOST_ON_CPU: Settings = {
    "task.prompt_length": 256,
    "task.response_length": 256,
    "learner.steps": 200,
    "learner.queries": 4,
    "learner.completions": 8,
    "searchers.count": 1,
    "searchers.queries_per_batch": 4,
    "searchers.samples_per_query": 8,
    "replay.min_rows": 64,
    "evaluation.queries": 64,
    "evaluation.batch_size": 32,
}
_ON_CPU: Settings = {"model.compute_dtype": "float32", "task.long_prompts": "skip"}
# Settings in steps, which a run of fewer steps than its recipe has in proportion.
_IN_PROPORTION = (
    *("learner.warmup_steps", "learner.decay_steps", "learner.schedule_steps", "learner.beta_steps"),
    *("learner.ref_temperature_steps", "learner.reward_temperature_steps"),
    *("evaluation.every_steps", "checkpoint.every_steps"),
)
# Full rows in an update's micro-batch on a device, queries decoded side by side, rows of an evaluator: ever less memory.
_BUDGETS = ((8, 4, 64), (4, 2, 32), (1, 1, 8))
_RANK = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """settings: those that differ from the recipe with the user's flags, with values before and after. told: the estimates."""

    config: Any
    settings: Mapping[str, tuple[Any, Any]]
    told: tuple[str, ...]

    @property
    def flags(self) -> list[str]:
        """The settings as flags of tba_jax.main."""
        return [f"--config.{name}={after}" for name, (_, after) in self.settings.items()]


def choose(config: Any, recipe: Any, run: layout.RunDir, *, named: Collection[str], small: str) -> Chosen:
    """The first of ever smaller forms of a recipe that fits this machine: budgets first, then adapters in place of all weights.

    Args: config: the recipe with the user's flags, which name the settings `named`; recipe: without them; run: not there yet;
      small: the command of the recipe's small form, "" where it has none.

    Raises:
      ValueError: the config is wrong, its tokenizer does not go with its prompts, or no form fits; says what is needed and there.
    """
    kind, count = _devices()
    flags = _Flags(named)
    config = flags.applied(config, _first(config, recipe, kind=kind, count=count, steps_are_named="learner.steps" in named))
    experiment = composition.build(config, reward_models={}, weights=False, new=True)
    if (found := prompt_check.find(experiment, share=_CHANGED_PROMPTS)) is not None:
        raise ValueError(f"{found.sentence}: {found.advice}")
    problems, told = list[str](), tuple[str, ...]()
    for policy in _policies(config, named):
        trained = _with(experiment, flags.applied(config, policy))
        budgets = _Search(trained, flags, lambda e: [(v.fits, str(v)) for v in answer.verdicts(e, share=_SHARES[kind])])
        disks = _Search(trained, flags, lambda e: [(d.fits, f"disk       {d.describe()}") for d in disk.demands(e, run)])
        budgets.over(_budgets(trained.config, kind=kind, count=count))
        disks.over(_disks(trained.config))
        if budgets.found is not None and disks.found is not None:
            config = flags.applied(trained.config, {**budgets.found, **disks.found})
            return Chosen(config=config, settings=_changes(recipe, config, named), told=(*told, *budgets.told, *disks.told))
        problems = [" ".join(each.split()) for each in (*budgets.problems, *disks.problems)]
        told = (f"adapters are trained, because with all weights {'; '.join(problems)}",)
    called = config.model.path or "the policy of this recipe"
    what = "the smallest batches and adapters" if config.lora.rank == 0 else "the smallest batches"
    offer = f"; the recipe's small form, with a tiny model and no downloads, runs anywhere: {small}" if small else ""
    raise ValueError(
        f"{called} does not fit this machine ({answer.machine_in_words()}), not even with {what}, by estimates from shapes: "
        f"{'; '.join(problems)}; a smaller model may fit{offer}"
    )


def tell(chosen: Chosen) -> None:
    """Logs what was chosen, a line for each section of the config, and what the run will take."""
    log.info("settings of the recipe → for this machine (%s); flags change them:", answer.machine_in_words())
    for section, names in itertools.groupby(chosen.settings, lambda name: name.partition(".")[0]):
        changes = (f"{name} {before} → {after}" for name in names for before, after in [chosen.settings[name]])
        log.info("  %s", ", ".join(change if i == 0 else change.removeprefix(f"{section}.") for i, change in enumerate(changes)))
    for line in chosen.told:
        log.info("  %s", line)


class _Flags:
    """Changes configs, but for the settings that the user has named."""

    def __init__(self, named: Collection[str]):
        self._named = named

    def applied(self, config: Any, settings: Settings) -> Any:
        changed = config.copy_and_resolve_references()
        changed.update_from_flattened_dict({name: value for name, value in settings.items() if name not in self._named})
        return changed


class _Search:
    """Looks for the first settings with which every part of an estimate fits. found: these settings, None where there are none;
    told: the estimate's sentences with them; problems: the sentences on what does not fit with the last ones tried."""

    def __init__(self, experiment: Experiment, flags: _Flags, estimate: Callable[[Experiment], list[tuple[bool | None, str]]]):
        self._experiment, self._flags, self._estimate = experiment, flags, estimate
        self.found: Settings | None = None
        self.told: list[str] = []
        self.problems: list[str] = []

    def over(self, candidates: Iterable[Settings]) -> None:
        for settings in candidates:
            parts = self._estimate(_with(self._experiment, self._flags.applied(self._experiment.config, settings)))
            self.told, self.problems = [said for _, said in parts], [said for fits, said in parts if fits is False]
            if not self.problems:
                self.found = settings
                return


def _with(experiment: Experiment, config: Any) -> Experiment:
    """The experiment with other budgets, files or adapters; lengths and queries are the same."""
    policy = dataclasses.replace(experiment.policy, lora=named_policy.adapters(config))
    return dataclasses.replace(experiment, config=config, policy=policy)


def _devices() -> tuple[str, int]:
    """Of this machine: "gpu", "cpu" or "other", accelerators that one process holds; and how many.

    Raises:
      ValueError: there are GPUs that JAX cannot use.
    """
    if visible := gpus.visible():
        gpus.check_supported(visible)
        return "gpu", len(visible)
    devices = gpus.jax_devices()
    return ("cpu" if devices[0].platform == "cpu" else "other"), len(devices)


def _first(config: Any, recipe: Any, *, kind: str, count: int, steps_are_named: bool) -> dict[str, Any]:
    """Settings by the kind of the devices: lengths, batches, steps and the mode of the schedule."""
    values, found = flatten(config.to_dict()), dict[str, Any]()
    if kind == "cpu":
        values["evaluation.queries"] = values["evaluation.queries"] or _AT_MOST_ON_CPU["evaluation.queries"]  # 0: all of them
        found |= {name: min(values[name], most) for name, most in _AT_MOST_ON_CPU.items()} | dict(_ON_CPU)
    if kind == "other":  # a host's TPU cannot be divided between processes
        found["schedule.mode"] = "interleaved"
    if kind != "gpu":  # every role has all devices, which have to divide its rows
        of_update = found.get("learner.completions", values["learner.completions"])
        of_batch = found.get("searchers.samples_per_query", values["searchers.samples_per_query"])
        found |= {
            "learner.queries": _divided(found.get("learner.queries", values["learner.queries"]), of_update, count),
            "searchers.queries_per_batch": _divided(
                found.get("searchers.queries_per_batch", values["searchers.queries_per_batch"]), of_batch, count
            ),
            "evaluation.batch_size": _divided(found.get("evaluation.batch_size", values["evaluation.batch_size"]), 1, count),
        }
    if kind == "gpu":
        found["searchers.count"] = max(1, min(values["searchers.count"], count - 1))
    steps = values["learner.steps"] if steps_are_named else found.get("learner.steps", values["learner.steps"])
    if steps < recipe.learner.steps:
        whole = {name: values[name] * steps // recipe.learner.steps for name in _IN_PROPORTION}
        found |= {name: max(value, 1) if name.endswith("every_steps") else value for name, value in whole.items()}
    return found


def _divided(queries: int, samples: int, devices: int) -> int:
    """The least number of queries, from `queries` on, whose samples divide over the devices."""
    return next(number for number in range(queries, queries + devices) if number * samples % devices == 0)


def _policies(config: Any, named: Collection[str]) -> Iterator[Settings]:
    """All weights, then adapters alone, which take a tenth of the memory and a hundredth of the disk."""
    yield {}
    if not (config.lora.rank or "lora.rank" in named):
        # Adapters learn at about ten times the rate of whole matrices.
        rate = float(f"{10 * config.learner.learning_rate:.6g}")
        yield {"lora.rank": _RANK, "lora.alpha": 2.0 * _RANK, "learner.learning_rate": rate}


def _budgets(config: Any, *, kind: str, count: int) -> Iterator[Settings]:
    """From the recipe's own on several devices, which is made for them, to the smallest."""
    if count > 1 and kind != "cpu":
        yield {}
    row, samples = config.task.prompt_length + config.task.response_length, config.searchers.samples_per_query
    learner, searchers, evaluation = config.learner, config.searchers, config.evaluation
    each = 1 if kind == "gpu" else count  # devices of a searcher and of the evaluator
    for rows, queries, batch in _BUDGETS:
        whole = learner.queries * learner.completions * row
        found: dict[str, Any] = {
            "learner.micro_batch_tokens": min(learner.micro_batch_tokens or whole, rows * count * row, whole),
            "searchers.slots": min(searchers.slots or searchers.queries_per_batch * samples, queries * samples * each),
            "evaluation.batch_size": min(evaluation.batch_size, batch * each),
        }
        for section in (searchers, evaluation):
            name = "searchers" if section is searchers else "evaluation"
            found[f"{name}.score_tokens"] = min(section.score_tokens or 2 * rows * row, 2 * rows * row)
            if rows == 1 and kind != "cpu" and not config.lora.rank and searchers.weights == "full":
                found[f"{name}.swap_memory"] = "in_place"
        yield found


def _disks(config: Any) -> Iterator[Settings]:
    """The recipe's own files where they are bounded, then ever fewer."""
    yield {"publish.keep": config.publish.keep or max(5, flow.least_kept(config))}
    fewer = {
        "publish.keep": max(3, flow.least_kept(config)),
        "publish.dtype": "bfloat16",
        "checkpoint.keep": 1,
        "replay.retention": "checkpoints",
    }
    yield fewer
    yield fewer | {"evaluation.every_steps": max(config.evaluation.every_steps, config.learner.steps // 2, 1)}


def _changes(recipe: Any, config: Any, named: Collection[str]) -> dict[str, tuple[Any, Any]]:
    """Name -> value in the recipe and in the config, of settings that the user has not named."""
    before, after = flatten(recipe.to_dict()), flatten(config.to_dict())
    return {name: (before[name], after[name]) for name in after if name not in named and before[name] != after[name]}
