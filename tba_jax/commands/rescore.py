"""Scores the rows of a stopped run again by its task as it is now, as a new reward version beside the old one.

python -m tba_jax rescore --workdir=DIR [--config=RECIPE[:NAME] | --trust_task]

`DIR/rewards/<version>/` becomes a replay log of whole rows with the same writers and row numbers, and the new rewards. Runs of
the new version train on it by replay.mount. The rows of a writer appear when all of them are scored, and count once
`DIR/rewards/<version>.json` exists. The same command continues an interrupted one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from absl import flags

from tba_jax import trajectory
from tba_jax.commands import command_line, recipes
from tba_jax.commands.append import score, write_whole
from tba_jax.outputs import visible
from tba_jax.replay.log import registration
from tba_jax.replay.reader import LogReader
from tba_jax.replay.window import REJECTIONS, validate_rows
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout, places
from tba_jax.storage.lease import EpochLease

if TYPE_CHECKING:  # what imports JAX is imported late: a mistyped flag is answered at once
    from tba_jax.experiment.composition import Experiment
    from tba_jax.tasks.interface import EncodedQuery

# Fields of the contract that a new version of the reward changes.
_OF_REWARD = ("reward_version", "reward_parts")
Queries: TypeAlias = "Mapping[int, EncodedQuery]"  # by their ids


def rescore(workdir: Path, settings: command_line.Source = command_line.AS_IT_IS) -> str:
    """Writes the rewards of the task's present version for all committed rows of a run. Returns a sentence that says what.

    Raises ValueError where there is no run, nobody trusts its task, the task differs by more than its reward, rows are gone or
    answer queries that are not the task's any more, or hold values of states; LeaseHeld where the run's trainer is at work.
    """
    from tba_jax.experiment import composition
    from tba_jax.rewards import task_models

    run = layout.open_run_dir(workdir)
    stored = contract_lib.read_run(run, called=str(workdir))
    theirs = contract_lib.of(stored, called=str(workdir))
    experiment = composition.build(command_line.config_of(stored, settings, called=str(workdir)), date=theirs.date)
    here, there = ({k: v for k, v in c.to_json().items() if k not in _OF_REWARD} for c in (experiment.contract, theirs))
    if different := contract_lib.differences(there, here):
        raise ValueError(f"the task of {workdir} is not what it was in more than its reward; " + contract_lib.in_words(different))
    version = experiment.contract.reward_version
    if version == theirs.reward_version:
        told = f"the rows of {workdir} have reward version {version}, that of task.name={theirs.task_name}: nothing to do"
        return f"{told}; where the reward means something else now, raise reward_version of the task's class"
    if theirs.step_ends:
        why = f"which are mean rewards of version {theirs.reward_version} of responses that were not kept"
        told = f"the rows of {workdir} hold values of states (task.step_ends={tuple(theirs.step_ends)}), {why}"
        raise ValueError(f"{told}: they cannot be scored again")
    EpochLease.refuse_if_held(run.lease)
    reader = LogReader(run.replay, theirs.row_shape())
    heads = {writer: head for writer, head in sorted(reader.heads().items()) if head}
    queries = {trajectory.query_id(query.prompt): query for split in experiment.queries.values() for query in split}
    waiting = {writer: head for writer, head in heads.items() if not _is_done(run, experiment, writer, head)}
    for writer, head in waiting.items():
        if reader.kept(writer) != [range(head)]:
            raise ValueError(
                f"{workdir} does not hold all of the {head} rows of writer {writer} any more: retention removed some "
                f"(replay.retention={stored['config']['replay']['retention']}), and a new reward version needs every row"
            )
    if waiting:
        task_models.check(experiment.task, role="searcher")
        with task_models.started(experiment.task, 0, date=experiment.contract.date):
            for writer, head in waiting.items():
                _rescore_writer(run, experiment, reader, queries, writer=writer, head=head)
    layout.write_json(run.rescored_commit(version), {"reward_parts": list(experiment.contract.reward_parts), "heads": heads})
    total = f"{sum(heads.values())} rows of {len(heads)} writers have reward version {version} in {run.rescored(version)}"
    return "; ".join([f"{total}, {sum(waiting.values())} of them scored now", *sorted(reader.problems.values())])


def _is_done(run: layout.RunDir, experiment: "Experiment", writer: str, head: int) -> bool:
    """Whether all rows of a writer are scored already."""
    folder = run.rescored(experiment.contract.reward_version)
    if not places.exists(registration(folder, writer)):
        return False
    done = LogReader(folder, experiment.contract.row_shape()).heads().get(writer, 0)
    if done != head:
        raise ValueError(
            f"{folder / writer} has {done} of the {head} rows of writer {writer}, which was still at work then; "
            f"remove it and {registration(folder, writer)} to score them all, where no run mounts them"
        )
    return True


def _rescore_writer(
    run: layout.RunDir, experiment: "Experiment", reader: LogReader, queries: Queries, *, writer: str, head: int
) -> None:
    """Writes one writer's rows; the writer is registered once all are there, so that nobody reads them before."""
    contract, schema = experiment.contract, reader.schema(writer)
    folder, size = run.rescored(contract.reward_version), schema.rows_per_append
    places.make_folder(folder.parent)
    old = (reader.read(writer, start, start + size) for start in range(0, head, size))
    appends = (_scored_again(rows, experiment, queries, writer) for rows in old)
    told = dict(info={**reader.info(writer), "rescored": contract.reward_version}, segment_appends=schema.segment_appends)
    write_whole(folder, writer, contract.row_shape(), appends, rows_per_append=size, **told)


def _scored_again(rows: trajectory.Rows, experiment: "Experiment", queries: Queries, writer: str) -> dict[str, np.ndarray]:
    """The rows with reward, reward parts and version of the task as it is now. Rows that cannot be decoded get NaN."""
    contract = experiment.contract
    ids = rows["query_id"].tolist()
    reasons = validate_rows(rows, vocab_size=experiment.policy.model.vocab)
    valid = np.isin(reasons, (0, REJECTIONS.index("reward")))  # a reward that was not finite may be now
    known = np.array([query in queries for query in ids])
    if (valid & ~known).any():
        row = int((valid & ~known).argmax())
        raise ValueError(f"row {writer}:{rows['row'][row]} answers query {ids[row]:016x}, which is not the task's any more")
    reward = np.full(len(ids), np.nan, np.float32)
    parts = np.full((len(ids), len(contract.reward_parts)), np.nan, np.float32)
    if valid.any():
        chosen = {name: column[valid] for name, column in rows.items()}
        asked = [queries[ids[i]] for i in np.flatnonzero(valid)]
        responses = [trajectory.response(chosen, i) for i in range(len(asked))]
        _, scores = score(experiment, responses, asked, chosen["finished"])
        reward[valid], parts[valid] = scores.reward, scores.parts
    version = np.full(len(ids), contract.reward_version, np.int32)
    return {**rows, "reward": reward, "reward_parts": parts, "reward_version": version}


def add_flags(values: flags.FlagValues) -> recipes.Program:
    return command_line.add_source(values)


def run(given: command_line.Given) -> int:
    contract_lib.follow_privacy(given.workdir)
    print(visible(rescore(given.workdir, command_line.source(given))))
    return 0
