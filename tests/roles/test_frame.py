"""The picture on a terminal: it fits, and shows the texts of roles as they are."""

import dataclasses
import io

import pytest
from rich.console import Console
from tba_jax.roles.standing import Standing

from tba_jax.roles import frame, plain
from tba_jax.run import best_step

LONG = "has waited 42 s for rows: 2 of 3 queries; in 18 s it publishes step 300 unless that is there, or lets searchers go on"
BUSY = Standing(
    seconds=125.0,
    step=300,
    steps=400,
    trainer={
        "reward": 0.75,
        "reward_own": 0.8,
        "reward_mounted": 0.5,
        "buffer_rows": 50000.0,
        "staleness_mean": 5.0,
        "staleness_max": 9.0,
        "tokens_per_second": 18312.0,
        "computed_tokens_per_second": 21950.0,
        "mfu": 0.312,
    },
    rewards=[(step, step / 400) for step in range(205, 301, 5)],
    steps_per_second=3.1,
    eta_seconds=32.0,
    searchers={"searcher-0": 21000.0, "searcher-1": None},
    evaluations=[(0, 0.47), (300, 0.99)],
    says=[("trainer", LONG), *((f"searcher-{n}", "starts again in 5 s (died 2 times)") for n in range(40))],
)


def shown(standing: Standing, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, markup=False, highlight=False)
    console.print(frame.frame(standing, width=width, console=console))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [12, 20, 36, 60, 80, 200])
def test_it_fits_every_width_and_a_small_height(width):
    lines = shown(BUSY, width)
    assert max(map(len, lines)) < width, "a full last column may begin a new line"
    assert len(lines) <= 1 + 5 + 3 * 7 + 1 and "step 300"[: width - 2] in lines[0]


def test_eighty_columns_hold_the_figures():
    lines = shown(BUSY, 80)
    assert lines[0].startswith("step 300/400  75 %  ━") and lines[0].rstrip().endswith("ETA 0:32  after 2:05")
    resumed = shown(dataclasses.replace(BUSY, first_step=200), 80)
    assert resumed[0].rstrip().endswith("ETA 0:32  after 2:05 since step 200")
    assert [line.rstrip() for line in lines[1:6]] == [
        "reward     0.750  (own 0.800, mounted 0.500)  ▲ +0.125 in 95 steps",
        "held-out   0.990 at step 300  (0.470 at step 0)  ▁█",
        "trainer    3.1 steps/s  18.3k tokens/s (21.9k with padding)  MFU 31.2 %",
        "searchers  21.0k + – tokens/s",
        "rows       50,000 in the buffer  staleness 5.0  largest 9",
    ]
    assert lines[6].startswith("trainer: has waited 42 s") and lines[-1].strip() == "and 35 more"


def test_the_best_step_is_named_where_it_is_not_the_newest():
    better = dataclasses.replace(BUSY, best=best_step.Scored(200, 1.0))
    assert "held-out   0.990 at step 300  (best 1.000 at step 200)  (0.470 at step 0)  ▁█" in [
        each.rstrip() for each in shown(better, 80)
    ]
    assert "held-out 0.990 at step 300 (best 1.000 at step 200)  trainer" in plain.line(better)
    newest = dataclasses.replace(BUSY, best=best_step.Scored(300, 0.99))
    assert shown(newest, 80) == shown(BUSY, 80) and plain.line(newest) == plain.line(BUSY)


def test_markup_and_brackets_are_text():
    text = "[bold]x[/bold] [link=http://a]y :smile: [/] [red"
    lines = shown(Standing(seconds=1.0, steps=4, headline="starting", says=[("a[red]b", text)]), 200)
    assert lines[-1].rstrip() == f"a[red]b: {text}"


def test_what_is_not_known_is_not_shown():
    lines = shown(Standing(seconds=1.0, steps=4, step=2, trainer={"reward": 0.5}, searchers={"searcher-0": None}), 80)
    assert [line.split()[0] for line in lines] == ["step", "reward"] and "ETA" not in lines[0]


def test_the_trend_compares_halves_and_the_sparkline_follows():
    assert frame.trend([0.0, 0.2, 0.9, 0.4, 0.6]) == pytest.approx(0.4)
    assert frame.sparkline([0.0, 0.5, 1.0]).plain == "▁▅█" and frame.sparkline([0.3] * 40).plain == "▁" * 16


def test_a_line_of_text_holds_the_same():
    told = plain.line(BUSY)
    assert told.startswith(
        "step 300/400  reward 0.750  own 0.800  mounted 0.500  staleness 5.0  3.1 steps/s  ETA 0:32  trainer 18.3k tokens/s  "
        "MFU 31.2 %  searchers 21.0k + – tokens/s  held-out 0.990 at step 300  trainer: has waited 42 s"
    )
    assert told.endswith("and 37 more")
    slow = Standing(seconds=1.0, steps=9, step=2, trainer={"reward": 0.5}, steps_per_second=0.025, eta_seconds=7000.0)
    assert plain.line(slow) == "step 2/9  reward 0.500  40.0 s/step  ETA 1:56:40"
    done = Standing(seconds=1.0, steps=9, step=9, trainer={"reward": 0.5}, says=[("evaluator", "evaluating step 9 3 s")])
    assert plain.line(done) == "step 9/9  all steps are done  reward 0.500  evaluator: evaluating step 9 3 s"
