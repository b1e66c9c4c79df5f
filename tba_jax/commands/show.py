"""Prints rows of a run's replay log as text.

python -m tba_jax show --workdir=DIR [--order=newest|best|worst] [--count=10]

The first lines say how many rows there are, and which step has the best held-out score. No task is imported. Control characters
of the text are escaped.
"""

import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import flags

from tba_jax import trajectory
from tba_jax.commands import command_line
from tba_jax.outputs import visible
from tba_jax.replay.log import Append
from tba_jax.replay.reader import LogReader
from tba_jax.reporting.gathering import blocks
from tba_jax.roles import results
from tba_jax.storage import layout
from tba_jax.text.tokenizers import Tokenizer

log = logging.getLogger(__name__)

# Columns that decide the order: best and worst are by reward, among equals the newest.
_SIGNS = {"newest": 0.0, "best": -1.0, "worst": 1.0}


def rank(reward: np.ndarray, policy_step: np.ndarray, order: str) -> np.ndarray:
    """Indices of rows, first to show first. reward float32[n]; policy_step int[n], of the newest token of each row."""
    return np.lexsort((-np.arange(len(reward)), -policy_step, _SIGNS[order] * reward))


def show(workdir: Path, order: str, count: int) -> str:
    """The text that is printed, without control characters. Raises ValueError where there is no run, or no row."""
    from tba_jax.experiment import stored_run  # imports JAX: late, so that a mistyped flag is answered at once

    run = layout.open_run_dir(workdir)
    stored = stored_run.read(run, called=str(workdir))
    reader = LogReader(run.replay, stored.contract.row_shape())
    kept = {writer: reader.kept(writer) for writer, head in sorted(reader.heads().items()) if head}
    if not kept:
        raise ValueError(f"{run.replay} holds no committed row yet")
    writers, rows = _first(reader, kept, order, count)
    newest_step = rows["policy_step"].max(axis=1)
    total = sum(len(each) for ranges in kept.values() for each in ranges)
    gone = sum(ranges[-1].stop for ranges in kept.values()) - total
    removed = f" ({gone} more were removed by retention)" if gone else ""
    sections = [f"{total} rows of {len(kept)} writers{removed}, {order} first{_best(run)}"]
    for i in rank(rows["reward"], newest_step, order):
        prompt, response = rows["tokens"][i, : rows["prompt_length"][i]].tolist(), trajectory.response(rows, i).tolist()
        sections.append(
            f"── {writers[i]}:{rows['row'][i]}  reward {rows['reward'][i]:.3f}  policy step {newest_step[i]}"
            f"{'' if rows['finished'][i] else '  (cut)'}\n"
            f"query:    {visible(stored.tokenizer.decode(prompt))}\n"
            f"response: {_parts(stored.tokenizer, prompt, response, trajectory.trained(rows)[i])}"
        )
    return "\n\n".join(sections)


def _parts(tokenizer: Tokenizer, prompt: list[int], response: list[int], trained: np.ndarray) -> str:
    """The text of a response, what an environment said within ⟦ ⟧."""
    edges = [0, *(np.flatnonzero(np.diff(trained[: len(response)])) + 1).tolist(), len(response)]
    told = ""
    for begin, end in itertools.pairwise(edges):
        text = visible(tokenizer.decode_continuation([*prompt, *response[:begin]], response[begin:end]))
        told += text if begin == end or trained[begin] else f"⟦{text}⟧"
    return told


def _best(run: layout.RunDir) -> str:
    """A line about the snapshot with the best held-out score, "" where there is none."""
    from tba_jax.storage import published

    steps = {*published.kept(run.policies)}
    best = results.best(each for each in results.Scores(run.evaluations)().items() if each[0] in steps)
    return "" if best is None else f"\nbest held-out score of a snapshot: {best.score:.3f} at step {best.step}"


def _newest(appends: Sequence[Append], count: int) -> list[range]:
    """The last appends of a writer that hold at least `count` rows. A later append never has older weights."""
    found: list[range] = []
    for each in reversed(appends):
        if count > 0:
            follows = found and found[0].start == each.stop
            found[:1] = [range(each.first, found[0].stop)] if follows else [range(each.first, each.stop), *found[:1]]
            count -= each.stop - each.first
    return found


def _first(reader: LogReader, kept: Mapping[str, Sequence[range]], order: str, count: int) -> tuple[list[str], trajectory.Rows]:
    """The first `count` rows and their writers, in the order of storage. Memory holds few rows more than these."""
    writers, rows, spans = list[str](), dict[str, np.ndarray](), list[tuple[str, range]]()
    for writer, ranges in kept.items():
        some = _newest(reader.appends(writer), count) if order == "newest" else ranges
        spans += [(writer, span) for span in some]
    for writer, span in spans:
        for read in blocks(reader, writer, span, lost=lambda error: log.warning("%s", error)):
            writers += [writer] * len(read["row"])
            rows = {**(trajectory.concatenate([rows, read]) if rows else read)}
            best = np.sort(rank(rows["reward"], rows["policy_step"].max(axis=1), order)[:count])
            writers, rows = [writers[i] for i in best], {name: column[best] for name, column in rows.items()}
    return writers, rows


def add_flags(values: flags.FlagValues) -> None:
    command_line.add_workdir(values)
    flags.DEFINE_enum("order", "newest", tuple(_SIGNS), "which rows come first", flag_values=values)
    flags.DEFINE_integer("count", 10, "how many rows", lower_bound=1, flag_values=values)


def run(given: command_line.Given) -> int:
    print(show(given.workdir, given.order, given.count))
    return 0
