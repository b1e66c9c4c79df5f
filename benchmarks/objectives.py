"""What objectives and references do: the optimum that is reached, TBA′ at work, rewards with noise.

    python -m benchmarks.objectives --workdir=runs/objectives [--only=posterior,baselines,…] [--steps=N]

posterior: the distance to the exact optimum, by who produced the rows; baselines: likewise, by objective; siblings: those of
trajectory balance, to optima of their own. The others train the demo's policy on sums, all from one warm start. references: TBA′
with each kind of reference, asynchronous. noise: accuracy where rewards are flipped or rows are planted.
Prints markdown tables; output of the runs themselves goes to stderr and into the workdir.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from absl import app, flags, logging

from benchmarks import noise, posterior, references, siblings

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the runs.", required=True)
_ONLY = flags.DEFINE_list("only", [], "Parts, of posterior, baselines, siblings, references and noise; all of them by default.")
_STEPS = flags.DEFINE_integer(
    "steps",
    0,
    "Trainer steps of each run; 0: posterior and siblings 4000, baselines 2000, references 300, noise 200.",
    lower_bound=0,
)


PARTS: dict[str, Callable[..., None]] = {
    "posterior": posterior.compare,
    "baselines": posterior.compare_objectives,
    "siblings": siblings.compare,
    "references": references.compare,
    "noise": noise.compare,
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
