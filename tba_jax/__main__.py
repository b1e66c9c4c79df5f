"""The commands on runs: python -m tba_jax COMMAND …; without one, their list."""

import difflib
import importlib
import sys
from collections.abc import Sequence

# Each is a module of tba_jax/commands/, imported when it is asked for: its main(arguments) runs it.
COMMANDS = {
    "append": "add responses that a file holds to a run's replay log",
    "audit": "which rows trained a step; generate a row again and compare",
    "evaluate": "evaluate a snapshot on the held-out queries",
    "export": "write a snapshot as a Hugging Face folder",
    "rescore": "give a run's rows the rewards of another reward version",
    "show": "print rows of a run's replay log as text",
    "supervised": "train by supervised fine-tuning, or a reward model on preferences",
}


def main(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print("usage: python -m tba_jax COMMAND …    (COMMAND --help tells its arguments)\n")
        print("\n".join(f"  {name:10}  {line}" for name, line in COMMANDS.items()))
        print("\nA run itself: python -m tba_jax.main --config=configs/X.py --workdir=DIR")
        return
    name, *rest = arguments
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(COMMANDS)}"
        print(f"error: there is no command {name!r}; {hint}", file=sys.stderr)
        sys.exit(2)
    importlib.import_module(f"tba_jax.commands.{name}").main(rest)


if __name__ == "__main__":
    main(sys.argv[1:])
