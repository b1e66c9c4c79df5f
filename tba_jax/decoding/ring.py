"""Which entries of the own caches a lane reads: the first ones, as many as the running samples need.

The entries that are read are a ring: after the last of them, steps write to the first again. A ring can become longer where no
running sample goes over its end; else it is rotated first, so that the oldest entry of the longest sample comes first. A ring
becomes shorter without being moved, as soon as the running samples lie in the shorter one.
"""

from collections.abc import Sequence


class Ring:
    """The host's side of the rings of all slots.

    Attributes: window: entries that the next call reads; position: of the next step's entry, at most `window`, which is entry 0
      again or, if the ring becomes longer, the entry after.
    """

    def __init__(self, windows: Sequence[int], chunk: int, *, lockstep: bool):
        """
        Args:
          windows: that may be chosen, ascending, the last the whole caches.
          chunk: most steps of a call; lockstep: see Engine.
        """
        self._windows, self._chunk, self._lockstep = tuple(windows), chunk, lockstep
        self.window, self.position = self._windows[-1], 0
        # Windows that were needed at most, in the last round and in this one. So a window is not given up because all samples
        # happen to be short for a few steps.
        self._needed = (self._windows[-1], 0)
        self.begin()

    def begin(self) -> None:
        """All slots are idle. In lockstep, the next samples begin together, with the shortest window."""
        self.position = 0
        if self._lockstep:
            self.window, self._needed = self._windows[0], (0, 0)
        elif self._needed[1]:
            self._next_round()

    def choose(self, longest: int) -> int:
        """Chooses the window of the next call. Returns by how many entries the rings of the window before must be rotated first.

        Args: longest: entries of the longest running sample.
        """
        needed = self._fitting(longest + self._chunk)
        self._needed = self._needed[0], max(self._needed[1], needed)
        if needed > self.window:
            by = (self.position - longest) % self.window if longest > self.position else 0
            self.window, self.position = needed, max(self.position, longest)
            return by
        kept = max(self._needed)
        if longest <= self.position <= kept:
            self.window = min(self.window, kept)
        return 0

    def advance(self, steps: int) -> None:
        """Moves the position on after a call that made `steps` decode steps."""
        self.position += steps
        if self.position > self.window:
            self.position -= self.window
            self._next_round()

    def _next_round(self) -> None:
        self._needed = self._needed[1], 0

    def _fitting(self, entries: int) -> int:
        return next((window for window in self._windows if window >= entries), self._windows[-1])
