"""Which row of a full query, or of a full window, leaves."""

import numpy as np

from tba_jax.replay.eviction import LowestReward


def test_the_lowest_resident_is_found_in_little_memory():
    """2,000 rows through 20 slots, some of which leave without having been asked for."""
    rng, lowest = np.random.default_rng(0), LowestReward()
    arrival, reward = np.full(20, -1), np.zeros(20)
    for row in range(2000):
        free = np.flatnonzero(arrival < 0)
        slot = int(free[0]) if len(free) else int(rng.integers(20))  # the row in it leaves
        if row % 3 == 0 and not len(free):
            slot = lowest.slot(arrival)
            assert reward[slot] == reward.min() and arrival[slot] == arrival[reward == reward.min()].min()
        arrival[slot], reward[slot] = row, rng.integers(50)
        lowest.put(reward[slot], slot, arrival)
        assert len(lowest) <= 2 * 20 + 64
