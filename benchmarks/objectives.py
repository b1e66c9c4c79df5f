"""Which optimum objectives reach, on a space small enough to add up.

    python -m benchmarks.objectives --workdir=runs/objectives [--only=posterior,baselines,…] [--steps=N]

posterior: the distance to the exact optimum, by who produced the rows; baselines: by objective; offline: on a fixed log;
siblings: those of trajectory balance, to optima of their own. Prints markdown tables; figures go to the workdir.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from absl import app, flags, logging

from benchmarks import posterior, siblings

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the runs.", required=True)
_ONLY = flags.DEFINE_list("only", [], "Parts, of posterior, baselines, offline and siblings; all of them by default.")
_STEPS = flags.DEFINE_integer("steps", 0, "Updates of each run; 0: 4000, of baselines 2000.", lower_bound=0)

PARTS: dict[str, Callable[..., None]] = {
    "posterior": posterior.compare,
    "baselines": posterior.compare_objectives,
    "offline": posterior.compare_offline,
    "siblings": siblings.compare,
}


def main(argv: Sequence[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    if unknown := sorted(set(_ONLY.value) - PARTS.keys()):
        raise app.UsageError(f"--only={','.join(unknown)} is not among {', '.join(PARTS)}")
    steps = {"steps": _STEPS.value} if _STEPS.value else {}
    root = Path(_WORKDIR.value).absolute()
    for name, part in PARTS.items():
        if not _ONLY.value or name in _ONLY.value:
            print(f"\n{name}\n", flush=True)
            part(root, **steps)


if __name__ == "__main__":
    app.run(main)
