"""Writes one HTML file about a run, live or ended: whether it learns, who waits, alarms, samples and what trained on them.

python -m tba_jax report --workdir=DIR [--output=FILE]

The file needs no network and no other file. No task is imported, and the run is only read.
"""

from pathlib import Path

from absl import flags

from tba_jax import outputs
from tba_jax.commands import command_line
from tba_jax.storage import contract
from tba_jax.text.visible import visible_line


def write(workdir: Path, output: Path) -> tuple[int, list[str]]:
    """Writes the report. Returns its bytes, and sentences about what of the run could not be read.

    Raises ValueError where there is no run of this version in `workdir`, or the output cannot be written.
    """
    from tba_jax.reporting import page
    from tba_jax.reporting.gathering import Source

    outputs.check_file(output)
    found = Source(workdir).gather()
    content = page.page(found).encode("utf-8", errors="replace")
    # Rows that are for their owner alone stay so outside of the run.
    outputs.write(output, content, mode=0o600 if contract.is_private(found.run) else 0o666)
    return len(content), found.problems


def add_flags(values: flags.FlagValues) -> None:
    command_line.add_workdir(values)
    command_line.add_path(values, "output", "the HTML file to write or replace; default: report.html in the current folder")


def run(given: command_line.Given) -> int:
    output = given.output or Path.cwd() / "report.html"
    if not given.output and Path.cwd().is_relative_to(given.workdir.resolve()):
        raise ValueError(f"the current folder belongs to the run {given.workdir}: name a file by --output")
    size, problems = write(given.workdir, output)
    print(visible_line(f"{output} ({size / 1e6:.1f} MB)"))
    if problems:
        parts = f"{len(problems)} parts" if len(problems) > 1 else "A part"
        print(f"{parts} of the run could not be read whole: see “What could not be read” in the report")
    return 0
