"""Policy, tokenizer and places that a config names, and a run that exists, as its config.json tells it.

Whoever can write a workdir decides what its config.json names. Nothing of that is executed here: no task is imported, and no code
of a checkpoint.
"""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from tba_jax.experiment.mistakes import Mistakes
from tba_jax.experiment.schema import SCHEMA
from tba_jax.models import attention
from tba_jax.models.config import FREE_FIELDS, PRESETS, DecoderConfig
from tba_jax.models.hugging_face import load
from tba_jax.models.policy import LoraConfig, Policy
from tba_jax.schemas import flatten
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout, places
from tba_jax.storage.places import Place
from tba_jax.text import stop_strings
from tba_jax.text.tokenizers import CharacterTokenizer, HuggingFaceTokenizer, Tokenizer

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

    Raises:
      ValueError: there is no run, its config.json is damaged, or the checkpoint at its model.path is gone or another one now.
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

    Raises:
      ValueError: it is not the config of a run of this version; names a setting.
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

    Args:
      alphabet: without model.path, the characters of the tokenizer, which the task defines; "" where it defines none.
      weights: False: those of model.path need not be there; and model.preset, where it is given, says the shape in its place.
      date: see HuggingFaceTokenizer.

    Raises:
      ValueError: the checkpoint cannot be used, or policy, adapters and tokenizer do not go together.
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
    policy = Policy(model=model, lora=adapters(config))
    _ = policy.trained_specs  # refuses targets that the model does not have
    return policy, tokenizer


def _model_from_shape(config: Any, vocab: int) -> DecoderConfig:
    m = config.model
    if m.preset:
        return dataclasses.replace(PRESETS[m.preset], compute_dtype=m.compute_dtype, attention=m.attention)
    shape = {name: value for name, value in m.items() if name not in ("path", "preset")}
    return DecoderConfig(vocab=vocab, max_positions=config.task.prompt_length + config.task.response_length, **shape)


def adapters(config: Any) -> LoraConfig | None:
    """The adapters that config.lora asks for, None where it asks for none."""
    c = config.lora
    return LoraConfig(rank=c.rank, alpha=c.alpha, targets=tuple(c.targets)) if c.rank else None


def check_policy(config: Any, policy: Policy, tokenizer: Tokenizer, found: Mistakes) -> None:
    """Adds to `found` where kernel, stop strings or lengths do not go with the policy or the tokenizer."""
    task, model = config.task, policy.model
    if model.attention == "cudnn" and model.compute_dtype != "bfloat16":
        found.add([f"model.attention=cudnn needs model.compute_dtype=bfloat16, not {model.compute_dtype}"])
    elif model.attention == "cudnn" and not attention.cudnn_takes(model.head_size):
        of_model = f"the model's are {model.head_size}"
        found.add([f"model.attention=cudnn takes heads of a multiple of 8 up to 128, {of_model}"])
    found.attempt(stop_strings.check_stop_strings, task.stop_strings, tokenizer)
    found.attempt(stop_strings.check_stop_strings, task.step_ends, tokenizer, setting="task.step_ends", special=False)
    total = task.prompt_length + task.response_length
    if total > model.max_positions:
        lengths = f"task.prompt_length={task.prompt_length} + task.response_length={task.response_length}"
        found.add([f"{lengths} = {total} exceed the model's {model.max_positions} positions"])


def named_places(config: Any, *, init_from: str = "") -> list[tuple[str, Place]]:
    """(setting or flag, place) of the run of --init_from, of the runs of replay.mount, and of whatever settings name by a path;
    one may be a name on the hub. Args: init_from: see other_runs.parse_init_from."""
    paths = [(name, value) for name, value in flatten(config.to_dict()).items() if name.endswith(("_path", ".path"))]
    texts = [("--init_from", init_from.rpartition("@")[0]), *(("replay.mount", folder) for folder in config.replay.mount), *paths]
    found = []
    for name, text in texts:
        if text and isinstance(text, str):
            with contextlib.suppress(ValueError):  # it names no place, and other checks say so
                found.append((name, places.place(text)))
    return found


def check_answers(named: Iterable[tuple[str, Place]], *, limit: float = math.inf) -> None:
    """Returns once each place has answered, and says every ten seconds for which one it waits: asked before anything else touches
    storage, which might wait for ever.

    Args: named: (setting or flag, place); limit: seconds for each place.

    Raises:
      ValueError: a place has not answered within the limit, or is in no bucket. OSError: a store refuses.
    """
    for setting, place in dict.fromkeys(named):

        def report(seconds: float, told: str = f"{setting}={place}") -> None:
            log.warning("%s has not answered for %g s; still trying", told, round(seconds, 1))

        try:
            places.check_answers(place, report=report, limit=limit)
        except TimeoutError as error:
            told = f"{setting}={place} has not answered within {limit:g} s, and is not waited for any longer"
            raise ValueError(told) from error
