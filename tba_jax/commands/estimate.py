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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from tba_jax import trajectory
from tba_jax.commands import audit, command_line
from tba_jax.outputs import visible, visible_line
from tba_jax.replay import journal, off_policy
from tba_jax.replay.log import GIVEN
from tba_jax.replay.reader import LogReader
from tba_jax.replay.window import validate_rows
from tba_jax.reporting.gathering import blocks
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import file_systems, layout

log = logging.getLogger(__name__)

# Effective rows below which an estimate is refused: its weights are then too few for its variance to be known.
MIN_EFFECTIVE = 100
_ROWS = 64  # that are scored at a time
_LEAST_GROUPS = 32  # of which a row of the table of gradients tells, where as many are asked for
_BINS, _LEAST_BINS, _GROUPS_OF_BIN = 5, 3, 8  # of response lengths
_SHOWN = 60  # characters of a prompt
# Why a row does not count, in the order in which that is asked.
_LEFT_OUT = ("responses of files", "not valid or without a reward", "truncated or greedy", "drawn by the steps that trained it")
_FIGURES = np.dtype([
    ("writer", "i4"), ("row", "i8"), ("query", "u8"), ("reward", "f8"), ("length", "i4"), ("log_weight", "f8"), ("log_ratio", "f8")
])  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """policy: STEP or FOLDER. temperature: at which it is sampled, None: the run's. rows: the newest of the log, 0: all."""

    policy: str
    temperature: float | None = None
    rows: int = 0
    gradients: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """A run, its policy as the estimate computes it, and the weights. step: of the snapshot, -1: the policy is of a folder;
    at: the step whose β, γ and τ count; config: of LearnerConfig; log: what audit opens of the run."""

    log: audit.Run
    tokenizer: Any
    mesh: Any
    trained: Any
    frozen: Any
    learner: Any
    schedules: Any
    step: int
    at: int
    temperature: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """figures: _FIGURES[n] of the rows that count; writers: names, by number; left_out: reason -> rows."""

    figures: np.ndarray
    writers: list[str]
    left_out: collections.Counter[str]


def open_policy(workdir: Path, asked: Asked) -> Opened:
    """Raises ValueError where there is no run or no such policy, or the policy's vocabulary is not the run's."""
    import jax

    from tba_jax import sharding
    from tba_jax.experiment import stored_run
    from tba_jax.learner import update
    from tba_jax.roles.sampler import Scoring, load_reference
    from tba_jax.storage import published

    run, stored = audit.open_run(workdir), stored_run.read(layout.open_run_dir(workdir), called=str(workdir))
    device, kept = jax.devices()[0], published.kept(run.layout.policies)
    mesh = sharding.make_mesh((1, 1, 1), setting="estimate", devices=[device])
    temperature = stored.config.sampling.temperature if asked.temperature is None else asked.temperature
    if not 0 < temperature < math.inf:
        raise ValueError(f"--temperature={temperature} must be above 0: a greedy policy gives most rows no probability")
    if asked.policy.isdecimal():
        step, policy = int(asked.policy), stored.policy.on_device(device)
        if step not in kept:
            there = layout.listed([*kept]) if kept else "none"
            raise ValueError(f"--policy={step} is not a kept snapshot of {workdir}; there are {there}")
        frozen: Any = {}
        if policy.lora is not None:
            c = stored.config.searchers
            sizes = dict(logit_megabytes=c.logit_megabytes, score_tokens=c.score_tokens)
            frozen = load_reference(Scoring(contract=stored.contract, policy=policy, mesh=mesh, **sizes), run.layout)
        try:
            arrays = policy.trained_specs, policy.trained_shardings(mesh)
            trained = published.Published(run.layout.policies).load(step, *arrays)
        except FileNotFoundError as error:
            raise ValueError(f"snapshot {step} of {workdir} is gone: the run removed it meanwhile (publish.keep)") from error
    else:
        step, frozen = -1, {}
        policy, trained = _of_folder(asked.policy, stored, mesh, there=layout.listed([*kept]))
    at, config = run.lines.last if step < 0 else step, stored.config
    for _, values in stored_run.past_schedules(run.layout, after=at)[:1]:
        config = stored_run.with_settings(config, values)
    learner = update.make_learner_config(config.learner, stored.contract, policy, mesh)
    of_run = dict(log=run, tokenizer=stored.tokenizer, mesh=mesh, learner=learner, temperature=temperature)
    schedules = update.make_schedules(config.learner)
    return Opened(**of_run, trained=trained, frozen=frozen, schedules=schedules, step=step, at=at)


def _of_folder(name: str, stored: Any, mesh: Any, *, there: str) -> tuple[Any, Any]:
    """Policy and float32 weights of a Hugging Face folder. Raises ValueError where it does not read the run's tokens."""
    from tba_jax.models.hugging_face import load
    from tba_jax.models.policy import Policy
    from tba_jax.text.tokenizers import HuggingFaceTokenizer

    folder = file_systems.path(name)
    if not folder.is_dir():
        raise ValueError(f"--policy={name} is neither a step nor a folder; the run keeps the snapshots {there}")
    run, contract = stored.policy.model, stored.contract
    model = load.read_config(folder, compute_dtype=run.compute_dtype, attention=run.attention, head="language_model")
    tokenizer, told = HuggingFaceTokenizer(folder, vocab=model.vocab), f"--policy={name} cannot weigh the rows of this run: "
    if model.vocab != run.vocab:
        raise ValueError(f"{told}it has a vocabulary of {model.vocab} tokens, and the run's has {run.vocab}")
    if (tokenizer.token_bytes(), tokenizer.eos_id) != (stored.tokenizer.token_bytes(), stored.tokenizer.eos_id):
        raise ValueError(f"{told}its tokenizer gives other texts to the {model.vocab} token ids than the run's")
    if (length := contract.prompt_length + contract.response_length) > model.max_positions:
        raise ValueError(f"{told}they have up to {length} tokens, and it has {model.max_positions} positions")
    policy = Policy(model=model).on_device(mesh.devices.flat[0])
    return policy, load.load_params(folder, policy.model, policy.model_shardings(mesh))


def newest(reader: LogReader, count: int) -> dict[str, list[range]]:
    """Writer -> the rows of it that are among the newest `count` of the log, by the minutes of their appends; 0: all rows."""
    heads = reader.heads()
    appends = sorted((append for writer in sorted(heads) for append in reader.appends(writer)), key=lambda each: each.minute)
    begin = dict.fromkeys(heads, 0) if not count else dict(heads)
    for append in reversed(appends):
        taken = min(count, append.stop - append.first)
        if taken:
            begin[append.writer], count = append.stop - taken, count - taken
    spans = {writer: [range(max(begin[writer], each.start), each.stop) for each in reader.kept(writer)] for writer in heads}
    return {writer: [span for span in of_writer if len(span)] for writer, of_writer in spans.items()}


def _drawn(run: audit.Run, step: int) -> dict[str, np.ndarray]:
    """Writer -> bool[head], the rows that the first `step` steps drew."""
    found = {writer: np.zeros(head, bool) for writer, head in run.reader.heads().items()}
    for line in (each for each in run.lines if each["step"] <= step):
        for writer, row in journal.line_ids(line):
            if row < len(found.get(writer, ())):
                found[writer][row] = True
    return found


def _reasons(rows: trajectory.Rows, writer: str, drawn: np.ndarray, *, vocab: int) -> np.ndarray:
    """int[B]: which of _LEFT_OUT holds of a row first; len(_LEFT_OUT) where it counts. Args: drawn: see _drawn."""
    truncated = (rows["top_k"] > 0) | (rows["top_p"] < 1) | (rows["min_p"] > 0) | ~(rows["temperature"] > 0)
    given = np.full(len(truncated), writer.startswith(GIVEN))
    return np.stack([given, validate_rows(rows, vocab_size=vocab) > 0, truncated, drawn[rows["row"]], ~given | given]).argmax(0)


def _drawn_tokens(rows: trajectory.Rows, contract: contract_lib.Contract) -> np.ndarray:
    """bool[B, R]: the tokens that a policy drew. The end that a response without one is given at token R has probability 1."""
    mask = trajectory.trained(rows)
    if contract.force_eos:
        mask[:, -1] &= rows["finished"]
    return mask


def measure(opened: Opened, count: int) -> Measured:
    """Scores the rows that count. Args: count: see Asked.rows."""
    run, left_out = opened.log, collections.Counter[str]()
    drawn, vocab, score = _drawn(run, opened.step), opened.learner.policy.model.vocab, _score_program(opened)
    writers, found = list[str](), [np.zeros(0, _FIGURES)]
    for writer, spans in newest(run.reader, count).items():
        writers.append(writer)
        for rows in _blocks(run.reader, writer, spans):
            reasons = _reasons(rows, writer, drawn[writer], vocab=vocab)
            left_out.update({_LEFT_OUT[i]: int((reasons == i).sum()) for i in range(len(_LEFT_OUT)) if (reasons == i).any()})
            counts = np.flatnonzero(reasons == len(_LEFT_OUT))
            # Rows of one query side by side share its prompt.
            counts = counts[np.argsort(rows["query_id"][counts], kind="stable")]
            for begin in range(0, len(counts), _ROWS):
                some = counts[begin : begin + _ROWS]
                found.append(score(trajectory_rows(rows, np.resize(some, _ROWS)), len(writers) - 1)[: len(some)])
            log.info("%s: %d rows scored", writer, sum(map(len, found)))
    return Measured(figures=np.concatenate(found), writers=writers, left_out=left_out)


def trajectory_rows(rows: trajectory.Rows, which: np.ndarray) -> trajectory.Rows:
    return {name: column[which] for name, column in rows.items()}


def _blocks(reader: LogReader, writer: str, spans: list[range]) -> Iterator[trajectory.Rows]:
    for span in spans:
        yield from blocks(reader, writer, span, lost=lambda error: log.warning("%s", error))


def _score_program(opened: Opened) -> Any:
    """A function of _ROWS rows and the number of their writer: their _FIGURES."""
    import jax

    from tba_jax import sharding
    from tba_jax.learner import update
    from tba_jax.roles.sampler import Scorer, Scoring

    run, policy, T = opened.log, opened.learner.policy, opened.log.contract.scoring_temperature
    c = run.config.searchers
    sizes = dict(logit_megabytes=c.logit_megabytes, score_tokens=c.score_tokens)
    how = Scoring(contract=run.contract, policy=policy, mesh=opened.mesh, **sizes)
    weights = sharding.on_mesh(opened.mesh, jax.jit(functools.partial(policy.for_sampling, weights="full")))
    scorer = Scorer(how, weights(opened.trained, opened.frozen), called="scoring by the policy")
    inputs_of = functools.partial(update.objective_inputs, step=opened.at, schedules=opened.schedules, config=opened.learner)
    no_target = _no_target(opened)

    def figures(rows: trajectory.Rows, writer: int) -> np.ndarray:
        found, mask = np.zeros(len(rows["row"]), _FIGURES), _drawn_tokens(rows, run.contract)
        sampled = scorer.logprobs(rows, temperature=opened.temperature)
        scored = sampled if opened.temperature == T else scorer.logprobs(rows)
        for name, column in {"row": "row", "query": "query_id", "reward": "reward"}.items():
            found[name] = rows[column]
        found["writer"], found["length"] = writer, trajectory.trained(rows).sum(axis=1)
        found["log_weight"] = np.where(mask, sampled - rows["behavior_logprobs"], 0.0).sum(axis=1, dtype=np.float64)
        found["log_ratio"] = np.nan
        if not no_target:
            inputs = inputs_of(update.batch_from_rows(rows))
            has = rows["reference_id"] > 0
            found["log_ratio"][has] = np.asarray(inputs.log_target() - inputs.token_sum(scored))[has]
        return found

    return figures


def _no_target(opened: Opened) -> str:
    """Why rows alone do not give log p̃, "" where they do."""
    from tba_jax.learner.update import HELD_REFERENCES

    kind = opened.log.config.learner.reference.kind
    if not opened.log.contract.has_reference or kind in HELD_REFERENCES or not opened.log.config.searchers.scores_reference:
        scores = opened.log.config.searchers.scores_reference
        return f"the reference of learner.reference.kind={kind}, searchers.scores_reference={scores}, is not in the rows"
    return "" if float(opened.schedules.beta(opened.at)) > 0 else f"β is 0 at step {opened.at}"


def describe(workdir: Path, opened: Opened, measured: Measured, *, min_effective: int, queries: int) -> tuple[str, bool]:
    """The text that is printed, and whether it holds an estimate. Raises ValueError where no row counts."""
    whose = f"step {opened.step}" if opened.step >= 0 else "the folder"
    left_out = ", ".join(f"{count} {why}" for why, count in measured.left_out.items()) or "none"
    if not len(measured.figures):
        raise ValueError(f"no row of {workdir} can be weighed: the log-probs of what drew them must be known; left out: {left_out}")
    f = measured.figures
    found = off_policy.estimate(f["log_weight"], f["reward"], f["query"])
    lines = [
        f"policy of {whose}, as it is sampled at temperature {opened.temperature:g}, by {found.rows} rows of {found.queries} queries",
        f"left out: {left_out}",
    ]
    if opened.step < 0:
        lines.append("all rows count, those on which this policy may have been trained too: they would flatter it")
    lines.append(f"mean reward of these rows:   {found.plain:.4f}")
    if good := found.effective >= min_effective:
        interval = f"95 % interval {found.low:.4f} to {found.high:.4f}; {found.effective:.1f} effective rows"
        lines.append(f"mean reward of the policy:   {found.mean:.4f}, {interval}")
    else:
        lines.append(
            f"no estimate: {found.effective:.1f} effective rows (ESS) of {found.rows} are fewer than --min_effective={min_effective}: "
            "this policy is too far from those that drew the rows"
        )
    return "\n".join([*lines, "", *_queries(opened, measured, queries)]), good


def _queries(opened: Opened, measured: Measured, count: int) -> list[str]:
    """Lines about the queries, those first that teach most."""
    f = measured.figures
    found = off_policy.by_query(f["query"], f["reward"], f["log_ratio"])
    several, why = found.rows > 1, _no_target(opened)
    lines = [f"{int((found.spread[several] > 0).sum())} of {int(several.sum())} queries with several rows have rewards that differ"]
    teaches = np.where(several, found.spread if why else np.nan_to_num(found.log_weight_std, nan=-1.0), -1.0)
    first = np.argsort(-teaches, kind="stable")[:count]
    if not len(first):
        return lines
    lines.append(f"no log_weight_std: {why}" if why else f"log_weight_std, nats, with β, γ and τ of step {opened.at}")
    lines.append(f"{'rows':>6} {'reward':>8} {'spread':>8} {'log_weight_std':>15}  query")
    ids = [(measured.writers[f["writer"][i]], int(f["row"][i])) for i in found.first[first]]
    rows = opened.log.reader.read_ids(ids)
    for i, g in enumerate(first):
        prompt = opened.tokenizer.decode(rows["tokens"][i, : rows["prompt_length"][i]].tolist())
        shown = visible_line(prompt if len(prompt) <= _SHOWN else prompt[: _SHOWN - 1] + "…")
        std = "-" if found.rows[g] < 2 or np.isnan(found.log_weight_std[g]) else f"{found.log_weight_std[g]:.3f}"
        lines.append(f"{found.rows[g]:6} {found.mean[g]:8.3f} {found.spread[g]:8.3f} {std:>15}  {shown}")
    return lines


def groups_of(query: np.ndarray, K: int, *, most: int, seed: int) -> np.ndarray:
    """int64[n, K], n ≤ most: random disjoint groups of K rows of one query, which are numbers of rows. Args: query: [rows]."""
    rng = np.random.default_rng([seed, K])
    order = rng.permutation(len(query))
    order = order[np.argsort(query[order], kind="stable")]
    _, starts, rows = np.unique(query[order], return_index=True, return_counts=True)
    begins = np.concatenate([start + K * np.arange(n // K) for start, n in zip(starts, rows, strict=True)])
    return order[rng.permutation(begins)[:most, None] + np.arange(K)]


def gradients(opened: Opened, measured: Measured, count: int) -> str:
    """The table of gradients of `count` groups of each size and of bins of lengths. Raises ValueError where rows do not give it."""
    objective, name = opened.learner.objective, opened.log.config.learner.objective
    if count < 2:
        raise ValueError(f"--gradients={count} must be at least 2 groups, from which a variance can be told; 0: no gradients")
    if needs := [each for each in ("log_z_head", "value_head", "state_values") if getattr(objective, each)]:
        raise ValueError(f"--gradients: learner.objective={name} needs a {needs[0].replace('_', ' ')}, which rows alone do not give")
    if objective.reads_reference and opened.log.contract.has_reference and (why := _no_target(opened)) and why[0] == "t":
        raise ValueError(f"--gradients: learner.objective={name} reads the reference: {why}")
    K, least, tables = 2, min(count, _LEAST_GROUPS), list[str]()
    while len(groups := groups_of(measured.figures["query"], K, most=count, seed=opened.log.config.seed)) >= least:
        if K >= objective.min_completions:
            tables += _of_size(opened, measured, groups)
        K *= 2
    if not tables:
        told = f"and of {K} rows of one query there are {len(groups)}"
        raise ValueError(f"--gradients={count} needs at least {least} groups of {max(2, objective.min_completions)} rows, {told}")
    head = f"{'rows':>5} {'lengths, tokens':>18} {'groups':>7} {'signal':>10} {'variance':>22} {'SNR':>9}"
    unit = f"gradient of {name} on one group, squared, in units of the reward, at step {opened.at}: signal ‖E g‖², variance E ‖g − E g‖²"
    return "\n".join([unit, head, *tables])


def _of_size(opened: Opened, measured: Measured, groups: np.ndarray) -> list[str]:
    """Lines about groups of one size: of all, and of bins of their mean lengths. Args: groups: int64[n, K]."""
    import jax

    from tba_jax import sharding
    from tba_jax.learner import gradient_noise as noise_lib
    from tba_jax.learner import update

    n, K = groups.shape
    settings = dataclasses.replace(opened.learner.settings, completions=K)
    given: dict[str, Any] = dict(step=opened.at, schedules=opened.schedules)
    given["config"] = dataclasses.replace(opened.learner, settings=settings)

    def add(sums: noise_lib.Sums, trained: Any, frozen: Any, batch: update.Batch) -> noise_lib.Sums:
        return noise_lib.add(sums, noise_lib.group_gradient(trained, frozen, batch, **given))

    step = sharding.on_mesh(opened.mesh, jax.jit(add, donate_argnums=0))
    length = measured.figures["length"][groups].mean(axis=1)
    bins = min(_BINS, n // _GROUPS_OF_BIN)
    total, lines = noise_lib.no_sums(opened.trained), list[str]()

    def line(which: np.ndarray, sums: noise_lib.Sums) -> str:
        found, lengths = noise_lib.noise(sums, len(which)), f"{length[which].min():.1f} to {length[which].max():.1f}"
        figures = f"{found.signal:10.3g} {f'{found.variance:.3g} ± {found.stderr:.2g}':>22} {found.ratio:9.3g}"
        return f"{K:5} {lengths:>18} {found.groups:7} {figures}"

    for which in np.array_split(np.argsort(length, kind="stable"), bins if bins >= _LEAST_BINS else 1):
        sums = noise_lib.no_sums(opened.trained)
        for group in groups[which]:
            f = measured.figures[group]
            rows = opened.log.reader.read_ids([(measured.writers[i], int(row)) for i, row in f[["writer", "row"]].tolist()])
            sums = step(sums, opened.trained, opened.frozen, update.batch_from_rows(rows))
        if not np.isfinite(float(sums.squares)):
            raise ValueError(f"--gradients: the gradient of a group of {K} rows is not finite")
        lines += [line(which, sums)] if bins >= _LEAST_BINS else []
        total = jax.tree.map(jax.numpy.add, total, sums)
    return [line(np.arange(n), total), *lines]


def add_flags(values: flags.FlagValues) -> None:
    command_line.add_workdir(values)
    flags.DEFINE_string("policy", None, "the step of a kept snapshot, or a Hugging Face folder", flag_values=values, required=True)
    flags.DEFINE_float("temperature", None, "at which it is sampled; default: sampling.temperature", flag_values=values)
    numbers = {
        "rows": (0, 0, "only the newest rows of the log; 0: all"),
        "min_effective": (MIN_EFFECTIVE, 1, "effective rows (ESS) below which there is no estimate"),
        "queries": (10, 0, "lines of the table of queries"),
        "gradients": (0, 0, "groups of rows of each size whose gradients are compared; 0: none"),
    }
    for name, (default, least, told) in numbers.items():
        flags.DEFINE_integer(name, default, told, lower_bound=least, flag_values=values)


def run(given: command_line.Given) -> int:
    """Prints the report. Returns 1 where the rows are too few for an estimate."""
    opened = open_policy(given.workdir, Asked(policy=given.policy, temperature=given.temperature, rows=given.rows))
    measured = measure(opened, given.rows)
    text, good = describe(given.workdir, opened, measured, min_effective=given.min_effective, queries=given.queries)
    if given.gradients:
        text += "\n\n" + gradients(opened, measured, given.gradients)
    print(visible(text))
    return 0 if good else 1
