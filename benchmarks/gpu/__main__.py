"""What the project does on the accelerator of this machine, by one command that holds its time.

python -m benchmarks.gpu --minutes=9 [--output=runs/gpu] [--only=decode,update,…] [--model=FOLDER] [--data=FILE.jsonl]

Runs the GPU tests first and then the cases of cases.py in the order of their worth, each in a process of its own: one that fails,
hangs or needs more memory than the device has costs nothing but its own row, and the rows say so. What is measured is kept at
once in OUTPUT/rows.jsonl, and OUTPUT/results.md is the section for benchmarks/RESULTS.md. An interrupted suite (Ctrl-C, SIGTERM,
the end of its minutes) writes the table of what it has. The same OUTPUT again goes on: cases that this kind of device has rows of
are not run again, those that failed are.

It needs no network: weights are random, in the shapes of published models, and the run on GSM8K is the recipe's `small` variant,
whose data lie in the repository; --model and --data give that run a real policy and real rows. It needs the packages of
requirements.txt, but for plotly, math-verify and datasets, and pytest. Comparisons with PyTorch need torch with support
for the GPU, and transformers, and are left out without them. A TPU takes the same command. Without an accelerator the suite has a
CPU form: the same cases at tiny sizes, which show that the suite works and say nothing about an accelerator.
"""

import functools
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from benchmarks.gpu import cases, device, suite, table
from tba_jax.roles import gpus

_MINUTES = flags.DEFINE_float("minutes", 9.0, "The suite ends after so long, whatever is left.", lower_bound=0.1)
_OUTPUT = flags.DEFINE_string(
    "output", "runs/gpu", "The folder for rows, logs, table and compiled programs.", allow_override=True
)
_ONLY = flags.DEFINE_list("only", [], "Kinds of cases; default: all.", allow_override=True)
_MODEL = flags.DEFINE_string("model", "", "A Hugging Face folder for the run on GSM8K; default: the recipe's tiny one.")
_DATA = flags.DEFINE_string("data", "", "Rows of GSM8K (JSON lines) for that run; default: the repository's few.")


def main(argv: Sequence[str]) -> None:
    del argv
    for flag, path in (("model", _MODEL.value), ("data", _DATA.value)):
        if path and not Path(path).exists():
            sys.exit(f"error: --{flag}={path} does not exist")
    if unknown := sorted(set(_ONLY.value) - set(cases.KINDS)):
        sys.exit(f"error: --only={unknown[0]} is none of {', '.join(cases.KINDS)}")
    end = time.monotonic() + 60 * _MINUTES.value
    try:
        told = device.take_one()
        found = device.find()
        told += device.warnings(found, gpus.visible())
    except ValueError as error:
        sys.exit(f"error: {error}")
    if found.platform == "cpu":
        print("There is no GPU and no TPU: this is the CPU form, at tiny sizes, whose figures say nothing about an accelerator.")
    for sentence in told:
        print(sentence, flush=True)
    output = Path(_OUTPUT.value)
    output.mkdir(parents=True, exist_ok=True)
    known = cases.of(found, output, model=_MODEL.value, data=_DATA.value)
    wanted = [case for case in known if not _ONLY.value or case.kind in _ONLY.value]
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda received, _: sys.exit(128 + received))
    rows = suite.rows(output, found.kind)
    shown = [case for case in known if case in wanted or case.name in rows]
    write = functools.partial(table.write, found, shown, output, rows, told)
    try:
        write()
        suite.run(wanted, output, rows, until=end, device=found.kind, after_each=write)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    finally:
        print(table.text(found, shown, rows, told))


if __name__ == "__main__":
    app.run(main)
