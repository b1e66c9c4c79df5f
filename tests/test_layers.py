"""The layers of DESIGN.md, held against every import of the package, those inside functions included."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A unit is a module of tba_jax/ or a room (a folder); imports go strictly down, or stay within the room.
LAYERS = (
    {"trajectory", "mesh", "storage", "run_dir", "metrics", "run_config", "lifeline"},
    {"tokenizer", "models", "tasks", "objectives", "optimizer"},
    {"fine_tuning", "decoding", "learner", "replay", "policy_store", "checkpoint"},
    {"searcher", "trainer", "evaluator", "scorers"},
    {
        "config_checks",
        "experiment",
        "prompts",
        "vocabulary",
        "other_runs",
        "interleave",
        "supervisor",
        "report",
        "dry_run",
        "show",
        "export",
        "audit",
        "rescore",
        "roles",
        "task_models",
        "evaluate",
        "append",
        "main",
    }
    | {"examples", "tuning", "supervised", "command"},
)
LAYER = {unit: number for number, units in enumerate(LAYERS) for unit in units}
# The lowest layer and the composition may import their own kind, without cycles.
SAME_LAYER_ALLOWED = {0, len(LAYERS) - 1}
# What a unit never reaches, by any chain of imports.
NEVER = {"trainer": {"decoding", "tasks"}, "searcher": {"objectives", "optimizer", "learner", "checkpoint"}}


def imported_names(path: Path) -> Iterator[str]:
    """Dotted names that a file imports; `from a import b` gives a.b, since b may be a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.relative_to(ROOT)}:{node.lineno} imports relatively: write the whole name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def import_graph(folder: Path = ROOT / "tba_jax") -> dict[str, set[str]]:
    """Unit -> other units that it imports."""
    graph: dict[str, set[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        unit = path.relative_to(folder).with_suffix("").parts[0]
        if unit == "__init__":
            assert not any(name.startswith("tba_jax") for name in imported_names(path)), (
                f"{path} must import nothing of the package"
            )
            continue
        names = (name.split(".") for name in imported_names(path))
        graph.setdefault(unit, set()).update(name[1] for name in names if name[0] == "tba_jax")
    return {unit: used - {unit} for unit, used in graph.items()}


def violations(graph: dict[str, set[str]]) -> list[str]:
    """One sentence for each import that does not go down."""
    return [
        f"tba_jax.{unit} (L{LAYER[unit]}) imports tba_jax.{used} (L{LAYER[used]}): imports go strictly down (DESIGN.md)"
        for unit in graph
        for used in sorted(graph[unit])
        if LAYER[used] > LAYER[unit] or (LAYER[used] == LAYER[unit] and LAYER[unit] not in SAME_LAYER_ALLOWED)
    ]


def reach(graph: dict[str, set[str]], unit: str) -> set[str]:
    """All units that `unit` imports, directly or through others."""
    return graph[unit].union(*(reach(graph, used) for used in graph[unit]))


def test_every_module_has_a_layer_and_imports_only_lower_ones():
    graph = import_graph()
    unknown, gone = set(graph) - set(LAYER), set(LAYER) - set(graph)
    assert not unknown, (
        f"tba_jax/ has {sorted(unknown)}, which stand in no layer: decide on one and enter it here and in DESIGN.md"
    )
    assert not gone, f"the layer table names {sorted(gone)}, which tba_jax/ does not have"
    assert not violations(graph), "\n".join(violations(graph))
    list(TopologicalSorter(graph).static_order())  # raises CycleError with the cycle


@pytest.mark.parametrize("unit", NEVER)
def test_roles_do_not_reach_what_they_must_not(unit):
    reached = reach(import_graph(), unit) & NEVER[unit]
    assert not reached, f"tba_jax.{unit} imports {sorted(reached)}, directly or through another module; it never may"


def test_nothing_pickles():
    picklers = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
    for folder in ("tba_jax", "configs", "tests", "benchmarks", "launch", "colab"):
        for path in (ROOT / folder).rglob("*.py"):
            banned = {name.split(".")[0] for name in imported_names(path)} & picklers
            assert not banned, f"{path.relative_to(ROOT)} imports {sorted(banned)}: no pickle in this project"


def test_an_import_that_goes_up_is_told_in_one_sentence(tmp_path):
    (tmp_path / "learner.py").write_text("def f():\n    from tba_jax.replay import log\n    import tba_jax.trainer\n")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "decoder.py").write_text("from tba_jax import mesh\nfrom tba_jax.models import scoring\n")
    assert violations(import_graph(tmp_path)) == [
        "tba_jax.learner (L2) imports tba_jax.replay (L2): imports go strictly down (DESIGN.md)",
        "tba_jax.learner (L2) imports tba_jax.trainer (L3): imports go strictly down (DESIGN.md)",
    ]


def test_what_studies_import_defines_no_flags():
    """Those of benchmarks/ have a --workdir of their own, as main has."""
    code = "import tba_jax.roles, tba_jax.report, tba_jax.interleave; from absl import flags; print('workdir' in flags.FLAGS)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
