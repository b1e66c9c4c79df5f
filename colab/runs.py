"""What colab/tba_jax.ipynb does beside the commands: runs in the background, pictures of them, responses side by side.

Roles are processes of their own, and this process never asks JAX for devices: a TPU serves one process at a time, and a process
that looks for GPUs takes their memory.
"""

import dataclasses
import functools
import html
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tba_jax.outputs import visible, visible_line
from tba_jax.roles import results
from tba_jax.run import processes
from tba_jax.storage import layout
from tba_jax.telemetry import metrics

_ROOT = Path(__file__).parents[1]
_STOP_SECONDS = 60.0
_TAIL_BYTES = 20_000
# A line of the progress that a run prints: "   12 s  step 5/200  reward 0.431 …".
_PROGRESS = re.compile(r" *\d+ s  (.+)")

_ASK_JAX = "import jax; device = jax.devices()[0]; print(device.platform, jax.device_count(), device.device_kind, sep='|')"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runtime:
    """What computes here, and the settings that the notebook takes for it.

    platform: "cpu", "gpu" or "tpu". steps: updates of the demo. searchers: processes beside the trainer; 0: search and training
    take turns in one process. flags: of tba_jax.main, for every run. why: a sentence.
    """

    platform: str
    steps: int
    searchers: int
    flags: tuple[str, ...]
    why: str


def find_runtime() -> Runtime:
    """Asks a process of its own what JAX computes with. Raises RuntimeError where JAX does not start."""
    done = subprocess.run([sys.executable, "-c", _ASK_JAX], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"JAX finds no device: {done.stderr.strip()[-2000:]}")
    platform, count, kind = done.stdout.splitlines()[-1].split("|", 2)
    return runtime_of(platform, int(count), kind)


def runtime_of(platform: str, count: int, kind: str) -> Runtime:
    """The settings for so many devices of a kind, as JAX names them."""
    if platform == "tpu":
        why = f"{count} × {kind}: one process at a time may use a TPU, so search and training take turns in one, in bfloat16"
        return Runtime(platform=platform, steps=400, searchers=0, flags=("--config.model.compute_dtype=bfloat16",), why=why)
    if platform == "gpu":
        why = f"{count} × {kind}: a trainer, two searchers and an evaluator share what is there, in float32"
        return Runtime(platform=platform, steps=400, searchers=2, flags=("--config.model.compute_dtype=float32",), why=why)
    cores = os.cpu_count()
    why = f"a CPU with {cores} cores: a trainer, two searchers and an evaluator share them, in float32, with fewer steps"
    return Runtime(platform=platform, steps=150, searchers=2, flags=("--config.model.compute_dtype=float32",), why=why)


def schedule(*, searchers: int, lag: int = 0) -> list[str]:
    """Flags for searchers that are processes beside the trainer; of 0 searchers for turns in one process, with a lag."""
    if searchers:
        return [f"--config.searchers.count={searchers}"]
    keep = max(5, lag + 2)  # snapshots: the rows of a step come from the one that is `lag` steps old
    return ["--config.schedule.mode=interleaved", f"--config.schedule.lag={lag}", f"--config.publish.keep={keep}"]


class BackgroundRun:
    """A run of `python -m tba_jax.main` as a process that ends with this one. Its output goes to WORKDIR.log.

    Attributes: workdir, score_name: of the task, as the pictures call the held-out score.
    """

    def __init__(self, workdir: Path | str, *flags: str, score_name: str):
        """Args: flags: of tba_jax.main besides --workdir, such as --config=configs/demo.py."""
        self.workdir, self.score_name = Path(workdir).absolute(), score_name
        self.log = self.workdir.with_name(f"{self.workdir.name}.log")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._lifeline = processes.Lifeline()  # a notebook whose session is restarted leaves no run behind
        with open(self.log, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tba_jax.main", f"--workdir={self.workdir}", *flags],
                cwd=_ROOT,
                env=os.environ | self._lifeline.child_environment(()),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=self._lifeline.child_fds,
                start_new_session=True,  # an interrupted cell stops the run in order, see `watch`
            )

    @property
    def goes_on(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """Asks the run to end after its step, and waits. The same WORKDIR and flags go on with it."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def said(self) -> str:
        """The newest line about where the run stands; once it has ended, its last line."""
        lines = self._tail()
        told = [found[1] for line in lines if (found := _PROGRESS.fullmatch(line))]
        return (lines or ["it has said nothing"])[-1] if not self.goes_on else (told or ["starts"])[-1]

    def failure(self) -> str:
        """Why the run failed, in one sentence or with the end of its log; "" where it has not."""
        code = self._process.poll()
        if code in (None, 0, processes.STOPPED):
            return ""
        lines = self._tail()
        errors = [line for line in lines if line.startswith("error: ")]
        return (
            f"{self.workdir.name}: {errors[-1]}" if errors else "\n".join([f"exit code {code}; {self.log} ends:", *lines[-20:]])
        )

    def _tail(self) -> list[str]:
        with open(self.log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return [visible_line(line) for line in file.read().decode(errors="replace").splitlines() if line.strip()]

    @property
    def has_trained(self) -> bool:
        return any(metrics.each_line(layout.open_run_dir(self.workdir).metrics("trainer")))

    def picture(self) -> bytes:
        """PNG of held-out score, reward and staleness by step so far."""
        return compared({self.workdir.name: self.workdir}, score_name=self.score_name)


def watch(run: BackgroundRun, *, every_seconds: float = 4.0) -> None:
    """Shows in a cell where a run stands, with a picture that is drawn anew, until the run has ended. An interrupt stops it.

    Raises:
      RuntimeError: the run has failed; says why.
    """
    from IPython.display import Image, display

    line, picture = display({"text/plain": run.said()}, raw=True, display_id=True), None
    try:
        while True:
            goes_on = run.goes_on  # read before the picture, so that the last one has everything
            line.update({"text/plain": run.said()}, raw=True)
            if run.has_trained:
                image = Image(data=run.picture(), width=720)
                picture = display(image, display_id=True) if picture is None else picture
                picture.update(image)
            if not goes_on:
                break
            time.sleep(every_seconds)
    except KeyboardInterrupt:
        run.stop()
        line.update({"text/plain": f"stopped: {run.said()}"}, raw=True)
        return
    if told := run.failure():
        raise RuntimeError(told)


class Panel:
    """Widgets with a button that starts a run with their values, and a picture of all runs that it has started.

    Attributes: widget: to be displayed. button: starts a run. runs: label -> run, in the order of their starts.
    """

    def __init__(self, settings: Sequence[Any], begin: Callable[[], tuple[str, BackgroundRun]], *, every_seconds: float = 4.0):
        """Args: settings: widgets. begin: starts a run with their values, and returns its label and the run."""
        import ipywidgets

        self.runs: dict[str, BackgroundRun] = {}
        self._begin, self._seconds, self._thread = begin, every_seconds, threading.Thread()
        self.button = ipywidgets.Button(description="Start a run", button_style="primary")
        self._stop = ipywidgets.Button(description="Stop it", disabled=True)
        self._said, self._image = ipywidgets.HTML("No run was started yet."), ipywidgets.Image(format="png", width=720)
        self._image.layout.display = "none"
        self.button.on_click(lambda _: self.start())
        self._stop.on_click(lambda _: self.stop())
        buttons = ipywidgets.HBox([self.button, self._stop])
        self.widget = ipywidgets.VBox([*settings, buttons, self._said, self._image])

    def start(self) -> None:
        """Starts a run with the values that the widgets have, unless one is at work."""
        if self._thread.is_alive():
            return
        label, run = self._begin()
        self.runs[label] = run
        self.button.disabled, self._stop.disabled = True, False
        self._thread = threading.Thread(target=self._follow, args=(label, run), name="follows a run", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops the run that is at work."""
        for run in self.runs.values():
            if run.goes_on:
                run.stop()

    def wait(self) -> None:
        """Returns once the run that is at work has ended. Raises RuntimeError where one of the runs has failed."""
        if self._thread.is_alive():
            self._thread.join()
        if told := next(filter(None, (run.failure() for run in self.runs.values())), ""):
            raise RuntimeError(told)

    def picture(self) -> bytes:
        """PNG of all runs."""
        (score_name, *_) = (run.score_name for run in self.runs.values())
        return compared({label: run.workdir for label, run in self.runs.items()}, score_name=score_name)

    def _follow(self, label: str, run: BackgroundRun) -> None:
        goes_on = True
        while goes_on:
            goes_on = run.goes_on
            self._said.value = f"<b>{html.escape(label)}</b>: {html.escape(run.failure() or run.said())}"
            if run.has_trained:
                self._image.value, self._image.layout.display = self.picture(), ""
            time.sleep(self._seconds if goes_on else 0)
        self.button.disabled, self._stop.disabled = False, True


def compared(runs: Mapping[str, Path], *, score_name: str) -> bytes:
    """PNG of held-out score, reward of training batches (pale) and mean staleness of several runs, by step.

    Args: runs: label -> workdir.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    for number, (label, workdir) in enumerate(runs.items()):
        run, color = layout.open_run_dir(workdir), f"C{number}"
        steps, reward, staleness = results.by_step(metrics.each_line(run.metrics("trainer")), ("reward", "staleness_mean")).T
        reports = results.evaluations(run)
        top.plot(steps, reward, color=color, alpha=0.3)
        top.plot([x["step"] for x in reports], [x["greedy_reward"] for x in reports], "o-", color=color, label=label)
        bottom.plot(steps, staleness, color=color)
    top.set_ylabel(f"held-out greedy {score_name}\n(pale: reward of training batches)")
    top.legend(loc="best")
    bottom.set_ylabel("mean staleness\n(steps)")
    bottom.set_ylim(bottom=0)
    bottom.set_xlabel("trainer step")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()


def side_by_side(workdir: Path | str) -> str:
    """A table in HTML: greedy responses to held-out queries at the first and at the last evaluation, with their rewards.

    Raises:
      ValueError: the run has no two evaluations yet.
    """
    run = layout.open_run_dir(workdir)
    steps = layout.steps_in(run.evaluations)
    if len(steps) < 2:
        raise ValueError(f"{workdir} has {len(steps)} evaluations, and two are needed: let the run go on to its end")
    files = [run.evaluations / f"{layout.step_name(step)}.json" for step in (steps[0], steps[-1])]
    before, after = (layout.read_json(file)["samples"]["greedy"] for file in files)
    style = "text-align:left;vertical-align:top;white-space:pre-wrap"
    rows = [tuple(f"<b>{name}</b>" for name in ("query", f"step {steps[0]}", f"step {steps[-1]}"))]
    rows += [(_text(old["query"]), _response(old), _response(new)) for old, new in zip(before, after, strict=True)]
    cells = ("".join(f"<td style='{style}'>{cell}</td>" for cell in row) for row in rows)
    # The classes keep MathJax from reading mathematics into a text with two dollars.
    head = "<table class='tex2jax_ignore mathjax_ignore' style='max-width:70em'>"
    return head + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


def _response(response: Mapping[str, Any]) -> str:
    reward = response["reward"]
    told = "no reward" if reward is None else f"reward {reward:.2f}"
    return f"{_text(response['response'])}<br><small style='opacity:.65'>{told}</small>"


def _text(text: str) -> str:
    """Text that a task or a model wrote, which is text on the page and nothing else."""
    return html.escape(visible(text))


def frame(page: Path | str, *, height: int = 700) -> str:
    """HTML that shows a page which needs no other file, such as a report, inside the notebook."""
    content = html.escape(Path(page).read_text(encoding="utf-8"))
    return f'<div><iframe srcdoc="{content}" style="width:100%;height:{height}px;border:1px solid #ccc"></iframe></div>'


def command(*arguments: str) -> str:
    """What `python -m tba_jax COMMAND …` prints. Raises RuntimeError with its sentence where it fails."""
    done = subprocess.run([sys.executable, "-m", "tba_jax", *arguments], cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"exit code {done.returncode}")
    return done.stdout.strip()


def pretrained(model: str, stories: str, *, into: Path, count: int = 1000) -> tuple[Path, Path]:
    """The folder of a pretrained model, and a JSON list of stories, for the task story_sentiment.

    Args:
      model: a local folder, or a hub id.
      stories: a JSON file, or a data set of the hub with a column `text`, of whose split `validation` the first `count` are
        written to a file in `into`.

    Raises:
      ValueError: neither is here, and the hub does not give it or cannot be reached.
    """
    from tba_jax.models.hugging_face import load

    file = Path(stories).expanduser()
    if not file.is_file():
        file = into / f"{file.name}.json"
    if not file.is_file():
        texts = _stories_of_hub(stories, count)
        into.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(texts), encoding="utf-8")
    return load.resolve_folder(Path(model).expanduser() if Path(model).expanduser().is_dir() else model), file


def _stories_of_hub(name: str, count: int) -> list[str]:
    import datasets
    import huggingface_hub

    from tba_jax.models.hugging_face import load

    try:
        ask = functools.partial(huggingface_hub.HfApi().dataset_info, name, timeout=load.HUB_TIMEOUT_SECONDS)
        if away := load.unreachable(ask, called=f"data set {name}"):
            raise away
        # Streamed, because all its splits would be fetched otherwise.
        return [row["text"] for row in datasets.load_dataset(name, split="validation", streaming=True).take(count)]
    except Exception as error:  # the errors depend on the version of the hub's HTTP client
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"there is no file {name}, and the hub did not give a data set of this name: {reason}") from error
