"""The resident window against a slow model of it, its ledger, and restoring it from the log."""

import json
import time

import numpy as np
import pytest

from tba_jax.replay.index import ReplayIndex
from tba_jax.replay.log import LogWriter
from tba_jax.replay.near_duplicates import NearByEdits, NearByEmbedding
from tba_jax.replay.reader import LogReader
from tba_jax.replay.selection import Selection, draw_batch
from tba_jax.trajectory import RowShape

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
    """Identities in order of arrival."""
    slots = np.flatnonzero(index.slot_query >= 0)
    return index.ids(slots[np.argsort(index.arrival[slots])])


def test_the_newest_of_identical_responses_stays():
    index = index_of()
    index.add("a", make_rows(0, [7, 7, 8], [(1, 2), (3,), (1, 2)]), step=1)
    index.mark_drawn(index.slots_of([("a", 0), ("a", 1)]))
    # The same tokens under a longer padding are the same response; (1,) and (1, 0) are not.
    index.add("b", make_rows(0, [7, 7, 7], [(1, 2), (1,), (1, 0)]), step=2)
    assert resident(index) == [("a", 1), ("a", 2), ("b", 0), ("b", 1), ("b", 2)]
    assert index.ledger()["a"]["evicted"] == {"duplicate": 1, "query_capacity": 0, "capacity": 0}
    slot = index.slots_of([("b", 0)])[0]
    assert index.row_draws[slot] == 0 and index.visible_step[slot] == 2
    query = index.slot_query[slot]
    assert index.query_draws[query] == 1 and index.recent_draws[query] == 0


def test_oldest_rows_leave_first_by_query_and_in_total():
    index = index_of(capacity=4, capacity_per_query=2)
    index.add("a", make_rows(0, [1, 2, 1, 1], [(0,), (0,), (1,), (2,)]), step=1)
    assert resident(index) == [("a", 1), ("a", 2), ("a", 3)]
    index.add("a", make_rows(4, [3, 4, 5], [(0,), (0,), (0,)]), step=2)
    assert resident(index) == [("a", 3), ("a", 4), ("a", 5), ("a", 6)]
    entry = index.ledger()["a"]
    assert entry["evicted"] == {"duplicate": 0, "query_capacity": 1, "capacity": 2}
    assert entry["evicted_untrained"] == 3
    assert sorted(index.query_ids[index.query_rows > 0].tolist()) == [1, 3, 4, 5]


def test_invalid_rows_are_counted_and_left_out():
    index = index_of()
    rows = make_rows(0, [1, 1, 1, 1], [(0,), (1,), (2,), (3,)])
    rows["tokens"][1, 1] = V
    rows["reward"][2] = np.nan
    index.add("a", rows, step=1)
    assert resident(index) == [("a", 0), ("a", 3)]
    assert {reason: count for reason, count in index.ledger()["a"]["rejected"].items() if count} == {
        "tokens": 1,
        "reward": 1,
    }
    assert index.rejected_first == {("a", "tokens"): 1, ("a", "reward"): 2}
    index.add("a", {name: column.copy() for name, column in rows.items()} | {"row": np.arange(4, 8)}, step=1)
    assert index.rejected_first == {("a", "tokens"): 1, ("a", "reward"): 2}


def test_rows_of_a_writer_are_added_once_and_in_order():
    index = index_of()
    index.add("a", make_rows(0, [1, 1], [(0,), (1,)]), step=1)
    for rows in (make_rows(1, [1], [(2,)]), make_rows(2, [1, 1], [(2,), (3,)]) | {"row": np.array([2, 4])}):
        with pytest.raises(ValueError, match="writer a"):
            index.add("a", rows, step=2)
    with pytest.raises(ValueError, match="capacity=0"):
        index_of(capacity=0)


def test_row_step_is_that_of_the_oldest_real_token():
    index = index_of()
    index.add("a", make_rows(0, [1, 1], [(0, 1, 2), (1,)], steps=[4, 9]), step=10)
    assert index.row_step[index.slots_of([("a", 0), ("a", 1)])].tolist() == [4, 9]


def test_the_lowest_reward_leaves_first_the_older_of_two():
    index = index_of(capacity=4, capacity_per_query=2, drop="lowest_reward")
    rows = make_rows(0, [1, 1, 1, 1], [(0,), (1,), (2,), (3,)])
    rows["reward"][:] = [5, 3, 3, 4]
    index.add("a", rows, step=1)
    # Row 2 ties with row 1, which is older; row 3 then displaces row 2.
    assert resident(index) == [("a", 0), ("a", 3)]
    index.mark_drawn(index.slots_of([("a", 0)]))
    rows = make_rows(4, [1, 2, 3, 4, 1], [(4,), (0,), (0,), (0,), (0,)])
    rows["reward"][:] = [1, 2, 9, 7, -1]
    index.add("a", rows, step=2)
    # Row 4 is its full query's lowest; row 7 fills the window and row 5 leaves; row 8 replaces the identical row 0.
    assert resident(index) == [("a", 3), ("a", 6), ("a", 7), ("a", 8)]
    assert index.ledger()["a"]["evicted"] == {"duplicate": 1, "query_capacity": 3, "capacity": 1}
    query = index.slot_query[index.slots_of([("a", 8)])[0]]
    assert index.recent_draws[query] == 0


def test_a_row_that_leaves_at_once_is_not_the_newest_of_its_query():
    index = index_of(capacity_per_query=2, drop="lowest_reward")
    index.add("a", make_rows(0, [1] * 4, [(0,), (1,), (2,), (3,)]) | {"reward": np.float32([5, 6, 7, 8])}, step=1)
    index.mark_drawn(index.slots_of([("a", 2), ("a", 3)]))
    index.add("b", make_rows(0, [1], [(4,)]) | {"reward": np.float32([0])}, step=9)
    assert resident(index) == [("a", 2), ("a", 3)]
    assert index.newest_visible_step[index.query_rows > 0].tolist() == [1]
    assert index.recent_draws[index.query_rows > 0].tolist() == [1]


def test_the_nearest_response_within_the_share_is_replaced():
    shape = RowShape(prompt_length=1, response_length=12, reward_parts=())
    index = ReplayIndex(
        shape=shape, capacity=50, capacity_per_query=50, vocab_size=2000, merge_edit_distance=0.25, drop="lowest_reward"
    )
    responses = [
        [5] * 8,
        [5, 69, 133, 197, 5, 69, 133, 197],  # other tokens of the same bucket
        [1, 2, 3, 4, 5, 6, 7, 8],
        [1, 2, 3, 4, 5, 6, 9, 9],  # 2 of 8 from the one before: it goes
        [1, 2, 3, 4, 5, 9, 9, 9, 9],  # 3 of 9: too far
        [2, 3, 4, 5, 6, 9, 9],  # an insertion, 1 of 8 from row 3; 3 of 9 from row 4
        [1, 2, 3, 9, 4, 5, 9, 9, 9, 9, 9],  # 2 of 11 from row 4
        [],
        [1500],
        [1501],
    ]
    rows = {name: np.zeros((len(responses), *row), dtype) for name, (dtype, row) in shape.columns().items()}
    rows["row"] = np.arange(len(responses))
    for i, response in enumerate(responses):
        rows["response_length"][i] = len(response)
        rows["tokens"][i, : len(response)] = response
    index.add("a", rows, step=1)
    assert [row for _, row in resident(index)] == [0, 1, 5, 6, 7, 8, 9]
    assert index.ledger()["a"]["evicted"] == {"duplicate": 3, "query_capacity": 0, "capacity": 0}
    # Another query's responses are not compared.
    index.add("b", {name: column[:1] for name, column in rows.items()} | {"query_id": np.uint64([3])}, step=1)
    assert len(index) == 8


def test_bad_options_are_named():
    for settings, words in [
        ({"drop": "newest"}, "drop='newest'"),
        ({"merge_edit_distance": 1.0}, "merge_edit_distance=1.0"),
        ({"merge_edit_distance": -0.1}, "merge_edit_distance=-0.1"),
        ({"merge_edit_distance": 0.1, "merge_duplicates": False}, "merge_edit_distance=0.1 .* need merge_duplicates"),
        ({"merge_edit_distance": 0.1, "merge_cosine_distance": 0.1}, "exclude each other"),
        ({"merge_cosine_distance": 2.0}, "merge_cosine_distance=2.0"),
        ({"merge_cosine_distance": 0.1}, "needs rows with an embedding"),
    ]:
        with pytest.raises(ValueError, match=words):
            index_of(**settings)


def edit_distance(a, b) -> int:
    """Levenshtein, by the table."""
    table = np.zeros((len(a) + 1, len(b) + 1), int)
    table[:, 0], table[0] = np.arange(len(a) + 1), np.arange(len(b) + 1)
    for i in range(len(a)):
        for j in range(len(b)):
            table[i + 1, j + 1] = min(table[i, j] + (a[i] != b[j]), table[i, j + 1] + 1, table[i + 1, j] + 1)
    return int(table[-1, -1])


def as_row(tokens) -> dict[str, np.ndarray]:
    lengths = {"prompt_length": np.array([1]), "response_length": np.array([len(tokens)])}
    return {"tokens": np.array([[0, *tokens]], np.int32), **lengths}


def test_the_nearest_is_the_one_that_comparing_all_finds():
    rng = np.random.default_rng(0)
    for share in (0.1, 0.6):
        near, texts, found = NearByEdits(slots=120, share=share, vocab_size=300), [], 0
        for slot in range(120):
            # Copies of earlier texts with a few tokens replaced, and texts of their own.
            text = rng.integers(0, 300, rng.integers(0, 40))
            if slot > 20 and rng.random() < 0.7:
                text = texts[rng.integers(slot)].copy()
                changed = rng.random(len(text)) < rng.choice([0.05, 0.2, 0.5])
                text[changed] = rng.integers(0, 300, changed.sum())
                text = np.delete(text, np.flatnonzero(rng.random(len(text)) < 0.05))
            texts.append(text)
            near.put(slot, as_row(text), 0)
            if slot % 4:
                continue
            distances = [edit_distance(text, other) for other in texts[:-1]]
            within = [d for d, other in zip(distances, texts, strict=False) if d <= share * max(len(text), len(other))]
            nearest = near.nearest(slot, rng.permutation(slot), np.arange(120))
            assert (nearest is None) == (not within)
            if within:
                found += 1
                assert distances[nearest] == min(within)
        assert found >= 3


def unit(vectors) -> np.ndarray:
    """float32, of length 1 along the last axis."""
    vectors = np.asarray(vectors, np.float32)
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def test_embeddings_within_the_distance_are_merged_within_their_query():
    shape = RowShape(prompt_length=2, response_length=4, reward_parts=(), embedding_size=2)
    index = ReplayIndex(shape=shape, capacity=9, capacity_per_query=9, vocab_size=V, merge_cosine_distance=0.1)
    degrees = np.radians([0, 40, 90, 25, 20, 20])  # cosine distance 0.1 is 25.8 degrees
    rows = {name: np.zeros((6, *row), dtype) for name, (dtype, row) in shape.columns().items()}
    rows["row"], rows["query_id"] = np.arange(6), np.array([7, 7, 7, 7, 7, 8], np.uint64)
    rows["response_length"][:], rows["tokens"][:, 0] = 1, np.arange(6) % V
    rows["embedding"] = np.stack([np.cos(degrees), np.sin(degrees)], axis=1).astype(np.float32)
    index.add("a", {name: column[:4] for name, column in rows.items()}, step=1)
    # 25 degrees are 15 from row 1 and 25 from row 0: the nearest goes.
    assert [row for _, row in resident(index)] == [0, 2, 3]
    index.add("a", {name: column[4:] for name, column in rows.items()}, step=1)
    assert [row for _, row in resident(index)] == [0, 2, 4, 5]
    assert index.ledger()["a"]["evicted"]["duplicate"] == 2
    spoilt = {name: column[5:].copy() for name, column in rows.items()} | {"row": np.arange(6, 7)}
    spoilt["embedding"][0, 1] = np.nan
    index.add("a", spoilt, step=1)
    assert index.ledger()["a"]["rejected"]["embedding"] == 1 and len(index) == 4


def test_the_nearest_embedding_is_the_one_that_comparing_all_finds():
    rng = np.random.default_rng(0)
    vectors = unit(rng.normal(size=(300, 4)))
    near = NearByEmbedding(slots=300, distance=0.05, embedding_size=4)
    for slot in range(300):
        near.put(slot, {"embedding": vectors}, slot)
    found = []
    for slot in range(1, 300):
        distances = [1 - float(np.dot(vectors[slot].astype(float), other)) for other in vectors[:slot].astype(float)]
        best = int(np.argmin(distances))
        nearest = near.nearest(slot, rng.permutation(slot), np.arange(300))
        assert nearest == (best if distances[best] <= 0.05 else None)
        found.append(nearest)
    assert 0 < found.count(None) < 299
    near.put(0, {"embedding": vectors}, 5)
    near.put(1, {"embedding": vectors}, 5)
    assert near.nearest(5, np.array([1, 0]), np.array([7, 3, 0, 0, 0, 0])) == 1  # of equally near ones the older


class Model:
    """The window as a plain list of dicts, oldest first."""

    def __init__(self, capacity, capacity_per_query, drop, share):
        self.drop, self.share = drop, share
        self.capacity, self.capacity_per_query, self.rows = capacity, capacity_per_query, []
        self.evicted = {"duplicate": 0, "query_capacity": 0, "capacity": 0}
        self.queries, self.round = {}, 0

    def add(self, writer, rows, step):
        for i in range(len(rows["row"])):
            if rows["reward"][i] != rows["reward"][i]:
                continue
            query = int(rows["query_id"][i])
            response = rows["tokens"][i, rows["prompt_length"][i] :][: rows["response_length"][i]].tolist()
            new = {"id": (writer, int(rows["row"][i])), "query": query, "response": response, "step": step, "draws": 0}
            new["reward"] = float(rows["reward"][i])
            same = [row for row in self.rows if row["query"] == query and self.distance(row, new) <= self.share]
            same.sort(key=lambda row: (edit_distance(row["response"], response), row["response"] != response))
            self.rows.append(new)
            self.queries.setdefault(query, {"draws": self.round, "recent": 0})
            of_query = [row for row in self.rows if row["query"] == query]
            if same:
                self.evict(same[0], "duplicate")
            elif len(of_query) > self.capacity_per_query:
                self.evict(self.leaving(of_query), "query_capacity")
            if len(self.rows) > self.capacity:
                self.evict(self.leaving(self.rows), "capacity")
            if self.rows and self.rows[-1] is new:
                self.queries[query]["recent"] = 0

    def distance(self, row, new):
        if not self.share:
            return row["response"] != new["response"]
        return edit_distance(row["response"], new["response"]) / max(len(row["response"]), len(new["response"]))

    def leaving(self, rows):
        return rows[0] if self.drop == "oldest" else min(rows, key=lambda row: row["reward"])

    def evict(self, row, rule):
        self.rows.remove(row)
        self.evicted[rule] += 1
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


@pytest.mark.parametrize("drop", ["oldest", "lowest_reward"])
@pytest.mark.parametrize("seed", range(4))
def test_random_operation_agrees_with_a_slow_model(seed, drop):
    rng = np.random.default_rng(seed)
    capacity, capacity_per_query = [(12, 3), (40, 40), (5, 2), (1, 1)][seed]
    index, model = index_of(capacity, capacity_per_query, drop=drop), Model(capacity, capacity_per_query, drop, 0)
    heads = {"a": 0, "b": 0}
    for step in range(60):
        writer, count = str(rng.choice(["a", "b"])), int(rng.integers(1, 9))
        responses = [tuple(rng.integers(0, 3, rng.integers(1, 4)).tolist()) for _ in range(count)]
        rows = make_rows(heads[writer], rng.integers(0, 6, count).tolist(), responses)
        rows["reward"][rng.random(count) < 0.1] = np.nan
        heads[writer] += count
        index.add(writer, rows, step=step)
        model.add(writer, rows, step)
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
        live = np.flatnonzero(index.query_rows > 0)
        numbers = dict(zip(index.query_ids[live].tolist(), live.tolist(), strict=True))
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
    assert index.slots_of([("a", 10**6), ("nobody", 0)]).tolist() == [-1, -1]


def test_how_rows_are_split_over_calls_makes_no_difference():
    rng = np.random.default_rng(0)
    whole, split = index_of(capacity=20, capacity_per_query=5), index_of(capacity=20, capacity_per_query=5)
    for step in range(1, 20):
        responses = [tuple(rng.integers(0, 3, 2).tolist()) for _ in range(12)]
        rows = make_rows(12 * (step - 1), rng.integers(0, 9, 12).tolist(), responses)
        whole.add("a", rows, step=step)
        for part in np.split(np.arange(12), np.sort(rng.integers(0, 13, 3))):
            split.add("a", {name: column[part] for name, column in rows.items()}, step=step)
        drawn = rng.choice(np.flatnonzero(whole.slot_query >= 0), 4)
        whole.mark_drawn(drawn)
        split.mark_drawn(drawn)
        assert split.state() == whole.state()
        for name, column in whole.gather(drawn).items():
            np.testing.assert_array_equal(split.gather(drawn)[name], column)


OPTIONS = [{}, {"drop": "lowest_reward"}, {"merge_edit_distance": 0.4}, {"merge_edit_distance": 0.4, "drop": "lowest_reward"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_restored_index_goes_on_as_the_original(tmp_path, options):
    rng, reader = np.random.default_rng(0), LogReader(tmp_path, SHAPE)
    logs = [LogWriter(tmp_path, name, SHAPE, rows_per_append=6, segment_appends=2, info={}) for name in ("a", "b")]
    original = index_of(capacity=25, capacity_per_query=6, **options)

    def integrate(indices, step):
        log = logs[step % 2]
        responses = [tuple(rng.integers(0, 3, rng.integers(1, 4)).tolist()) for _ in range(6)]
        log.append(make_rows(log.next_row, rng.integers(0, 8, 6).tolist(), responses, steps=[step] * 6))
        rows = reader.read(log.writer, log.next_row - 6, log.next_row)
        for index in indices:
            index.add(log.writer, rows, step=step)

    def draw(index, step):
        selection = Selection(
            queries=3,
            completions=4,
            recent_probability=0.5,
            recent_window=2,
            strategy="softmax",
            inverse_temperature=1.0,
        )
        slots = draw_batch(index, selection, rng=np.random.default_rng(step), step=step)
        index.mark_drawn(slots)
        return slots

    for step in range(1, 13):
        integrate([original], step)
        draw(original, step)
    state = json.loads(json.dumps(original.state()))
    restored = ReplayIndex.restore(state, LogReader(tmp_path, SHAPE))
    assert restored.state() == state
    for step in range(13, 30):
        integrate([original, restored], step)
        slots = draw(original, step)
        np.testing.assert_array_equal(draw(restored, step), slots)
        for name, column in original.gather(slots).items():
            np.testing.assert_array_equal(restored.gather(slots)[name], column)
    assert restored.state() == original.state()
    assert restored.ledger() == original.ledger()


def test_an_empty_index_is_restored(tmp_path):
    index = ReplayIndex.restore(index_of().state(), LogReader(tmp_path, SHAPE))
    assert len(index) == 0 and index.slots_of([("a", 0)]).tolist() == [-1]


def test_one_query_of_many_rows_takes_near_duplicates_in_time():
    """100,000 resident responses of up to 64 tokens: comparing with them costs milliseconds a row."""
    rng, slots, V = np.random.default_rng(0), 100_000, 50_000
    near = NearByEdits(slots=slots + 1, share=0.1, vocab_size=V)
    # Every bucket of token ids is as frequent as in text: few tokens are most of it.
    tokens = (V ** rng.random((slots, 64))).astype(np.int32) - 1
    lengths = rng.integers(32, 65, slots)
    for slot, length in enumerate(lengths.tolist()):
        near.put(slot, as_row(tokens[slot, :length]), 0)
    seconds = []
    for slot in range(10):
        response = tokens[slot, : lengths[slot]].copy()
        response[5] = V - 1
        near.put(slots, as_row(response), 0)
        begin = time.perf_counter()
        assert near.nearest(slots, np.arange(slots), np.arange(slots + 1)) == slot
        seconds.append(time.perf_counter() - begin)
    assert np.median(seconds) < 0.05, seconds
