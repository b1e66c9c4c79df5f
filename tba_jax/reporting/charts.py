"""The charts and the samples of a report as plain dictionaries, which the page's script shows.

A chart's trace has the x of both axes of the page under "x_by": {"step": [...], "time": [...]}. Text of others in its labels is
escaped, as plotly takes some HTML there.
"""

import codecs
import html
import itertools
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax.outputs import visible, visible_line
from tba_jax.reporting.gathering import Gathered, Role, steps_of_rows
from tba_jax.roles.results import STDERR
from tba_jax.storage import places
from tba_jax.text.tokenizers import Tokenizer
from tba_jax.trajectory import Rows, response, trained, turns

# Okabe and Ito's colours, which colour-blind people can tell apart.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b6b6b", "#8a6d00")
_WAITING, _WORKING = ("#d62728", "#ff7f7f", "#b22222", "#ffb3b3"), tuple(_COLOURS[number] for number in (0, 5, 2, 4, 3, 7))
# Title, what the chart tells, axis, and the trainer's figures: (name in metrics.jsonl, name on the page).
_OF_TRAINER: tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Loss", "Of the objective. Trajectory balance's loss falls as the policy nears its target; it need not reach 0.", "loss",
     (("loss", "loss"),)),
    # Not the k3 estimate: one unlikely token makes it so large that nothing else can be seen.
    ("Distance from the reference", "KL(π_θ‖π_ref) of the trained rows. It grows as the policy leaves the reference.",
     "nats per response", (("kl_to_ref", "KL"),)),
    ("Gradient norm", "Before clipping, in units of the reward.", "norm", (("grad_norm", "gradient norm"),)),
    ("Entropy", "Of the policy's next token. Near 0, all responses to a query are the same, and nothing is explored.",
     "nats per token", (("entropy", "entropy"),)),
    ("log Z", "The estimated log partition function, with which trajectory balance compares each row.", "nats",
     (("log_z", "mean"), ("log_z_std", "deviation over queries"))),
    ("Effective sample share", "Near 1, all trained rows count alike as samples of the policy; near 0, a few carry the estimate.",
     "share", (("effective_sample_share", "effective sample share"),)),
    ("Staleness", "How many steps before the update the trained rows were sampled.", "steps",
     (("staleness_mean", "mean"), ("staleness_max", "largest"))),
    ("Groups that teach nothing", "Share of the queries of a batch whose responses all have the same reward.", "share of queries",
     (("equal_reward_groups", "equal rewards"),)),
    ("Difficulty of the queries", "Shares of the queries of whose newest responses none, some and all succeed.",
     "share of queries", (("queries_failed", "fail"), ("queries_mixed", "in between"), ("queries_solved", "solved"))),
    ("Log-prob gap", "Between the log-probs of searcher and learner on the same weights. It should stay near 0.",
     "nats per token", (("logprob_gap_max", "largest"), ("logprob_gap_mean", "mean"))),
    ("Response length", "Of the trained rows.", "tokens", (("response_length", "mean length"),)),
    ("Speed of the trainer", "Updates a second since the process started.", "steps/s", (("steps_per_second", "steps/s"),)),
    ("Tokens of the trainer", "Tokens a second of the trained rows, and with what the model computed beside them, as padding.",
     "tokens/s", (("tokens_per_second", "of rows"), ("computed_tokens_per_second", "computed"))),
)  # fmt: skip
# The same of each searcher: title, what the chart tells, axis, the figure.
_OF_SEARCHERS = (
    ("Reward of fresh rows", "Of the rows that each searcher has just sampled, trained on or not.", "reward", "reward"),
    ("Turns that the environment could not read", "Of each fresh row, in the mean.", "turns", "environment_errors"),
    ("Waiting for environments", "For each fresh row, while others are decoded.", "s", "environment_seconds"),
    ("Speed of the searchers", "Tokens a second of each, since its process started.", "tokens/s", "tokens_per_second"),
)

Figure = dict[str, Any]
Texts = Callable[[Sequence[int]], list[str]]


def of(found: Gathered) -> dict[str, Any]:
    """All charts, {"charts": [...], "resumes": x of each axis, "time_title": ...}."""
    begin, end = found.times
    units = (("s", 1, 300), ("min", 60, 18_000), ("h", 3600, 1e6), ("days", 86_400, math.inf))
    unit, seconds = next((unit, seconds) for unit, seconds, limit in units if end - begin < limit)

    def line(name: str, role: Role, figure: str, number: int) -> list[Figure]:
        step = "step" if "policy_step" not in role.last else "policy_step"
        return _line(name, role.curve(figure), role.curve(step), (role.curve("time") - begin) / seconds, _COLOURS[number % 8])

    trainer = found.trainer
    steps, times = trainer.curve("step"), (trainer.curve("time") - begin) / seconds

    def when(at: Sequence[float]) -> np.ndarray:
        return np.interp(at, steps, times) if len(steps) else np.full(len(at), np.nan)

    names = (("reward", "trained rows"), ("reward_own", "of them, the run's own"), ("reward_mounted", "of them, of mounted runs"))
    rewards = [line(called, trainer, name, colour) for (name, called), colour in zip(names, (0, 5, 3), strict=True)]
    charts = [_reward([*itertools.chain(*rewards)], found.evaluations, when)]
    for title, told, y, figures in _OF_TRAINER:
        lines = [line(called, trainer, name, number) for number, (name, called) in enumerate(figures)]
        charts.append(_chart("learning", title, told, y, [*itertools.chain(*lines)]))
    searchers = {name: role for name, role in found.roles.items() if name.startswith("searcher")}
    for title, told, y, figure in _OF_SEARCHERS:
        lines = [line(name, role, figure, number) for number, (name, role) in enumerate(searchers.items())]
        charts.append(_chart("learning", title, told, y, [*itertools.chain(*lines)]))
    charts.append(_shares(found.roles))
    at = found.table.resumes[-50:]
    return {
        "charts": [chart for chart in charts if chart["traces"]],
        "resumes": {"step": at, "time": rounded(when(at))},
        "time_title": f"time since the run began ({unit})",
    }


def safe(text: str) -> str:
    """Text that others wrote, for a label."""
    return html.escape(visible_line(text)[:80], quote=False)


def rounded(values: Any) -> list[Any]:
    """Numbers with six digits, None in place of what is not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in np.asarray(values, np.float64).ravel()]


def _chart(section: str, title: str, told: str, y: str, traces: Sequence[Figure], **more: Any) -> Figure:
    """A chart over both axes. Args: section: of the page, whose end it is put at; more: of the figure."""
    values = [value for trace in traces for value in trace["y"] if isinstance(value, float)]
    axis: Figure = {"title": {"text": y}}
    if values and min(values) >= 0:
        axis |= {"rangemode": "tozero"} if max(values) > 0 else {"range": [0, 1]}
    figure = {"section": section, "title": title, "told": told, "height": 260, "axes": True, "wide": False}
    return {**figure, "traces": [*traces], "layout": {"yaxis": axis}, **more}


def _line(name: str, values: np.ndarray, steps: np.ndarray, times: np.ndarray, colour: str, **more: Any) -> list[Figure]:
    """A line over both axes, none where there is no such figure. Args: more: of the trace."""
    there = np.isfinite(values)
    if not there.any():
        return []
    x_by = {"step": rounded(steps[there]), "time": rounded(times[there])}
    mode = "lines+markers" if there.sum() < 40 else "lines"
    line = {"mode": mode, "marker": {"size": 4}, "line": {"color": colour, "width": 1.8}}
    return [{"x_by": x_by, "y": rounded(values[there]), "name": safe(name), **line, **more}]


def _reward(
    traces: list[Figure], evaluations: Sequence[Mapping[str, Any]], when: Callable[[Sequence[float]], np.ndarray]
) -> Figure:
    """Rewards of the trained rows (traces), and held-out scores with their standard errors. Args: when: step -> time."""
    steps = np.array([each["step"] for each in evaluations], np.float64)
    for name, colour in (("greedy", _COLOURS[1]), ("sampled", _COLOURS[2])):
        figure = f"{name}_reward"
        values, errors = (np.array([each.get(key, np.nan) for each in evaluations]) for key in (figure, figure + STDERR))
        bars = {"array": rounded(np.nan_to_num(errors[np.isfinite(values)])), "thickness": 1, "color": colour}
        traces += _line(f"held out, {name}", values, steps, when(steps.tolist()), colour, mode="lines+markers", error_y=bars)
    told = "Held-out queries are never trained on; bars are standard errors."
    return _chart("learning", "Reward", told, "reward", traces, height=340, wide=True)


def _shares(roles: Mapping[str, Role]) -> Figure:
    """A bar for each role: what at least a hundredth of its time went into."""
    shares = {name: of_role for name, role in reversed([*roles.items()]) if (of_role := role.shares())}
    names = {name for of_role in shares.values() for name, share in of_role.items() if share >= 0.01}
    traces = []
    for number, name in enumerate(sorted(names, key=lambda name: (name == "other", not name.startswith("wait_"), name))):
        colour = "#e3e3e3" if name == "other" else (_WAITING[number % 4] if name.startswith("wait_") else _WORKING[number % 6])
        values = rounded([of_role.get(name, 0.0) for of_role in shares.values()])
        called = safe(name.replace("_", " "))
        look = {"name": called, "marker": {"color": colour}, "hovertemplate": "%{x:.1%}<extra>" + called + "</extra>"}
        traces.append({"type": "bar", "orientation": "h", "y": [safe(role) for role in shares], "x": values, **look})
    layout = {"barmode": "stack", "xaxis": {"range": [0, 1], "tickformat": ".0%"}, "yaxis": {"type": "category"}}
    layout["legend"] = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"}
    told = "What the time of each role went into since its process began to work. Red is waiting."
    more: Figure = {"axes": False, "wide": True, "height": 110 + 30 * len(shares), "layout": layout}
    return _chart("time", "Where the time goes", told, "", traces, **more)


MOST_TOKENS, MOST_PROMPT, MOST_STEPS = 400, 3000, 12  # of a row: tokens of the response, characters, steps that drew it
ROWS_EACH, RANDOM_ROWS, QUERIES, POLICY_STEPS = 12, 24, 6, 8


def chosen(rows: np.ndarray, counts: np.ndarray) -> dict[str, list[int]]:
    """Group -> indices of rows, first to show first. Args: rows: FIGURES[n]; counts: int[n], how often steps drew each row.

    `worst` and `best` are by reward, then drawn rows, then the newest; different queries come first. `disagreeing` has the best
    and the worst row of the queries whose rewards differ most. `random` is drawn evenly. `steps` has three random rows of each of
    some policy steps.
    """
    if not len(rows):
        return {}
    rng = np.random.default_rng(0)
    age, undrawn = -rows["newest_step"].astype(np.int64), counts == 0
    groups = {}
    for name, reward in (("worst", rows["reward"]), ("best", -rows["reward"])):
        near = np.lexsort((age, undrawn, reward))[:4096]
        first = np.sort(np.unique(rows["query_id"][near], return_index=True)[1])
        groups[name] = near[[*first, *np.setdiff1d(np.arange(len(near)), first)][:ROWS_EACH]].tolist()
    groups["disagreeing"] = _disagreeing(rows, undrawn)
    groups["random"] = sorted(rng.choice(len(rows), min(len(rows), RANDOM_ROWS), replace=False).tolist(), key=age.__getitem__)
    steps = np.unique(rows["newest_step"][rows["newest_step"] >= 0])
    groups["steps"] = []
    for step in steps[np.unique(np.linspace(0, len(steps) - 1, POLICY_STEPS).astype(int))] if len(steps) else ():
        mine = np.flatnonzero(rows["newest_step"] == step)
        groups["steps"] += rng.choice(mine, min(len(mine), 3), replace=False).tolist()
    return groups


def _disagreeing(rows: np.ndarray, undrawn: np.ndarray) -> list[int]:
    there = np.flatnonzero(np.isfinite(rows["reward"]))
    order = there[np.lexsort((undrawn[there], rows["reward"][there], rows["query_id"][there]))]
    reward, ids = rows["reward"][order], rows["query_id"][order]
    begins = np.flatnonzero(np.append(True, ids[1:] != ids[:-1])[: len(ids)])
    ends = np.append(begins[1:], len(ids))[: len(begins)]
    spread = reward[ends - 1] - reward[begins]
    found = [query for query in np.argsort(-spread, kind="stable")[:QUERIES] if spread[query] > 1e-6]
    return [int(order[place]) for query in found for place in (ends[query] - 1, begins[query])]


def pieces(tokenizer: Tokenizer | None) -> Texts:
    """A function of token ids: the visible text that each adds. Args: tokenizer: None: a token's text is its number.

    The token that completes a character has its text, where several share it.
    """
    contents = [] if tokenizer is None else tokenizer.token_bytes()
    special = frozenset(() if tokenizer is None else tokenizer.special_ids)
    names = {} if tokenizer is None else {tokenizer.pad_id: "⟨padding⟩", tokenizer.eos_id: "⟨end⟩"}

    def texts(ids: Sequence[int]) -> list[str]:
        decoder, found = codecs.getincrementaldecoder("utf-8")("replace"), []
        for each in map(int, ids):
            content = contents[each] if 0 <= each < len(contents) else None
            if each in special or content is None:
                name = names.get(each) or ("" if content is None else content.decode(errors="replace")) or f"⟨{each}⟩"
                # A character that a special token interrupts stays unfinished.
                found.append(decoder.decode(b"", final=True) + visible(name))
                decoder.reset()
            else:
                found.append(visible(decoder.decode(content)))
        if rest := decoder.decode(b"", final=True):
            found[-1] += rest
        return found

    return texts


def samples(found: Gathered, indices: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Index into `found.table.rows` -> the row as the page shows it; what cannot be read is named in `found.problems`."""
    table, texts = found.table, pieces(found.tokenizer)
    keys = {int(i): int(table.rows["key"][i]) for i in indices}
    draws = table.draws_of([*keys.values()])
    audit = f"python -m tba_jax audit --workdir={shlex.quote(found.called)}"
    shown: dict[int, dict[str, Any]] = {}
    lost = 0
    for index, key in keys.items():
        writer, row = table.name(key)
        try:
            rows = table.reader.read_ids([(writer, row)])
        except places.STORAGE_ERRORS as error:
            lost += 1
            if lost <= 5:
                found.problems.append(f"row {writer}:{row} is not shown: {error}")
            continue
        newest, oldest = steps_of_rows(rows)
        shown[index] = {
            "name": f"{writer}:{row}",
            "query": f"{int(rows['query_id'][0]):016x}",
            "prompt": _prompt(rows, found.tokenizer, texts),
            **_tokens(rows, texts),
            "reward": _number(rows["reward"][0]),
            "parts": [*zip(table.reader.shape.reward_parts, map(_number, rows["reward_parts"][0]), strict=True)],
            "finished": bool(rows["finished"][0]),
            "length": int(rows["response_length"][0]),
            "turns": _turns(rows),
            "newest": int(newest[0]),
            "oldest": int(oldest[0]),
            "ratio": _number(_log_ratios(rows).sum(dtype=np.float64)),
            "steps": draws[key][:MOST_STEPS],
            "draws": len(draws[key]),
            "mounted": not table.reader.is_own(writer),
            "again": f"{audit} --regenerate={shlex.quote(f'{writer}:{row}')}",
        }
    return shown


def _log_ratios(rows: Rows) -> np.ndarray:
    """log π_θ/π_ref of the first row's tokens, nats: float32[R], NaN where no reference has scored it."""
    return np.where(rows["reference_id"][0] == 0, np.float32(np.nan), rows["policy_logprobs"][0] - rows["ref_logprobs"][0])


def _tokens(rows: Rows, texts: Texts) -> dict[str, Any]:
    """tokens: [text, log π_θ/π_ref in nats, policy step] each, MOST_TOKENS at most; more: how many tokens follow."""
    steps = rows["policy_step"][0].tolist()
    ids = response(rows, 0)[: len(steps)]  # a trainer refuses rows whose length is wrong
    told = zip(texts(ids[:MOST_TOKENS].tolist()), _log_ratios(rows).tolist(), steps, strict=False)
    found = [[text, _number(ratio, "{:.3f}"), step] for text, ratio, step in told]
    return {"tokens": found, "more": max(0, len(ids) - MOST_TOKENS)}


def _turns(rows: Rows) -> str:
    if "environment" not in rows:
        return ""
    calls, errors, seconds = rows["environment"][0].tolist()
    count = int(turns(trained(rows)).sum())
    told = f"{count} {'turn' if count == 1 else 'turns'}"
    return f"{told}, {calls:.0f} calls of tools, {errors:.0f} errors, {seconds:.1f} s of its environment"


def _number(value: float, form: str = "{:.6g}") -> float | None:
    return float(form.format(value)) if np.isfinite(value) else None


def _prompt(rows: Rows, tokenizer: Tokenizer | None, texts: Texts) -> str:
    """The visible text of the prompt, without its middle where it is very long."""
    ids = rows["tokens"][0, : rows["prompt_length"][0]].tolist()
    if tokenizer is None:
        text = "".join(texts(ids))
    else:
        text = visible(tokenizer.decode([each for each in ids if 0 <= each < tokenizer.vocab_size]))
    return text if len(text) <= MOST_PROMPT else f"{text[: MOST_PROMPT // 2]} … {text[-MOST_PROMPT // 2 :]}"
