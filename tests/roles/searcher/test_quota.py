"""Backpressure counts whole batches, and a grant counts only where it was given to a searcher that waits."""

from tba_jax.roles.searcher.quota import Quota


def asked(quota: Quota) -> int:
    count = 0
    while quota.is_left and count < 100:
        quota.ask()
        count += 1
    return count


def test_a_quota_is_of_whole_batches():
    for rows, queries in ((1, 2), (8, 2), (9, 4), (16, 4), (0, 100)):
        assert asked(Quota(max_rows=rows, queries_per_batch=2, samples_per_query=4)) == queries


def test_a_snapshot_or_a_later_grant_renews_it():
    quota = Quota(max_rows=8, queries_per_batch=2, samples_per_query=4)
    assert asked(quota) == 2
    assert not quota.wait(5) and not quota.wait(5), "grants that came before it waited are not its own"
    assert quota.wait(6) and asked(quota) == 2
    assert not quota.wait(6)
    quota.renew()
    assert asked(quota) == 2
    assert not quota.wait(9) and quota.wait(10)
