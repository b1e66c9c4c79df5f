"""Estimates log Z of every query from the rows of a run's log, for learner.objective=frozen_log_z of another run.

python -m tba_jax log_z --workdir=RUN --output=FILE [--beta=B] [--min_effective=N]

log Ẑ(x) = log mean_j p̃(y_j|x)/μ_j(y_j|x), p̃ with the run's reference, rewards, γ and τ, over all rows to x whose μ_j, the policy
that drew the row, has full support and is known. A run with the file must begin from the same reference (--init_from=RUN@0).
"""

import collections
from pathlib import Path

import numpy as np
from absl import flags

from tba_jax.commands import audit, command_line
from tba_jax.outputs import visible
from tba_jax.replay.log import GIVEN
from tba_jax.replay.log_z import COEFFICIENTS, Estimate, FrozenLogZ, estimate
from tba_jax.replay.window import validate_rows
from tba_jax.storage import layout

# Effective rows of a query below which it gets no log Z.
MIN_EFFECTIVE = 4.0


def log_z(workdir: Path, output: Path, *, beta: float | None, min_effective: float) -> str:
    """Writes the file, and returns a sentence about it. Raises ValueError where there is no run, or no query gets a log Z.

    Args: beta: of p̃; None: learner.beta_end of the run; min_effective: see MIN_EFFECTIVE.
    """
    run = audit.open_run(workdir)
    ends = {name: float(run.config.learner[f"{name}_end"]) for name in COEFFICIENTS}
    ends |= {} if beta is None else {"beta": beta}
    if not 0 < ends["beta"] < float("inf"):
        raise ValueError(f"β={ends['beta']:g} must be above 0 (--beta): without it there is no log Z")
    reference = run.contract.reference_of_rows(layout.reference_id(run.layout))
    found, left_out = _by_query(run, ends, int(reference, 16))
    kept = {query: each for query, each in found.items() if each.effective >= min_effective}
    told = f"{left_out} rows are responses of files, truncated, not valid, or of another reference, and do not count"
    if not kept:
        raise ValueError(f"no query of {workdir} has --min_effective={min_effective:g} effective rows; {told}")
    version = int(run.contract.reward_version)
    FrozenLogZ(log_z={}, coefficients=ends, reference=reference, reward_version=version).write(output, kept)
    effective = np.array([each.effective for each in kept.values()])
    spread = f"effective rows of a query: {effective.min():.1f} to {effective.max():.1f}, median {np.median(effective):.1f}"
    fewer = f"{len(found) - len(kept)} queries have fewer than --min_effective={min_effective:g} and are not in it"
    return f"{output} has log Z of {len(kept)} queries at β={ends['beta']:g}; {spread}; {fewer}; {told}"


def _by_query(run: audit.Run, of: dict[str, float], reference: int) -> tuple[dict[int, Estimate], int]:
    """Query -> estimate, and how many rows do not count. Args: of: β, γ and τ of p̃."""
    terms, left_out = collections.defaultdict[int, list[tuple[float, float]]](list), 0
    vocab = run.contract.model["vocab"]
    for writer in sorted(run.reader.heads()):
        for span in run.reader.kept(writer):
            for append in run.reader.appends(writer, span.start, span.stop):
                rows = run.reader.read(writer, append.first, append.stop)
                counts = validate_rows(rows, vocab_size=vocab, reference_ids=(reference,)) == 0
                counts &= (rows["top_k"] == 0) & (rows["top_p"] == 1) & (rows["min_p"] == 0) & (rows["temperature"] > 0)
                counts &= not writer.startswith(GIVEN)
                left_out += int((~counts).sum())
                sums = (rows[f"{whose}_logprobs"].sum(axis=1, dtype=np.float64) for whose in ("ref", "behavior"))
                ref, behavior = sums
                target = (ref / of["ref_temperature"] + rows["reward"] / of["beta"]) / of["reward_temperature"]
                for i in np.flatnonzero(counts):
                    terms[int(rows["query_id"][i])].append((target[i], behavior[i]))
    return {query: estimate(*np.array(each).T) for query, each in sorted(terms.items())}, left_out


def add_flags(values: flags.FlagValues) -> None:
    command_line.add_workdir(values)
    flags.DEFINE_string("output", None, "the file, JSON", required=True, flag_values=values)
    flags.DEFINE_float("beta", None, "of the run that gets the file; default: learner.beta_end of this run", flag_values=values)
    told = "effective rows below which a query gets no log Z"
    flags.DEFINE_float("min_effective", MIN_EFFECTIVE, told, lower_bound=1, flag_values=values)


def run(given: command_line.Given) -> int:
    print(visible(log_z(given.workdir, Path(given.output), beta=given.beta, min_effective=given.min_effective)))
    return 0
