"""The house: its rooms and layers, read from every import of the package, and the sizes of files."""

import ast
import functools
import re
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


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """Module -> modules of the package that it imports, as dotted names below tba_jax."""
    paths = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}
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


def reach(graph: dict[str, set[str]], start: str) -> set[str]:
    """All modules that `start`, a module or a folder, imports, directly or through others."""
    found = {module for module in graph if f"{module}.".startswith(f"{start}.")}
    while more := set().union(*(graph[module] for module in found)) - found:
        found |= more
    return found


def test_imports_go_strictly_down():
    graph = import_graph()
    rooms = {module.split(".")[0] for module in graph} - {"__init__"}
    assert rooms == set(LAYER), f"rooms and the table of layers differ by {sorted(rooms ^ set(LAYER))}"
    assert not violations(graph), "\n".join(violations(graph))


def test_no_import_cycles():
    list(TopologicalSorter(import_graph()).static_order())  # raises CycleError with the cycle


@pytest.mark.parametrize("folder", NEVER)
def test_never_reached(folder):
    reached = {module.split(".")[0] for module in reach(import_graph(), folder)} & NEVER[folder]
    assert not reached, f"tba_jax.{folder} imports {sorted(reached)}, directly or through another module; it never may"


def test_few_modules_stand_beside_the_rooms():
    assert len(list(PACKAGE.glob("*.py"))) <= 9


def test_no_file_is_long():
    long = {str(path.relative_to(ROOT)): n for path in PACKAGE.rglob("*.py") if (n := path.read_text().count("\n")) > 520}
    assert not long, f"files of over 520 lines: {long}"


def test_recipes_load_without_jax():
    reached = reach(import_graph(), "experiment.schema")
    names = {name for module in reached for name in imported_names(PACKAGE / f"{module.replace('.', '/')}.py")}
    assert not {name for name in names if name.split(".")[0] in ("jax", "flax", "optax")}


def test_nothing_pickles():
    pickler = re.compile(r"^\s*(import|from) (pickle|cloudpickle|dill|shelve|marshal|joblib)\b", re.MULTILINE)
    for folder in ("tba_jax", "configs", "tests", "benchmarks", "launch", "colab"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not pickler.search(path.read_text()), f"{path.relative_to(ROOT)}: no pickle in this project"
