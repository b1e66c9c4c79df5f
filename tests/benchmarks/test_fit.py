"""The table of what fits: how a page takes a row, what a row is, and the page against a compilation."""

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys

import pytest

from benchmarks import fit
from tests.support import tiny_run


def test_a_row_takes_the_place_of_the_same_row(tmp_path, monkeypatch):
    first, second = (dataclasses.replace(fit.ROWS[0], recipe=name) for name in ("a", "b"))
    page = tmp_path / "fit.md"
    page.write_text("# Words\n\n| recipe | topology |\n| --- | --- |\n\nMore words.\n")
    monkeypatch.setattr(fit, "PAGE", page)
    monkeypatch.setattr(fit, "ROWS", (first, second))
    for row, programs in ((second, "1"), (first, "2"), (second, "3")):
        fit.write(row, [row.recipe, f"`{row.topology}`", programs])
    lines = page.read_text().splitlines()
    assert [line for line in lines if line.startswith("| ")][2:] == ["| a | `v5e:1x1` | 2 |", "| b | `v5e:1x1` | 3 |"]
    assert lines[-1] == "More words." and lines[-2] == ""


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
        sizes = re.findall(r"\| ([\d.]+) of ([\d.]+) \(", line)
        assert len(sizes) == 3 and all(float(size) <= float(limit) for size, limit in sizes), line
        assert f"| fits{', by TPU proxy' if 'A100' in row.topology else ''} |" in line, line


@pytest.mark.slow
def test_the_page_is_what_the_compiler_says():
    """Compiles the row of the demo, or with FIT_ROWS=WORDS the rows of --rows=WORDS, which take hours together."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU's compiler is not installed: pip install -e '.[tpu]'")
    words = os.environ.get("FIT_ROWS", "demo")
    command = [sys.executable, "-m", "benchmarks.fit", f"--rows={words}"]
    done = subprocess.run(command, cwd=tiny_run.ROOT, env=tiny_run.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [row for row in fit.ROWS if words in f"{row.name} on {row.topology}"]
    for row, line in zip(rows, done.stdout.splitlines(), strict=True):
        theirs = fit.row_of(fit.PAGE.read_text(), row).strip("| ").split(" | ")
        for ours, there in zip(line.split(" | ")[2:5], theirs[2:5], strict=True):
            assert float(ours.split()[0]) == pytest.approx(float(there.split()[0]), rel=0.02), (row.recipe, ours, there)
            assert float(ours.split()[2]) == pytest.approx(float(there.split()[2]), rel=0.02), (row.recipe, ours, there)
