"""One run of one system on one case, in processes of its own."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import cases, checkpoint, prompts, tba_run

WARM_UP_STEPS = 2
_REPOSITORY = Path(__file__).resolve().parents[2]


# System -> what pip installs. Where pip's index offers several builds of torch, PIP_EXTRA_INDEX_URL can name that of CPUs.
REQUIREMENTS = {"trl": ("trl==1.16.0", "torch==2.13.0", "transformers==5.23.0"), "tunix": ("google-tunix==0.1.7",)}


class Failed(Exception):
    """A run failed; the message says why in one sentence. everywhere: other cases of the system would fail alike."""

    def __init__(self, sentence: str, *, everywhere: bool = False):
        super().__init__(sentence)
        self.everywhere = everywhere


def python_of(system: str, root: Path) -> Path:
    """The Python of a peer's environment, which is made unless it is there.

    Raises Failed: venv or pip failed, with its last line. What was made is removed, so that the next call tries again.
    """
    folder, log, requirements = root / system, root / f"{system}.log", REQUIREMENTS[system]
    made, interpreter, wanted = folder / "requirements.txt", folder / "bin" / "python", "\n".join(requirements)
    if made.exists() and made.read_text() == wanted:  # written last
        return interpreter
    shutil.rmtree(folder, ignore_errors=True)
    root.mkdir(parents=True, exist_ok=True)
    print(f"installs {' '.join(requirements)} into {folder}", file=sys.stderr, flush=True)
    # Other code than the environment's own could otherwise be imported.
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    for command in ([sys.executable, "-m", "venv", str(folder)], [str(interpreter), "-m", "pip", "install", *requirements]):
        with open(log, "w") as output:
            ended = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=clean, check=False)
        if ended.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            raise Failed(f"{' '.join(requirements)} cannot be installed: {reason(log)}", everywhere=True)
    made.write_text(wanted)
    return interpreter


def reason(log: Path) -> str:
    """The last line of a log that says something, without pip's word ERROR; of a traceback that is the error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    said = [line for line in lines if line and not line.startswith(("WARNING", "[notice]", "hint:"))]
    return said[-1].removeprefix("ERROR: ") if said else "it said nothing"


@dataclasses.dataclass(frozen=True)
class Bench:
    """What all runs share. root: the folder of inputs, runs and environments. gsm8k: that of GSM8K's files, or None. steps: timed
    ones of a run."""

    root: Path
    gsm8k: Path | None
    steps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One run. case: a name of CASES."""

    bench: Bench
    system: str
    case: str
    repeat: int

    @property
    def name(self) -> str:
        return f"{self.case}/{self.system}-{self.repeat}"

    @property
    def result(self) -> Path:
        """Runs with other steps or cores have other folders."""
        folder = f"{len(os.sched_getaffinity(0))}_cores_{self.bench.steps}_steps"
        return self.bench.root / "runs" / folder / f"{self.name}.json"


def inputs(bench: Bench, name: str) -> Path:
    """The folder with a case's checkpoint, tokenizer and prompts.json, which is made unless it is there."""
    case, folder = cases.CASES[name], bench.root / "inputs" / name
    if not (folder / "prompts.json").exists():
        texts = prompts.corpus(bench.gsm8k if case.gsm8k else None)
        tokenizer = prompts.train(texts, case.vocab)
        prompts.write(folder, tokenizer)
        checkpoint.write(folder, vocab=case.vocab, ends=case.ends)
        (folder / "prompts.json").write_text(json.dumps(prompts.of_case(case, tokenizer, texts)))  # last
    return folder


def spec(job: Job, folder: Path) -> dict[str, Any]:
    """What a peer's script is told."""
    case = cases.CASES[job.case]
    sizes = ("vocab", "queries", "samples", "prompt_length", "response_length", "reward_seconds")
    return {field: getattr(case, field) for field in sizes} | {
        "checkpoint": str(folder),
        "prompts": json.loads((folder / "prompts.json").read_text()),
        "eos": checkpoint.EOS,
        "steps": WARM_UP_STEPS + job.bench.steps,
        "learning_rate": cases.LEARNING_RATE,
        "adam_betas": cases.ADAM_BETAS,
        "adam_epsilon": cases.ADAM_EPSILON,
        "clip_norm": cases.CLIP_NORM,
        "beta": cases.BETA,
        "seed": job.repeat,
    }


def run(job: Job) -> dict[str, Any]:
    """The record of a run: what is done is read, the rest is made. See `timed` for its fields.

    Raises:
      Failed: the system cannot be installed, or the run ended with an error.
    """
    if job.result.exists():
        return json.loads(job.result.read_text())
    folder = inputs(job.bench, job.case)
    job.result.parent.mkdir(parents=True, exist_ok=True)
    record = _peer(job, folder) if job.system in REQUIREMENTS else _tba(job, folder)
    draft = job.result.with_suffix(".draft")
    draft.write_text(json.dumps(record, indent=1))
    draft.rename(job.result)  # whole or not at all: what is there is not made again
    return record


def timed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record of the steps after the warm-up: lists with one value a step become lists of the last ones."""
    parts = {part: seconds[WARM_UP_STEPS:] for part, seconds in record["parts"].items()}
    return {**record, "parts": parts, **{name: record[name][WARM_UP_STEPS:] for name in ("seconds", "tokens")}}


def _call(job: Job, command: Sequence[str]) -> None:
    """Raises Failed with the last line of the command's output."""
    # Of all systems: as many threads as cores, and memory as tba_jax's supervisor gives it to its roles.
    environment = os.environ | {
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(job.bench.root / "compilation_cache" / job.system),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(_REPOSITORY),
    }
    log = job.result.with_suffix(".log")
    with open(log, "w") as output:
        ended = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=_REPOSITORY, check=False)
    if ended.returncode:
        raise Failed(f"{reason(log)} (see {log.relative_to(job.bench.root)})")


def _peer(job: Job, folder: Path) -> dict[str, Any]:
    python = python_of(job.system, job.bench.root / "environments")
    told, result = (job.result.with_suffix(f".{suffix}") for suffix in ("spec", "new"))
    told.write_text(json.dumps(spec(job, folder)))
    _call(job, [str(python), "-m", f"benchmarks.peers.run_{job.system}", str(told), str(result)])
    record = json.loads(result.read_text())
    # Rows that are generated are those of the updates.
    after = record["seconds"][WARM_UP_STEPS:]
    record["rows_per_second"] = cases.CASES[job.case].rows * len(after) / sum(after)
    return record


def _tba(job: Job, folder: Path) -> dict[str, Any]:
    workdir, case, interleaved = job.result.with_suffix(""), cases.CASES[job.case], job.system == "tba_interleaved"
    shutil.rmtree(workdir, ignore_errors=True)
    steps = WARM_UP_STEPS + job.bench.steps
    settings = tba_run.settings(case, folder, interleaved=interleaved, steps=steps, seed=job.repeat)
    flags = [f"--config.{leaf}={value}" for leaf, value in settings.items()]
    _call(job, [sys.executable, "-m", "tba_jax.main", f"--config={tba_run.RECIPE}", f"--workdir={workdir}", *flags])
    record = tba_run.record(workdir, case, interleaved=interleaved, skip=WARM_UP_STEPS)
    shutil.rmtree(workdir, ignore_errors=True)
    return record
