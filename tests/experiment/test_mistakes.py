"""Mistakes that are gathered: one stays what it is, several are told together."""

import errno

import pytest

from tba_jax.experiment.mistakes import Mistakes, Refused
from tba_jax.run.processes import BadInput


def refuse(*sentences: str) -> int:
    if sentences:
        found = Mistakes()
        for sentence in sentences:
            found.require(False, sentence)
        found.end()
    return 3


def test_one_mistake_is_raised_as_it_was():
    found = Mistakes()
    assert found.attempt(refuse) == 3 and not found
    found.end()
    mistake = BadInput("lower steps")

    def fail() -> None:
        raise mistake

    assert found.attempt(fail) is None and found
    with pytest.raises(BadInput) as raised:
        found.end()
    assert raised.value is mistake


def test_several_are_told_together_and_each_once():
    found = Mistakes()
    found.require(True, "nothing")
    found.require(False, "a=1 is less than b=2")
    found.attempt(refuse, "c=3", "d=4")
    found.attempt(refuse, "d=4")
    with pytest.raises(Refused) as raised:
        found.end()
    assert raised.value.sentences == ("a=1 is less than b=2", "c=3", "d=4")
    assert str(raised.value) == "3 mistakes: (1) a=1 is less than b=2; (2) c=3; (3) d=4"
    more = found.copy()
    more.require(False, "e=5")
    assert not found.accepts(refuse, "f=6") and found.accepts(refuse)
    with pytest.raises(Refused) as raised:
        found.end()
    assert raised.value.sentences[3:] == ("f=6",), "what the copy found is its own"


def test_a_setting_is_not_taken_for_another_whose_name_goes_on():
    found = Mistakes()
    found.silence(["replay.capacity"])
    found.attempt(refuse, "replay.capacity=1 is less than 2", "replay.capacity_per_query=1 is less than 2")
    with pytest.raises(ValueError, match=r"^replay\.capacity_per_query=1 is less than 2$"):
        found.end()
    silent = Mistakes()
    silent.silence(["replay.capacity_per_query"])
    silent.require(False, "replay.capacity_per_query=1 is less than 2")
    assert not silent


def test_a_failure_of_storage_is_no_mistake():
    def fail() -> None:
        raise ValueError("cannot write") from OSError(errno.ENOSPC, "no space")

    with pytest.raises(ValueError, match="cannot write"):
        Mistakes().attempt(fail)
