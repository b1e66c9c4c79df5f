"""Accounts for every row of a run, shows the rows that trained a step, or generates a row again and compares.

python -m tba_jax audit --workdir=DIR [--step=N | --regenerate=WRITER:ROW]
"""

import collections
import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from ml_collections import config_dict

from tba_jax import trajectory
from tba_jax.commands import command_line
from tba_jax.outputs import visible, visible_line
from tba_jax.replay import journal, ledger
from tba_jax.replay.index import ReplayIndex
from tba_jax.replay.journal import Again, RowsLost
from tba_jax.replay.ledger import KnownGaps, Losses
from tba_jax.replay.reader import LogReader
from tba_jax.roles.trainer.buffer import make_index, references_of_rows
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout as layout_lib

_ATTEMPTS = 5  # to read the index of a run whose trainer removes rows meanwhile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run opened for reading. config: the stored settings; lines: of the journal, which stay in their files."""

    layout: layout_lib.RunDir
    config: config_dict.ConfigDict
    contract: contract_lib.Contract
    reader: LogReader
    lines: journal.Lineage


def open_run(workdir: Path | str) -> Run:
    """The run in `workdir`. Raises ValueError if there is none, or if its journal is lost."""
    layout = layout_lib.open_run_dir(workdir)
    stored = contract_lib.read_run(layout)
    contract = contract_lib.of(stored, called=str(workdir))
    config = config_dict.ConfigDict(stored["config"])
    mounts = contract_lib.mounted_logs(config.replay.mount, reward_version=contract.reward_version)
    reader = LogReader(layout.replay, contract.row_shape(), mounts=mounts, patience_seconds=1.0)
    checkpointed = max(layout_lib.steps_in(layout.checkpoints), default=0)  # before the lines, of which a trainer writes more
    lines = journal.read_lineage(layout.journal)
    if checkpointed > lines.last:
        raise ValueError(
            f"{layout.journal} has lost lines: it ends at step {lines.last}, and there is a checkpoint of step {checkpointed}; "
            "restore it from a copy"
        )
    return Run(layout=layout, config=config, contract=contract, reader=reader, lines=lines)


def rebuild_index(run: Run) -> ReplayIndex:
    """The trainer's index after the last journalled step: from log and journal, or from the newest checkpoint where some rows
    that earlier steps drew are not there any more.

    A trainer at work may remove rows and checkpoints meanwhile: then all is read again. Raises ValueError where it always does.
    """
    for _ in range(_ATTEMPTS):
        before = _removed(run)
        try:
            index = _read_index(run)
        except (RowsLost, FileNotFoundError):
            if _removed(run) == before:
                raise
            continue
        if _removed(run)[0] == before[0]:
            return index
    raise ValueError(
        f"the trainer of {run.layout.root} removed rows {_ATTEMPTS} times while they were read: stop it, or try again"
    )


def _removed(run: Run) -> tuple[dict[str, int], list[int]]:
    """Writer -> how many of its rows are not in the log any more; and the checkpoints that are there."""
    missing = {writer: head - sum(map(len, run.reader.kept(writer))) for writer, head in run.reader.heads().items()}
    return {writer: count for writer, count in missing.items() if count}, layout_lib.steps_in(run.layout.checkpoints)


def _read_index(run: Run) -> ReplayIndex:
    losses = Losses(journal.read_lineage(run.layout.journal))
    removed, may_lack = _removed(run), run.config.replay.retention == "checkpoints"
    if not removed[1] or not (may_lack or removed[0]):
        index = make_index(run.config, run.contract, reference_ids=references_of_rows(run.config, run.contract, run.layout))
        try:
            return _replayed(run, index, losses, start=0)
        except RowsLost:
            if not removed[1]:
                raise
    index, start = _checkpointed_index(run, losses)
    return _replayed(run, index, losses, start=start)


def _replayed(run: Run, index: ReplayIndex, losses: Losses, *, start: int) -> ReplayIndex:
    """The index after all journal lines. Args: index: after step `start`."""
    again = Again(index, run.reader, losses, step=start)
    for line in journal.read_lineage(run.layout.journal, after=start):
        index.mark_drawn(again.do(line))
    return index


def _checkpointed_index(run: Run, losses: Losses) -> tuple[ReplayIndex, int]:
    """The index of the newest checkpoint, and its step."""
    from tba_jax.storage.checkpoints import Checkpoints

    with contextlib.closing(Checkpoints(run.layout.checkpoints, keep=1, read_only=True)) as checkpoints:
        if not (steps := checkpoints.steps()):
            raise ValueError(f"retention has removed rows of {run.layout.root}, and there is no checkpoint to account from")
        # The newest: a trainer at work removes the oldest, and each of them holds the whole history of counts.
        state, known = checkpoints.restore_host(steps[-1])["index"], KnownGaps(losses.until(steps[-1]))
        references = references_of_rows(run.config, run.contract, run.layout)
        return ReplayIndex.restore(state, run.reader, closed=run.layout.closed, reference_ids=references, known=known)[0], steps[
            -1
        ]


def accounts(run: Run) -> dict[str, ledger.Account]:
    """Writer -> what became of its rows, as of the last journalled step."""
    return ledger.accounts(rebuild_index(run), run.reader.heads())


def trained_rows(run: Run) -> collections.Counter[str]:
    """Writer -> how many of its rows at least one step drew. The memory is a byte a row of the log."""
    drawn = {writer: np.zeros(head, bool) for writer, head in run.reader.heads().items()}
    for writer, row in (each for line in run.lines for each in journal.line_ids(line)):
        if 0 <= row < len(drawn.get(writer, ())):
            drawn[writer][row] = True
    return collections.Counter({writer: int(rows.sum()) for writer, rows in drawn.items() if rows.any()})


def describe_ledger(run: Run) -> tuple[str, bool]:
    """The table that is printed, and whether every writer's account balances."""
    found, trained = accounts(run), trained_rows(run)
    names = ("committed", "resident", "evicted", "rejected", "damaged", "passed over", "pending", "unseen", "trained")
    lines = [f"{'writer':32}" + "".join(f" {name:>11}" for name in names)]
    for writer, a in found.items():
        gone = sum(a.evicted.values()), sum(a.rejected.values())
        counts = (a.committed, a.resident, *gone, a.damaged, a.passed_over, a.pending, a.unseen, trained[writer])
        lines.append(f"{writer:32}" + "".join(f" {n:11}" for n in counts) + ("" if a.balances else "   DOES NOT BALANCE"))
    for what in ("evicted", "rejected"):
        total = collections.Counter[str]()
        for account in found.values():
            total.update(getattr(account, what))
        lines.append(f"{what}: " + (", ".join(f"{rule} {count}" for rule, count in total.items() if count) or "none"))
    lines.append(f"evicted by a capacity without ever being trained on: {sum(a.evicted_untrained for a in found.values())}")
    lines += [f"not in the log any more: {count} rows of {writer}" for writer, count in _removed(run)[0].items()]
    epochs = run.lines.epochs
    by = f"trainer epoch{'' if len(epochs) == 1 else 's'} {', '.join(map(str, epochs))}"
    lines.append(f"{len(run.lines)} journalled steps, each once, by {by}" if epochs else "no journalled steps")
    lines += sorted(map(visible_line, run.reader.problems.values()))
    balanced = all(account.balances for account in found.values())
    lines.append("the ledger balances" if balanced else "THE LEDGER DOES NOT BALANCE")
    return "\n".join(lines), balanced


def rebuild_batch(run: Run, step: int) -> tuple[str, bool]:
    """The rows that trained a step, and whether they are what was journalled.

    Raises ValueError where there was no such step, or some of its rows are not in the log any more.
    """
    if not 1 <= step <= len(run.lines):
        raise ValueError(f"--step={step} is not a journalled step of {run.layout.root}; there are 1 to {len(run.lines)}")
    line = next(iter(journal.read_lineage(run.layout.journal, after=step - 1)))
    ids = journal.line_ids(line)
    try:
        rows = run.reader.read_ids(ids)
    except ValueError as error:
        raise ValueError(f"the batch of step {step} cannot be rebuilt: {error}") from error
    same = journal.batch_hash(rows) == line["batch"]
    trained = trajectory.trained(rows).sum(axis=1)
    listed = [
        f"{writer}:{row:<8} query {int(rows['query_id'][i]):016x}  reward {rows['reward'][i]:8.4f}  "
        f"policy step {rows['policy_step'][i].max():6}  {trained[i]:5} tokens"
        for i, (writer, row) in enumerate(ids)
    ]
    verdict = "is the one journalled" if same else f"IS NOT THE ONE JOURNALLED ({line['batch'][:16]}…)"
    end = f"step {step} (epoch {line['epoch']}): {len(ids)} rows; the hash of the batch {verdict}"
    return "\n".join([*listed, end]), same


def regenerate(run: Run, name: str) -> tuple[str, bool]:
    """Generates a row again from its key, settings and snapshot. Returns a sentence, and whether the tokens are the same.

    Raises ValueError where there is no such row, its weights were swapped midway, or its snapshot is gone.
    """
    writer, _, number = name.rpartition(":")
    if not writer or not number.isdigit():
        raise ValueError(f"--regenerate={name!r} must be WRITER:ROW, as the other reports name rows")
    if writer not in run.reader.heads():
        there = sorted(run.reader.heads())
        raise ValueError(f"--regenerate={name!r}: the run has no writer {writer!r}; it has {', '.join(there[:4]) or 'none'}")
    rows = run.reader.read_ids([(writer, int(number))])
    row = {column: value[0] for column, value in rows.items()}
    if not run.reader.is_own(writer):  # its weights are those of the run that it is mounted from
        mounts, folder = map(open_run, run.config.replay.mount), str(run.reader.root_of(writer))
        return regenerate(next(mount for mount in mounts if folder.startswith(f"{mount.layout.shared}/")), name)
    if source := run.reader.info(writer).get("responses"):
        raise ValueError(f"{name} was not generated: its response is from {source}")
    if (engine := run.reader.info(writer).get("engine", "own")) != "own":
        raise ValueError(f"{name} cannot be generated again: its tokens were drawn by a server (searchers.engine={engine})")
    length = int(row["response_length"])
    drawn = trajectory.trained(rows)[0]
    steps = sorted(set(row["policy_step"][drawn].tolist()))
    if not steps:
        raise ValueError(f"{name} has no token that the policy drew")
    if len(steps) != 1:
        raise ValueError(f"{name} cannot be generated again: its weights were swapped midway (policy steps {steps})")
    again = _generated(run, name, row, drawn, step=steps[0])
    there, here, weights = trajectory.response_tokens(rows)[0], again.tokens[0], run.config.searchers.weights
    if int(again.length[0]) != length or not np.array_equal(here[:length], there[:length]):
        first = int((here != there).argmax())
        told = f"{name} differs from token {first} on: {there[first]} there, {here[first]} here"
        return f"{told}, with searchers.weights={weights}, which its searcher may have had otherwise", False
    gap = float(np.abs(again.policy_logprobs - rows["policy_logprobs"])[0, drawn].max(initial=0.0))
    return f"{name} is identical: {length} tokens; its log-probs differ by {gap:.2g} nats at most", True


def _generated(run: Run, name: str, row: Mapping[str, np.ndarray], drawn: np.ndarray, *, step: int) -> Any:
    """Generates a row again with a searcher's sampler and the policy of a step; what its environment said is as it was.

    Args: drawn: bool[R], the tokens of the policy.
    """
    import jax

    from tba_jax import sharding
    from tba_jax.decoding.requests import Request
    from tba_jax.decoding.sampling import Sampling
    from tba_jax.experiment import stored_run
    from tba_jax.roles.sampler import NoReference, Sampler, Scoring
    from tba_jax.storage import published

    stored = stored_run.read(run.layout, called=str(run.layout.shared))
    policy = stored.policy.on_device(jax.devices()[0])
    gone = f"the snapshot of its policy step {step} has been removed"
    if step not in published.kept(run.layout.policies):
        raise ValueError(f"{name} cannot be generated again: {gone}")
    given = run.contract.given_length if run.contract.turns else 0
    one = sharding.make_mesh((1, 1, 1), setting="audit", devices=jax.devices()[:1])
    scoring = Scoring(contract=run.contract, policy=policy, mesh=one, logit_megabytes=1, score_tokens=0)
    sampler = Sampler(
        run.contract,
        run.layout,
        policy=policy,
        tokenizer=stored.tokenizer,
        reference=NoReference(scoring, run.layout),
        weights=run.config.searchers.weights,
        slots=1,
        samples=1,
        prompt_length=int(row["prompt_length"]) + given,
        given_length=given,
    )
    try:
        sampler.load_step(step)
    except FileNotFoundError as error:  # its trainer removed it meanwhile
        raise ValueError(f"{name} cannot be generated again: {gone}") from error
    prompt = row["tokens"][: row["prompt_length"]].tolist()
    sampling = Sampling(**{field.name: row[field.name][None] for field in dataclasses.fields(Sampling)})
    asked: dict[str, Any] = dict(name=name, prompt=prompt, keys=row["key"][None], sampling=sampling)
    tokens = row["tokens"][len(prompt) :][: len(drawn)]
    begins = np.flatnonzero(trajectory.turns(drawn[None])[0]).tolist() if run.contract.turns else [0]
    turns = [Request(**asked, beginning=tokens[:begin].tolist(), turn=begin) for begin in begins]
    made = sampler.engine.generate(turns)
    for begin, turn, following in zip(begins, made, [*begins[1:], None], strict=True):
        end = begin + int(drawn[begin:following].sum())
        if (following is not None and int(turn.length[0]) != end) or not np.array_equal(turn.tokens[0, :end], tokens[:end]):
            return turn
    # Each holds the log-probs of its own turn.
    return dataclasses.replace(made[-1], policy_logprobs=np.sum([turn.policy_logprobs for turn in made], axis=0))


def add_flags(values: flags.FlagValues) -> None:
    command_line.add_workdir(values)
    flags.DEFINE_integer("step", None, "print the rows that trained this step", flag_values=values)
    flags.DEFINE_string("regenerate", None, "WRITER:ROW, a row to generate again and compare", flag_values=values)
    flags.mark_flags_as_mutual_exclusive(["step", "regenerate"], flag_values=values)


def run(given: command_line.Given) -> int:
    """Prints the report. Returns 1 if an account does not balance, or if a batch or a row differs from the stored one."""
    opened = open_run(given.workdir)
    if given.step is not None:
        text, good = rebuild_batch(opened, given.step)
    elif given.regenerate is not None:
        text, good = regenerate(opened, given.regenerate)
    else:
        text, good = describe_ledger(opened)
    print(visible(text))
    return 0 if good else 1
