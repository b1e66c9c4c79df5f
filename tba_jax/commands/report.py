"""Writes one HTML file about a run, live or ended: whether it learns, who waits, alarms, samples and what trained on them.

python -m tba_jax report --workdir=DIR [--output=FILE] [--config=RECIPE]

The file needs no network and no other file. No task is imported, and the run is only read.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

from absl import flags

from tba_jax import outputs
from tba_jax.commands import command_line, recipes
from tba_jax.storage import privacy
from tba_jax.text.visible import visible_line

TELL_SECONDS = 5.0


def write(
    workdir: Path, output: Path, *, recipe: str = "", tell: Callable[[str], None] = lambda sentence: None
) -> tuple[int, list[str]]:
    """Writes the report. Returns its bytes, and sentences about what of the run could not be read.

    Args: recipe: FILE.py[:NAME], whose settings the run's are compared with; "": with the defaults alone.
      tell: is given a sentence now and then about how far the reading is.

    Raises:
      ValueError: there is no run in `workdir`, another version made it, or the output cannot be written.
    """
    from tba_jax.reporting import page
    from tba_jax.reporting.gathering import Source

    outputs.check_file(output)
    begin = b""
    with contextlib.suppress(FileNotFoundError), open(output, "rb") as file:
        begin = file.read(1000)
    if begin and page.MARK not in begin:
        raise ValueError(f"--output={output} is there and is no report: name another file")
    of_recipe = recipes.load(recipe, (), program=recipes.BASE).to_dict() if recipe else None
    found = Source(workdir).gather(tell)
    content = page.page(found, recipe=of_recipe, recipe_name=recipe).encode("utf-8", errors="replace")
    # Rows that are for their owner alone stay so outside of the run.
    outputs.write(output, content, mode=0o600 if privacy.is_private(found.run) else 0o666)
    return len(content), found.problems


def add_flags(values: flags.FlagValues) -> None:
    command_line.add_workdir(values)
    command_line.add_path(values, "output", "the HTML file to write or replace; default: report.html in the current folder")
    flags.DEFINE_string("config", "", "a recipe FILE.py[:NAME], whose settings the run's are compared with", flag_values=values)


def teller() -> Callable[[str], None]:
    """A function that prints a sentence it is given to stderr, once in TELL_SECONDS."""
    told = [time.monotonic()]

    def tell(sentence: str) -> None:
        if time.monotonic() - told[0] >= TELL_SECONDS:
            told[0] = time.monotonic()
            print(visible_line(sentence), file=sys.stderr, flush=True)

    return tell


def run(given: command_line.Given) -> int:
    output = given.output or Path.cwd() / "report.html"
    if not given.output and Path.cwd().is_relative_to(given.workdir.resolve()):
        raise ValueError(f"the current folder belongs to the run {given.workdir}: name a file by --output")
    size, problems = write(given.workdir, output, recipe=given.config, tell=teller())
    print(visible_line(f"{output} ({size / 1e6:.1f} MB)"))
    if problems:
        parts = f"{len(problems)} parts" if len(problems) > 1 else "A part"
        print(f"{parts} of the run could not be read whole: see “What could not be read” in the report")
    return 0
