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

from tba_jax.run import processes
from tba_jax.storage import layout

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One run of tba_jax.main.

    root: the study's folder; name: the run's, below root; recipe: a file under configs/, with its variant; settings: leaf of the
    config -> value; warm: the run begins from root's warm start (ensure_warm_start makes it), else as its recipe says; checkout:
    the folder whose code runs, here by default.
    """

    root: Path
    name: str
    recipe: str
    settings: Mapping[str, Any]
    warm: bool = False
    checkout: Path = Path()

    @property
    def workdir(self) -> Path:
        return self.root / self.name

    @property
    def stopped(self) -> Path:
        """Says why the run ended early, where it met numbers that are not finite: a figure of the study, not an error of it."""
        return Path(f"{self.workdir}.stopped")


def run_all(jobs: Sequence[Job], *, at_a_time: int = 0) -> None:
    """Makes the runs that are not done, in their order. Output goes to <run>.out, programs that runs share are compiled once.

    Args: at_a_time: runs side by side, at most one a core; 0: one a core.

    Raises:
      RuntimeError: a run failed, other than by numbers that are not finite; runs that have begun are finished before.
    """

    def timed(job: Job, cores: Sequence[int]) -> None:
        begin = time.monotonic()
        run(job, cores=cores)
        print(f"{job.name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)

    share_cores(timed, jobs, at_a_time=at_a_time)


def share_cores(work: Callable[[T, Sequence[int]], object], items: Sequence[T], *, at_a_time: int = 0) -> None:
    """Calls work(item, cores) for each item, side by side in threads, each with a share of the cores. Raises what a call raises,
    once those that have begun have ended."""
    cores = sorted(os.sched_getaffinity(0))
    at_a_time = min(at_a_time or len(cores), len(cores))
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


def on_cores(cores: Sequence[int]) -> list[str]:
    """What a command begins with that is to run on these cores."""
    return ["taskset", "--cpu-list", ",".join(map(str, cores))] if len(cores) < len(os.sched_getaffinity(0)) else []


def run(job: Job, *, cores: Sequence[int]) -> None:
    """One run on these cores, from its beginning, unless it is done. Raises RuntimeError as run_all."""
    if (job.workdir / "finished.json").exists() or job.stopped.exists():
        return
    (_begin if job.warm else _clear)(job.root, job.name)
    command = [*on_cores(cores), sys.executable, "-m", "tba_jax.main", f"--config={job.recipe}", f"--workdir={job.workdir}"]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(job.root / "compilation_cache")}
    output = Path(f"{job.workdir}.out")
    with open(output, "w") as file:
        ended = subprocess.run(
            command + [f"--config.{leaf}={value}" for leaf, value in job.settings.items()],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=job.checkout,
            check=False,
        )
    if ended.returncode == processes.NOT_FINITE:
        job.stopped.write_text(output.read_text()[-500:])
    elif ended.returncode:
        raise RuntimeError(f"{job.workdir} ended with code {ended.returncode}; see {output}")


def ensure_warm_start(root: Path, *arguments: str, recipe: str, checkout: Path = Path()) -> None:
    """Makes root/warm/reference, unless it is there. arguments: further ones of tba_jax.main; checkout: whose code makes it."""
    if (root / "warm" / "reference" / "initial.json").exists():
        return
    print(f"warm start begins, its output is in {root / 'warm.out'}", file=sys.stderr, flush=True)
    begin = time.monotonic()
    command = [sys.executable, "-m", "tba_jax.main", f"--config={recipe}", f"--workdir={root / 'warm'}", "--role=reference"]
    root.mkdir(parents=True, exist_ok=True)
    with open(root / "warm.out", "w") as output:
        subprocess.run([*command, *arguments], check=True, stdout=output, stderr=subprocess.STDOUT, cwd=checkout)
    print(f"warm start: {time.monotonic() - begin:.0f} s\n", file=sys.stderr)


def _begin(root: Path, name: str) -> None:
    """A fresh workdir root/name that holds the warm start and nothing else."""
    workdir = _clear(root, name)
    shutil.copytree(root / "warm" / "reference", workdir / "reference")
    # A workdir with folders of a run needs its config.json. At step 0 every setting of the schedule may change.
    stored = layout.read_json(root / "warm" / "config.json")
    layout.write_json(workdir / "config.json", stored | {"id": uuid.uuid4().hex})


def _clear(root: Path, name: str) -> Path:
    """The workdir root/name, which does not exist; the folder that it will be in does."""
    workdir = root / name
    shutil.rmtree(workdir, ignore_errors=True)
    workdir.parent.mkdir(parents=True, exist_ok=True)
    return workdir
