"""Estimates the mean reward of a policy, what queries teach it, and the noise of its gradient, from the rows of a run's log.

python -m tba_jax estimate --workdir=RUN --policy=STEP|FOLDER [--temperature=T] [--rows=N] [--min_effective=N] [--queries=N]
  [--gradients=N]

Nothing is generated, and no task is imported. STEP is a kept snapshot of the run, FOLDER a policy that `export` has written, or
another one with the vocabulary of the run. Rows that trained the policy of STEP are left out.
"""

import collections
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from tba_jax import trajectory
from tba_jax.commands import audit, command_line
from tba_jax.outputs import visible, visible_line
from tba_jax.replay import journal, off_policy
from tba_jax.replay.reader import LogReader
from tba_jax.reporting.gathering import blocks
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import file_systems, layout

log = logging.getLogger(__name__)

# Effective rows below which there is no estimate: its variance is then estimated from few rows with most of the weight.
MIN_EFFECTIVE = 100
_ROWS = 64  # that are scored at a time
_LEAST_GROUPS = 32  # of a size, below which larger groups are left out where more are asked for
_BINS, _LEAST_BINS, _GROUPS_OF_BIN = 5, 3, 8  # of response lengths
_SHOWN = 60  # characters of a prompt
# Why a row does not count, in this order.
_LEFT_OUT = (*off_policy.UNWEIGHED, "trained this policy")
# log_weight: log π − log μ of a row, and log_ratio: its log p̃ − log π, nats, NaN where there is no target; length: its trained
# tokens.
_KINDS = {"writer": "i4", "row": "i8", "query": "u8", "reward": "f8", "length": "i4", "log_weight": "f8", "log_ratio": "f8"}
_FIGURES = np.dtype([*_KINDS.items()])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """A run and the policy that is estimated.

    run: as audit reads it; config: with the schedule of the step `at`; tokenizer: the run's; mesh: of one device; trained,
    frozen: the weights, see Policy.for_training; learner: LearnerConfig; schedules: of β, γ and τ; step: of the snapshot,
    -1: a folder's policy; temperature: at which it is sampled.
    """

    run: audit.Run
    config: Any
    tokenizer: Any
    mesh: Any
    trained: Any
    frozen: Any
    learner: Any
    schedules: Any
    at: int
    step: int
    temperature: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """figures: _FIGURES[n] of the rows that count; writers: names, by number; left_out: one of _LEFT_OUT -> rows."""

    figures: np.ndarray
    writers: list[str]
    left_out: Mapping[str, int]


def open_policy(workdir: Path, name: str, *, temperature: float | None = None) -> Opened:
    """Args: name: STEP or FOLDER; temperature: None: the run's sampling.temperature.

    Raises ValueError where there is no run or no such policy, or the policy does not read the run's tokens.
    """
    import jax

    from tba_jax import sharding
    from tba_jax.experiment import stored_run
    from tba_jax.learner import update

    run = audit.open_run(workdir)
    stored = stored_run.read(run.layout, called=str(workdir))
    config, mesh = stored.config, sharding.make_mesh((1, 1, 1), setting="estimate", devices=jax.devices()[:1])
    temperature = config.sampling.temperature if temperature is None else temperature
    if not 0 < temperature < math.inf:
        raise ValueError(f"--temperature={temperature} must be a number above 0: a greedy policy can draw few of the rows")
    step = int(name) if name.isdecimal() else -1
    policy, trained, frozen = (_of_folder if step < 0 else _of_step)(run, name, stored, mesh)
    at = run.lines.last if step < 0 else step
    for _, values in stored_run.past_schedules(run.layout, after=at)[:1]:
        config = stored_run.with_settings(config, values)
    learner = update.make_learner_config(config.learner, stored.contract, policy, mesh)
    return Opened(
        run=run,
        config=config,
        tokenizer=stored.tokenizer,
        mesh=mesh,
        trained=trained,
        frozen=frozen,
        learner=learner,
        schedules=update.make_schedules(config.learner),
        at=at,
        step=step,
        temperature=temperature,
    )


def _scoring(run: audit.Run, policy: Any, mesh: Any) -> Any:
    from tba_jax.roles.sampler import Scoring

    sizes = {name: run.config.searchers[name] for name in ("logit_megabytes", "score_tokens")}
    return Scoring(contract=run.contract, policy=policy, mesh=mesh, **sizes)


def _of_step(run: audit.Run, name: str, stored: Any, mesh: Any) -> tuple[Any, Any, Any]:
    """Policy, trained and frozen weights of a snapshot."""
    from tba_jax.roles.sampler import load_reference
    from tba_jax.storage.published import Published

    snapshots, policy = Published(run.layout.policies), stored.policy.on_device(mesh.devices.flat[0])
    try:
        trained = snapshots.load(int(name), policy.trained_specs, policy.trained_shardings(mesh))
    except FileNotFoundError as error:
        there = layout.listed([*snapshots.kept()]) or "none"
        raise ValueError(f"--policy={name} is not a kept snapshot of {run.layout.root}; there are {there}") from error
    return policy, trained, {} if policy.lora is None else load_reference(_scoring(run, policy, mesh), run.layout)


def _of_folder(run: audit.Run, name: str, stored: Any, mesh: Any) -> tuple[Any, Any, Any]:
    """Policy, trained and frozen weights of a Hugging Face folder."""
    from tba_jax.models.hugging_face import load
    from tba_jax.models.policy import Policy
    from tba_jax.text.tokenizers import HuggingFaceTokenizer

    folder, ours = file_systems.path(name), stored.policy.model
    if not folder.is_dir():
        raise ValueError(f"--policy={name} is neither the number of a step nor a folder")
    model = load.read_config(folder, compute_dtype=ours.compute_dtype, attention=ours.attention, head="language_model")
    tokenizer, told = HuggingFaceTokenizer(folder, vocab=model.vocab), f"--policy={name} cannot score the rows of this run"
    if model.vocab != ours.vocab:
        raise ValueError(f"{told}: it has a vocabulary of {model.vocab} tokens, and the run's policy has {ours.vocab}")
    # An export of an alphabet's tokenizer has another fingerprint.
    texts, theirs = ([each.decode([i]) for i in range(each.vocab_size)] for each in (stored.tokenizer, tokenizer))
    if texts != theirs or tokenizer.eos_id != stored.tokenizer.eos_id:
        raise ValueError(f"{told}: its tokenizer has other texts for token ids, or another end of sequence, than the run's")
    if (length := run.contract.prompt_length + run.contract.response_length) > model.max_positions:
        raise ValueError(f"{told}: they have up to {length} tokens, and it has {model.max_positions} positions")
    policy = Policy(model=model).on_device(mesh.devices.flat[0])
    return policy, load.load_params(folder, policy.model, policy.model_shardings(mesh)), {}


def newest(reader: LogReader, count: int) -> dict[str, list[range]]:
    """Writer -> its rows among the newest `count` of the log, by the minutes of their appends; 0: all rows."""
    heads = reader.heads()
    begin = dict(heads) if count else dict.fromkeys(heads, 0)
    appends = sorted((append for writer in sorted(heads) for append in reader.appends(writer)), key=lambda each: each.minute)
    for append in reversed(appends):
        if taken := min(count, append.stop - append.first):
            begin[append.writer], count = append.stop - taken, count - taken
    return {writer: [range(max(begin[writer], each.start), each.stop) for each in reader.kept(writer)] for writer in heads}


def _drawn(run: audit.Run, step: int) -> dict[str, np.ndarray]:
    """Writer -> bool[head], the rows that the first `step` steps drew."""
    found = {writer: np.zeros(head, bool) for writer, head in run.reader.heads().items()}
    for line in run.lines:
        for writer, row in journal.line_ids(line) if line["step"] <= step else ():
            if row < len(found.get(writer, ())):
                found[writer][row] = True
    return found


def measure(opened: Opened, count: int = 0) -> Measured:
    """Scores the rows that count among the newest `count` of the log, 0: all."""
    reader, vocab, score = opened.run.reader, opened.learner.policy.model.vocab, _scorer(opened)
    drawn, left_out = _drawn(opened.run, opened.step), collections.Counter[str]()
    writers, found, scored = list[str](), [np.zeros(0, _FIGURES)], 0
    for writer, spans in newest(reader, count).items():
        writers.append(writer)
        for rows in (
            rows for span in spans for rows in blocks(reader, writer, span, lost=lambda error: log.warning("%s", error))
        ):
            reasons = np.stack([*off_policy.unweighed(rows, writer, vocab_size=vocab), drawn[writer][rows["row"]]])
            counted = np.bincount(reasons.argmax(0)[reasons.any(0)], minlength=len(_LEFT_OUT))
            left_out.update(dict(zip(_LEFT_OUT, counted.tolist(), strict=True)))
            counts = np.flatnonzero(~reasons.any(0))
            # Rows of one query share its prompt where they are scored together.
            counts = counts[np.argsort(rows["query_id"][counts], kind="stable")]
            for some in (counts[begin : begin + _ROWS] for begin in range(0, len(counts), _ROWS)):
                filled = {name: column[np.resize(some, _ROWS)] for name, column in rows.items()}
                found.append(score(filled, len(writers) - 1)[: len(some)])
            log.info("%d rows scored", scored := scored + len(counts))
    return Measured(figures=np.concatenate(found), writers=writers, left_out=left_out)


def _scorer(opened: Opened) -> Callable[[trajectory.Rows, int], np.ndarray]:
    """A function of rows and the number of their writer to their _FIGURES."""
    import jax

    from tba_jax import sharding
    from tba_jax.learner import update
    from tba_jax.roles.sampler import Scorer

    contract, policy = opened.run.contract, opened.learner.policy
    plain = sharding.on_mesh(opened.mesh, jax.jit(functools.partial(policy.for_sampling, weights="full")))
    weights = plain(opened.trained, opened.frozen)
    inputs_of = _inputs_of(opened, opened.learner)
    scorer = Scorer(_scoring(opened.run, policy, opened.mesh), weights, called="scoring by the policy")

    def figures(rows: trajectory.Rows, writer: int) -> np.ndarray:
        found, drawn = np.zeros(len(rows["row"]), _FIGURES), trajectory.trained(rows)
        for name, column in {"row": "row", "query": "query_id", "reward": "reward"}.items():
            found[name] = rows[column]
        found["writer"], found["length"], found["log_ratio"] = writer, drawn.sum(axis=1), np.nan
        sampled = scorer.logprobs(rows, temperature=opened.temperature)
        found["log_weight"] = off_policy.log_weight(rows, sampled, force_eos=contract.force_eos)
        if not _no_target(opened):
            same = opened.temperature == contract.scoring_temperature
            inputs = inputs_of(update.batch_from_rows(rows))
            log_ratio = inputs.log_target() - inputs.token_sum(sampled if same else scorer.logprobs(rows))
            found["log_ratio"] = np.where(rows["reference_id"] > 0, np.asarray(log_ratio), np.nan)
        return found

    return figures


def _inputs_of(opened: Opened, config: Any) -> Callable[..., Any]:
    """A function of a batch to what the objective reads of it, see update.objective_inputs."""
    import jax.numpy as jnp

    from tba_jax.learner import update

    of_step = dict[str, Any](step=jnp.asarray(opened.at), schedules=opened.schedules)
    return functools.partial(update.objective_inputs, **of_step, config=config)


def _no_reference(config: Any) -> str:
    """Why the rows do not hold log-probs of the learner's reference, "" where they do, or it has none."""
    from tba_jax.learner.update import holds_reference

    kind, scores = config.learner.reference.kind, config.searchers.scores_reference
    setting = f"learner.reference.kind={kind}" if scores else "searchers.scores_reference=False"
    return f"{setting}, so the rows lack the log-probs of the learner's reference" if holds_reference(config) else ""


def _no_target(opened: Opened) -> str:
    """Why there is no log p̃, "" where there is."""
    if not opened.run.contract.has_reference:
        return "the run has no reference"
    beta = float(opened.schedules.beta(opened.at))
    return _no_reference(opened.config) or ("" if beta > 0 else f"β is 0 at step {opened.at}")


def describe(opened: Opened, measured: Measured, *, min_effective: int, queries: int) -> tuple[str, bool]:
    """The text that is printed, and whether it holds an estimate. Raises ValueError where no row counts."""
    f, run = measured.figures, opened.run
    left_out = "; ".join(f"{count} {why}" for why, count in measured.left_out.items() if count) or "none"
    if not len(f):
        raise ValueError(f"{run.layout.root} has no row whose weight under --policy is known; of those left out, {left_out}")
    found = off_policy.estimate(f["log_weight"], f["reward"], f["query"])
    whose = "the folder's policy" if opened.step < 0 else f"the policy of step {opened.step}"
    lines = [
        f"{whose} at temperature {opened.temperature:g}, from {found.rows} rows of {found.queries} queries; left out: {left_out}"
    ]
    if opened.step < 0:
        lines.append("all rows count: rows on which this policy was trained, if there are any, flatter it")
    elif opened.config.replay.mount and contract_lib.read(run.layout)["init_from"]:
        lines.append("rows of mounted runs count: those on which the policy of --init_from was trained flatter it")
    lines.append(f"mean reward of these rows  {found.plain:.4f}")
    good, told = found.effective >= min_effective, f"{found.effective:.1f} effective rows (ESS)"
    if good:
        interval = f"95 % interval {found.low:.4f} to {found.high:.4f}"
        lines.append(f"mean reward of the policy  {found.mean:.4f}, {interval}, from {told}")
    else:
        few = found.effective > found.rows / 2
        why = "there are too few rows" if few else "the policies that drew them are too different from it"
        too_few = f"are fewer than --min_effective={min_effective}"
        lines.append(f"no estimate: {told} of {found.rows} {too_few}; {why}")
    return "\n".join([*lines, "", *_queries(opened, measured, queries)]), good


def _queries(opened: Opened, measured: Measured, count: int) -> list[str]:
    """Lines about the queries, those first whose rows are furthest from the optimum: that teach most."""
    f, why = measured.figures, _no_target(opened)
    found = off_policy.by_query(f["query"], f["reward"], f["log_ratio"])
    several = found.rows > 1
    lines = [
        f"{int((found.spread[several] > 0).sum())} of {int(several.sum())} queries with several rows have rewards that differ"
    ]
    teaches = np.where(several, found.spread if why else np.nan_to_num(found.log_weight_std, nan=-1.0), -1.0)
    first = np.argsort(-teaches, kind="stable")[:count]
    if not len(first):
        return lines
    lines.append(f"log_weight_std, nats, with β, γ and τ of step {opened.at}" if not why else f"no log_weight_std: {why}")
    lines.append(f"{'rows':>6} {'reward':>8} {'spread':>8} {'log_weight_std':>15}  query")
    rows = opened.run.reader.read_ids(_ids(measured, found.first[first]))
    for i, g in enumerate(first):
        prompt = opened.tokenizer.decode(rows["tokens"][i, : rows["prompt_length"][i]].tolist())
        shown = visible_line(prompt if len(prompt) <= _SHOWN else f"{prompt[: _SHOWN - 1]}…")
        std = f"{found.log_weight_std[g]:.3f}" if several[g] and np.isfinite(found.log_weight_std[g]) else "-"
        lines.append(f"{found.rows[g]:6} {found.mean[g]:8.3f} {found.spread[g]:8.3f} {std:>15}  {shown}")
    return lines


def _ids(measured: Measured, which: np.ndarray) -> list[tuple[str, int]]:
    return [(measured.writers[writer], row) for writer, row in measured.figures[which][["writer", "row"]].tolist()]


def gradients(opened: Opened, measured: Measured, count: int) -> str:
    """A table of the gradient's signal and noise, by sizes of groups and lengths of responses. Raises ValueError where rows alone
    do not give it. Args: count: the most groups of a size, at least 2."""
    from tba_jax.learner import gradient_noise

    objective, named = opened.learner.objective, f"learner.objective={opened.config.learner.objective}"
    if count < 2:
        raise ValueError(f"--gradients={count} must be at least 2: the variance of one gradient is not known; 0 leaves it out")
    if needs := [each for each in ("given_log_z", "log_z_head", "value_head", "state_values") if getattr(objective, each)]:
        raise ValueError(f"--gradients={count}: {named} reads what rows alone do not give ({needs[0].replace('_', ' ')})")
    if objective.reads_reference and (why := _no_reference(opened.config)):
        raise ValueError(f"--gradients={count}: {named} reads the reference, and {why}")
    sizes = [K for power in range(1, 32) if (K := 2**power) >= objective.min_completions]
    least, tables = min(count, _LEAST_GROUPS), list[str]()
    for K in sizes:
        groups = gradient_noise.groups_of(measured.figures["query"], K, most=count, seed=opened.config.seed)
        if len(groups) < least:
            break
        tables += _of_size(opened, measured, groups)
    if not tables:
        told = f"the rows that count make {len(groups)} groups of {K} rows of one query"
        raise ValueError(f"--gradients={count} needs at least {least} groups, and {told}, the fewest for {named}")
    return "\n".join([
        f"gradient of {named} on one group, in units of the reward, at step {opened.at}",
        "signal: ‖E g‖²; variance: E ‖g − E g‖², with its standard error",
        f"{'rows':>5} {'mean lengths, tokens':>20} {'groups':>7} {'signal':>10} {'variance':>22} {'signal/variance':>16}",
        *tables,
    ])  # fmt: skip


def _of_size(opened: Opened, measured: Measured, groups: np.ndarray) -> list[str]:
    """Lines about groups of one size: of all, and of bins of their mean lengths. Args: groups: int64[n, K]."""
    import jax

    from tba_jax import sharding
    from tba_jax.learner import gradient_noise, update

    n, K = groups.shape
    settings = dataclasses.replace(opened.learner.settings, completions=K)
    config = dataclasses.replace(opened.learner, settings=settings)
    add = functools.partial(gradient_noise.add_group, inputs_of=_inputs_of(opened, config), config=config)
    step = sharding.on_mesh(opened.mesh, jax.jit(add, donate_argnums=0))
    length = measured.figures["length"][groups].mean(axis=1)
    bins = bins if (bins := min(_BINS, n // _GROUPS_OF_BIN)) >= _LEAST_BINS else 1

    def line(which: np.ndarray, sums: gradient_noise.Sums) -> str:
        found, lengths = gradient_noise.noise(sums, len(which)), f"{length[which].min():.1f} to {length[which].max():.1f}"
        variance = f"{found.variance:.3g} ± {found.stderr:.2g}"
        return f"{K:5} {lengths:>20} {found.groups:7} {found.signal:10.3g} {variance:>22} {found.ratio:16.3g}"

    total, lines = gradient_noise.no_sums(opened.trained), list[str]()
    for which in np.array_split(np.argsort(length, kind="stable"), bins):
        sums = gradient_noise.no_sums(opened.trained)
        for group in groups[which]:
            rows = opened.run.reader.read_ids(_ids(measured, group))
            sums = step(sums, opened.trained, opened.frozen, update.batch_from_rows(rows))
        if not np.isfinite(float(sums.squares)):
            raise ValueError(f"--gradients: the gradient of a group of {K} rows is not finite at step {opened.at}")
        lines += [line(which, sums)] if bins > 1 else []
        total = jax.tree.map(jax.numpy.add, total, sums)
    log.info("gradients of %d groups of %d rows", n, K)
    return [line(np.arange(n), total), *lines]


def add_flags(values: flags.FlagValues) -> None:
    command_line.add_workdir(values)
    flags.DEFINE_string(
        "policy", None, "the step of a kept snapshot, or a Hugging Face folder", required=True, flag_values=values
    )
    flags.DEFINE_float("temperature", None, "at which it is sampled; default: sampling.temperature", flag_values=values)
    flags.DEFINE_integer("rows", 0, "only the newest rows of the log; 0: all", lower_bound=0, flag_values=values)
    least = "effective rows (ESS) below which there is no estimate"
    flags.DEFINE_integer("min_effective", MIN_EFFECTIVE, least, lower_bound=1, flag_values=values)
    flags.DEFINE_integer("queries", 10, "lines of the table of queries", lower_bound=0, flag_values=values)
    told = "compare the gradients of so many groups of rows of each size; 0: of none"
    flags.DEFINE_integer("gradients", 0, told, lower_bound=0, flag_values=values)


def run(given: command_line.Given) -> int:
    """Prints the report. Returns 1 where there are too few effective rows for an estimate."""
    opened = open_policy(given.workdir, given.policy, temperature=given.temperature)
    measured = measure(opened, given.rows)
    text, good = describe(opened, measured, min_effective=given.min_effective, queries=given.queries)
    tables = [text, gradients(opened, measured, given.gradients)] if given.gradients else [text]
    print(visible("\n\n".join(tables)))
    return 0 if good else 1
