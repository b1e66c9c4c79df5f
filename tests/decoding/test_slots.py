"""How slots are divided into groups, the lengths that programs are compiled for, and the rings of own caches."""

import numpy as np
import pytest

from tba_jax.decoding import slots as slots_lib
from tba_jax.decoding.slots import Ring


def test_sizes_by_hand():
    # (groups, width): half of a query's samples side by side, a quarter of many; a width that divides what a way has. Where a
    # batch begins at once, the samples of a query share a group if the slots allow.
    apart = {(8, 4, 2): (2, 2), (192, 24, 2): (8, 12), (64, 1, 4): (16, 1), (128, 128, 1): (4, 32), (7, 4, 1): (7, 1)}
    for lockstep, cases in ((False, apart), (True, {(64, 16, 2): (2, 16), (8, 6, 1): (4, 2)})):
        for given, expected in cases.items():
            lane = slots_lib.lane_sizes(*given, lockstep=lockstep)
            assert (lane.groups, lane.width) == expected
    assert slots_lib.windows(127, 32) == (32, 64, 96, 127) and slots_lib.windows(20, 32) == (20,)
    assert slots_lib.windows(128, 32, tiled=True) == (128,) and slots_lib.windows(304, 8, tiled=True) == (128, 256, 304)
    # Two heads of 64 fill the columns of a tile; heads of 80 are eight to five tiles. Heads stay on their device.
    heads = {(16, 64, 1): 2, (2, 64, 2): 1, (2, 128, 1): 1, (32, 80, 1): 8, (3, 64, 1): 1}
    assert [slots_lib.heads_together(*each, tiled=True) for each in heads] == list(heads.values())
    assert slots_lib.buckets(256) == (32, 64, 128, 256) and slots_lib.buckets(63) == (32, 63) and slots_lib.buckets(1) == (1,)


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
    rng, caches, seen = np.random.default_rng(0), Caches(lockstep=lockstep), set()
    for _ in range(60):
        longest = rng.choice([3, 10, 19, WINDOWS[-1]])
        for _ in range(rng.integers(1, 30)):
            seen.add(caches.call(rng.integers(1, longest + 1, SLOTS)))
    assert seen == set(WINDOWS) and caches.rotations > 5
