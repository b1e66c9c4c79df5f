"""The window of the rings: it holds what running samples have made, whatever their lengths, and follows these lengths."""

import numpy as np
import pytest

from tba_jax.decoding.sizes import Ring

WINDOWS, CHUNK, SLOTS = (8, 16, 24, 31), 5, 6


class Caches:
    """The own caches of slots that always run: in each entry stands the step that wrote it."""

    def __init__(self, *, lockstep: bool):
        self.ring = Ring(WINDOWS, CHUNK, lockstep=lockstep)
        self.entries = np.full(WINDOWS[-1], -1)
        self.made = np.zeros(SLOTS, int)  # entries of the sample of each slot
        self.step = 0
        self.rotations = 0

    def call(self, lengths: np.ndarray) -> int:
        """A chunk in which a sample ends and another begins wherever it has as many entries as `lengths`. Returns the window."""
        window = self.ring.window
        if by := self.ring.choose(int(self.made.max())):
            self.entries[:window] = np.roll(self.entries[:window], -by)
            self.rotations += 1
        window = self.ring.window
        for t in range(CHUNK):
            entry = (self.ring.position + t) % window
            self.entries[entry] = self.step
            self.made += 1
            # Exactly the last steps, as the mask of the decode loop finds them.
            age = (entry - np.arange(window)) % window
            for made in self.made:
                assert sorted(self.entries[:window][age < made]) == list(range(self.step - made + 1, self.step + 1))
            self.step += 1
            self.made[self.made >= lengths] = 0
        self.ring.advance(CHUNK)
        return window


@pytest.mark.parametrize("lockstep", [False, True])
def test_every_running_sample_finds_its_entries(lockstep):
    """Spells of short, long and mixed samples."""
    rng, caches, seen = np.random.default_rng(0), Caches(lockstep=lockstep), set()
    for _ in range(60):
        longest = rng.choice([3, 10, 19, WINDOWS[-1]])
        for _ in range(rng.integers(1, 30)):
            seen.add(caches.call(rng.integers(1, longest + 1, SLOTS)))
    assert seen == set(WINDOWS) and caches.rotations > 5


def test_a_stream_of_short_samples_reads_a_short_window_after_one_round():
    caches = Caches(lockstep=False)
    windows = [caches.call(np.full(SLOTS, 3)) for _ in range(30)]
    # The whole caches for a round of 31 entries, and until the samples lie in the shorter ring.
    assert windows == [31] * 7 + [8] * 23 and not caches.rotations
    assert [caches.call(np.full(SLOTS, 25)) for _ in range(3)] == [8, 16, 16]
