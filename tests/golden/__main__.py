"""What the package promises in names, counts, exits and sentences, as files; and its floats, compared between two checkouts.

    make golden                                  # compares with tests/golden/*.json, and fails by the lines that differ
    make golden ARGS=--write                     # writes them anew; a commit that does says what changed and why
    make golden ARGS=--other=../before           # compares every float of a tiny run with that of another checkout

The tiny run takes search and training in turns on CPU, from fixed seeds; what is random in names is fixed by replacing uuid4 in
its processes. Of its outputs the files here hold no float, because those differ between machines.
"""

import argparse
import concurrent.futures
import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tba_jax.__main__ import commands
from tests.support import tiny_run

FOLDER = Path(__file__).parent
SITE = """
import threading, uuid
drawn = uuid.uuid4  # by threads, whose temporary files are beside each other
uuid.uuid4 = lambda: uuid.UUID(int=7) if threading.current_thread() is threading.main_thread() else drawn()
"""
RUN = {
    **tiny_run.SETTINGS,
    "schedule.mode": "interleaved",
    "task.missing_eos_reward": -1.0,
    "evaluation.every_steps": 6,
}
# Settings that are wrong together, each group one refusal.
TOGETHER = (
    "learner.objective=a_star_po replay.merge_duplicates=false",
    "learner.objective=grpo learner.completions=1",
    "learner.reference.kind=ema lora.rank=2",
    "learner.reference.kind=reset learner.reference.reset_steps=0",
    "searchers.lag=3 publish.every_steps=2",
    "searchers.lag=40 publish.keep=5",
    "searchers.lag=2 schedule.mode=interleaved",
    "searchers.count=0",
    "publish.keep=1 schedule.mode=interleaved schedule.lag=4",
    "replay.max_staleness=1 publish.every_steps=10",
    "replay.capacity=10 learner.queries=8",
    "learner.mesh.fsdp=3",
    "learner.mesh.fsdp=1024",
    "model.heads=3 model.kv_heads=2",
    "task.name=nothing.py:Task",
    "sampling.top_p=0.9",
    "sampling.top_k=5 sampling.explore_temperature_probability=0.5",
    "learner.schedule=wsd learner.decay=0.5 learner.warmup_steps=1000",
    "task.prompt_length=2",
    "metrics.sinks=('nobody',)",
)
# Commands that must fail: arguments -> what stands before them is python -m tba_jax.
FAILING = (
    *(f"{name} --workdir=/nowhere" for name in ("audit", "evaluate", "report", "show", "view")),
    "export --workdir=/nowhere --output=out",
    "export --output=out",
    "append --workdir=/nowhere",
    "evaluat",
    "audit --workdir=/nowhere --unknown=1",
    "supervised --config=configs/supervised.py --workdir=out --config.batch_size=0",
    "main",
)


def call(checkout: Path, folder: Path, *arguments: str, module: str = "tba_jax") -> subprocess.CompletedProcess[str]:
    """python -m MODULE of that checkout, whose random names are not random."""
    environment = tiny_run.environment() | {"PYTHONPATH": f"{folder}:{checkout}", "COLUMNS": "200", "XLA_FLAGS": ""}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )


def settings() -> dict[str, str]:
    """Setting -> its default and its limits."""
    from tba_jax.experiment import schema
    from tba_jax.schemas import flatten
    from tba_jax.supervised import schema as supervised

    found = {}
    for prefix, each in (("", schema.SCHEMA), ("supervised: ", supervised.SCHEMA)):
        defaults = flatten(each.defaults().to_dict())
        for name, rule in each.rules.items():
            found[prefix + name] = f"{defaults[name]!r} {rule.limits()}".strip()
    return found


def refusals() -> dict[str, str]:
    """Settings -> the sentence that refuses them: every setting with a limit beyond it, and settings that are wrong together."""
    from tba_jax.commands import recipes
    from tba_jax.experiment import composition, schema

    beyond = {}
    for name, rule in schema.SCHEMA.rules.items():
        low, high = (rule.at_least if rule.above is None else rule.above), rule.at_most if rule.below is None else rule.below
        if rule.one_of or rule.registry:
            beyond[f"{name}=nothing"] = ""
        elif low is not None or high is not None:
            beyond[f"{name}={low - 1 - rule.or_zero if low is not None else high + 1}"] = ""
    found = {}
    for asked in (*beyond, *TOGETHER):
        flags = [f"--config.{each}" for each in asked.split()]
        try:
            composition.build(recipes.load("configs/base.py", flags, program=recipes.BASE), new=True)
            found[asked] = "is taken"
        except ValueError as error:
            found[asked] = str(error)
    return found


def outputs(checkout: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Of the tiny run: {"counts": what no float is in, "floats": digests and texts}."""
    run = folder / "run"
    flags = [f"--config.{name}={value}" for name, value in RUN.items()]
    made = call(checkout, folder, "--config=configs/base.py", f"--workdir={run}", *flags, module="tba_jax.main")
    if made.returncode:
        raise SystemExit(f"the tiny run of {checkout} ended with {made.returncode}:\n{made.stderr[-2000:]}")
    counts: dict[str, Any] = {}
    floats: dict[str, Any] = {}
    lines = [json.loads(line) for path in sorted(run.glob("journal/*.jsonl")) for line in path.read_text().splitlines()]
    floats["batches"] = [line["batch"] for line in lines]
    counts["steps"] = [line["step"] for line in lines]
    for name, arguments in {
        "audit": ("audit",),
        "show": ("show", "--count=4", "--order=best"),
        "evaluate": ("evaluate", "--step=last", f"--output={folder / 'evaluation.json'}"),
        "export": ("export", "--step=last", f"--output={folder / 'exported'}"),
        "export of step 1": ("export", "--step=1", f"--output={folder / 'exported1'}"),
    }.items():
        done = call(checkout, folder, *arguments, f"--workdir={run}")
        counts[f"{name}: exit"] = done.returncode
        floats[name] = done.stdout.replace(str(folder), "")
    counts["audit"] = re.sub(r" +", " ", floats.pop("audit")).splitlines()
    evaluation = json.loads((folder / "evaluation.json").read_text())
    timed = [name for name in evaluation if "seconds" in name or name in ("time", "date")]
    floats["evaluation"] = {name: value for name, value in evaluation.items() if name not in timed}
    counts["evaluation"] = sorted(evaluation)
    for exported in ("exported", "exported1"):
        counts[exported] = sorted(path.name for path in (folder / exported).iterdir())
        floats[exported] = hashlib.sha256((folder / exported / "model.safetensors").read_bytes()).hexdigest()
    for role in ("trainer", "searcher-0", "evaluator"):
        text = (run / "metrics" / role / "metrics.jsonl").read_text()
        counts[f"metrics of {role}"] = sorted({name for line in text.splitlines() for name in json.loads(line)})
    return {"counts": counts, "floats": floats}


def said(folder: Path) -> dict[str, dict[str, Any]]:
    """{"help": of every command, "exits": of commands that must fail, with what they say}."""
    here = tiny_run.ROOT
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        helps = {name: threads.submit(call, here, folder, name, "--help") for name in commands()}
        helps["main"] = threads.submit(call, here, folder, "--help", module="tba_jax.main")
        exits = {each: threads.submit(call, here, folder, *each.split()) for each in FAILING}
        return {
            "help": {name: made.result().stdout.splitlines() for name, made in helps.items()},
            "exits": {
                each: [made.result().returncode, *made.result().stderr.replace(str(folder), "").splitlines()[-2:]]
                for each, made in exits.items()
            },
        }


def written(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False).replace(str(tiny_run.ROOT), "") + "\n"


def differ(name: str, before: object, after: object) -> bool:
    """Prints the lines that differ. Returns whether any does."""
    lines = [*difflib.unified_diff(written(before).splitlines(), written(after).splitlines(), name, name, lineterm="", n=1)]
    print("\n".join(lines)) if lines else None
    return bool(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the files of tests/golden anew")
    parser.add_argument("--other", type=Path, help="folder of another checkout, whose floats must be the same")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as made:
        folders = [Path(made, name) for name in ("here", "there")]
        for folder in folders:
            folder.mkdir()
            (folder / "sitecustomize.py").write_text(SITE)
        found = outputs(tiny_run.ROOT, folders[0])
        if given.other:
            there = outputs(given.other.absolute(), folders[1])
            return int(differ("floats", there["floats"], found["floats"]))
        facts = {"settings": settings(), "refusals": refusals(), "run": found["counts"], **said(folders[0])}
    if given.write:
        for name, fact in facts.items():
            (FOLDER / f"{name}.json").write_text(written(fact))
        return 0
    before = {name: json.loads((FOLDER / f"{name}.json").read_text()) for name in facts}
    return int(sum(differ(name, before[name], fact) for name, fact in facts.items()) > 0)


if __name__ == "__main__":
    os.chdir(tiny_run.ROOT)
    sys.exit(main(sys.argv[1:]))
