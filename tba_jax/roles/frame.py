"""The picture of a run's standing on a terminal: a bar, figures with their trends, and who does what."""

import itertools
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tba_jax.roles import plain
from tba_jax.roles.standing import Standing
from tba_jax.run import best_step

_LABEL = 11  # columns
# How many roles that do something else than their work are named, and by how many lines each at most.
_MOST_NAMED, _MOST_LINES = 6, 3
_BLOCKS = "▁▂▃▄▅▆▇█"
_NARROW = 34  # columns below which there is no bar
_SPARKS = 16
# Rewards of the run's own rows, and of rows of other runs; there where replay.mount is, and the batch has some.
_APART = (("own", "reward_own"), ("mounted", "reward_mounted"))
_LEAST_CHANGE = 0.0005  # of the reward, that a trend shows: less is 0.000


def frame(standing: Standing, *, width: int, console: Console) -> RenderableType:
    """What a terminal of `width` columns shows; no line is longer."""
    width = max(width - 1, _LABEL)  # in the last column a terminal may begin a new line, or not
    lines = [*_figures(standing, width)]
    for who, sentence in standing.says[:_MOST_NAMED]:
        lines += _wrapped(who, sentence, width, console)
    if len(standing.says) > _MOST_NAMED:
        lines.append(_labelled("", [f"and {len(standing.says) - _MOST_NAMED} more"], width))
    return Group(_bar(standing, width), *lines)


def _bar(standing: Standing, width: int) -> RenderableType:
    """The step, the share of steps that are done, the time so far and the time to come."""
    spent = plain.duration(standing.seconds) + (f" since step {standing.first_step}" if standing.first_step else "")
    texts = [Text(f"step {standing.step}/{standing.steps}", style="bold")]
    if standing.eta_seconds is not None:
        texts.append(Text(f"ETA {plain.duration(standing.eta_seconds)}", style="cyan"))
    else:
        texts.append(Text(f"after {spent}", style="dim"))
    if width < _NARROW:
        return _cut(Text("  ").join(texts), width)
    percent = Text(f"{100 * min(standing.step / max(standing.steps, 1), 1):.0f} %")
    if width >= 2 * _NARROW and standing.eta_seconds is not None:
        texts.append(Text(f"after {spent}", style="dim"))
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False, collapse_padding=True)
    grid.width = width
    for _ in (texts[0], percent):
        grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    for _ in texts[1:]:
        grid.add_column(no_wrap=True)
    grid.columns[-1].justify = "right"
    bar = ProgressBar(total=max(standing.steps, 1), completed=standing.step, complete_style="cyan", finished_style="green")
    grid.add_row(texts[0], percent, bar, *texts[1:])
    return grid


def _figures(standing: Standing, width: int) -> Iterator[Text]:
    if standing.headline:
        yield _cut(Text(standing.headline, style="bold yellow"), width)
        return
    if standing.is_trained:
        yield _cut(Text("all steps are done", style="bold green"), width)
    yield _labelled("reward", _reward(standing), width)
    if standing.evaluations:
        yield _labelled("held-out", _heldout(standing), width)
    if speed := _speed(standing):
        yield _labelled("trainer", speed, width)
    if any(each is not None for each in standing.searchers.values()):
        joined = [f"{standing.joined} joined"] if standing.joined else []
        yield _labelled("searchers", [plain.searchers(standing), *joined], width)
    if rows := _rows(standing):
        yield _labelled("rows", rows, width)


def _reward(standing: Standing) -> list[str | Text]:
    trainer, values = standing.trainer, [reward for _, reward in standing.rewards]
    parts: list[str | Text] = [f"{trainer['reward']:.3f}"] if "reward" in trainer else []
    apart = [f"{title} {trainer[name]:.3f}" for title, name in _APART if name in trainer]
    if apart:
        parts.append(f"({', '.join(apart)})")
    if len(values) >= 4 and abs(change := trend(values)) >= _LEAST_CHANGE:
        steps = standing.rewards[-1][0] - standing.rewards[0][0]
        arrow, style = ("▲", "green") if change > 0 else ("▼", "red")
        parts += [Text(f"{arrow} {change:+.3f} in {steps} steps", style=style), sparkline(values)]
    return parts


def _heldout(standing: Standing) -> list[str | Text]:
    step, score = standing.evaluations[-1]
    parts: list[str | Text] = [f"{score:.3f} at step {step}"]
    if best := best_step.told(standing.best, apart_from=step):
        parts.append(f"({best})")
    if len(standing.evaluations) > 1:
        first, before = standing.evaluations[0]
        parts.append(f"({before:.3f} at step {first})")
        scores = [score for _, score in standing.evaluations]
        parts += [sparkline(scores)] if min(scores) < max(scores) else []
    return parts


def _speed(standing: Standing) -> list[str | Text]:
    if standing.steps_per_second is None:
        return []
    parts: list[str | Text] = [plain.pace(standing.steps_per_second)]
    useful, computed = standing.rate("tokens_per_second"), standing.rate("computed_tokens_per_second")
    if useful is not None:
        padded = f" ({plain.short(computed)} with padding)" if computed is not None else ""
        parts.append(f"{plain.short(useful)} tokens/s{padded}")
    if (share := standing.rate("mfu")) is not None:
        parts.append(f"MFU {100 * share:.1f} %")
    return parts


def _rows(standing: Standing) -> list[str | Text]:
    trainer = standing.trainer
    parts: list[str | Text] = []
    if "buffer_rows" in trainer:
        parts.append(f"{trainer['buffer_rows']:,.0f} in the buffer")
    if "staleness_mean" in trainer:
        parts.append(f"staleness {trainer['staleness_mean']:.1f}")
    if "staleness_max" in trainer:
        parts.append(f"largest {trainer['staleness_max']:.0f}")
    return parts


def _labelled(label: str, parts: Sequence[str | Text], width: int) -> Text:
    """One line: as many of the parts as have room; the first is cut rather than left out."""
    line = Text(f"{label:{_LABEL}}", style="", no_wrap=True)
    line.stylize("dim", 0, _LABEL)
    for number, part in enumerate(parts):
        text = part if isinstance(part, Text) else Text(part)
        gap = "  " if number else ""
        if number and line.cell_len + len(gap) + text.cell_len > width:
            continue
        line.append(gap).append_text(text)
    return _cut(line, width)


def _wrapped(who: str, sentence: str, width: int, console: Console) -> list[Text]:
    """A sentence of a role over a few lines, all but the first indented."""
    whole = Text(f"{who}: {sentence}")
    whole.stylize("bold", 0, len(who) + 1)
    lines = list(whole.wrap(console, max(width - 2, 8), tab_size=8))
    if len(lines) > _MOST_LINES:
        lines = lines[:_MOST_LINES]
        lines[-1] = _cut(lines[-1].append(" …"), width - 2)
    return [line if number == 0 else Text("  ").append_text(line) for number, line in enumerate(lines)]


def _cut(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    return line


def trend(values: Sequence[float]) -> float:
    """The mean of the later half less the mean of the earlier half."""
    half = len(values) // 2
    return sum(values[-half:]) / half - sum(values[:half]) / half


def sparkline(values: Sequence[float]) -> Text:
    """Up to _SPARKS blocks; each stands for the mean of its share of the values."""
    count = min(_SPARKS, len(values))
    bounds = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return Text("".join(_BLOCKS[round((value - low) * scale)] for value in means), style="blue")
