"""Executes colab/tba_jax.ipynb from its first cell to its last, as a program of the environment that the notebook is to run in.

python tests/support/executed_notebook.py IN.ipynb OUT.ipynb [FIELDS]

FIELDS is JSON, by default {}: name of a form field (a line `NAME = value  # @param …`) -> value, as users fill it in. A cell more
presses the button of the sliders, and another one ends TensorBoard, which would stay behind. Prints the seconds of each cell.
"""

import datetime
import json
import re
import sys
from pathlib import Path
from typing import Any

PRESS = "panel.button.click()\npanel.wait()"
END_TENSORBOARD = (
    "import os, signal\nfrom tensorboard import manager\n[os.kill(each.pid, signal.SIGTERM) for each in manager.get_all()]"
)


def filled_in(source: str, fields: dict[str, Any], left: set[str]) -> str:
    """A cell with other values in its form. Args: left: names that no cell has had yet."""
    for name, value in fields.items():
        source, count = re.subn(rf"^{name} = .*?(?=  # @param)", f"{name} = {value!r}", source, flags=re.MULTILINE)
        if count:
            left.discard(name)
    return source


def execute(given: Path, result: Path, fields: dict[str, Any]) -> None:
    """Raises nbclient's CellExecutionError where a cell raises; what came before is in the result all the same."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(given, as_version=4)
    nbformat.validate(notebook)
    left = set(fields)
    cells = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = filled_in(cell.source, fields, left)
        cells.append(cell)
        if cell.id in ("settings", "export_policy"):
            more = PRESS if cell.id == "settings" else END_TENSORBOARD
            cells.append(nbformat.v4.new_code_cell(more, id=f"after_{cell.id}"))
    assert not left, f"the notebook has no form fields {sorted(left)}"
    notebook.cells = cells
    client = NotebookClient(notebook, timeout=1800, record_timing=True, resources={"metadata": {"path": str(given.parent)}})
    try:
        client.execute()
    finally:
        nbformat.write(notebook, result)
        for cell in notebook.cells:
            if cell.cell_type == "code" and "shell.execute_reply" in cell.metadata.get("execution", {}):
                print(f"{cell.id:20} {seconds(cell.metadata.execution):7.1f} s")


def seconds(times: dict[str, str]) -> float:
    began, ended = (datetime.datetime.fromisoformat(times[name]) for name in ("iopub.execute_input", "shell.execute_reply"))
    return (ended - began).total_seconds()


if __name__ == "__main__":
    execute(Path(sys.argv[1]), Path(sys.argv[2]), json.loads("".join(sys.argv[3:]) or "{}"))
