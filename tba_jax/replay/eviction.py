"""Which row leaves a full query or a full window: the oldest, or the one of the lowest reward."""

import heapq

import numpy as np


class LowestReward:
    """The row of the lowest reward among those put in and still resident: a function of these rows alone.

    resident_arrival: int64[slots] throughout, arrival of the row in a slot, −1 where the slot is free.
    """

    def __init__(self) -> None:
        # (reward, arrival, slot). Entries of rows that left are dropped at the top, or when the heap has doubled.
        self._heap: list[tuple[float, int, int]] = []
        self._limit = 64

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, reward: float, slot: int, resident_arrival: np.ndarray) -> None:
        heapq.heappush(self._heap, (reward, int(resident_arrival[slot]), slot))
        if len(self._heap) > self._limit:
            self._heap = [entry for entry in self._heap if resident_arrival[entry[2]] == entry[1]]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + 64

    def slot(self, resident_arrival: np.ndarray) -> int:
        while resident_arrival[self._heap[0][2]] != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][2]
