"""Prints rows of a run's replay log as text.

python -m tba_jax.show --workdir=DIR [--order=newest|best|worst] [--count=10]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

# Columns that decide the order: best and worst are by reward, among equals the newest.
_SIGNS = {"newest": 0.0, "best": -1.0, "worst": 1.0}


def rank(reward: np.ndarray, policy_step: np.ndarray, order: str) -> np.ndarray:
    """Indices of rows, first to show first. reward float32[n]; policy_step int[n], of the newest token of each row."""
    return np.lexsort((-np.arange(len(reward)), -policy_step, _SIGNS[order] * reward))


def show(workdir: Path, order: str, count: int) -> str:
    """The text that is printed.

    Raises:
      ValueError: there is no run, or no row, in `workdir`.
    """
    from ml_collections import config_dict

    from tba_jax import experiment as experiment_lib
    from tba_jax import run_config, run_dir, storage
    from tba_jax.replay.reader import LogReader

    run = run_dir.open_run_dir(workdir)
    if not storage.exists(run.config):
        raise ValueError(f"{workdir} holds no run: there is no {run.config}")
    config = config_dict.ConfigDict(run_config.read(run)["config"])
    experiment = experiment_lib.build(config)
    reader = LogReader(run.replay, experiment.contract.row_shape())
    heads = {writer: head for writer, head in reader.heads().items() if head}
    if not heads:
        raise ValueError(f"{run.replay} holds no committed row yet")
    ids = [(writer, row) for writer, head in sorted(heads.items()) for row in range(head)]
    rows = reader.read_ids(ids)
    newest_step = rows["policy_step"].max(axis=1)
    sections = []
    for i in rank(rows["reward"], newest_step, order)[:count]:
        prompt = rows["prompt_tokens"][i, len(rows["prompt_tokens"][i]) - rows["prompt_length"][i] :].tolist()
        response = rows["response_tokens"][i, : rows["response_length"][i]].tolist()
        writer, row = ids[i]
        sections.append(
            f"── {writer}:{row}  reward {rows['reward'][i]:.3f}  policy step {newest_step[i]}"
            f"{'' if rows['finished'][i] else '  (cut at the length limit)'}\n"
            f"query:    {experiment.tokenizer.decode(prompt)}\n"
            f"response: {experiment.tokenizer.decode_continuation(prompt, response)}"
        )
    total = f"{len(ids)} rows of {len(heads)} writers, {order} first"
    return "\n\n".join([total, *sections])


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tba_jax.show", description=__doc__, allow_abbrev=False)
    parser.add_argument("--workdir", type=Path, required=True, help="the run's folder")
    parser.add_argument("--order", choices=tuple(_SIGNS), default="newest", help="which rows come first")
    parser.add_argument("--count", type=int, default=10, help="how many rows")
    given = parser.parse_args(arguments)
    try:
        if given.count < 1:
            raise ValueError(f"--count={given.count} must be at least 1")
        print(show(given.workdir, given.order, given.count))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
