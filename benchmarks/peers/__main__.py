"""Steps of TRL, of Tunix and of tba_jax on the same work, side by side.

python -m benchmarks.peers --workdir=runs/peers [--data=DATA] [--cases=…] [--systems=…] [--repeats=5] [--reference=with]

The peers get virtual environments below --environments, with pinned versions; a peer that cannot be installed, or fails, has its
reason in the table. All systems begin with the same weights (a small Llama with random ones) and tokenizer, and have the same
prompts, reward, rows and optimiser; each step is a real update on responses of the weights of the step before (tba_async: of a
few steps before). A run is a process of its own, or several for tba_async, on the same cores. Runs are interleaved: each system
once, then each a second time. Steps that compile are not counted. What is done is not made again.

--reference=with: all have a reference policy (a KL term with β > 0 in TRL and Tunix). without: none has.
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
_ENVIRONMENTS = flags.DEFINE_string("environments", "", "Folder of the peers' environments; default: below --workdir.")
_DATA = flags.DEFINE_string(
    "data", "", "Folder that holds gsm8k/train.jsonl and gsm8k/test.jsonl, for the case with real prompts.", allow_override=True
)
_CASES = flags.DEFINE_list("cases", [], f"Among {', '.join(cases.CASES)}; default: all.", allow_override=True)
_SYSTEMS = flags.DEFINE_list("systems", [], f"Among {', '.join(cases.SYSTEMS)}; default: all.")
_REFERENCE = flags.DEFINE_enum("reference", "with", ["with", "without", "both"], "Steps with a reference policy or without.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Runs of each system on each case.", lower_bound=1, allow_override=True)
# There are 256 prompts, and Tunix takes each once.
_STEPS = flags.DEFINE_integer("steps", 6, "Timed steps of a run.", lower_bound=2, upper_bound=60, allow_override=True)
_CORES = flags.DEFINE_integer(
    "cores", 0, "Of this process' cores, how many a system gets: the first ones; 0: all.", lower_bound=0, allow_override=True
)


def measure(bench: jobs.Bench, groups: Sequence[table.Group], systems: Sequence[str], *, repeats: int) -> table.Found:
    """Group -> system -> the records of its runs, or the sentence that says why there are none."""
    nowhere: dict[str, str] = {}  # system -> why it runs on no case
    found: table.Found = {}
    for group in groups:
        found[group] = {}
        if cases.CASES[group.case].gsm8k and bench.gsm8k is None:
            found[group] = dict.fromkeys(
                systems, "the case needs --data, a folder that holds gsm8k/train.jsonl and gsm8k/test.jsonl"
            )
        for repeat, system in itertools.product(range(repeats), systems):
            if system in nowhere:
                found[group].setdefault(system, nowhere[system])
            if isinstance(found[group].get(system), str):
                continue
            job = jobs.Job(bench=bench, system=system, case=group.case, reference=group.reference, repeat=repeat)
            begin = time.monotonic()
            try:
                found[group].setdefault(system, []).append(jobs.run(job))
            except jobs.Failed as error:
                found[group][system] = str(error)
                nowhere |= {system: str(error)} if error.everywhere else {}
            print(f"{job.name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return found


def asked(root: Path) -> tuple[jobs.Bench, list[table.Group], list[str]]:
    """What the flags ask for. Raises ValueError: they name what there is not."""
    names = cases.checked(_CASES.value, cases.CASES, "cases")
    systems = cases.checked(_SYSTEMS.value, cases.SYSTEMS, "systems")
    cores = sorted(os.sched_getaffinity(0))
    if _CORES.value > len(cores):
        raise ValueError(f"--cores={_CORES.value} is more than the {len(cores)} cores that this process may use")
    gsm8k = Path(_DATA.value).absolute() / "gsm8k" if _DATA.value else None
    if gsm8k is not None and not (gsm8k / "train.jsonl").is_file():
        raise ValueError(f"--data={_DATA.value} holds no gsm8k/train.jsonl")
    bench = jobs.Bench(
        root=root,
        environments=Path(_ENVIRONMENTS.value).absolute() if _ENVIRONMENTS.value else root / "environments",
        gsm8k=gsm8k,
        steps=_STEPS.value,
        cores=tuple(cores[: _CORES.value or None]),
    )
    references = {"with": [True], "without": [False], "both": [True, False]}[_REFERENCE.value]
    return bench, [table.Group(name, reference) for reference in references for name in names], systems


def main(argv: Sequence[str]) -> None:
    del argv
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the run under way ends as well
    root = Path(_WORKDIR.value).absolute()
    begin = time.monotonic()
    try:
        bench, groups, systems = asked(root)
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"error: --workdir={_WORKDIR.value} cannot be a folder for results: {error}")
    except ValueError as error:
        sys.exit(f"error: {error}")
    found = measure(bench, groups, systems, repeats=_REPEATS.value)
    lines = table.lines(found)
    print("\n".join(lines))
    print(f"\nthis call took {time.monotonic() - begin:.0f} s; load average of the last minute {os.getloadavg()[0]:.1f}")
    (root / "peers.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    app.run(main)
