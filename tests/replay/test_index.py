"""The resident window against a slow model of it, its ledger, and restoring it from the log."""

import numpy as np
import pytest

from tba_jax.replay.index import ReplayIndex
from tba_jax.trajectory import RowShape
from tests.replay.test_window import edit_distance

SHAPE = RowShape(prompt_length=2, response_length=3, reward_parts=("a",))

V = 5


def make_rows(first: int, queries: list[int], responses: list[tuple[int, ...]], *, steps: list[int] | None = None):
    """Valid rows of given query ids and response tokens; `steps`: policy_step of the last token (the others are 1 later)."""
    count = len(queries)
    rows = {name: np.zeros((count, *row), dtype) for name, (dtype, row) in SHAPE.columns().items()}
    rows["row"] = np.arange(first, first + count)
    rows["query_id"] = np.array(queries, np.uint64)
    rows["prompt_length"][:] = 1
    rows["policy_step"][:] = -1
    for i, response in enumerate(responses):
        rows["response_length"][i] = len(response)
        rows["tokens"][i, 1 : 1 + len(response)] = response
        step = steps[i] if steps else 0
        rows["policy_step"][i, : len(response)] = step + 1
        rows["policy_step"][i, len(response) - 1] = step
    rows["reward"] = (rows["row"] % 10).astype(np.float32)
    return rows


def index_of(capacity: int = 100, capacity_per_query: int = 100, **settings) -> ReplayIndex:
    return ReplayIndex(shape=SHAPE, capacity=capacity, capacity_per_query=capacity_per_query, vocab_size=V, **settings)


def resident(index: ReplayIndex) -> list[tuple[str, int]]:
    slots = np.flatnonzero(index.slot_query >= 0)
    return index.ids(slots[np.argsort(index.arrival[slots])])


class Model:
    """The window as a plain list of dicts, oldest first. share: of both lengths, below which two responses are near."""

    def __init__(self, capacity, capacity_per_query, keep="newest", share=0.0):
        self.keep, self.share = keep, share
        self.late = keep == "best" or share > 0
        self.capacity, self.capacity_per_query, self.rows = capacity, capacity_per_query, []
        self.evicted, self.untrained = {"duplicate": 0, "query_capacity": 0, "capacity": 0}, 0
        self.queries, self.round = {}, 0

    def add(self, writer, rows, step):
        for i in range(len(rows["row"])):
            if rows["reward"][i] != rows["reward"][i]:
                continue
            query = int(rows["query_id"][i])
            response = rows["tokens"][i, rows["prompt_length"][i] :][: rows["response_length"][i]].tolist()
            new = {"id": (writer, int(rows["row"][i])), "query": query, "response": response, "step": step, "draws": 0}
            new |= {"reward": float(rows["reward"][i]), "merged": False}
            self.rows.append(new)
            self.queries.setdefault(query, {"draws": self.round, "recent": 0})
            if not self.late:
                self.merge_row(new)
            of_query = [row for row in self.rows if row["query"] == query]
            if len(of_query) > self.capacity_per_query:
                self.evict(of_query[0], "query_capacity")
            if len(self.rows) > self.capacity:
                self.evict(self.rows[0], "capacity")
            self.queries[query]["recent"] = 0

    def leave_the_recent_window(self, steps):
        """Merges the rows before the last `steps` steps at which any resident row came."""
        recent = sorted({row["step"] for row in self.rows})[-steps:]
        for row in list(self.rows):
            if self.late and not row["merged"] and row["step"] < recent[0]:
                self.merge_row(row)

    def merge_row(self, row):
        row["merged"] = True
        older = [other for other in self.rows[: self.rows.index(row)] if other["query"] == row["query"]]
        distances = [edit_distance(other["response"], row["response"]) for other in older]
        limits = [self.share * (len(other["response"]) + len(row["response"])) for other in older]
        near = [i for i, distance in enumerate(distances) if distance == 0 or distance < limits[i]]
        if near:
            other = older[min(near, key=distances.__getitem__)]
            better = self.keep == "best" and other["reward"] > row["reward"]
            self.evict(row if better else other, "duplicate")

    def evict(self, row, rule):
        self.rows = [other for other in self.rows if other is not row]
        self.evicted[rule] += 1
        self.untrained += rule != "duplicate" and not row["draws"]
        if all(other["query"] != row["query"] for other in self.rows):
            del self.queries[row["query"]]

    def draw(self, ids):
        queries = set()
        for row in self.rows:
            row["draws"] += ids.count(row["id"])
            queries |= {row["query"]} if row["id"] in ids else set()
        for query in queries:
            self.queries[query]["draws"] += 1
            self.queries[query]["recent"] += 1
        self.round = min(query["draws"] for query in self.queries.values())


@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize("keep", ["newest", "best"])
@pytest.mark.parametrize("seed", range(4))
def test_random_operation_agrees_with_a_slow_model(seed, keep, share):
    rng = np.random.default_rng(seed)
    capacity, capacity_per_query = [(12, 3), (40, 40), (5, 2), (1, 1)][seed]
    index = index_of(capacity, capacity_per_query, merge_keep=keep, merge_edit_distance=share)
    model = Model(capacity, capacity_per_query, keep, share)
    heads = {"a": 0, "b": 0}
    for step in range(60):
        writer, count = str(rng.choice(["a", "b"])), int(rng.integers(1, 9))
        responses = [tuple(rng.integers(0, 3, rng.integers(1, 4)).tolist()) for _ in range(count)]
        rows = make_rows(heads[writer], rng.integers(0, 6, count).tolist(), responses)
        rows["reward"][rng.random(count) < 0.1] = np.nan
        heads[writer] += count
        index.add(writer, rows, step=step)
        model.add(writer, rows, step)
        index.merge(before=index.recent_since(3))
        assert index.recent_since(0) > step
        model.leave_the_recent_window(3)
        if len(index):
            numbers = np.unique(index.slot_query[index.slot_query >= 0])
            slots, group = index.rows_of(rng.permutation(numbers))
            for position in range(len(numbers)):
                own = slots[group == position]
                assert own.tolist() == np.flatnonzero(index.slot_query == index.slot_query[own[0]]).tolist()
            assert len(slots) == len(index)
            drawn = rng.choice(np.flatnonzero(index.slot_query >= 0), 3)
            model.draw(index.ids(drawn))
            index.mark_drawn(drawn)

        assert resident(index) == [row["id"] for row in model.rows]
        slots = index.slots_of([row["id"] for row in model.rows])
        assert index.row_draws[slots].tolist() == [row["draws"] for row in model.rows]
        assert index.visible_step[slots].tolist() == [row["step"] for row in model.rows]
        content = index.gather(slots)
        assert content["row"].tolist() == [row["id"][1] for row in model.rows]
        assert content["query_id"].tolist() == [row["query"] for row in model.rows]
        numbers = dict(zip(content["query_id"].tolist(), index.slot_query[slots].tolist(), strict=True))
        assert set(numbers) == set(model.queries)
        for query, number in numbers.items():
            own = [row for row in model.rows if row["query"] == query]
            assert index.query_rows[number] == len(own)
            assert index.newest_visible_step[number] == own[-1]["step"]
            assert index.query_draws[number] == model.queries[query]["draws"]
            assert index.recent_draws[number] == model.queries[query]["recent"]
        ledger = index.ledger()
        for entry in ledger.values():
            assert entry["seen"] == entry["resident"] + sum(entry["evicted"].values()) + sum(entry["rejected"].values())
        for rule, count in model.evicted.items():
            assert sum(entry["evicted"][rule] for entry in ledger.values()) == count
        assert sum(entry["evicted_untrained"] for entry in ledger.values()) == model.untrained
    assert index.slots_of([("a", 10**6), ("nobody", 0)]).tolist() == [-1, -1]
    head = index.heads["a"]
    for first, numbers in ((head - 1, [head - 1]), (head, [head, head + 2])):
        with pytest.raises(ValueError, match="writer a must be consecutive"):
            index.add("a", make_rows(first, [1] * len(numbers), [(2,)] * len(numbers)) | {"row": np.array(numbers)}, step=99)


def test_successes_are_counted_of_the_run_s_own_valid_rows_that_its_policy_sampled():
    index = index_of(success_decay=0.5)
    rows = make_rows(0, [1, 1, 1, 2], [(0,), (1,), (2,), (0,)])
    rows["reward"][:] = 1.0, np.nan, 0.25, 0.0
    index.add("a", rows, step=1)
    for writer, own in (("given-0", True), ("b", False)):
        index.add(writer, make_rows(0, [1, 2], [(3,), (3,)]), step=1, own=own)  # rewards of 0 and 1
    published = index.success_counts.published()
    assert published.query_id.tolist() == [1, 2]
    assert published.successes.tolist() == [1.25, 0] and published.trials.tolist() == [2, 1]
    # Identical responses are merged in the window, and count all the same.
    index.add("a", make_rows(4, [1], [(0,)]) | {"reward": np.float32([1])}, step=2)
    assert index.success_counts.published().trials.tolist() == [0.5 * 2 + 1, 1]


def test_near_embeddings_are_merged_within_their_query():
    shape = RowShape(prompt_length=2, response_length=4, reward_parts=(), embedding_size=2)
    index = ReplayIndex(shape=shape, capacity=9, capacity_per_query=9, vocab_size=V, merge_cosine_distance=0.1)
    degrees = np.radians([0, 40, 90, 25, 20, 20])  # cosine distance 0.1 is 25.8 degrees
    rows = {name: np.zeros((6, *row), dtype) for name, (dtype, row) in shape.columns().items()}
    rows["row"], rows["query_id"] = np.arange(6), np.array([7, 7, 7, 7, 7, 8], np.uint64)
    rows["response_length"][:], rows["tokens"][:, 0] = 1, np.arange(6) % V
    rows["embedding"] = np.stack([np.cos(degrees), np.sin(degrees)], axis=1).astype(np.float32)
    index.add("a", {name: column[:4] for name, column in rows.items()}, step=1)
    index.merge(before=2)
    # 25 degrees are 15 from row 1 and 25 from row 0: the nearest goes.
    assert [row for _, row in resident(index)] == [0, 2, 3]
    index.add("a", {name: column[4:] for name, column in rows.items()}, step=2)
    index.merge(before=3)
    assert [row for _, row in resident(index)] == [0, 2, 4, 5]
    assert index.ledger()["a"]["evicted"]["duplicate"] == 2
    spoilt = {name: column[5:].copy() for name, column in rows.items()} | {"row": np.arange(6, 7)}
    spoilt["embedding"][0, 1] = np.nan
    index.add("a", spoilt, step=3)
    assert index.ledger()["a"]["rejected"]["embedding"] == 1 and len(index) == 4
