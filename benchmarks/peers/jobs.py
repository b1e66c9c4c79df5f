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

from benchmarks import side_by_side
from benchmarks.peers import cases, checkpoint, environments, prompts, tba_run

WARM_UP_STEPS = 2
_REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENTS = {"trl": environments.TRL, "tunix": environments.TUNIX}


class Failed(Exception):
    """A run failed; the message says why in one sentence. everywhere: other cases of the system would fail alike."""

    def __init__(self, sentence: str, *, everywhere: bool = False):
        super().__init__(sentence)
        self.everywhere = everywhere


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """What all runs share.

    root: the folder of inputs and runs. environments: that of the peers' environments. gsm8k: that of GSM8K's files, if it is
    there. steps: timed ones of a run. cores: the numbers of those that all processes of a system share.
    """

    root: Path
    environments: Path
    gsm8k: Path | None
    steps: int
    cores: tuple[int, ...]

    @property
    def runs(self) -> Path:
        """The folder of runs with these steps and cores: others have their own."""
        return self.root / "runs" / f"{len(self.cores)}_cores_{self.steps}_steps"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One run. case: a name of CASES. reference: whether its steps have a reference policy."""

    bench: Bench
    system: str
    case: str
    reference: bool
    repeat: int

    @property
    def name(self) -> str:
        return f"{self.case}/{'with' if self.reference else 'without'}/{self.system}-{self.repeat}"

    @property
    def result(self) -> Path:
        return self.bench.runs / f"{self.name}.json"


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
    sizes = {
        field: getattr(case, field) for field in ("queries", "samples", "prompt_length", "response_length", "reward_seconds")
    }
    return sizes | {
        "vocab": case.vocab,
        "checkpoint": str(folder),
        "prompts": json.loads((folder / "prompts.json").read_text()),
        "eos": checkpoint.EOS,
        "steps": WARM_UP_STEPS + job.bench.steps,
        "learning_rate": cases.LEARNING_RATE,
        "adam_betas": cases.ADAM_BETAS,
        "adam_epsilon": cases.ADAM_EPSILON,
        "clip_norm": cases.CLIP_NORM,
        "beta": cases.BETA if job.reference else 0.0,
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
    record = _peer(job, folder) if job.system in ENVIRONMENTS else _tba(job, folder)
    draft = job.result.with_suffix(".draft")
    draft.write_text(json.dumps(record, indent=1))
    draft.rename(job.result)  # whole or not at all: what is there is not made again
    return record


def timed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record of the steps after the warm-up: lists with one value a step become lists of the last ones."""

    def last(values: Any) -> Any:
        return values[WARM_UP_STEPS:]

    parts = {part: last(seconds) for part, seconds in record["parts"].items()}
    return {**record, "seconds": last(record["seconds"]), "parts": parts, "tokens": last(record["tokens"])}


def _environment(job: Job) -> dict[str, str]:
    """Of all systems: as many threads as cores, and memory as tba_jax's supervisor gives it to its roles."""
    return os.environ | {
        "OMP_NUM_THREADS": str(len(job.bench.cores)),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(job.bench.root / "compilation_cache" / job.system),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(_REPOSITORY),
    }


def _call(job: Job, command: Sequence[str]) -> None:
    """Raises Failed with the last line of the command's output."""
    log = Path(f"{job.result.with_suffix('')}.log")
    with open(log, "w") as output:
        ended = subprocess.run(
            [*side_by_side.on_cores(job.bench.cores), *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(job),
            cwd=_REPOSITORY,
            check=False,
        )
    if ended.returncode:
        raise Failed(f"{environments.reason(log)} (see {log.relative_to(job.bench.root)})")


def _peer(job: Job, folder: Path) -> dict[str, Any]:
    try:
        python = environments.python(ENVIRONMENTS[job.system], job.bench.environments)
    except environments.NotInstalled as error:
        raise Failed(str(error), everywhere=True) from error
    told, result = (job.result.with_suffix(f".{suffix}") for suffix in ("spec", "new"))
    told.write_text(json.dumps(spec(job, folder)))
    _call(job, [str(python), "-m", f"benchmarks.peers.run_{job.system}", str(told), str(result)])
    record = json.loads(result.read_text())
    # Rows that are generated are those of the updates.
    after = record["seconds"][WARM_UP_STEPS:]
    record["rows_per_second"] = cases.CASES[job.case].rows * len(after) / sum(after)
    return record


def _tba(job: Job, folder: Path) -> dict[str, Any]:
    workdir = job.result.with_suffix("")
    shutil.rmtree(workdir, ignore_errors=True)
    settings = tba_run.settings(
        cases.CASES[job.case],
        folder,
        interleaved=job.system == "tba_interleaved",
        reference=job.reference,
        steps=WARM_UP_STEPS + job.bench.steps,
        seed=job.repeat,
    )
    flags = [f"--config.{leaf}={value}" for leaf, value in settings.items()]
    _call(job, [sys.executable, "-m", "tba_jax.main", f"--config={tba_run.RECIPE}", f"--workdir={workdir}", *flags])
    record = tba_run.record(workdir, cases.CASES[job.case], interleaved=job.system == "tba_interleaved", skip=WARM_UP_STEPS)
    shutil.rmtree(workdir, ignore_errors=True)
    return record
