"""What a person sees of a run while it runs: a picture by rich on a terminal, elsewhere a line of text every ten seconds.

It shows the status files of the roles (telemetry/status.py) and their alarms.
"""

import contextlib
import datetime
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tba_jax.outputs import visible_line
from tba_jax.storage import layout
from tba_jax.telemetry import alarms, status
from tba_jax.telemetry.status import Told

LIVE_SECONDS, PLAIN_SECONDS, _JOIN_SECONDS = 1.0, 10.0, 5.0
MOST_ROLES, _MOST_NAMED = 200, 6  # roles that are looked at, those that wrote last; idle roles that are named
# The figures of a role with an older status do not count, as it may be dead. A wait is shown once it is so long.
QUIET_SECONDS, WAIT_SECONDS = 30.0, 10.0
_ENDS = ("finished", "stopped")


def duration(seconds: float) -> str:
    """H:MM:SS."""
    return str(datetime.timedelta(seconds=round(seconds)))


def doing(told: Told, now: float) -> str:
    """What a role does other than its work, "" where it works, or has ended as it should. Args: now: unix seconds."""
    if told.phase in _ENDS:
        return ""
    if now - told.time > QUIET_SECONDS:
        return f"has said nothing for {now - told.time:.0f} s"
    if told.trouble:
        return told.trouble
    if told.waits and now - told.since >= WAIT_SECONDS and not (told.phase and told.phase_since > told.since):
        return f"has waited {now - told.since:.0f} s for {told.waits}"
    parts = f": {told.done} of {told.total}" if told.total else ""
    return f"{told.phase}{parts}, {max(0.0, now - told.phase_since):.0f} s" if told.phase else ""


def facts(told: Mapping[str, Told], *, steps: int, now: float) -> list[tuple[str, str]]:
    """(title, text) of all that is known of a run, the step first. Args: told: by role, since the run was started."""
    trainer, evaluator = (told.get(name, Told()) for name in ("trainer", "evaluator"))
    figures, held_out = trainer.figures, evaluator.figures
    at_work = trainer.step < steps and not doing(trainer, now) and trainer.phase not in _ENDS
    speed = figures.get("steps_per_second", 0.0) if at_work else 0.0
    eta = f"  ETA {duration((steps - trainer.step) / speed)}" if speed else ""
    found = [("step", f"{trainer.step}/{steps}  {100 * min(trainer.step / max(steps, 1), 1):.0f} %{eta}")]
    if "reward" in figures:
        apart = [f"{name[7:]} {figures[name]:.3f}" for name in ("reward_own", "reward_mounted") if name in figures]
        found.append(("reward", "  ".join((f"{figures['reward']:.3f}", *apart))))
    if "greedy_reward" in held_out:
        score, best_step = f"{held_out['greedy_reward']:.3f} at step {evaluator.step}", held_out.get("best_step", evaluator.step)
        if best_step != evaluator.step:
            score += f"  best {held_out['best_greedy_reward']:.3f} at step {best_step:.0f}"
        found.append(("held-out", score))
    if speed:
        pace = f"{speed:.1f} steps/s" if speed >= 1 else f"{1 / speed:.1f} s/step"
        tokens = [f"{figures['tokens_per_second']:,.0f} tokens/s"] if "tokens_per_second" in figures else []
        mfu = [f"MFU {100 * figures['mfu']:.1f} %"] if "mfu" in figures else []
        found.append(("trainer", "  ".join((pace, *tokens, *mfu))))
    others = ("trainer", "evaluator", "reference")
    makers = [each for name, each in told.items() if not name.startswith(others) and not doing(each, now)]
    speeds = [each.figures["tokens_per_second"] for each in makers if "tokens_per_second" in each.figures]
    if speeds and trainer.step < steps:
        found.append(("searchers", f"{len(speeds)} at work  {sum(speeds):,.0f} tokens/s"))
    if "buffer_rows" in figures:
        named = (("staleness", "staleness_mean"), ("largest", "staleness_max"))
        ages = [f"{title} {figures[name]:.1f}" for title, name in named if name in figures]
        found.append(("rows", "  ".join((f"{figures['buffer_rows']:,.0f} in the buffer", *ages))))
    says = [(f"{visible_line(name)}:", visible_line(said)) for name, each in told.items() if (said := doing(each, now))]
    more = [("", f"and {len(says) - _MOST_NAMED} more roles do not work")] if len(says) > _MOST_NAMED else []
    return [*found, *says[:_MOST_NAMED], *more]


def picture(shown: Sequence[tuple[str, str]], *, step: int, steps: int, spent: float, width: int) -> RenderableType:
    """What a terminal shows of facts. Args: spent: seconds; width: columns, of which the last stays free."""
    bar, lines = Table.grid(expand=True, padding=(0, 2, 0, 0)), Table.grid(padding=(0, 2, 0, 0))
    bar.width = width - 1
    bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True, justify="right")
    done = ProgressBar(total=max(steps, 1), completed=step, complete_style="cyan", finished_style="green")
    bar.add_row(Text(f"step {shown[0][1]}", style="bold"), done, Text(f"after {duration(spent)}", style="dim"))
    for title, text in shown[1:]:
        lines.add_row(Text(title, style="dim"), Text(text))
    return Group(bar, lines)


class _Console(Console):
    """Never hides the cursor: a process that is killed could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class Progress:
    """Shows where the run stands inside of `with`, by a thread: the main one may compile for a minute."""

    def __init__(self, run: layout.RunDir, *, steps: int, tells_alarms: bool = True):
        """Args: steps: learner.steps. tells_alarms: False: this process logs the alarms itself."""
        self._run, self._steps, self._tells_alarms = run, steps, tells_alarms
        self._began, self._begin, self._first_step = time.time(), time.monotonic(), 0
        with contextlib.suppress(OSError):
            self._first_step = status.read(run.metrics("trainer")).step
        self._kinds: set[str] = set()  # of alarms that were told
        # What shells export as the size does not follow the terminal.
        known = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        console = _Console(file=sys.stdout, markup=False, highlight=False, emoji=False, _environ=known)
        shows = sys.stdout.isatty() and not console.is_dumb_terminal and not console.options.ascii_only
        self._live = Live(console=console, auto_refresh=False, transient=True) if shows else None
        self._handlers: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
        self._seconds = LIVE_SECONDS if shows else PLAIN_SECONDS
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="progress", daemon=True)

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._begin

    @property
    def spent(self) -> str:
        """The time since it was made, in words, and the step that a resumed run went on from."""
        return f"{self.seconds:.0f} s" + (f" from step {self._first_step} on" if self._first_step else "")

    def __enter__(self) -> "Progress":
        if self._live is not None:
            before = sys.stdout, sys.stderr
            self._live.start()  # it replaces both streams, so that what is written to them appears above the picture
            for handler in logging.getLogger().handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream in before and handler.stream.isatty():
                    self._handlers.append((handler, handler.stream))
                    handler.setStream(sys.stderr)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join(_JOIN_SECONDS)
        if not self._thread.is_alive():  # else storage hangs, which does not keep the process from its end
            self._tell_alarms(self._roles())
        for handler, stream in self._handlers:
            handler.setStream(stream)
        if self._live is not None:
            self._live.stop()

    def _go_on(self) -> None:
        while not self._ends.is_set():
            self.look()
            self._ends.wait(self._seconds)

    def _roles(self) -> list[str]:
        with contextlib.suppress(OSError):
            folders = [(each.stat().st_mtime, each.name) for each in os.scandir(self._run.metrics("trainer").parent)]
            return sorted(name for _, name in sorted(folders)[-MOST_ROLES:])
        return []

    def look(self) -> None:
        """Shows where the run stands now, and alarms that are new."""
        roles, now, trainer = self._roles(), time.time(), Told()
        try:
            read = {name: status.read(self._run.metrics(name)) for name in roles}
        except OSError as error:
            shown = [("step", "not known"), ("storage", visible_line(f"does not answer: {error}"))]
        else:
            told = {name: each for name, each in read.items() if each.time >= self._began}
            trainer = told.get("trainer", trainer)
            shown = facts(told, steps=self._steps, now=now)
            self._tell_alarms(roles)
        if self._live is not None:
            width = self._live.console.width
            self._live.update(picture(shown, step=trainer.step, steps=self._steps, spent=self.seconds, width=width), refresh=True)
        else:
            self._print("  ".join(f"{title} {text}" for title, text in shown))

    def _tell_alarms(self, roles: Sequence[str]) -> None:
        for alarm in [alarm for role in roles if self._tells_alarms for alarm in alarms.read(self._run.metrics(role))]:
            if alarm.time >= self._began and alarm.kind not in self._kinds:
                self._kinds.add(alarm.kind)
                self._print(visible_line(f"warning: {alarm.sentence}. What to do: {alarm.advice}"))

    def _print(self, line: str) -> None:
        if self._live is not None:
            self._live.console.print(Text(line, style="yellow"))
            return
        encoding = sys.stdout.encoding or "utf-8"
        with contextlib.suppress(OSError):  # whoever reads the output has gone; the run goes on
            sys.stdout.write(f"{self.seconds:5.0f} s  {line}\n".encode(encoding, "replace").decode(encoding))
            sys.stdout.flush()
