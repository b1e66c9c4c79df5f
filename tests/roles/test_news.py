"""Alarms and troubles are told once."""

from tba_jax.roles.news import News

from tba_jax.run import layout
from tba_jax.telemetry import alarms


def tell(run: layout.RunDir, role: str, kind: str, sentence: str = "most groups have equal rewards") -> None:
    alarms.Alarms(run.metrics(role)).tell(kind=kind, sentence=sentence, advice="raise sampling.temperature", step=3)


def test_an_alarm_is_told_once_whoever_tells_it(tmp_path):
    run = layout.RunDir(tmp_path)
    news = News(run)
    tell(run, "searcher-0", "equal_rewards")
    roles = ["trainer", "searcher-0", "joined-1"]
    assert news(roles, {}) == ["warning: most groups have equal rewards. What to do: raise sampling.temperature"]
    tell(run, "joined-1", "equal_rewards")
    assert news(roles, {}) == []
    tell(run, "joined-1", "no_end", sentence="no response ends by itself")
    assert news(roles, {}) == ["warning: no response ends by itself. What to do: raise sampling.temperature"]
    assert news(roles, {}) == []


def test_alarms_of_an_earlier_start_and_of_this_process_are_not_told_again(tmp_path):
    run = layout.RunDir(tmp_path)
    tell(run, "trainer", "old")
    news = News(run, silent=["searcher-0"])
    news.skip(["trainer", "searcher-0"])
    tell(run, "searcher-0", "logged")
    assert news(["trainer", "searcher-0"], {}) == []


def test_an_alarm_cannot_write_control_characters(tmp_path):
    run = layout.RunDir(tmp_path)
    tell(run, "trainer", "kind", sentence="1/5\x1b[2J\nbecomes 15")
    assert News(run)(["trainer"], {}) == ["warning: 1/5\\x1b[2J\\x0abecomes 15. What to do: raise sampling.temperature"]


def test_rewards_that_fail_are_told_on_lines_of_their_own_and_not_again_and_again(tmp_path):
    news, failing = News(layout.RunDir(tmp_path)), {"searcher-0": "no row has a reward: 64 of 64 failed, KeyError: 'x'"}
    assert news([], failing) == ["searcher-0: no row has a reward: 64 of 64 failed, KeyError: 'x'"]
    assert news([], {"searcher-0": "no row has a reward: 90 of 90 failed"}) == []
    assert news([], {"searcher-0": ""}) == ["searcher-0: rows have rewards again"]
    assert news([], {"searcher-0": ""}) == []


def test_a_searcher_that_died_has_no_rewards_again(tmp_path):
    news, failing = News(layout.RunDir(tmp_path)), {"searcher-0": "no row has a reward: KeyError: 'x'"}
    assert news([], failing) and news([], {}) == [] and news([], {"searcher-0": ""}) == []
    assert news([], failing), "a new life's trouble is new"
