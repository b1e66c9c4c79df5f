"""Backpressure: how many queries a searcher may ask one snapshot (searchers.max_rows_per_snapshot)."""


class Quota:
    """Counts the queries that were asked since the newest snapshot, or since the trainer's last grant, in whole batches."""

    def __init__(self, *, max_rows: int, queries_per_batch: int, samples_per_query: int):
        """Args: max_rows: searchers.max_rows_per_snapshot, 0 = no limit."""
        self._limit = -(-max_rows // (queries_per_batch * samples_per_query)) * queries_per_batch if max_rows else None
        self._asked = 0
        # The number of grants when the searcher began to wait.
        self._grants: int | None = None

    @property
    def is_left(self) -> bool:
        """Whether another query may be asked."""
        return self._limit is None or self._asked < self._limit

    def ask(self) -> None:
        """Another query is asked."""
        self._asked += 1

    def renew(self) -> None:
        """A newer snapshot has come."""
        self._asked, self._grants = 0, None

    def wait(self, grants: int) -> bool:
        """Called while the searcher waits. Returns whether it is let go on: by a grant that was given since it began to wait.

        A grant that came before is not taken: the trainer may have waited for the very rows that this searcher was generating.

        Args: grants: how many the run has had.
        """
        if self._grants is None:
            self._grants = grants
        if grants == self._grants:
            return False
        self.renew()
        return True
