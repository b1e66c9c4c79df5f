"""The commands: python -m tba_jax COMMAND …; without a command, their list."""

import ast
import difflib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

# A command that is another one with a flag -> that one, the flag, and what it does.
SHORT = {"view": ("report", "--serve", "Serves the report of a run on this machine, and makes it again as the run goes on.")}


def commands() -> dict[str, str]:
    """Every module of tba_jax/commands that is a command, and those of SHORT -> what it does, in a line. Imports none."""
    found = {name: told for name, (*_, told) in SHORT.items()}
    for path in sorted((Path(__file__).parent / "commands").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if {"add_flags", "run"} <= functions:
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return dict(sorted(found.items()))


def main(arguments: Sequence[str]) -> int:
    there = commands()
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print("usage: python -m tba_jax COMMAND …    (COMMAND --help tells its arguments)\n")
        print("\n".join(f"  {name:10}  {line}" for name, line in there.items()))
        print(
            "\nA run itself: python -m tba_jax.main --config=configs/X.py --workdir=DIR (--help lists the recipes and settings)"
        )
        return 0
    name, *rest = arguments
    if name not in there:
        near = difflib.get_close_matches(name, there, n=1)
        told = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(there)}"
        print(f"error: there is no command {name!r}; {told}", file=sys.stderr)
        return 2
    if name in SHORT:
        name, flag, _ = SHORT[name]
        rest = [flag, *rest]
    from tba_jax.commands import command_line

    return command_line.execute(importlib.import_module(f"tba_jax.commands.{name}"), rest)


if __name__ == "__main__":
    from tba_jax.run import processes

    processes.hold()
    with processes.to_the_end():
        sys.exit(main(sys.argv[1:]))
