"""GPUs that are not here: what their names say, and which role gets how many of them."""

import pytest

from tba_jax.experiment import gpus
from tests.support import tiny_run

GIB = 1 << 30


@pytest.mark.parametrize(
    "text, name, count, gib",
    [("H100x8", "H100", 8, 80), ("h100x1", "h100", 1, 80), ("L4x2@22.5", "L4", 2, 22.5), ("MI300Xx4@192", "MI300X", 4, 192)],
)
def test_a_name_says_how_many_and_how_large(text, name, count, gib):
    assert gpus.parse(text) == gpus.Gpus(name=name, count=count, memory=int(gib * GIB))


@pytest.mark.parametrize(
    "text, words", [("H100", "NAMExCOUNT"), ("H100x0", "NAMExCOUNT"), ("8", "H100x8"), ("K80x2", "K80x2@GIB")]
)
def test_what_is_no_gpu_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        gpus.parse(text)


@pytest.mark.parametrize("count, topology", [(1, "v5p:1x1x1"), (3, "v5p:2x2x1/3"), (4, "v5p:2x2x1"), (5, "v5p:2x2x2/5")])
def test_as_many_chips_stand_in(count, topology):
    assert gpus.stand_in(count) == topology


def test_too_many_to_stand_in_for():
    with pytest.raises(ValueError, match="up to 64 GPUs of a role, not 65"):
        gpus.stand_in(65)


def shares(count: int, **changes) -> dict[str, tuple[int, list[str]]]:
    found = gpus.shares(tiny_run.config(searchers__count=2, **changes), count)
    return {role: (share.count, sorted(share.beside)) for role, share in found.items()}


def test_roles_get_what_the_supervisor_gives_them():
    """Two searchers have a GPU each and the trainer the others; the evaluator sits beside a searcher if none is idle."""
    assert shares(4) == {"trainer": (2, []), "searcher": (1, ["evaluator"]), "evaluator": (1, ["searcher"])}
    assert shares(4, evaluation__enabled=False) == {"trainer": (2, []), "searcher": (1, [])}
    # Rows of 12 divide by 4 of the 5 GPUs that are left: the evaluator has the idle one.
    assert shares(7) == {"trainer": (4, []), "searcher": (1, []), "evaluator": (1, [])}
    everybody = shares(1)
    assert everybody["trainer"] == (1, ["evaluator", "searcher", "searcher"]) and everybody["searcher"][0] == 1


def test_one_process_has_all_gpus():
    found = shares(2, schedule__mode="interleaved")
    assert found["trainer"] == (2, ["evaluator", "searcher"]) and found["searcher"] == (2, ["evaluator", "trainer"])
