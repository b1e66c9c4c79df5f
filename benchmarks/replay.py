"""What the two wires cost: the replay log (appends, visibility, bytes, layout), sampling, and publishing weights.

python -m benchmarks.replay [--only=append,latency,layout,sampling,tail,policy] [--folder=<on the disk to measure>]
  [--appends=32] [--repeats=5] [--window=1000000] [--parameters=100000000]

An append has 64 rows with tokens from a vocabulary of 50,000, responses of R/2 to R tokens and random log-probs, so that
compression gains no more than it does on real rows. Comparisons are interleaved, their times are medians.
"""

import functools
import json
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
from absl import app, flags, logging

from tba_jax.replay.index import ReplayIndex
from tba_jax.replay.log import LogWriter
from tba_jax.replay.reader import LogReader
from tba_jax.replay.segment import Segment
from tba_jax.replay.selection import STRATEGIES, Selection, draw_batch
from tba_jax.replay.tail import Tail
from tba_jax.trajectory import Rows, RowShape, response_mask

PARTS = ["append", "latency", "layout", "sampling", "tail", "policy"]
_ONLY = flags.DEFINE_list("only", PARTS, "Which parts to run.")
_FOLDER = flags.DEFINE_string("folder", "", "Where to write; default: the system's temporary folder.")
_APPENDS = flags.DEFINE_integer("appends", 32, "Of every writer.", lower_bound=2)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Of each time.", lower_bound=1)
_WINDOW = flags.DEFINE_integer("window", 1_000_000, "Resident rows for sampling.", lower_bound=10_000)
_PARAMETERS = flags.DEFINE_integer("parameters", 100_000_000, "Of the policy, in bfloat16.", lower_bound=1_000_000)

SHAPES = {f"P={P} R={R}": RowShape(prompt_length=P, response_length=R, reward_parts=("task",)) for P, R in ((16, 32), (512, 512))}
ROWS, SEGMENT_APPENDS, VOCAB = 64, 256, 50_000


def make_rows(shape: RowShape, first: int, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Valid rows `first` to `first + count - 1`, 16 of each query, with values as random as those of a run."""
    rows = {name: np.zeros((count, *row), dtype) for name, (dtype, row) in shape.columns().items()}
    rows["row"] = np.arange(first, first + count)
    rows["query_id"] = (rows["row"] // 16).astype(np.uint64)
    rows["reward"] = rng.normal(size=count).astype(np.float32)
    rows["key"] = rng.integers(0, 1 << 32, rows["key"].shape, np.uint32)
    R = shape.response_length
    rows["prompt_length"][:] = shape.prompt_length
    rows["response_length"] = rng.integers(R // 2, R + 1, count, np.int32)
    mask = response_mask(rows["response_length"], R)
    rows["tokens"] = rng.integers(0, VOCAB, rows["tokens"].shape, np.int32)
    rows["tokens"][:, shape.prompt_length :][~mask] = 0
    for name in ("ref_logprobs", "policy_logprobs", "behavior_logprobs"):
        rows[name] = np.where(mask, -rng.exponential(size=mask.shape), 0).astype(np.float32)
    rows["policy_step"] = np.where(mask, 7, -1).astype(np.int32)
    return rows


def row_bytes(shape: RowShape) -> int:
    return sum(np.dtype(dtype).itemsize * int(np.prod(row)) for dtype, row in shape.columns().values())


def bytes_under(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def open_log(root: Path, name: str, shape: RowShape) -> LogWriter:
    return LogWriter(root, name, shape, rows_per_append=ROWS, segment_appends=SEGMENT_APPENDS, info={})


def renumbered(rows: Rows, first: int) -> Rows:
    return {**rows, "row": np.arange(first, first + ROWS)}


def _appender(root: Path, name: str, shape: RowShape, appends: int, pause: float, barrier: Any, times: Any) -> None:
    """A writer process: puts (name, [(began, returned), …]) in seconds of the system-wide monotonic clock."""
    log, rows = open_log(root, name, shape), make_rows(shape, 0, ROWS, np.random.default_rng())
    log.append(rows)  # opens the segment; not counted
    barrier.wait()
    spans = []
    for _ in range(appends):
        began = time.monotonic()
        log.append(renumbered(rows, log.next_row))
        spans.append((began, time.monotonic()))
        time.sleep(pause)
    times.put((name, spans))


def start_appenders(root: Path, writers: int, shape: RowShape, appends: int, pause: float) -> tuple[list[Any], Any, Any]:
    """Processes that wait at the barrier, the barrier, and the queue of their times."""
    context = multiprocessing.get_context("spawn")
    barrier, times = context.Barrier(writers + 1), context.Queue()
    arguments = [(root, f"w{number}", shape, appends, pause, barrier, times) for number in range(writers)]
    processes = [context.Process(target=_appender, args=each) for each in arguments]
    for process in processes:
        process.start()
    return processes, barrier, times


def append(folder: Path, appends: int) -> None:
    print(f"appends of {ROWS} rows by writer processes, {appends} each (rows/s of all together; bytes of a row, raw and on disk)")
    for name, shape in SHAPES.items():
        for writers in (1, 2, 4, 8):
            root = folder / "append"
            processes, barrier, times = start_appenders(root, writers, shape, appends, 0.0)
            barrier.wait()
            spans = [span for _ in processes for span in times.get()[1]]
            for process in processes:
                process.join()
            seconds = max(end for _, end in spans) - min(begin for begin, _ in spans)
            stored = bytes_under(root) / (writers * (appends + 1) * ROWS)
            median = 1e3 * np.median([end - begin for begin, end in spans])
            print(
                f"  {name:12} {writers} writers {writers * appends * ROWS / seconds:8.0f} rows/s   {median:6.1f} ms an append   "
                f"{row_bytes(shape)} -> {stored:.0f} bytes ({stored / row_bytes(shape):.2f})"
            )
            shutil.rmtree(root)


def latency(folder: Path, appends: int) -> None:
    """The reader asks without pause; a trainer that polls adds up to `replay.poll_seconds`."""
    print(f"visibility: from the return (and the begin) of an append to the reader's new head, {4 * appends} appends, ms")
    for name, shape in SHAPES.items():
        root = folder / "latency"
        processes, barrier, times = start_appenders(root, 1, shape, 4 * appends, 0.01)
        barrier.wait()
        reader, last = LogReader(root, shape), ROWS * (4 * appends + 1)
        seen, seconds = [0], [0.0]
        while seen[-1] < last:
            head = reader.heads()["w0"]
            if head > seen[-1]:
                seen.append(head)
                seconds.append(time.monotonic())
        spans = np.array(times.get()[1])
        processes[0].join()
        visible = np.array(seconds)[np.searchsorted(seen, ROWS * np.arange(2, len(spans) + 2))]
        # Negative where the reader saw the commit before the writer had returned.
        for words, begin in (("return", spans[:, 1]), ("begin", spans[:, 0])):
            median, p99 = np.percentile(1e3 * (visible - begin), [50, 99])
            print(f"  {name:12} from the {words:6} median {median:6.2f}   p99 {p99:6.2f}")
        shutil.rmtree(root)


class NamedLog:
    """The alternative layout: one array a column in the same store, an append and its head one transaction."""

    def __init__(self, folder: Path, shape: RowShape):
        self._columns, self._context = shape.columns(), ts.Context()  # one context: the arrays share a B-tree writer
        database = {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{folder}/"},
            "config": {"max_decoded_node_bytes": 16384},
        }
        self._database = ts.KvStore.open(database, context=self._context).result()
        self._arrays = {name: self._open(name, dtype, row) for name, (dtype, row) in self._columns.items()}

    def _open(self, name: str, dtype: str, row: tuple[int, ...]) -> Any:
        codecs = [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "zstd", "configuration": {"level": 1}},
            {"name": "crc32c"},
        ]
        metadata = {
            "shape": [ROWS * SEGMENT_APPENDS, *row],
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [ROWS, *row]}},
            "codecs": codecs,
        }
        spec = {"driver": "zarr3", "metadata": metadata, "store_data_equal_to_fill_value": True}
        return ts.open(spec, kvstore=self._database / f"{name}/", create=True, context=self._context).result()

    def append(self, position: int, rows: Rows) -> None:
        transaction, part = ts.Transaction(atomic=True), slice(position * ROWS, (position + 1) * ROWS)
        written = [array.with_transaction(transaction)[part].write(rows[name]) for name, array in self._arrays.items()]
        self._database.with_transaction(transaction)["head"] = json.dumps({"rows": (position + 1) * ROWS}).encode()
        transaction.commit_sync()
        for each in written:
            each.result()

    def read(self, position: int) -> dict[str, np.ndarray]:
        with ts.Batch() as batch:  # the columns of an append lie side by side in one file
            part = slice(position * ROWS, (position + 1) * ROWS)
            reads = {name: array[part].read(batch=batch) for name, array in self._arrays.items()}
        return {name: np.asarray(read.result()) for name, read in reads.items()}


def layout(folder: Path, appends: int) -> None:
    print(f"layout: packed columns (the log) against named columns, {appends} appends of {ROWS} rows, interleaved")
    for name, shape in SHAPES.items():
        root, rng = folder / "layout", np.random.default_rng(0)
        root.mkdir()
        log, named, reader = (
            open_log(root / "packed", "w0", shape),
            NamedLog(root / "named", shape),
            LogReader(root / "packed", shape),
        )
        times: dict[str, list[float]] = {"packed": [], "named": [], "packed read": [], "named read": []}

        def timed(key: str, function: Callable[[], Any], times: dict[str, list[float]] = times) -> Any:
            begin = time.perf_counter()
            result = function()
            times[key].append(time.perf_counter() - begin)
            return result

        for position in range(appends + 1):
            rows = make_rows(shape, position * ROWS, ROWS, rng)
            timed("packed", functools.partial(log.append, rows))
            timed("named", functools.partial(named.append, position, rows))
        reader.heads()
        for position in range(appends + 1):
            stored = timed("packed read", functools.partial(reader.read, "w0", position * ROWS, (position + 1) * ROWS))
            columns = timed("named read", functools.partial(named.read, position))
            assert all(np.array_equal(columns[column], stored[column]) for column in stored)
        medians = {key: float(np.median(values[1:])) for key, values in times.items()}
        for key, store in (("packed", root / "packed" / "w0"), ("named", root / "named")):
            stored_bytes = bytes_under(store) / ((appends + 1) * ROWS)
            print(
                f"  {name:12} {key:6} append {1e3 * medians[key]:6.2f} ms ({medians[key] / medians['packed']:.2f})   "
                f"{ROWS / medians[key]:7.0f} rows/s   read {1e3 * medians[key + ' read']:6.2f} ms "
                f"({medians[key + ' read'] / medians['packed read']:.2f})   {stored_bytes:6.0f} bytes a row "
                f"({stored_bytes / row_bytes(shape):.2f} of raw)"
            )
        shutil.rmtree(root)


def filled_index(shape: RowShape, rows: int, capacity_per_query: int, *, one_query: bool) -> ReplayIndex:
    index = ReplayIndex(shape=shape, capacity=rows, capacity_per_query=capacity_per_query, vocab_size=VOCAB)
    rng, size = np.random.default_rng(0), rows // 100
    for step in range(1, 101):
        part = make_rows(shape, (step - 1) * size, size, rng)
        part["policy_step"] = np.where(part["policy_step"] >= 0, step - 1, -1).astype(np.int32)
        if one_query:
            part["query_id"][:] = 0
        index.add("w", part, step=step)
    return index


def sampling(window: int, repeats: int) -> None:
    shape = SHAPES["P=16 R=32"]
    for rows, Q, K in ((window, 32, 16), (100_000, 1, 128)):
        begin = time.perf_counter()
        index = filled_index(shape, rows, 100 if Q > 1 else rows, one_query=Q == 1)
        seconds = time.perf_counter() - begin
        print(
            f"sampling Q={Q} K={K} from {len(index)} rows of {int((index.query_rows > 0).sum())} queries "
            f"(made and added in {seconds:.1f} s), medians"
        )
        settings: list[dict[str, Any]] = [
            dict(recent_probability=m, strategy=strategy) for m in (0.0, 0.5, 0.95) for strategy in STRATEGIES
        ]
        settings += [settings[2] | {"max_draws_per_row": 4}, settings[2] | {"max_staleness": 90}]
        for each in settings:
            times = []
            for number in range(5 * repeats):
                rng = np.random.default_rng(number)
                fixed: dict[str, Any] = dict(queries=Q, completions=K, recent_window=3, inverse_temperature=1.0)
                selection = Selection(**fixed, **each)
                began = time.perf_counter()
                slots = draw_batch(index, selection, rng=rng, step=100)
                drawn = time.perf_counter()
                assert slots is not None
                index.mark_drawn(slots)
                marked = time.perf_counter()
                index.gather(slots)
                times.append((drawn - began, marked - drawn, time.perf_counter() - marked))
            draw, mark, gather = 1e3 * np.median(times, axis=0)
            print(f"  draw {draw:5.2f} ms   mark {mark:5.2f} ms   gather {gather:5.2f} ms   {each}")


def long_log(root: Path, name: str, shape: RowShape, *, full_segments: int) -> LogWriter:
    """A log with a long past of which only the last append has bytes.

    The folders of the full segments are empty. The last segment is a real one: its append is committed under the head that
    a writer with all those rows behind it would have written, and appends go on from there.
    """
    log = open_log(root, name, shape)
    for number in range(full_segments):
        (root / name / f"{number:06d}").mkdir(parents=True)
    segment = Segment(root / name / f"{full_segments:06d}", log._schema, create=True)
    head = full_segments * SEGMENT_APPENDS + 10
    segment.append(9, make_rows(shape, (head - 1) * ROWS, ROWS, np.random.default_rng(0)), {"appends": head, "rows": head * ROWS})
    log._next_row, log._segment, log._segment_number = head * ROWS, segment, full_segments
    return log


def tail(folder: Path, repeats: int) -> None:
    shape = SHAPES["P=16 R=32"]
    for full_segments in (0, 10):
        root = folder / "tail"
        logs = [long_log(root, f"w{number}", shape, full_segments=full_segments) for number in range(64)]
        past = LogReader(root, shape).heads()
        follower = Tail(LogReader(root, shape), past, poll_seconds=1.0)
        print(f"a poll of 64 writers with {sum(past.values())} rows behind them (simulated past), medians")
        for writing in (0, 1, 8, 64):
            times = []
            for number in range(2 * repeats + 1):
                for log in logs[:writing]:
                    log.append(make_rows(shape, log.next_row, ROWS, np.random.default_rng(number)))
                begin = time.perf_counter()
                follower.poll()
                times.append(time.perf_counter() - begin)
            print(f"  {writing:2} writers with {ROWS} new rows each   {1e3 * np.median(times[1:]):6.2f} ms")
        shutil.rmtree(root)


def policy(folder: Path, parameter_count: int, repeats: int) -> None:
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    from tba_jax import sharding
    from tba_jax.models import parameters
    from tba_jax.run import snapshots

    width = 2048
    blocks = -(-parameter_count // width**2)
    spec = parameters.ParamSpec(shape=(width, width), axes=("ffn", "embed"))
    specs = {f"block_{number}": {"weight": spec} for number in range(blocks)}
    mesh = sharding.make_mesh((1, 1, 1), setting="benchmark", devices=jax.devices()[:1])
    shardings = parameters.shardings(specs, mesh)

    def random() -> parameters.Params:
        return parameters.map_specs(lambda name, spec: jax.random.normal(jax.random.key(0), spec.shape, jnp.bfloat16), specs)

    params = jax.jit(random, out_shardings=shardings)()
    target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, shardings)
    checkpointer, number = ocp.StandardCheckpointer(), 0

    def ours(path: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
        info = snapshots.SnapshotInfo(step=1, epoch=1)
        save = functools.partial(snapshots.save, path, params, info, dtype="bfloat16", durable=False)
        return save, functools.partial(snapshots.load, path, specs, shardings, dtype="bfloat16")

    def orbax(path: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
        def save() -> None:
            checkpointer.save(path, params)
            checkpointer.wait_until_finished()

        return save, lambda: checkpointer.restore(path, target)

    times: dict[str, list[tuple[float, float]]] = {"ours": [], "orbax": []}
    for _ in range(repeats + 1):
        for name, store in (("ours", ours), ("orbax", orbax)):
            number += 1
            path = (folder / f"policy{number}").absolute()
            save, load = store(path)
            began = time.perf_counter()
            save()
            saved = time.perf_counter()
            loaded = jax.block_until_ready(load())
            times[name].append((saved - began, time.perf_counter() - saved))
            assert all(jnp.array_equal(a, b) for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True))
            shutil.rmtree(path)
    print(f"publish and load {parameters.count(specs) / 1e6:.0f}M bfloat16 parameters in one process, medians of {repeats}")
    medians = {name: np.median([sum(pair) for pair in pairs[1:]]) for name, pairs in times.items()}
    for name, pairs in times.items():
        save_seconds, load_seconds = np.median(pairs[1:], axis=0)
        print(
            f"  {name:6} {1e3 * medians[name]:6.0f} ms (save {1e3 * save_seconds:.0f}, load {1e3 * load_seconds:.0f}; "
            f"{medians[name] / medians['orbax']:.2f} of orbax)"
        )


def main(argv: Sequence[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    if _FOLDER.value:
        Path(_FOLDER.value).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_FOLDER.value or None) as name:
        folder = Path(name).absolute()
        parts: dict[str, Callable[[], None]] = {
            "append": lambda: append(folder, _APPENDS.value),
            "latency": lambda: latency(folder, _APPENDS.value),
            "layout": lambda: layout(folder, _APPENDS.value),
            "sampling": lambda: sampling(_WINDOW.value, _REPEATS.value),
            "tail": lambda: tail(folder, _REPEATS.value),
            "policy": lambda: policy(folder, _PARAMETERS.value, _REPEATS.value),
        }
        for part in _ONLY.value:
            parts[part]()


if __name__ == "__main__":
    app.run(main)
