"""What a program of a role takes in a process of its own, by the system and by the compiler; prints both as one line of JSON.

python -m tests.support.measured_memory PROGRAM FOLDER
"""

import ctypes
import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tba_jax.decoding import sampling
from tba_jax.decoding.requests import Request
from tba_jax.experiment import dry_run, initial_policy, jobs, joining, training
from tba_jax.programs import Measure
from tba_jax.roles.sampler import ReferencePolicy, Scoring, policy_mesh
from tba_jax.telemetry.record import TimeAccount
from tests.support import tiny_run, tiny_searcher

# Large enough that programs take far more than everything else in the process. Rows are short: matrix products of a CPU pack
# operands of attention, whose size grows with the square of a row, into memory of their own that the compiler does not count.
P, R, ROWS, SAMPLES = 64, 64, 128, 4
SETTINGS = dict(
    task__prompt_length=P,
    task__response_length=R,
    task__min_response_length=R,  # the caches are used as far as they go
    task__arithmetic__train_queries=64,
    model__layers=6,
    model__width=256,
    model__heads=4,
    model__kv_heads=4,
    model__head_size=64,
    model__ffn=1024,
    learner__queries=ROWS // SAMPLES,
    learner__completions=SAMPLES,
    learner__mesh__fsdp=1,
    learner__micro_batch_tokens=0,
    learner__logprob_gap_every_steps=0,
    searchers__queries_per_batch=ROWS // SAMPLES,
    searchers__samples_per_query=SAMPLES,
    searchers__score_tokens=ROWS * (P + R),
)


def _status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


def _rise(run: Callable[[], Any]) -> int:
    """Bytes by which the process grows while `run` runs."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
    run()
    return _status("VmHWM") - before


def _rows(s: joining.Invocation) -> dict[str, np.ndarray]:
    """Whole rows of one token, as the replay buffer gives them."""
    columns = s.experiment.contract.row_shape().columns()
    rows = {name: np.zeros((ROWS, *shape), dtype) for name, (dtype, shape) in columns.items()}
    return rows | {
        "tokens": np.full_like(rows["tokens"], 3),
        "prompt_length": np.full_like(rows["prompt_length"], P),
        "response_length": np.full_like(rows["response_length"], R),
    }


def _update(s: joining.Invocation) -> tuple[Callable[[], Any], Any]:
    trainer, _ = training.make_trainer(s, publish_every_steps=1)
    return lambda: jax.block_until_ready(trainer.program.dispatch(trainer.program.place(_rows(s)))), trainer


def _scoring(s: joining.Invocation) -> tuple[Callable[[], Any], Any]:
    e, c = s.experiment, s.config
    limits = dict(logit_megabytes=c.searchers.logit_megabytes, score_tokens=c.searchers.score_tokens)
    how = Scoring(contract=e.contract, policy=e.policy, mesh=policy_mesh(c, "searchers"), **limits)
    reference = ReferencePolicy(how, s.run)
    return lambda: reference.logprobs(_rows(s)), reference


def _decode(s: joining.Invocation) -> tuple[Callable[[], Any], Any]:
    searcher = jobs.make_searcher(s, name="searcher", account=TimeAccount())
    searcher.refresh()
    prompt, keys = [3] * (len(s.experiment.queries["train"][0].prompt)), np.zeros((SAMPLES, 2), np.uint32)
    drawn = sampling.constant(SAMPLES, temperature=1.0)
    requests = [Request(name=str(i), prompt=prompt, keys=keys, sampling=drawn) for i in range(ROWS // SAMPLES)]
    return lambda: searcher._engine.generate(requests), searcher


# Name -> role, program of the dry run, what runs it, and what lies beside it here.
PROGRAMS: dict[str, tuple[str, str, Callable[..., Any], tuple[str, ...]]] = {
    "update": ("trainer", "update", _update, ()),
    "scoring": ("searcher", "scoring by the reference", _scoring, ()),
    "decode": ("searcher", "decode", _decode, ("reference",)),
}


def measure(name: str, folder: Path) -> dict[str, int]:
    """Bytes by the compiler, and then by JAX and by the system: resting and live, of arrays between calls; more and rise, what a
    call takes beyond them."""
    role, program, make, beside = PROGRAMS[name]
    s = tiny_run.settings(folder, tiny_run.config(**SETTINGS))
    fit = Measure().fit(program, dry_run.programs(s.experiment, s.run, role=role)[program])
    jobs.join(s, may_change_schedule=True)
    initial_policy.ensure(s.experiment, s.run, report=lambda *_: None)
    if role == "searcher":
        s.run.policies.mkdir(exist_ok=True)
        tiny_searcher.publish(s, 0)
    run, kept = make(s)
    for _ in range(2):
        run()  # compiles, and makes what stays
    gc.collect()
    live = sum(x.nbytes for x in jax.live_arrays())
    rise = _rise(run)
    del kept
    resting = fit.arguments + sum(fit.beside[part] for part in beside)
    return dict(resting=resting, live=live, more=fit.temporaries + fit.outputs - fit.aliased, rise=rise)


if __name__ == "__main__":
    # Each thread packs for itself.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]))))
