"""The runs of a study, several at a time, each on its own share of the machine's cores; the evaluation of their snapshots
afterwards; and the choice of a learning rate. A run that is done is not made again; one that was made with other settings is
refused."""

import concurrent.futures
import dataclasses
import math
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from absl import flags

from benchmarks import summary
from tba_jax.roles.evaluator import PendingSteps
from tba_jax.run import processes
from tba_jax.storage import layout, places
from tba_jax.telemetry import metrics

_JOBS = flags.DEFINE_integer("jobs", 0, "Runs side by side, each on its share of the cores; 0: one a core.", lower_bound=0)

T = TypeVar("T")

_LIFELINE = processes.Lifeline()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One run of tba_jax.main.

    root: the study's folder; name: the run's, below root; recipe: a file under configs/, with its variant; settings: leaf of the
    config -> value; warm: the run begins from root's warm start (ensure_warm_start makes it), else as its recipe says; fork: a
    finished run that this one goes on from, under its own settings; checkout: the folder whose code runs, here by default;
    seconds: the run is asked to stop so long after the first line of its trainer's metrics, 0: never.
    """

    root: Path
    name: str
    recipe: str
    settings: Mapping[str, Any]
    warm: bool = False
    fork: Path | None = None
    checkout: Path = Path()
    seconds: float = 0.0

    @property
    def workdir(self) -> Path:
        return self.root / self.name

    @property
    def stopped(self) -> Path:
        """Has the exit code and the last output of a run that ended early, where it met numbers that are not finite, or its
        seconds were over: a figure of the study, not an error of it."""
        return Path(f"{self.workdir}.stopped")

    @property
    def not_finite(self) -> bool:
        """Whether the run ended at numbers that are not finite, the only reason to end early where it has no seconds."""
        return self.stopped.exists() and (not self.seconds or self.stopped.read_text().startswith(f"{processes.NOT_FINITE}\n"))

    def is_done(self) -> bool:
        """Raises ValueError: it is, by another recipe or with other settings."""
        done = (self.workdir / "finished.json").exists() or self.stopped.exists()
        if done:
            _check_settings(self.workdir, self.recipe, self.settings)
        return done

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the run's processes. Compiled programs go to the root's folder, unless this process has another."""
        return {"JAX_COMPILATION_CACHE_DIR": str(self.root / "compilation_cache")} | os.environ

    def time_is_up(self) -> bool:
        """Whether the seconds of the run are over."""
        if not self.seconds:
            return False
        first = next(metrics.each_line(layout.RunDir(self.workdir).metrics("trainer")), None)
        return first is not None and time.time() - first["time"] > self.seconds


def run_all(jobs: Sequence[Job], *, at_a_time: int = 0) -> None:
    """Makes the runs that are not done, in their order. Output goes to <run>.out, programs that runs share are compiled once.

    Args: at_a_time: 0: as --jobs says; 1: each run has the whole machine, as is fit where it is timed.

    Raises:
      RuntimeError: a run failed, other than by numbers that are not finite; runs that have begun are finished before.
      ValueError: a run was made by another recipe or with other settings; then none begins.
    """

    def timed(job: Job, cores: Sequence[int]) -> None:
        begin = time.monotonic()
        run(job, cores=cores)
        print(f"{job.name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)

    share_cores(timed, [job for job in jobs if not job.is_done()], at_a_time=at_a_time)


def _told(recipe: str, settings: Mapping[str, Any]) -> dict[str, str]:
    return {"recipe": recipe} | {leaf: str(value) for leaf, value in settings.items()}


def _write_settings(workdir: Path, recipe: str, settings: Mapping[str, Any]) -> None:
    layout.write_json(Path(f"{workdir}.settings.json"), _told(recipe, settings))


def _check_settings(workdir: Path, recipe: str, settings: Mapping[str, Any]) -> None:
    """Raises ValueError: the run was made by another recipe or with other settings. Older runs do not say theirs, and pass."""
    file, asked = Path(f"{workdir}.settings.json"), _told(recipe, settings)
    made = layout.read_json(file) if file.exists() else asked
    for leaf in made | asked:
        before, now = (of.get(leaf, "its default") for of in (made, asked))
        if before != now:
            raise ValueError(f"{workdir} was made with {leaf}={before}, and this command asks for {now}: use another --workdir")


def share_cores(work: Callable[[T, Sequence[int]], object], items: Sequence[T], *, at_a_time: int = 0) -> None:
    """Calls work(item, cores) for each item, side by side in threads, each with a share of the cores. Raises what a call raises,
    once those that have begun have ended. Args: at_a_time: see run_all."""
    cores = sorted(os.sched_getaffinity(0))
    at_a_time = min(at_a_time or _JOBS.value or len(cores), len(cores))
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


def in_turn(steps: int, lag: int) -> dict[str, Any]:
    """Settings of a run whose search and training take turns: each update has rows of `lag` updates before."""
    ages = {"schedule.mode": "interleaved", "schedule.lag": lag, "publish.keep": lag + 3}
    return ages | {"learner.steps": steps, "evaluation.every_steps": max(1, steps // 4), "checkpoint.every_steps": steps}


def call(
    words: Sequence[str],
    settings: Mapping[str, Any],
    output: Path,
    *,
    cores: Sequence[int],
    fine: Sequence[int] = (),
    until: Callable[[], bool] = lambda: False,
    env: Mapping[str, str] = os.environ,
    cwd: Path = Path(),
) -> int:
    """The exit code of `python -m words` with these settings, which is asked to stop once `until` holds: 0, or one of `fine`. It
    dies with this process. Raises RuntimeError: another code, see output."""
    command = [sys.executable, "-m", *words, *(f"--config.{leaf}={value}" for leaf, value in settings.items())]
    where: dict[str, Any] = dict(env={**env, **_LIFELINE.child_environment(tuple(cores))}, pass_fds=_LIFELINE.child_fds, cwd=cwd)
    with open(output, "w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, **where) as process:
        asked = False
        while process.poll() is None:
            if not asked and until():
                process.send_signal(signal.SIGTERM)
                asked = True
            time.sleep(0.2)
        code = process.returncode
    if code not in (0, *fine):
        raise RuntimeError(f"{' '.join(words)} ended with code {code}; see {output}")
    return code


def _copy_or_link(source: str, target: str) -> None:
    """Copies a file of a run. Files of snapshots are never changed, so two runs may have one."""
    (os.link if layout.RunDir(Path()).policies.name in Path(source).parts else shutil.copy2)(source, target)


def prepare(job: Job) -> None:
    """Makes the workdir as the run is to find it."""
    shutil.rmtree(job.workdir, ignore_errors=True)
    job.workdir.parent.mkdir(parents=True, exist_ok=True)
    _write_settings(job.workdir, job.recipe, job.settings)
    if job.fork is not None:
        shutil.copytree(job.fork, job.workdir, ignore=shutil.ignore_patterns("finished.json"), copy_function=_copy_or_link)
    elif job.warm:
        begin(job.root / "warm", job.workdir)


def run(job: Job, *, cores: Sequence[int]) -> None:
    """One run on these cores, from its beginning. Raises RuntimeError as run_all."""
    prepare(job)
    words, output = ["tba_jax.main", f"--config={job.recipe}", f"--workdir={job.workdir}"], Path(f"{job.workdir}.out")
    words += [f"--allow_change={','.join(job.settings)}"] if job.fork is not None else []
    fine = (processes.NOT_FINITE, *[processes.STOPPED] * bool(job.seconds))
    where: dict[str, Any] = dict(cores=cores, env=job.environment, cwd=job.checkout)
    code = call(words, job.settings, output, fine=fine, until=job.time_is_up, **where)
    if code == processes.STOPPED and not job.time_is_up():
        raise RuntimeError(f"{job.name} was stopped before its time")
    if code:
        job.stopped.write_text(f"{code}\n{output.read_text()[-500:]}")


def evaluate_afterwards(jobs: Sequence[Job], settings: Mapping[str, Any] | None = None) -> None:
    """Evaluates the kept snapshots of runs that have ended, where that is not done: multiples of evaluation.every_steps and the
    last. Their reports are then those of a run with an evaluator beside it, which takes cores from search and training.

    Args: settings: of evaluation, besides every_steps: leaf of the config -> value.
    """

    def one(job: Job, cores: Sequence[int]) -> None:
        run = layout.RunDir(job.workdir)
        config = layout.read_json(run.config)["config"]
        pending = PendingSteps(run, every_steps=config["evaluation"]["every_steps"], final_step=config["learner"]["steps"])
        if not pending():
            return
        words = ["tba_jax.main", f"--workdir={job.workdir}", "--role=evaluator", "--trust_task"]
        # The evaluator of a run that was stopped would wait for more.
        until = (lambda: False) if places.exists(run.finished) else (lambda: not pending())
        where: dict[str, Any] = dict(cores=cores, env=job.environment, cwd=job.checkout)
        call(words, settings or {}, Path(f"{job.workdir}.evaluated.out"), until=until, **where)

    share_cores(one, jobs)


def mean_score(workdir: Path) -> float:
    """The held-out greedy score, mean over the evaluated steps after the first."""
    return float(np.mean(list(summary.curve(workdir).values())[1:] or [-math.inf]))


def chosen_rate(
    make: Callable[[float], Job],
    rates: Sequence[float],
    *,
    at_a_time: int = 0,
    score: Callable[[Path], float] = mean_score,
    evaluates: bool = True,
) -> float:
    """The learning rate of the best score: of one run for each rate, which are evaluated afterwards. A run that met numbers that
    are not finite loses.

    Args: make: the run at a rate, of a seed that the study does not use otherwise. at_a_time: see run_all. score: of a run's
    workdir; evaluates: whether it reads evaluations.
    """
    jobs = {rate: make(rate) for rate in rates}
    run_all(list(jobs.values()), at_a_time=at_a_time)
    if evaluates:
        evaluate_afterwards(list(jobs.values()))
    found = {rate: -math.inf if job.not_finite else score(job.workdir) for rate, job in jobs.items()}
    best = max(found, key=found.__getitem__)
    told = ", ".join(f"{rate:g}: {value:.3f}" for rate, value in found.items())
    print(f"{jobs[best].name}: {best:g} is the best of {told}", file=sys.stderr, flush=True)
    return best


def ensure_warm_start(root: Path, settings: Mapping[str, Any], *, recipe: str, checkout: Path = Path()) -> None:
    """Makes root/warm/reference, unless it is there. checkout: whose code makes it.

    Raises ValueError: it is there, and was made by another recipe or with other settings.
    """
    if (root / "warm" / "reference" / "initial.json").exists():
        _check_settings(root / "warm", recipe, settings)
        return
    print(f"warm start begins, its output is in {root / 'warm.out'}", file=sys.stderr, flush=True)
    root.mkdir(parents=True, exist_ok=True)
    _write_settings(root / "warm", recipe, settings)
    words = ["tba_jax.main", f"--config={recipe}", f"--workdir={root / 'warm'}", "--role=reference"]
    call(words, settings, root / "warm.out", cores=sorted(os.sched_getaffinity(0)), cwd=checkout)


def begin(warm: Path, workdir: Path) -> None:
    """Makes a workdir that holds the warm start and nothing else."""
    shutil.copytree(warm / "reference", workdir / "reference")
    # A workdir with folders of a run needs its config.json. At step 0 every setting of the schedule may change.
    layout.write_json(workdir / "config.json", layout.read_json(warm / "config.json") | {"id": uuid.uuid4().hex})
