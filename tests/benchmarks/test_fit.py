"""The table of what fits: what a row adds up, how a page takes it, and the page against a compilation."""

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys

import pytest

from benchmarks import fit
from tests.support import tiny_run

GIB = dict(trainer=30.0, searcher=20.0, evaluator=25.0)


def found(row: fit.Row, **changes) -> fit.Found:
    words = dict.fromkeys(GIB, "update")
    return fit.Found(
        **dict(row=row, gib=GIB, worst=words, meshes=words, limit=72.0, programs=3, seconds=9.0, settings="") | changes
    )


def test_what_roles_take_that_share_a_device_is_added_up():
    row = dataclasses.replace(fit.ROWS[0], sharing=(), limit=72.0)
    assert found(row).most == 30
    assert found(dataclasses.replace(row, sharing=("searcher", "evaluator"))).most == 45
    together = found(dataclasses.replace(row, sharing=tuple(GIB)))
    assert together.most == 75 and "**does not fit**, by proxy" in together.cells()
    assert "fits" in found(dataclasses.replace(row, sharing=tuple(GIB), limit=0), limit=95.7).cells()


def test_a_row_takes_the_place_of_the_same_row(tmp_path, monkeypatch):
    first, second = (dataclasses.replace(fit.ROWS[0], recipe=name) for name in ("a", "b"))
    page = tmp_path / "fit.md"
    page.write_text("# Words\n\n| recipe | hardware |\n| --- | --- |\n\nMore words.\n")
    monkeypatch.setattr(fit, "PAGE", page)
    monkeypatch.setattr(fit, "ROWS", (first, second))
    for row in (second, first, second):
        fit.write(found(row))
    lines = page.read_text().splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith("| ")] == ["| recipe", "| ---", "| a", "| b"]
    assert lines[-1] == "More words." and lines[-2] == ""
    fit.write(found(first, programs=77))
    assert "77 in" in fit.row_of(page.read_text(), first) and "77 in" not in fit.row_of(page.read_text(), second)


def test_a_row_is_its_recipe_with_prompts_of_the_full_length(tmp_path):
    row = next(row for row in fit.ROWS if row.recipe == "tldr_pythia:410m")
    experiment = fit.experiment_of(row, tmp_path)
    assert experiment.config.task.prompt_length == 512 == len(experiment.queries["train"][0].prompt)
    assert experiment.policy.model.layers == 24 and experiment.config.learner.queries == 8


def test_the_page_has_rows_of_the_list_and_everything_fits():
    text = fit.PAGE.read_text()
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    there = [row for row in fit.ROWS if fit.row_of(text, row)]
    assert lines == [fit.row_of(text, row) for row in there]
    for row, line in zip(there, lines, strict=True):
        most, limit = map(float, re.search(r"\| ([\d.]+) of ([\d.]+), ", line).groups())
        assert most <= limit and f"| fits{', by proxy' if row.limit else ''} |" in line, line


@pytest.mark.slow
def test_the_page_is_what_the_compiler_says(tmp_path):
    """Compiles the row of the demo, or with FIT_ROWS=WORDS the rows of --rows=WORDS, which take hours together."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU's compiler is not installed: pip install -e '.[tpu]'")
    words = os.environ.get("FIT_ROWS", "demo")
    command = [sys.executable, "-m", "benchmarks.fit", f"--rows={words}"]
    done = subprocess.run(command, cwd=tiny_run.ROOT, env=tiny_run.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [row for row in fit.ROWS if words in row.name]
    for row, line in zip(rows, done.stdout.splitlines(), strict=True):
        theirs = fit.row_of(fit.PAGE.read_text(), row).strip("| ").split(" | ")
        for ours, there in zip(line.split(" | ")[2:6], theirs[2:6], strict=True):
            assert float(ours.split()[0]) == pytest.approx(float(there.split()[0]), rel=0.02), (row.name, ours, there)
