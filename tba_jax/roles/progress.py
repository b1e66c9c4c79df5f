"""What a person sees of a run while it runs: on a terminal a live display, elsewhere a line of text every ten seconds."""

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence

from tba_jax.roles import plain, terminal
from tba_jax.roles.lives import Supervised
from tba_jax.roles.news import News
from tba_jax.roles.standing import Lookout, Standing
from tba_jax.run import layout
from tba_jax.text.visible import visible_line

_LIVE_SECONDS, _PLAIN_SECONDS = 0.5, 10.0
_JOIN_SECONDS = 5.0


class Progress:
    """Shows where the run stands, from `with` to its end, in a thread of its own: a compilation takes a minute, and is named."""

    def __init__(
        self,
        run: layout.RunDir,
        *,
        steps: int,
        searchers: Sequence[str],
        warm_start_steps: int,
        supervised: Callable[[], Supervised] | None = None,
        plain_seconds: float = _PLAIN_SECONDS,
    ):
        """Args:
        searchers: names of those that are started here.
        supervised: what the supervisor of the roles knows of them; None: the roles are in this process, and it logs their alarms.
        plain_seconds: between two lines where the output is no terminal.
        """
        self._lookout = Lookout(
            run, steps=steps, searchers=searchers, warm_start_steps=warm_start_steps, supervised=supervised or Supervised
        )
        self._news = News(run, silent=self._lookout.roles() if supervised is None else ())
        self._terminal = terminal.Terminal(sys.stdout) if terminal.suits(sys.stdout) else None
        self._seconds = plain_seconds if self._terminal is None else _LIVE_SECONDS
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="progress", daemon=True)

    @property
    def spent(self) -> str:
        """The time since it was made, in words; of a run that is resumed it also says from where, because steps came before."""
        first = self._lookout.first_step
        return f"{self.seconds:.0f} s" + (f" from step {first} on" if first else "")

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return self._lookout.seconds

    def __enter__(self) -> "Progress":
        self._news.skip(self._lookout.roles())
        if self._terminal is not None:
            self._terminal.start()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join(_JOIN_SECONDS)
        if not self._thread.is_alive():  # else storage hangs, which does not keep the process from its end
            self._lookout.list_again()
            self._tell(self._look()[1])
        if self._terminal is not None:
            self._terminal.stop()

    def _go_on(self) -> None:
        while not self._ends.is_set():
            self.look()
            self._ends.wait(self._seconds)

    def look(self) -> None:
        """Shows where the run stands now, and what is new."""
        standing, news = self._look()
        self._tell(news)
        if self._terminal is not None:
            self._terminal.show(standing)
        else:
            self._print(plain.line(standing))

    def _look(self) -> tuple[Standing, list[str]]:
        """Where the run stands, and the lines that are new. The run goes on without them where its files cannot be read."""
        try:
            standing = self._lookout()
            return standing, self._news(self._lookout.roles(), standing.troubles)
        except OSError as error:
            told = f"storage does not answer: {error}"
        except (ValueError, KeyError, TypeError) as error:
            told = f"the metrics of the run cannot be read: {type(error).__name__}: {error}"
        headline = visible_line(" ".join(told.split()))
        return Standing(seconds=self.seconds, steps=self._lookout.steps, headline=headline), []

    def _tell(self, news: Sequence[str]) -> None:
        for line in news:
            if self._terminal is not None:
                self._terminal.tell(line)
            else:
                self._print(line)

    def _print(self, line: str) -> None:
        encoding = sys.stdout.encoding or "utf-8"
        text = f"{self.seconds:5.0f} s  {line}\n".encode(encoding, "replace").decode(encoding)
        with contextlib.suppress(OSError):  # whoever reads the output has gone; the run goes on
            sys.stdout.write(text)
            sys.stdout.flush()
