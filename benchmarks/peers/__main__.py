"""Steps of TRL, of Tunix and of tba_jax on the same work, side by side.

python -m benchmarks.peers --workdir=runs/peers [--data=DATA] [--cases=…] [--systems=…] [--repeats=5] [--steps=6]

The peers get virtual environments in WORKDIR/environments, with pinned versions; a peer that cannot be installed, or fails, has
its reason in the table. All systems begin with the same weights (a small Llama with random ones) and tokenizer, and have the same
prompts, reward, rows, optimiser and a reference policy (a KL term with β > 0 in TRL and Tunix); each step is a real update on
responses of the weights of the step before (tba_async: of a few steps before). A run is a process of its own, or several for
tba_async, on this process' cores (`taskset` leaves it fewer). Runs are interleaved: each system once, then each a second time.
Steps that compile are not counted. What is done is not made again. The tables are also in WORKDIR/peers.md.
"""

import itertools
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from benchmarks.peers import cases, jobs, table

# Other benchmarks that a process of the tests imports have flags of the same names.
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for inputs, runs and results.", required=True, allow_override=True)
_DATA = flags.DEFINE_string("data", "", "Folder that holds gsm8k/train.jsonl and gsm8k/test.jsonl.", allow_override=True)
_CASES = flags.DEFINE_list("cases", [], f"Among {', '.join(cases.CASES)}; default: all.", allow_override=True)
_SYSTEMS = flags.DEFINE_list("systems", [], f"Among {', '.join(cases.SYSTEMS)}; default: all.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Runs of each system on each case.", lower_bound=1, allow_override=True)
# There are 256 prompts, and Tunix takes each once.
_STEPS = flags.DEFINE_integer("steps", 6, "Timed steps of a run.", lower_bound=2, upper_bound=60, allow_override=True)


def measure(bench: jobs.Bench, names: Sequence[str], systems: Sequence[str], *, repeats: int) -> table.Found:
    """Case -> system -> the records of its runs, or the sentence that says why there are none."""
    nowhere: dict[str, str] = {}  # system -> why it runs on no case
    found: table.Found = {}
    for name in names:
        found[name] = {}
        if cases.CASES[name].gsm8k and bench.gsm8k is None:
            found[name] = dict.fromkeys(
                systems, "the case needs --data, a folder that holds gsm8k/train.jsonl and gsm8k/test.jsonl"
            )
        for repeat, system in itertools.product(range(repeats), systems):
            if system in nowhere:
                found[name].setdefault(system, nowhere[system])
            if isinstance(found[name].get(system), str):
                continue
            job, begin = jobs.Job(bench=bench, system=system, case=name, repeat=repeat), time.monotonic()
            try:
                found[name].setdefault(system, []).append(jobs.run(job))
            except jobs.Failed as error:
                found[name][system] = str(error)
                nowhere |= {system: str(error)} if error.everywhere else {}
            print(f"{job.name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return found


def main(argv: Sequence[str]) -> None:
    del argv
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the run under way ends as well
    root, begin = Path(_WORKDIR.value).absolute(), time.monotonic()
    gsm8k = Path(_DATA.value).absolute() / "gsm8k" if _DATA.value else None
    try:
        names = cases.checked(_CASES.value, cases.CASES, "cases")
        systems = cases.checked(_SYSTEMS.value, cases.SYSTEMS, "systems")
        if gsm8k is not None and not (gsm8k / "train.jsonl").is_file():
            raise ValueError(f"--data={_DATA.value} holds no gsm8k/train.jsonl")
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"error: --workdir={_WORKDIR.value} cannot be a folder for results: {error}")
    except ValueError as error:
        sys.exit(f"error: {error}")
    lines = table.lines(measure(jobs.Bench(root, gsm8k, _STEPS.value), names, systems, repeats=_REPEATS.value))
    print("\n".join(lines))
    print(f"\nthis call took {time.monotonic() - begin:.0f} s; load average of the last minute {os.getloadavg()[0]:.1f}")
    (root / "peers.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    app.run(main)
