"""How slots are divided into groups, and the lengths that programs are compiled for."""

from tba_jax.decoding import sizes as sizes_lib


def test_arrangements_and_buckets_by_hand():
    # (groups, width): half of a query's samples side by side, a quarter of many; a width that divides what a way has.
    assert sizes_lib.arrange(8, 4, 1) == (4, 2) and sizes_lib.arrange(8, 4, 2) == (2, 2)
    assert sizes_lib.arrange(64, 16, 1) == (8, 8) and sizes_lib.arrange(192, 24, 2) == (8, 12)
    assert sizes_lib.arrange(4, 6, 1) == (2, 2) and sizes_lib.arrange(64, 1, 4) == (16, 1)
    # Where a batch begins at once, the samples of a query share a group if the slots allow.
    assert sizes_lib.arrange(64, 16, 2, lockstep=True) == (2, 16) and sizes_lib.arrange(7, 7, 1, lockstep=True) == (1, 7)
    assert sizes_lib.arrange(8, 6, 1, lockstep=True) == sizes_lib.arrange(8, 6, 1) == (4, 2)
    assert sizes_lib.arrange(128, 128, 1) == (4, 32) and sizes_lib.arrange(7, 4, 1) == (7, 1)
    assert sizes_lib.windows(127, 32) == (32, 64, 96, 127) and sizes_lib.windows(20, 32) == (20,)
    assert sizes_lib.windows(128, 32, tiled=True) == (128,) and sizes_lib.windows(304, 8, tiled=True) == (128, 256, 304)
    # Two heads of 64 fill the columns of a tile; heads of 80 are eight to five tiles. Heads stay on their device.
    together = [
        sizes_lib.heads_together(heads, size, ways, tiled=True)
        for heads, size, ways in [(16, 64, 1), (2, 64, 2), (2, 128, 1), (8, 256, 1), (32, 80, 1), (3, 64, 1)]
    ]
    assert together == [2, 1, 1, 1, 8, 1] and sizes_lib.heads_together(16, 64, 1, tiled=False) == 1
    assert sizes_lib.buckets(256) == (32, 64, 128, 256) and sizes_lib.buckets(100) == (50, 100)
    assert sizes_lib.buckets(64) == (32, 64) and sizes_lib.buckets(63) == (32, 63) and sizes_lib.buckets(1) == (1,)
