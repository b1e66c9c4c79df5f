"""Estimates log Z of every query from the rows of a run's log, for learner.objective=frozen_log_z of another run.

python -m tba_jax log_z --workdir=RUN --output=FILE [--beta=B] [--min_effective=N]

log Ẑ(x) = log mean_j p̃(y_j|x)/μ_j(y_j|x), p̃ with the run's reference, rewards, γ and τ, over all rows to x whose μ_j, the policy
that drew the row, has full support and is known. A run with the file must begin from the same reference (--init_from=RUN@0).
"""

import collections
import logging
from pathlib import Path

import numpy as np
from absl import flags

from tba_jax.commands import audit, command_line
from tba_jax.outputs import visible
from tba_jax.replay import off_policy
from tba_jax.replay.log_z import COEFFICIENTS, FrozenLogZ, QueryLogZ, estimate
from tba_jax.reporting.gathering import blocks
from tba_jax.storage import layout

log = logging.getLogger(__name__)

# Effective rows of a query below which it gets no log Z.
MIN_EFFECTIVE = 4.0


def log_z(workdir: Path, output: Path, *, beta: float | None, min_effective: float) -> str:
    """Writes the file, and returns a sentence about it. Raises ValueError where there is no run, or no query gets a log Z.

    Args: beta: of p̃; None: learner.beta_end of the run; min_effective: see MIN_EFFECTIVE.
    """
    if output.is_dir() or not output.parent.is_dir() or not output.name:
        raise ValueError(f"--output={output} must name a file in a folder that exists")
    run = audit.open_run(workdir)
    ends = {name: float(run.config.learner[f"{name}_end"]) for name in COEFFICIENTS}
    ends |= {} if beta is None else {"beta": beta}
    if not 0 < ends["beta"] < float("inf"):
        raise ValueError(f"β={ends['beta']:g} must be above 0 (--beta): without it there is no log Z")
    reference = run.contract.reference_of_rows(layout.reference_id(run.layout))
    found, left_out = _by_query(run, ends, int(reference, 16))
    kept = {query: each for query, each in found.items() if each.effective >= min_effective}
    told = "; ".join(f"{count} rows {why}" for why, count in left_out.items() if count) or "all rows count"
    if not kept:
        most = max((each.effective for each in found.values()), default=0.0)
        raise ValueError(
            f"no query of {workdir} has --min_effective={min_effective:g} effective rows, the most are {most:.1f}; {told}"
        )
    FrozenLogZ(log_z={}, coefficients=ends, reference=reference, contract=run.contract.to_json()).write(output, kept)
    effective = np.array([each.effective for each in kept.values()])
    spread = f"effective rows of a query: {effective.min():.1f} to {effective.max():.1f}, median {np.median(effective):.1f}"
    fewer = f"{len(found) - len(kept)} queries have fewer than --min_effective={min_effective:g} and are not in it"
    return f"{output} has log Z of {len(kept)} queries at β={ends['beta']:g}; {spread}; {fewer}; {told}"


def _by_query(run: audit.Run, of: dict[str, float], reference: int) -> tuple[dict[int, QueryLogZ], collections.Counter[str]]:
    """Query -> log Z; and why rows do not count -> how many. Args: of: β, γ and τ of p̃."""
    terms, left_out = collections.defaultdict[int, list[tuple[float, float]]](list), collections.Counter[str]()
    vocab, force_eos, reader = run.contract.model["vocab"], run.contract.force_eos, run.reader
    why = (*off_policy.UNWEIGHED, "have log-probs of another reference, or of none")
    for writer in sorted(reader.heads()):
        for span in reader.kept(writer):
            for rows in blocks(reader, writer, span, lost=lambda error: log.warning("%s", error)):
                reasons = [*off_policy.unweighed(rows, writer, vocab_size=vocab), rows["reference_id"] != reference]
                for reason, holds in zip(why, reasons, strict=True):
                    left_out[reason] += int(holds.sum())
                drawn = off_policy.by_chance(rows, force_eos=force_eos)
                behavior = np.where(drawn, rows["behavior_logprobs"], 0.0).sum(axis=1, dtype=np.float64)
                ref = rows["ref_logprobs"].sum(axis=1, dtype=np.float64)
                target = (ref / of["ref_temperature"] + rows["reward"] / of["beta"]) / of["reward_temperature"]
                for i in np.flatnonzero(~np.any(reasons, axis=0)):
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
