"""Appends the responses of a file to a run's replay log: attacks that people wrote, demonstrations, another model's answers.

python -m tba_jax append --workdir=DIR --responses=FILE [--unfit=skip] [--config=RECIPE[:NAME] | --trust_task]

FILE is a .jsonl, .json or .parquet file with rows {"prompt", "response"}, or a data set of the hub. "prompt" may be missing if
the task has one query. The run must exist (`main --role=reference` makes one) and may be training meanwhile. The rows count as
rows of step 0, and have the log-probs of its policy, as trajectory balance needs no others. Objectives that weigh rows by
π_θ/π_behaviour refuse them. Either all rows appear at once, or none does.
"""

import hashlib
import os
import platform
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from absl import flags

from tba_jax import trajectory
from tba_jax.commands import command_line, recipes
from tba_jax.outputs import visible
from tba_jax.replay.log import GIVEN, LogWriter, registration, remove
from tba_jax.replay.reader import LogReader
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import file_systems, layout, places
from tba_jax.tasks import data
from tba_jax.text.prompts import encode_pair
from tba_jax.text.prompts import texts as prompt_texts

if TYPE_CHECKING:  # what imports JAX is imported late: a mistyped flag is answered at once
    from tba_jax.experiment.composition import Experiment
    from tba_jax.roles.sampler import Reference, Scoring
    from tba_jax.tasks.interface import EncodedQuery, Scores
    from tba_jax.text.tokenizers import StopStrings

UNFIT = ("refuse", "skip")


class GivenResponse(NamedTuple):
    """tokens: of the response, up to and including the token that ends it."""

    query: "EncodedQuery"
    tokens: list[int]


def append(workdir: Path, source: str, *, unfit: str, settings: command_line.Source = command_line.AS_IT_IS) -> str:
    """Scores the responses of a file by the task and the policy of step 0, and commits them as rows of a new writer.

    Args: source: see tasks.data.read; unfit: what happens to responses that no policy of the run can give, one of UNFIT.

    Returns a sentence that says what was appended. Raises ValueError where the run or the file does not allow it, or the same
    responses were appended before; FloatingPointError where log-probs of step 0 are not finite.
    """
    run, experiment = command_line.rebuilt(workdir, settings)
    _check_objective(experiment)
    if not places.exists(run.initial_reference):
        raise ValueError(f"{workdir} has no reference policy yet: python -m tba_jax.main --role=reference makes it")
    given, left_out = _read(source, experiment, unfit)
    digest = hashlib.blake2b(repr([(each.query.prompt, each.tokens) for each in given]).encode(), digest_size=8).hexdigest()
    writer = f"{GIVEN}{digest}"
    if places.exists(registration(run.replay, writer)):
        raise ValueError(f"--responses={source!r}: these {len(given)} responses are in {workdir} already, as writer {writer}")
    rows = _rows(run, experiment, given)
    size = _rows_at_a_time(experiment)
    info = {"host": platform.node(), "pid": os.getpid(), "started": time.time(), "responses": source}
    parts = ({name: column[at : at + size] for name, column in rows.items()} for at in range(0, len(given), size))
    write_whole(run.replay, writer, experiment.contract.row_shape(), parts, info=info)
    scored = rows["reward"][~np.isnan(rows["reward"])]
    mean = f"{len(scored)} of them have a reward" + (f", {scored.mean():.4g} on average" if len(scored) else "")
    told = "".join(f"; left out: {count}, each of which {reason}" for reason, count in sorted(left_out.items()))
    return f"{len(given)} responses are rows of {workdir} now, as writer {writer}; {mean}{told}"


def write_whole(
    root: places.Place, writer: str, shape: trajectory.RowShape, appends: Iterable[trajectory.Rows], *, info: Mapping[str, Any]
) -> None:
    """Writes a log that counts once it is whole, and registered. Args: info: see LogWriter."""
    before = LogReader(root, shape)
    before.look()
    remove(root, before.appends(writer))  # of an attempt that was interrupted
    log = LogWriter(root, writer, shape, claim=False, info=info)
    for rows in appends:
        log.append(rows)
    log.claim()


def score(
    experiment: "Experiment", responses: Sequence[Any], queries: "Sequence[EncodedQuery]", finished: np.ndarray
) -> "tuple[list[str], Scores]":
    """The texts of responses and their scores by the task, which is started. Args: responses: token ids without padding."""
    from tba_jax.rewards.task_models import response_texts, reward_texts

    texts, missing = response_texts(responses, queries, experiment.tokenizer), experiment.contract.missing_eos_reward
    return texts, reward_texts(texts, finished, queries, task=experiment.task, missing_eos_reward=missing)


def _check_objective(experiment: "Experiment") -> None:
    from tba_jax.roles.trainer.update_program import behavior_reader

    if reader := behavior_reader(experiment.config.learner):
        why = "responses of a file have no known behaviour; trajectory_balance and others need none"
        raise ValueError(f"{reader} reads π_behaviour of every row, and {why}")
    if ends := experiment.contract.step_ends:
        raise ValueError(f"rows of this run hold values of states (task.step_ends={ends}), which searchers alone make")
    if turns := experiment.contract.turns:
        raise ValueError(
            f"rows of this run have up to {turns} turns, between which an environment answers: searchers alone make them"
        )


def _read(source: str, experiment: "Experiment", unfit: str) -> tuple[list[GivenResponse], Counter[str]]:
    """The responses that the run can have, and the number of other responses by the reason why it cannot have them."""
    from tba_jax.roles.sampler import automaton

    stops = automaton(experiment.contract.stop_strings, experiment.tokenizer, vocab=experiment.policy.model.vocab)
    queries = {encoded.query.prompt: encoded for encoded in experiment.queries["train"]}
    kept: list[GivenResponse] = []
    left_out: Counter[str] = Counter()
    for row in data.read(source, fields={"response": str}, optional={"prompt": str}, setting="--responses", split="train"):
        query = _query(row, queries, experiment.config.task.name)
        tokens, reason = _encoded(row, query, experiment, stops)
        if not reason:
            kept.append(GivenResponse(query, tokens))
        elif unfit == "skip":
            left_out[reason] += 1
        else:
            raise ValueError(f"{row.where}: the response {reason}; --unfit=skip leaves such ones out")
    if not kept:
        told = "; ".join(f"{count}, each of which {reason}" for reason, count in left_out.most_common())
        raise ValueError(f"--responses={source!r}: none of its {left_out.total()} responses can be one of this run: {told}")
    return kept, left_out


def _query(row: data.Row, queries: dict[str, "EncodedQuery"], task: str) -> "EncodedQuery":
    if "prompt" not in row:
        if len(queries) == 1:
            return next(iter(queries.values()))
        raise ValueError(f"{row.where}: field 'prompt' is missing, and task.name={task!r} has {len(queries)} train queries")
    if row["prompt"] not in queries:
        told = f"prompt {row['prompt'][:60]!r} is none of the {len(queries)} train queries of the task"
        raise ValueError(f"{row.where}: {told}, such as {next(iter(queries))[:60]!r}")
    return queries[row["prompt"]]


def _encoded(
    row: data.Row, query: "EncodedQuery", experiment: "Experiment", stops: "StopStrings | None"
) -> tuple[list[int], str]:
    """The tokens of a response, and the reason why no policy of the run can give it; "" if a policy can."""
    contract, tokenizer, task = experiment.contract, experiment.tokenizer, experiment.config.task
    around = dict(chat_template=task.chat_template, system_prompt=task.system_prompt)
    (prompt,) = prompt_texts([query.query.prompt], tokenizer, **around)
    try:
        _, tokens = encode_pair(prompt, row["response"], tokenizer, begin=not task.chat_template)
    except ValueError as error:
        raise ValueError(f"{row.where}: {error}") from error
    if tokens[-2:-1] == [contract.eos_id]:  # the text has spelled it out
        del tokens[-1]
    if contract.eos_id in tokens[:-1]:
        return tokens, "goes on after the end of sequence"
    accepted = [] if stops is None else [stops.run(tokens[:end]) == stops.accept for end in range(1, len(tokens))]
    if any(accepted[:-1]):
        return tokens, f"goes on after one of task.stop_strings={contract.stop_strings}"
    ended_by_text = accepted[-1:] == [True]
    if ended_by_text:
        tokens = tokens[:-1]
    if banned := set(tokens) & set(contract.banned_tokens):
        return tokens, f"holds token {min(banned)}, which is special or one of task.banned_tokens"
    if len(tokens) > contract.response_length:
        return tokens, f"has more than task.response_length={contract.response_length} tokens, end of sequence included"
    if contract.force_eos and ended_by_text and len(tokens) == contract.response_length:
        return tokens, f"has no end of sequence at token task.response_length={contract.response_length} (task.force_eos)"
    if len(tokens) < contract.min_response_length and not ended_by_text:
        return tokens, f"has fewer than task.min_response_length={contract.min_response_length} tokens"
    return tokens, ""


def _rows_at_a_time(experiment: "Experiment") -> int:
    """The rows of one append of a searcher, which fit into memory."""
    s = experiment.config.searchers
    return s.queries_per_batch * s.samples_per_query


def _rows(run: layout.RunDir, experiment: "Experiment", given: Sequence[GivenResponse]) -> dict[str, np.ndarray]:
    """All columns of the rows."""
    from tba_jax.decoding import sampling
    from tba_jax.roles.sampler import text_columns

    contract, count = experiment.contract, len(given)
    columns = text_columns([each.query.prompt for each in given], [each.tokens for each in given], contract)
    mask = trajectory.response_mask(columns["response_length"], contract.response_length)
    rows: dict[str, np.ndarray] = {
        "row": np.arange(count, dtype=np.int64),
        "query_id": np.array([trajectory.query_id(each.query.prompt) for each in given], np.uint64),
        **columns,
        "finished": np.ones(count, bool),
        "reward_version": np.full(count, contract.reward_version, np.int32),
        "policy_step": np.where(mask, 0, -1).astype(np.int32),
        "key": np.zeros((count, 2), np.uint32),
        **vars(sampling.constant(count, temperature=contract.scoring_temperature)),
    }
    from tba_jax.roles import gpus
    from tba_jax.roles.sampler import ReferencePolicy, make_reference

    experiment = experiment.on_device(gpus.jax_devices()[0])
    scoring = _scoring(experiment)
    initial = ReferencePolicy(scoring, run)
    logprobs, reference = _logprobs(initial, experiment, rows), contract.reference_of_rows(initial.id)
    rows["reference_id"] = np.full(count, int(reference, 16), np.uint64)
    rows["ref_logprobs"] = logprobs
    if reference != initial.id:
        other = make_reference(experiment.config, scoring, run, teacher=experiment.teacher)
        rows["ref_logprobs"] = _logprobs(other, experiment, rows)
    rows |= dict.fromkeys(("policy_logprobs", "behavior_logprobs"), logprobs)
    return rows | _scored(experiment, given, rows["finished"])


def _scoring(experiment: "Experiment") -> "Scoring":
    from tba_jax.experiment import meshes
    from tba_jax.roles import gpus
    from tba_jax.roles.sampler import Scoring, policy_mesh

    searchers = experiment.config.searchers
    meshes.check(experiment, role="searcher", devices=len(gpus.jax_devices()))
    return Scoring(
        contract=experiment.contract,
        policy=experiment.policy,
        mesh=policy_mesh(experiment.config, "searchers"),
        logit_megabytes=searchers.logit_megabytes,
        score_tokens=searchers.score_tokens,
    )


def _logprobs(of: "Reference", experiment: "Experiment", rows: dict[str, np.ndarray]) -> np.ndarray:
    """float32[n, R], nats, 0 where masked: log-probs of the responses."""
    size, count = _rows_at_a_time(experiment), len(rows["row"])
    # The last rows are filled up: each call has as many rows.
    parts = [np.minimum(np.arange(start, start + size), count - 1) for start in range(0, count, size)]
    found = [of.logprobs({name: column[part] for name, column in rows.items()}) for part in parts]
    logprobs = np.concatenate(found)[:count]
    if broken := int((~np.isfinite(logprobs).all(axis=1)).sum()):
        raise FloatingPointError(
            f"{broken} responses have log-probs under the policy of step 0, or its teacher, that are not finite"
        )
    return logprobs


def _scored(experiment: "Experiment", given: Sequence[GivenResponse], finished: np.ndarray) -> dict[str, np.ndarray]:
    """The columns that the task and the encoder fill: reward, reward parts, and the embedding if rows have one."""
    from tba_jax import sharding
    from tba_jax.rewards import task_models
    from tba_jax.rewards.scorers import ResponseEmbedder

    config, contract, task, size = experiment.config, experiment.contract, experiment.task, _rows_at_a_time(experiment)
    tokens, queries = [each.tokens for each in given], [each.query for each in given]
    task_models.check(task, role="searcher")
    with task_models.started(task, config.searchers.task_devices, date=contract.date):
        parts = [slice(start, start + size) for start in range(0, len(given), size)]
        scored = [score(experiment, tokens[part], queries[part], finished[part]) for part in parts]
    found = {
        "reward": np.concatenate([each.reward for _, each in scored]),
        "reward_parts": np.concatenate([each.parts for _, each in scored]),
    }
    if contract.embedding:
        texts = [text for part, _ in scored for text in part]
        found["embedding"] = ResponseEmbedder(config.task.embedding_path, sharding.task_mesh(0))(texts)
    return found


def add_flags(values: flags.FlagValues) -> recipes.Program:
    settings = command_line.add_source(values)
    what = 'a file of {"prompt", "response"}, or a data set of the hub'
    flags.DEFINE_string("responses", None, what, flag_values=values, required=True)
    flags.DEFINE_enum("unfit", "refuse", UNFIT, "responses that no policy of the run can give: too long, say", flag_values=values)
    return settings


def run(given: command_line.Given) -> int:
    contract_lib.follow_privacy(given.workdir)
    responses = file_systems.absolute(given.responses, or_hub=True)
    print(visible(append(given.workdir, responses, unfit=given.unfit, settings=command_line.source(given))))
    return 0
