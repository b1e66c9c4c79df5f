"""The runs of a study, several at a time, each on its own share of the machine's cores. What is done is not made again."""

import concurrent.futures
import dataclasses
import os
import queue
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from absl import flags

from tba_jax.run import processes
from tba_jax.storage import layout

_JOBS = flags.DEFINE_integer("jobs", 0, "Runs side by side, each on its share of the cores; 0: one a core.", lower_bound=0)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One run of tba_jax.main.

    root: the study's folder; name: the run's, below root; recipe: a file under configs/, with its variant; settings: leaf of the
    config -> value; warm: the run begins from root's warm start (ensure_warm_start makes it), else as its recipe says; fork: a
    finished run that this one goes on from, under its own settings; checkout: the folder whose code runs, here by default.
    """

    root: Path
    name: str
    recipe: str
    settings: Mapping[str, Any]
    warm: bool = False
    fork: Path | None = None
    checkout: Path = Path()

    @property
    def workdir(self) -> Path:
        return self.root / self.name

    @property
    def stopped(self) -> Path:
        """Says why the run ended early, where it met numbers that are not finite: a figure of the study, not an error of it."""
        return Path(f"{self.workdir}.stopped")


def run_all(jobs: Sequence[Job]) -> None:
    """Makes the runs that are not done, in their order. Output goes to <run>.out, programs that runs share are compiled once.

    Raises:
      RuntimeError: a run failed, other than by numbers that are not finite; runs that have begun are finished before.
    """

    def timed(job: Job, cores: Sequence[int]) -> None:
        begin = time.monotonic()
        run(job, cores=cores)
        print(f"{job.name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)

    share_cores(timed, jobs)


def share_cores(work: Callable[[T, Sequence[int]], object], items: Sequence[T]) -> None:
    """Calls work(item, cores) for each item, side by side in threads, each with a share of the cores. Raises what a call raises,
    once those that have begun have ended."""
    cores = sorted(os.sched_getaffinity(0))
    at_a_time = min(_JOBS.value or len(cores), len(cores))
    shares: queue.Queue[list[int]] = queue.Queue()
    for i in range(at_a_time):
        shares.put(cores[i::at_a_time])

    def one(item: T) -> None:
        share = shares.get()
        try:
            work(item, share)
        finally:
            shares.put(share)

    with concurrent.futures.ThreadPoolExecutor(at_a_time) as threads:
        try:
            for done in concurrent.futures.as_completed([threads.submit(one, item) for item in items]):
                done.result()
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


def _on_cores(cores: Sequence[int]) -> list[str]:
    """What a command begins with that is to run on these cores."""
    return ["taskset", "--cpu-list", ",".join(map(str, cores))] if len(cores) < len(os.sched_getaffinity(0)) else []


def in_turn(steps: int, lag: int) -> dict[str, Any]:
    """Settings of a run whose search and training take turns: each update has rows of `lag` updates before."""
    ages = {"schedule.mode": "interleaved", "schedule.lag": lag, "publish.keep": lag + 3}
    return ages | {"learner.steps": steps, "evaluation.every_steps": max(1, steps // 4), "checkpoint.every_steps": steps}


def call(
    words: Sequence[str], settings: Mapping[str, Any], output: Path, *, cores: Sequence[int], fine: int = 0, **more: Any
) -> int:
    """The exit code of `python -m words` with these settings, 0 or `fine`. Raises RuntimeError: another one, see output."""
    given = [f"--config.{leaf}={value}" for leaf, value in settings.items()]
    with open(output, "w") as file:
        command = [*_on_cores(cores), sys.executable, "-m", *words, *given]
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, **more).returncode
    if code not in (0, fine):
        raise RuntimeError(f"{' '.join(words)} ended with code {code}; see {output}")
    return code


def run(job: Job, *, cores: Sequence[int]) -> None:
    """One run on these cores, from its beginning, unless it is done. Raises RuntimeError as run_all."""
    if (job.workdir / "finished.json").exists() or job.stopped.exists():
        return
    shutil.rmtree(job.workdir, ignore_errors=True)
    job.workdir.parent.mkdir(parents=True, exist_ok=True)
    if job.fork is not None:
        shutil.copytree(job.fork, job.workdir, ignore=shutil.ignore_patterns("finished.json"))
    elif job.warm:
        begin(job.root / "warm", job.workdir)
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(job.root / "compilation_cache")}
    words, output = ["tba_jax.main", f"--config={job.recipe}", f"--workdir={job.workdir}"], Path(f"{job.workdir}.out")
    words += [f"--allow_change={','.join(job.settings)}"] if job.fork is not None else []
    if call(words, job.settings, output, cores=cores, fine=processes.NOT_FINITE, env=environment, cwd=job.checkout):
        job.stopped.write_text(output.read_text()[-500:])


def ensure_warm_start(root: Path, settings: Mapping[str, Any], *, recipe: str, checkout: Path = Path()) -> None:
    """Makes root/warm/reference, unless it is there. checkout: whose code makes it."""
    if (root / "warm" / "reference" / "initial.json").exists():
        return
    print(f"warm start begins, its output is in {root / 'warm.out'}", file=sys.stderr, flush=True)
    root.mkdir(parents=True, exist_ok=True)
    words = ["tba_jax.main", f"--config={recipe}", f"--workdir={root / 'warm'}", "--role=reference"]
    call(words, settings, root / "warm.out", cores=sorted(os.sched_getaffinity(0)), cwd=checkout)


def begin(warm: Path, workdir: Path) -> None:
    """Makes a workdir that holds the warm start and nothing else."""
    shutil.copytree(warm / "reference", workdir / "reference")
    # A workdir with folders of a run needs its config.json. At step 0 every setting of the schedule may change.
    layout.write_json(workdir / "config.json", layout.read_json(warm / "config.json") | {"id": uuid.uuid4().hex})
