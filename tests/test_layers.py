"""The house: its rooms and layers, read from every import of the package, and the sizes of files and functions."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tba_jax"
# Rooms (folders of tba_jax/) and modules beside them, from the lowest layer up. Imports go strictly down, or stay within a room.
LAYERS = (
    {"trajectory", "sharding", "schemas", "outputs", "programs", "packing"},
    {"models", "objectives"},
    {"run"},
    {"storage"},
    {"tasks", "replay", "learner"},
    {"text"},
    {"telemetry"},
    {"decoding", "supervised"},
    {"rewards"},
    {"roles"},
    {"experiment"},
    {"reporting"},
    {"commands"},
    {"main", "__main__"},
)
LAYER = {unit: number for number, units in enumerate(LAYERS) for unit in units}
# What the modules of a folder never reach, by any chain of imports.
NEVER = {"roles.trainer": {"decoding", "tasks"}, "roles.searcher": {"objectives", "learner"}}


def imported_names(path: Path) -> Iterator[str]:
    """Dotted names that a file imports; `from a import b` gives a.b, since b may be a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}:{node.lineno} imports relatively: write the whole name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def import_graph(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Module -> modules of the package that it imports, as dotted names below tba_jax."""
    paths = {".".join(path.relative_to(package).with_suffix("").parts): path for path in sorted(package.rglob("*.py"))}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        parts = [name.split(".")[1:] for name in imported_names(path) if name.split(".")[0] == "tba_jax"]
        prefixes = {".".join(name[:n]) for name in parts for n in range(1, len(name) + 1)}
        # To import a module is to run the __init__.py of its folder, which may be a registry of the modules beside it.
        inits = {f"{prefix}.__init__" for prefix in prefixes if not module.startswith(f"{prefix}.")}
        graph[module] = ((prefixes | inits) & paths.keys()) - {module}
    return graph


def violations(graph: dict[str, set[str]]) -> list[str]:
    """One sentence for each import that does not go down."""
    sentences = []
    for module, used in graph.items():
        room = module.split(".")[0]
        for name in sorted(used):
            other = name.split(".")[0]
            if other != room and LAYER[other] >= LAYER[room]:
                sentences.append(f"{module} (layer {LAYER[room]}) imports {name} (layer {LAYER[other]}): imports go down")
    return sentences


def reach(graph: dict[str, set[str]], folder: str) -> set[str]:
    """All rooms whose modules the modules of `folder` import, directly or through others."""
    found = {module for module in graph if module.startswith(f"{folder}.")}
    while more := set().union(*(graph[module] for module in found)) - found:
        found |= more
    return {module.split(".")[0] for module in found}


def test_imports_go_strictly_down():
    graph = import_graph()
    rooms = {module.split(".")[0] for module in graph} - {"__init__"}
    assert rooms == set(LAYER), f"rooms and the table of layers differ by {sorted(rooms ^ set(LAYER))}"
    assert not violations(graph), "\n".join(violations(graph))


def test_no_import_cycles():
    list(TopologicalSorter(import_graph()).static_order())  # raises CycleError with the cycle


@pytest.mark.parametrize("folder", NEVER)
def test_never_reached(folder):
    reached = reach(import_graph(), folder) & NEVER[folder]
    assert not reached, f"tba_jax.{folder} imports {sorted(reached)}, directly or through another module; it never may"


def test_few_modules_stand_beside_the_rooms():
    assert len(list(PACKAGE.glob("*.py"))) <= 8


def test_no_file_is_long():
    long = {str(path.relative_to(ROOT)): n for path in PACKAGE.rglob("*.py") if (n := path.read_text().count("\n")) > 400}
    assert not long, f"files of over 400 lines: {long}"


def test_few_functions_are_long():
    long = {
        f"{path.relative_to(PACKAGE)}:{node.name}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= 50
    }
    assert len(long) <= 5, f"functions of over 50 lines: {sorted(long)}"


def test_nothing_pickles():
    picklers = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
    for folder in ("tba_jax", "configs", "tests", "benchmarks", "launch", "colab"):
        for path in (ROOT / folder).rglob("*.py"):
            banned = {name.split(".")[0] for name in imported_names(path)} & picklers
            assert not banned, f"{path.relative_to(ROOT)} imports {sorted(banned)}: no pickle in this project"


def test_an_import_that_goes_up_is_told_in_one_sentence(tmp_path):
    for room in ("learner", "replay", "models"):
        (tmp_path / room).mkdir()
    (tmp_path / "replay" / "log.py").write_text("")
    (tmp_path / "sharding.py").write_text("")
    (tmp_path / "learner" / "update.py").write_text("def f():\n    from tba_jax.replay import log\n")
    (tmp_path / "models" / "decoder.py").write_text("from tba_jax import sharding\n")
    sentence = "learner.update (layer 4) imports replay.log (layer 4): imports go down"
    assert violations(import_graph(tmp_path)) == [sentence]


def test_studies_define_their_own_workdir():
    modules = "tba_jax.experiment.jobs, tba_jax.telemetry.terminal, tba_jax.roles.interleaved"
    code = f"import {modules}; from absl import flags; print('workdir' in flags.FLAGS)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
