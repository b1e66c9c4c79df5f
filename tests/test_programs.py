"""What the compiler says of a program that does not fit."""

from tba_jax import programs


def test_sizes_in_what_the_compiler_says():
    told = "required for HLO temporaries (32.50G) exceeds available HBM (15.75G). HLO"
    assert programs.sizes_in(told) == [int(32.5 * 2**30), int(15.75 * 2**30)]
    assert programs.sizes_in("Used 2.00T of 95.73G hbm. Exceeded") == [2 << 40, int(95.73 * 2**30)]
    assert programs.sizes_in("error E1000 in module jit_update") == []
