"""What became of every row: per writer, committed = resident + evicted + rejected + damaged + expired + passed over + unseen."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tba_jax.replay.gaps import KINDS
from tba_jax.replay.index import ReplayIndex


@dataclasses.dataclass(frozen=True, kw_only=True)
class Account:
    """One writer's rows.

    evicted: by rule (index.EVICTIONS); rejected: by reason (validation.REJECTIONS); evicted_untrained: evicted by a
    capacity before any draw, a part of evicted; expired: removed by retention before they were read; passed_over: left out by
    a trainer that was far behind; unseen: not read yet.
    """

    committed: int
    resident: int
    evicted: dict[str, int]
    rejected: dict[str, int]
    evicted_untrained: int
    damaged: int
    expired: int
    passed_over: int
    unseen: int

    @property
    def balances(self) -> bool:
        kept_out = sum(self.evicted.values()) + sum(self.rejected.values()) + self.damaged + self.expired + self.passed_over
        return self.committed == self.resident + kept_out + self.unseen and self.unseen >= 0


def accounts(index: ReplayIndex, committed: Mapping[str, int]) -> dict[str, Account]:
    """Writer -> its account. committed: rows in each writer's log."""
    ledger = index.ledger()
    nothing = {"resident": 0, "evicted": {}, "rejected": {}, "evicted_untrained": 0, **dict.fromkeys(KINDS, 0)}
    found = {}
    for writer in sorted(set(committed) | set(ledger)):
        total, entry = committed.get(writer, 0), ledger.get(writer, nothing)
        counts: dict[str, Any] = {name: value for name, value in entry.items() if name != "seen"}
        found[writer] = Account(committed=total, unseen=total - index.heads.get(writer, 0), **counts)
    return found
