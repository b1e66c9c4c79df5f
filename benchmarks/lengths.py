"""What padding costs: update and scoring of rows as long as GSM8K's, packed, and with each row in a sequence of its own.

python -m benchmarks.lengths --data=DIR --tokenizer=FOLDER [--pairs=7] [--vocab=4096]

Prompts are GSM8K's train questions in the paper's prompt template, responses its human solutions; only their lengths are taken,
the tokens are random. Both sides are the programs that trainer and searchers call, in one process and strictly in turn, on the
first device. The rows of each measurement are others.
"""

import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from absl import app, flags

from benchmarks import trainer_update
from tba_jax import trajectory
from tba_jax.models import parameters, scoring
from tba_jax.packing import row_layout, row_packing
from tba_jax.packing.row_layout import Laid, Lengths, Limits, Piece, Plan
from tba_jax.roles.trainer.update_program import UpdateProgram
from tba_jax.tasks.gsm8k import GSM8K
from tba_jax.text.tokenizers import HuggingFaceTokenizer

_DATA = flags.DEFINE_string("data", None, "Folder that holds gsm8k/train.jsonl and gsm8k/test.jsonl.", required=True)
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Folder of a Hugging Face tokenizer.", required=True)
_PAIRS = flags.DEFINE_integer("pairs", 7, "Measurements of each side.", lower_bound=2)
_VOCAB = flags.DEFINE_integer("vocab", 4096, "Vocabulary of the model.", lower_bound=16)

_TEMPLATE = "[MATH TASK] Problem:\n{question}\n\nSolution:\n"
_MICRO_BATCH_ROWS = 8
_CHANGES: dict[str, Any] = {
    "task.prompt_length": 512,
    "task.response_length": 512,
    "learner.queries": 8,
    "learner.completions": 8,
    "learner.micro_batch_tokens": _MICRO_BATCH_ROWS * 1024,
    "learner.remat": "none",
}


def alone(lengths: Lengths, limits: Limits, *, second_pass: float) -> Plan:
    """As row_layout.plan, with one row in each sequence, and rows in their order."""
    del second_pass
    sizes = np.maximum(lengths.prompt + lengths.response - 1, 1).tolist()
    rows = [Laid(0, [Piece(row, 0, size)]) for row, size in enumerate(sizes)]
    parts = [[rows[first : first + limits.sequences]] for first in range(0, len(rows), limits.sequences)]
    return Plan(
        parts=parts,
        sequences=limits.sequences,
        whole_groups=limits.sequences % limits.group == 0,
        computed_tokens=len(parts) * limits.sequences * limits.length,
        useful_tokens=sum(sizes),
    )


@contextlib.contextmanager
def rows_alone() -> Iterator[None]:
    """Programs that are made and called here compute each row in a sequence of its own."""
    with mock.patch.object(scoring, "shares_prompts", lambda *_: False), mock.patch.object(row_layout, "plan", alone):
        yield


def gsm8k_lengths(data: Path, tokenizer: HuggingFaceTokenizer, *, rows: int, completions: int) -> Iterator[np.ndarray]:
    """int[2, rows] again and again: tokens of prompts, each `completions` times, and of responses, end of sequence included."""
    gsm8k = data / "gsm8k"
    task = GSM8K(train_path=str(gsm8k / "train.jsonl"), heldout_path=str(gsm8k / "test.jsonl"), prompt=_TEMPLATE)
    examples = task.worked_examples(np.random.default_rng(0), 64 * rows)
    prompts, responses = (np.array([len(tokenizer.encode(text)) for text in texts]) for texts in zip(*examples, strict=True))
    rng = np.random.default_rng(1)
    while True:
        of_batch = np.repeat(rng.choice(prompts, rows // completions), completions)
        yield np.minimum(np.stack([of_batch, 1 + rng.choice(responses, rows)]), 512)


def with_lengths(rows: trajectory.Rows, lengths: np.ndarray, vocab: int) -> trajectory.Rows:
    """The rows with other lengths. Args: lengths: int[2, B], of prompts and responses."""
    mask = trajectory.response_mask(lengths[1], rows["ref_logprobs"].shape[1])
    masked = {name: np.where(mask, -np.log(vocab), 0).astype(np.float32) for name in rows if name.endswith("_logprobs")}
    prompt, response = lengths.astype(np.int32)
    step = np.where(mask, 0, -1).astype(np.int32)
    return dict(rows) | masked | {"prompt_length": prompt, "response_length": response, "policy_step": step}


def scorer(program: UpdateProgram) -> tuple[Callable[[trajectory.Rows], Any], list[Plan]]:
    """The program by which a searcher's reference scores, in micro-batches of the update's size, and the plans of its calls."""
    config, plans = program.config, []
    limits, graphdef = config.limits, config.policy.base.graphdef
    score = scoring.program(program.mesh, graphdef=graphdef, R=limits.response, space=config.space, logit_megabytes=128)
    params = jax.tree.map(lambda x: x.copy(), jax.device_put(program.policy_params))
    params = parameters.cast(params, config.policy.model.compute_dtype)

    def run(rows: trajectory.Rows) -> Any:
        columns = [rows[name] for name in ("tokens", "prompt_length", "response_length")]
        packed, plan = row_packing.of_rows(*columns, limits=limits)
        plans.append(plan)
        return np.asarray(score(params, packed))

    return run, plans


def compare(name: str, runs: Sequence[Callable[[trajectory.Rows], Any]], batches: Iterator[trajectory.Rows], pairs: int) -> str:
    """A line of a report: seconds of both sides, and the ratio of the pairs. Args: runs: packed, and each row alone."""
    sides: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]]
    sides = {"packed": contextlib.nullcontext, "alone": rows_alone}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(-2, pairs):  # the first two compile
        rows = next(batches)
        for (side, context), run in sorted(zip(sides.items(), runs, strict=True), reverse=bool(number % 2)):
            with context():
                begin = time.perf_counter()
                run(rows)
                seconds[side] += [time.perf_counter() - begin] if number >= 0 else []
    ratios = [a / b for a, b in zip(seconds["alone"], seconds["packed"], strict=True)]
    lower, _, upper = statistics.quantiles(ratios, n=4)
    told = ", ".join(f"{side} {statistics.median(found):.2f} s" for side, found in seconds.items())
    return f"{name}: {told}; alone / packed {statistics.median(ratios):.2f} ({lower:.2f} to {upper:.2f}, {pairs} pairs)"


def main(argv: Sequence[str]) -> None:
    del argv
    if not (Path(_DATA.value) / "gsm8k" / "train.jsonl").is_file():
        sys.exit(f"error: --data={_DATA.value} holds no gsm8k/train.jsonl")
    try:
        tokenizer, vocab = HuggingFaceTokenizer(_TOKENIZER.value), _VOCAB.value
    except ValueError as error:
        sys.exit(f"error: --tokenizer={_TOKENIZER.value}: {error}")
    program = trainer_update.update_program(_CHANGES, vocab)
    with rows_alone():
        program_alone = trainer_update.update_program(_CHANGES, vocab)
    full = trainer_update.random_rows(program, _CHANGES, vocab)
    lengths = gsm8k_lengths(Path(_DATA.value), tokenizer, rows=program.rows, completions=_CHANGES["learner.completions"])
    batches = [with_lengths(full, each, vocab) for each in itertools.islice(lengths, 64)]
    report(batches, program.config.limits, program_alone.config.limits)
    again = itertools.cycle(batches)
    print(compare("update", (program.apply, program_alone.apply), again, _PAIRS.value), flush=True)
    (score, plans), (score_alone, _) = scorer(program), scorer(program_alone)
    print(compare("scoring", (score, score_alone), again, _PAIRS.value), flush=True)
    print(f"numbers of sequences of scoring: {sorted({plan.sequences for plan in plans})}")


def report(batches: Sequence[trajectory.Rows], limits: Limits, limits_alone: Limits) -> None:
    """Prints which share of the computed tokens is of rows, and the shapes."""

    def plans(plan: Callable[..., Plan], limits: Limits) -> list[Plan]:
        columns = [(rows["tokens"], rows["prompt_length"], rows["response_length"]) for rows in batches]
        return [plan(row_layout.lengths_of(*each), limits, second_pass=1 / 3) for each in columns]

    def share(plans: Sequence[Plan]) -> float:
        return sum(plan.useful_tokens for plan in plans) / sum(plan.computed_tokens for plan in plans)

    packed, apart, rows = plans(row_layout.plan, limits), plans(row_layout.plan, limits_alone), plans(alone, limits_alone)
    shares = f"{share(packed):.3f} packed, {share(apart):.3f} without shared prompts, {share(rows):.3f} alone"
    print(f"{len(batches)} batches of {limits.rows} rows: share of the computed tokens that are of rows: {shares}")
    tokens = [sum(plan.computed_tokens for plan in each) for each in (packed, apart, rows)]
    print(f"computed tokens: {tokens[0]:,} packed, {tokens[1]:,} without shared prompts, {tokens[2]:,} alone")
    print(f"shapes of the update (sequences, whole groups): {sorted({(plan.sequences, plan.whole_groups) for plan in packed})}")


if __name__ == "__main__":
    app.run(main)
