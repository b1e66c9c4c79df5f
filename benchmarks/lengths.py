"""What padding costs: update and scoring of rows as long as GSM8K's, packed, and with each row in a sequence of its own.

python -m benchmarks.lengths --data=DIR --tokenizer=FOLDER [--pairs=7] [--vocab=4096]

Prompts are GSM8K's train questions in the paper's prompt template, responses its human solutions; only their lengths are taken,
the tokens are random. Both sides are the programs that trainer and searchers call, in one process and strictly in turn, on the
first device. The rows of each measurement are others.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from absl import app, flags

from benchmarks import trainer_update
from tba_jax import packing, trajectory
from tba_jax.models import parameters, scoring
from tba_jax.packing import Limits, Plan
from tba_jax.roles.trainer.update_program import UpdateProgram
from tba_jax.tasks.gsm8k import GSM8K
from tba_jax.text.tokenizers import HuggingFaceTokenizer

_DATA = flags.DEFINE_string("data", None, "Folder that holds gsm8k/train.jsonl and gsm8k/test.jsonl.", required=True)
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Folder of a Hugging Face tokenizer.", required=True)
_PAIRS = flags.DEFINE_integer("pairs", 7, "Measurements of each side.", lower_bound=2)
_VOCAB = flags.DEFINE_integer("vocab", 4096, "Vocabulary of the model.", lower_bound=2)

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


def alone(tokens: np.ndarray, limits: Limits, *, second_pass: float) -> Plan:
    """As packing.plan, with one row in each sequence, and rows in their order."""
    del second_pass
    rows = [[row] for row in range(len(tokens))]
    parts = [rows[first : first + limits.sequences] for first in range(0, len(rows), limits.sequences)]
    computed = len(parts) * limits.sequences * limits.length
    whole = limits.sequences % limits.group == 0
    sizes: dict[str, Any] = dict(computed_tokens=computed, useful_tokens=int(tokens.sum()))
    return Plan(parts=parts, sequences=limits.sequences, one_row=True, whole_groups=whole, **sizes)


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
    """Rows of random tokens with other lengths. Args: lengths: int[2, B], of prompts and responses."""
    mask = trajectory.response_mask(lengths[1], rows["ref_logprobs"].shape[1])
    tokens = np.random.default_rng(2).integers(0, vocab, rows["tokens"].shape).astype(np.int32)
    masked = {name: np.where(mask, -np.log(vocab), 0).astype(np.float32) for name in rows if name.endswith("_logprobs")}
    prompt, response = lengths.astype(np.int32)
    step = np.where(mask, 0, -1).astype(np.int32)
    return dict(rows) | masked | {"tokens": tokens, "prompt_length": prompt, "response_length": response, "policy_step": step}


def scorer(program: UpdateProgram) -> tuple[Callable[[trajectory.Rows], Any], list[Plan]]:
    """Scoring as a searcher's reference does it, and the plans of its calls."""
    config, plans = program.config, []
    params = jax.device_put(program.policy_params)
    R, T = _CHANGES["task.response_length"], config.limits.length + 1
    graphdef = config.policy.base.graphdef
    score = scoring.program(program.mesh, graphdef=graphdef, R=R, space=config.space, logit_megabytes=128)
    params = parameters.cast(jax.tree.map(lambda x: x.copy(), params), config.policy.model.compute_dtype)

    def run(rows: trajectory.Rows) -> Any:
        columns = [rows[name] for name in ("tokens", "prompt_length", "response_length")]
        limits = scoring.limits(len(columns[0]), T, tokens=_CHANGES["learner.micro_batch_tokens"], ways=1)
        packed, plan = packing.of_rows(*columns, R=R, limits=limits)
        plans.append(plan)
        return np.asarray(score(params, packed))

    return run, plans


def compare(name: str, run: Callable[[trajectory.Rows], Any], batches: Iterator[trajectory.Rows], pairs: int) -> list[str]:
    """Lines of a report: seconds of both sides, and the ratio of the pairs."""
    sides = {"packed": packing.plan, "alone": alone}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(-2, pairs):  # the first two compile
        rows = next(batches)
        for side in sorted(sides, reverse=bool(number % 2)):
            with mock.patch.object(packing, "plan", sides[side]):
                begin = time.perf_counter()
                run(rows)
                seconds[side] += [time.perf_counter() - begin] if number >= 0 else []
    ratios = [a / b for a, b in zip(seconds["alone"], seconds["packed"], strict=True)]
    lower, _, upper = statistics.quantiles(ratios, n=4)
    told = ", ".join(f"{side} {statistics.median(found):.2f} s" for side, found in seconds.items())
    return [f"{name}: {told}; alone / packed {statistics.median(ratios):.2f} ({lower:.2f} to {upper:.2f}, {pairs} pairs)"]


def main(argv: Sequence[str]) -> None:
    del argv
    tokenizer, vocab = HuggingFaceTokenizer(_TOKENIZER.value), _VOCAB.value
    program = trainer_update.update_program(_CHANGES, vocab)
    rows = trainer_update.random_rows(program, _CHANGES, vocab)
    lengths = gsm8k_lengths(Path(_DATA.value), tokenizer, rows=program.rows, completions=_CHANGES["learner.completions"])
    of_batches = [next(lengths) for _ in range(64)]
    plans = [packing.plan(packing.row_tokens(*each), program.config.limits, second_pass=1 / 3) for each in of_batches]
    shapes = sorted({(plan.sequences, plan.one_row, plan.whole_groups) for plan in plans})
    share = sum(plan.useful_tokens for plan in plans) / sum(plan.computed_tokens for plan in plans)
    padded = sum(plan.useful_tokens for plan in plans) / (len(plans) * program.rows * program.config.limits.length)
    print(f"{len(plans)} batches of {program.rows} rows: useful tokens {share:.3f} of the computed ones, alone {padded:.3f}")
    print(f"shapes of the update (sequences, one row in each, whole groups): {shapes}")
    batches = (with_lengths(rows, each, vocab) for each in itertools.cycle(of_batches))
    score, scored = scorer(program)
    print(*compare("update", program.apply, batches, _PAIRS.value), sep="\n", flush=True)
    print(*compare("scoring", score, batches, _PAIRS.value), sep="\n", flush=True)
    told = sorted({(plan.sequences, plan.one_row) for plan in scored})
    print(f"shapes of scoring (sequences, one row in each), of both sides: {told}")


if __name__ == "__main__":
    app.run(main)
