"""Rewards of responses, and the frozen models with which a task scores: loading, checks, digests, memory and programs.

TextGenerator is one of them, such as the victim of red-teaming; scorers.py has the others.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tba_jax import sharding
from tba_jax.decoding import sampling
from tba_jax.decoding.engine import Engine
from tba_jax.decoding.requests import Request
from tba_jax.models import kv_cache, parameters, scoring
from tba_jax.models.config import DecoderConfig
from tba_jax.models.hugging_face import load as load_lib
from tba_jax.programs import Program, with_beside
from tba_jax.rewards import scorers
from tba_jax.tasks.interface import Closable, EncodedQuery, ModelUse, Scores, Task, UsesModels
from tba_jax.text.prompts import PromptTemplate
from tba_jax.text.tokenizers import HuggingFaceTokenizer, Tokenizer, has_tokenizer, stop_automaton


def response_texts(
    responses: Sequence[np.ndarray | Sequence[int]], queries: Sequence[EncodedQuery], tokenizer: Tokenizer
) -> list[str]:
    """The texts of B responses, token ids without padding, one response for each of B queries."""
    pairs = zip(queries, responses, strict=True)
    return [tokenizer.decode_continuation(query.prompt, np.asarray(response).tolist()) for query, response in pairs]


def reward_texts(
    texts: Sequence[str],
    finished: np.ndarray,
    queries: Sequence[EncodedQuery],
    *,
    task: Task,
    missing_eos_reward: float | None,
) -> Scores:
    """Scores of B responses, float32. Raises TypeError or ValueError where the task, perhaps a custom one, returns anything else.

    Args: finished: bool[B], whether a response ended before the length limit; missing_eos_reward replaces the reward of others,
      unless that is NaN; None: the task's reward is kept. Reward parts are always the task's.
    """
    method, n = f"rewards() of task {type(task).__name__}", len(texts)
    try:
        scores = task.rewards([query.query for query in queries], texts, finished)
    except SystemExit as error:
        raise RuntimeError(f"{method} raised SystemExit: {error}") from error
    if not isinstance(scores, Scores):
        raise TypeError(f"{method} must return Scores, not {type(scores).__name__}")
    found, shapes = (np.shape(scores.reward), np.shape(scores.parts)), ((n,), (n, len(task.reward_parts)))
    if found != shapes:
        raise ValueError(
            f"{method} returned a reward of shape {found[0]} and parts of shape {found[1]}; for {n} responses they must have "
            f"shapes {shapes[0]} and {shapes[1]}"
        )
    reward = np.asarray(scores.reward, np.float32)
    if missing_eos_reward is not None:
        reward = np.where(~finished & ~np.isnan(reward), np.float32(missing_eos_reward), reward)
    return Scores(reward, np.asarray(scores.parts, np.float32), str(scores.failure))


class TextGenerator:
    """Replies to texts. Several threads may call it at once; a lock lets one call decode at a time.

    A reply is a function of the seed, the text and the number of the reply alone. Each device decodes by itself.
    """

    def __init__(self, use: ModelUse, mesh: Mesh, *, date: str = "", load: bool = True):
        """Args: use: a model of kind "generator"; others and errors: see scorers.UnsafeTokenScorer."""
        called, prefix, settings = f"{use.setting}={use.path!r}", use.setting.removesuffix("path"), use.generator
        assert settings is not None, "ModelUse checks it"
        folder, config, tokenizer = scorers.language_model(
            use.path, setting=use.setting, compute_dtype=use.compute_dtype, date=date
        )
        if settings.prompt_length + settings.reply_length > config.max_positions:
            raise ValueError(
                f"{prefix}prompt_length={settings.prompt_length} + {prefix}reply_length={settings.reply_length} exceed the "
                f"{config.max_positions} positions of {called}"
            )
        self._settings, self._tokenizer, self._lock = settings, tokenizer, threading.Lock()
        self._template = PromptTemplate(
            tokenizer,
            settings.template,
            fields=("attack",),
            limit=settings.prompt_length,
            template_setting=f"{prefix}template",
            limit_setting=f"{prefix}prompt_length",
            system_prompt=settings.system_prompt,
        )
        replies = _replies(use, folder, tokenizer, config.vocab)
        if load:
            config = scorers.on_device(config, mesh, setting=use.setting)
            self._engine = _engine(config, mesh, use, **replies)
            shardings = jax.tree.map(lambda x: x.sharding, scorers.weight_shapes(config, mesh))
            params = load_lib.load_params(folder, config, shardings, dtype=config.compute_dtype)
            self._engine.swap(self._engine.prepare(params, consume=True), 0)

    def __call__(self, texts: Sequence[str], seed: int) -> list[str]:
        """samples · len(texts) replies without special tokens: first all replies to the first text, then all to the second."""
        settings, distinct = self._settings, list(dict.fromkeys(texts))
        prompts = self._template.encode([(text,) for text in distinct])
        sampled = sampling.constant(settings.samples, temperature=settings.temperature, top_p=settings.top_p)
        requests = [
            Request(name=repr(text[:60]), prompt=prompt, keys=_keys(seed, text, settings.samples), sampling=sampled)
            for text, prompt in zip(distinct, prompts, strict=True)
        ]
        with self._lock:
            generations = self._engine.generate(requests)
        replies = {
            text: [self._tokenizer.decode_continuation(prompt, response.tolist()) for response in made.responses]
            for text, prompt, made in zip(distinct, prompts, generations, strict=True)
        }
        return [reply for text in texts for reply in replies[text]]


def _replies(use: ModelUse, folder: Path, tokenizer: HuggingFaceTokenizer, vocab: int) -> dict[str, Any]:
    """What an Engine has to know of a tokenizer, for an embedding of `vocab` rows: the ids of a reply, and texts that end one."""
    others = _other_ends(folder, tokenizer)
    banned = {*tokenizer.special_ids, *range(tokenizer.vocab_size, vocab)} - {*others, tokenizer.eos_id}
    ends = None
    if others:  # stop strings end a reply at the texts of these tokens, however the reply spells them
        texts = scorers.token_bytes(tokenizer, called=f"{use.setting}={use.path!r}")
        ends = stop_automaton(texts, sorted({(texts[token] or b"").decode() for token in others}), vocab=vocab)
    space = dict(banned_tokens=tuple(sorted(banned)), eos_id=tokenizer.eos_id)
    return dict(space=space, pad_id=tokenizer.pad_id, stop_strings=ends)


def _other_ends(folder: Path, tokenizer: HuggingFaceTokenizer) -> list[int]:
    """End-of-sequence ids of generation_config.json besides the tokenizer's own one: chat models have several."""
    path = folder / "generation_config.json"
    try:
        ends = json.loads(path.read_bytes()).get("eos_token_id")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if wrong := [end for end in ends if type(end) is not int or not 0 <= end < tokenizer.vocab_size]:
        raise ValueError(f"{path}: eos_token_id holds {wrong[0]!r}, but the tokenizer's ids are 0 to {tokenizer.vocab_size - 1}")
    return [end for end in ends if end != tokenizer.eos_id]


def _engine(config: DecoderConfig, mesh: Mesh, use: ModelUse, *, space: Mapping[str, Any], **replies: Any) -> Engine:
    """The decoder without weights. Raises ValueError where slots or lengths do not suit. Args: space, replies: see _replies."""
    c = use.generator
    assert c is not None, "ModelUse checks it"
    sizes: dict[str, Any] = dict(samples=c.samples, prompt_length=c.prompt_length, response_length=c.reply_length)
    # Scoring at the sampling temperature saves the decoder a second pass over the logits.
    response_space = scoring.ResponseSpace(temperature=c.temperature or 1.0, **space)
    with load_lib.named(use.setting, use.path):
        return Engine(config, response_space, mesh, slots=use.rows, **sizes, **replies)


def _keys(seed: int, text: str, samples: int) -> np.ndarray:
    """uint32[samples, 2]: a random key for each reply, see requests.Request."""
    digests = (hashlib.blake2b(f"{seed} {k} {text}".encode("utf-8", "surrogatepass"), digest_size=8) for k in range(samples))
    return np.array([np.frombuffer(digest.digest(), "<u4") for digest in digests], np.uint32)


def uses(task: Task, *, role: str = "") -> Sequence[ModelUse]:
    """The models of a task; with a role, only the models that this role loads."""
    return [use for use in task.models() if not role or role in use.roles] if isinstance(task, UsesModels) else []


def away(task: Task, *, role: str = "") -> list[ModelUse]:
    """The models whose weights are not on this machine, of hub ids that nobody has fetched. Args, Raises: as `uses`, `check`."""
    found = []
    for use in uses(task, role=role):
        with load_lib.named(use.setting, use.path):
            found += [] if use.kind == "linear" or load_lib.holds_weights(use.path) else [use]
    return found


def read_config(use: ModelUse) -> Any:
    """A model's config; None for a linear classifier, which has none. Raises ValueError if the model is of another kind."""
    if use.kind == "linear":
        scorers.LinearScorer(use.path, setting=use.setting)
        return None
    if use.kind == "sequence":
        return scorers.classifier_config(use)
    if use.kind == "embedder":
        return scorers.encoder_config(use.path, setting=use.setting)
    with load_lib.named(use.setting, use.path):
        return load_lib.read_config(use.path, compute_dtype=use.compute_dtype, head="language_model")


def load(use: ModelUse, *, mesh: Mesh, date: str = "", weights: bool = True) -> Any:
    """Loads a model onto a mesh (n, 1, 1); see ModelUse.kind for what it is. Raises ValueError if it cannot be used.

    Args: date: of the run's contract. weights: False checks what loading checks; the model that it returns cannot be called.
    """
    match use.kind:
        case "sequence":
            return scorers.SequenceClassifier(use, mesh, load=weights)
        case "unsafe_token":
            return scorers.UnsafeTokenScorer(use, mesh, date=date, load=weights)
        case "generator":
            return TextGenerator(use, mesh, date=date, load=weights)
        case "embedder":
            return scorers.ResponseEmbedder(use.path, mesh, setting=use.setting)
        case _:
            return scorers.LinearScorer(use.path, setting=use.setting)


def check(task: Task, *, role: str, fetch: bool = True) -> None:
    """Raises ValueError if a model that the role will load cannot be used: kind, labels, names and shapes of weights, tokenizer,
    prompt template, lengths. Loads no weights.

    Args: fetch: whether the weights of hub ids are fetched; where not, the kind alone is checked of models that are away.
    """
    gone = [] if fetch else away(task, role=role)
    once = functools.cache(lambda use: load(use, mesh=sharding.task_mesh(0), weights=False))
    for use in uses(task, role=role):
        config = read_config(use)
        if config is not None and use not in gone:
            with load_lib.named(use.setting, use.path):
                load_lib.check_weights(use.path, config)
            if use.kind == "sequence":  # perhaps one that the task loads later
                once(use)
    if not gone and isinstance(task, UsesModels):
        task.start(once)


def digests(task: Task, *, fetch: bool = True) -> dict[str, str]:
    """setting -> digest of each model that computes rewards, for the contract. Raises ValueError if one cannot be used.

    Args: fetch: whether the weights of hub ids are fetched; where not, models that are away are left out.
    """
    found: dict[str, str] = {}
    gone = [] if fetch else away(task, role="searcher")
    for use in uses(task, role="searcher"):
        if read_config(use) is None:
            found[use.setting] = hashlib.blake2b(Path(use.path).read_bytes(), digest_size=8).hexdigest()
        elif use not in gone:
            found[use.setting] = scorers.digest(use.path)
    return found


@contextlib.contextmanager
def started(task: Task, task_devices: int, *, date: str) -> Iterator[None]:
    """Loads a task's models, if it has any, on the devices of sharding.task_mesh; ends the task's processes at the end. Each
    process that scores enters this once. Raises ValueError where a model cannot be used. Args: date: of the run's contract."""
    if isinstance(task, UsesModels):
        task.start(functools.partial(load, mesh=sharding.task_mesh(task_devices), date=date))
    try:
        yield
    finally:
        if isinstance(task, Closable):
            task.close()


def memory(use: ModelUse, *, length: int) -> int:
    """Bytes of a model on each device: all of its weights, and its KV cache or the activations of one forward pass.

    Args: length: tokens of the run's prompt and response.
    """
    config = read_config(use)
    if config is None:
        return 0  # a linear classifier is small and in host memory
    size, length = jnp.dtype(use.compute_dtype).itemsize, use.length or length
    padded = scorers.padded_length(length, scorers.most_tokens(config))
    if use.kind == "generator":
        row = 2 * config.layers * length * config.kv_heads * config.head_size * size + 4 * config.vocab
    else:
        row = padded * (4 * config.width + 3 * config.ffn) * size + padded * padded * config.heads * 4
    return parameters.count(scorers.definition(config).specs) * size + use.rows * row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
    """Frozen models on the same devices.

    held: name of a model -> its arrays that stay on the devices, as trees of jax.ShapeDtypeStruct; room: see
    programs.with_beside. loading: name -> a program that runs before the role has anything but models, with what lies beside it.
    scoring: name -> a program that runs beside all that the role has; `held` is not yet beside it.
    """

    held: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    loading: Mapping[str, Program] = dataclasses.field(default_factory=dict)
    scoring: Mapping[str, Program] = dataclasses.field(default_factory=dict)
    room: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    def __or__(self, other: "Models") -> "Models":
        fields = (field.name for field in dataclasses.fields(self))
        return Models(**{name: {**getattr(self, name), **getattr(other, name)} for name in fields})

    def alone(self) -> dict[str, Program]:
        """Name -> all programs, on devices that have nothing but these models."""
        return {**self.loading, **with_beside(self.scoring, self.held, self.room)}


def of_task(task: Task, mesh: Mesh, *, role: str, length: int, section: str = "") -> Models:
    """The models with which a task scores in a role, without linear classifiers. Raises ValueError if one cannot be used.

    Args: mesh: see sharding.task_mesh. length: tokens of the run's prompt and response. section: of the role's settings, where
      the devices have other things as well, "" where they have not.
    """
    found = Models()
    for use in (use for use in uses(task, role=role) if use.kind != "linear"):
        made = _generator(use, mesh) if use.kind == "generator" else _of_pass(use.name, _pass(use, mesh, use.length or length))
        less = (*([f"{section}.task_devices"] if section else []), use.setting)
        room = {"temporaries": (use.rows_setting or use.setting,), "arguments": less}
        scoring = {name: dataclasses.replace(program, room=room) for name, program in made.scoring.items()}
        # Models are loaded one after the other.
        of_model = dict.fromkeys(("arguments", "temporaries", use.name), less)
        loading = with_beside(made.loading, found.held, {**found.room, **of_model})
        found |= dataclasses.replace(made, scoring=scoring, loading=loading, room={use.name: less})
    return found


def sentence_encoder(path: str, mesh: Mesh, *, length: int) -> Models:
    """The encoder of task.embedding_path. Args: mesh: of the policy; length: tokens of a response."""
    use = ModelUse(name="sentence encoder", setting="task.embedding_path", path=path, rows=0, kind="embedder")
    made = _of_pass(use.name, dataclasses.replace(_pass(use, mesh, length), room={"temporaries": (use.setting,)}))
    return dataclasses.replace(made, room={use.name: (use.setting,)})


def _of_pass(name: str, program: Program) -> Models:
    return Models(held={name: program.arguments[0]}, scoring={f"pass of the {name}": program})


def _pass(use: ModelUse, mesh: Mesh, length: int) -> Program:
    """The pass of a model, over texts of `length` tokens."""
    config, rows = read_config(use), use.rows * mesh.size
    limit = length if use.kind == "unsafe_token" else scorers.most_tokens(config)
    if use.kind == "embedder":
        forward, rows = scorers.Pass(config, scorers.embed, mesh), scorers.encoder_rows(mesh)
    else:
        # Which token is the verdict makes no difference to memory, and needs a tokenizer.
        score = scorers.score if use.kind == "sequence" else functools.partial(scorers.verdict_logprobs, token=0)
        forward = scorers.Pass(scorers.on_device(config, mesh, setting=use.setting), score, mesh)
    return forward.program(rows=rows, length=scorers.padded_length(length, limit))


def _generator(use: ModelUse, mesh: Mesh) -> Models:
    """A TextGenerator, whose programs need no weights, nor a tokenizer. Its caches are made by the first call, and stay."""
    config, replies = read_config(use), dict[str, Any](space=dict(banned_tokens=(), eos_id=0), pad_id=0)
    folder = load_lib.resolve_folder(use.path, weights=False)
    if has_tokenizer(folder):
        replies = _replies(use, folder, HuggingFaceTokenizer(folder, vocab=config.vocab), config.vocab)
    config = scorers.on_device(config, mesh, setting=use.setting)
    stacked = scorers.weight_shapes(config, mesh)
    made = _engine(config, mesh, use, **replies).programs(stacked)
    weights, prompts, slots, *_ = made["decode"].arguments
    unstack = made.pop("weights as decoded with")
    rest = kv_cache.others(stacked, *unstack.arguments)
    del made["caches"]  # as large as what the others take
    return Models(
        held={use.name: (weights, prompts, slots)},
        loading={f"a parameter of the {use.name}": dataclasses.replace(unstack, beside={use.name: rest})},
        scoring={f"{name} of the {use.name}": program for name, program in made.items()},
    )
