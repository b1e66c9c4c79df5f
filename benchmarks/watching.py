"""What a long run costs who watches it: seconds and size of its report, and seconds of pages of its viewer.

python -m benchmarks.watching [--rows=1000000] [--steps=100000] [--batch=64] [--pages=20] [--folder=DIR] [--noreport]

The run is made here, file by file as roles write them: config.json, rows of four writers, a journal of two trainers, metrics,
statuses and evaluations. Its numbers are random. Pages have 50 rows, are asked for over HTTP one after the
other, and begin at random places of what each filter leaves. The target is below 300 ms.
"""

import dataclasses
import hashlib
import http.client
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import numpy as np
from absl import app, flags

from configs import base
from tba_jax import trajectory
from tba_jax.experiment import composition
from tba_jax.replay import gaps
from tba_jax.replay.journal import journal_line
from tba_jax.replay.log import LogWriter
from tba_jax.run import contract as contract_lib
from tba_jax.run import layout

_ROWS = flags.DEFINE_integer("rows", 1_000_000, "Of the replay log.", lower_bound=1024)
_STEPS = flags.DEFINE_integer("steps", 100_000, "Of the journal.", lower_bound=100)
_BATCH = flags.DEFINE_integer("batch", 64, "Rows of a step.", lower_bound=1)
_PAGES = flags.DEFINE_integer("pages", 20, "Of each filter.", lower_bound=2)
_FOLDER = flags.DEFINE_string("folder", "", "Where the run is made, or is from an earlier time; default: a temporary folder.")
_REPORT = flags.DEFINE_bool("report", True, "Whether the report is made, too.")

_WRITERS = tuple(f"searcher-{number}-4f0c{number}a7e" for number in range(4))
_ROWS_PER_APPEND, _SEGMENT_APPENDS = 64, 512
_QUERIES = 5000
_EVALUATIONS = 100
_LINES_EVERY = 5  # steps
_FIGURES = (
    "advantage_std",
    "beta",
    "effective_sample_share",
    "entropy",
    "equal_reward_groups",
    "finite",
    "grad_norm",
    "kl_to_ref",
    "kl_to_ref_k3",
    "log_weight_std",
    "log_z",
    "log_z_std",
    "loss",
    "ratio_clipped",
    "ratio_max",
    "ratio_mean",
    "response_length",
    "reward",
    "skipped_steps",
    "useful_token_share",
    "staleness_mean",
    "staleness_max",
    "steps_per_second",
    "buffer_rows",
    "buffer_queries",
    "rows_seen",
    "time_update",
    "time_draw",
    "time_wait_rows",
    "time_publish",
    "time_other",
)


def make(folder: Path, *, rows: int, steps: int, batch: int) -> None:
    """Writes the run."""
    config, run = base.get_config(), layout.RunDir(folder)
    config.learner.steps = steps
    contract = composition.build(config).contract
    contract_lib.join(run, config, contract)
    shape, each = contract.row_shape(), -(-rows // len(_WRITERS) // _ROWS_PER_APPEND) * _ROWS_PER_APPEND
    for number, writer in enumerate(_WRITERS):
        _write_rows(run, writer, shape, count=each, steps=steps, seed=number, alphabet=contract.alphabet)
    _write_journal(run.journal, steps=steps, batch=batch, rows=each)
    _write_role(run.metrics("trainer"), range(_LINES_EVERY, steps + 1, _LINES_EVERY), steps / 10, steps=steps)
    for number in range(2):
        _write_role(run.metrics(f"searcher-{number}"), range(1, steps // 10), steps / 10, steps=steps)
    run.evaluations.mkdir()
    for step in np.linspace(0, steps, _EVALUATIONS).astype(int).tolist():
        samples = {"greedy": [{"query": f"{i}+1=", "response": "#1", "reward": 1.0, "finished": True} for i in range(8)]}
        report = {"greedy_reward": step / steps, "queries": 256, "step": step, "samples": samples}
        layout.write_json(run.evaluations / f"{layout.step_name(step)}.json", report)


def _write_rows(
    run: layout.RunDir, writer: str, shape: trajectory.RowShape, *, count: int, steps: int, seed: int, alphabet: str
) -> None:
    rng, P, R = np.random.default_rng(seed), shape.prompt_length, shape.response_length
    prompts = [np.random.default_rng(query).integers(3, 3 + len(alphabet), P // 2).tolist() for query in range(_QUERIES)]
    ids = np.array([trajectory.query_id(prompt) for prompt in prompts], np.uint64)
    log = LogWriter(
        run.replay, writer, shape, rows_per_append=_ROWS_PER_APPEND, segment_appends=_SEGMENT_APPENDS, info={"host": "here"}
    )
    for begin in range(0, count, _ROWS_PER_APPEND):
        rows = {name: np.zeros((_ROWS_PER_APPEND, *size), dtype) for name, (dtype, size) in shape.columns().items()}
        queries = rng.integers(0, _QUERIES, _ROWS_PER_APPEND)
        responses = [rng.integers(3, 3 + len(alphabet), rng.integers(1, R + 1)) for _ in queries]
        rows |= trajectory.token_columns(
            [prompts[query] for query in queries], responses, prompt_length=P, response_length=R, pad_id=0
        )
        mask = trajectory.response_mask(rows["response_length"], R)
        rows["row"], rows["query_id"] = np.arange(begin, begin + _ROWS_PER_APPEND), ids[queries]
        rows["reward"] = rng.integers(0, 2, _ROWS_PER_APPEND).astype(np.float32)
        rows["finished"] = rows["response_length"] < R
        rows["policy_step"] = np.where(mask, begin * steps // count, -1).astype(np.int32)
        for name in ("ref_logprobs", "policy_logprobs", "behavior_logprobs"):
            rows[name] = np.where(mask, -rng.exponential(size=mask.shape), 0.0).astype(np.float32)
        log.append(rows)


def _write_journal(folder: Path, *, steps: int, batch: int, rows: int) -> None:
    """Lines of two trainers. Args: rows: of each writer."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for epoch, (first, stop) in enumerate(((1, steps // 2), (steps // 2, steps + 1)), start=1):
        with open(folder / f"epoch-{epoch:06d}.jsonl", "w") as file:
            for step in range(first, stop):
                head = max(batch, rows * step // steps)
                drawn = rng.integers(max(0, head - 10_000), head, batch)
                ids = [
                    (_WRITERS[writer], row)
                    for writer, row in zip(rng.integers(0, 4, batch).tolist(), drawn.tolist(), strict=True)
                ]
                visible = [gaps.integration(dict.fromkeys(_WRITERS, head))]
                line = journal_line(step=step, visible=visible, ids=ids, reward_version=1, key=step - 1, rows={})
                line |= {"batch": hashlib.sha256(b"%d" % step).hexdigest(), "epoch": epoch}
                file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _write_role(folder: Path, numbers: range, seconds: float, *, steps: int) -> None:
    """Metrics at these steps or batches, and a status. Args: seconds: that the run took."""
    folder.mkdir(parents=True)
    rng, begin = np.random.default_rng(0), 1.7e9
    with open(folder / "metrics.jsonl", "w") as file:
        for number in numbers:
            at = begin + seconds * number / numbers.stop
            figures = dict(zip(_FIGURES, np.round(rng.random(len(_FIGURES)), 12).tolist(), strict=True))
            histogram = {"counts": [64, 32, 16, 8], "edges": [0.0, 1.0, 2.0, 3.0, 4.0]}
            line = {"step": number, "time": at, **figures, "policy_step": number * steps // numbers.stop}
            file.write(json.dumps({**line, "staleness_histogram": histogram}) + "\n")
    (folder / "status.json").write_text(json.dumps({"time": begin, "process": {"started": begin, "host": "here"}}))


def time_report(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        output, begin = Path(place) / "report.html", time.perf_counter()
        command = [sys.executable, "-m", "tba_jax", "report", f"--workdir={folder}", f"--output={output}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"JAX_PLATFORMS": "cpu"})
        seconds, size = time.perf_counter() - begin, output.stat().st_size / 1e6
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"report: {seconds:.1f} s, {size:.1f} MB, at most {peak:.2f} GiB of memory", flush=True)


@dataclasses.dataclass(kw_only=True)
class Client:
    """A browser without a screen."""

    connection: http.client.HTTPConnection
    cookie: str

    def get(self, path: str) -> tuple[float, str]:
        """Seconds and content."""
        begin = time.perf_counter()
        self.connection.request("GET", path, headers={"Cookie": self.cookie})
        answer = self.connection.getresponse()
        content = answer.read().decode()
        if answer.status != 200:
            raise RuntimeError(f"{path} was answered {answer.status}")
        return time.perf_counter() - begin, content


def time_viewer(folder: Path, *, pages: int) -> None:
    command = [sys.executable, "-m", "tba_jax", "view", f"--workdir={folder}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        began = time.perf_counter()
        parts = urlsplit(process.stdout.readline().strip())
        connection = http.client.HTTPConnection("127.0.0.1", parts.port or 0)
        connection.request("GET", f"/?{parts.query}")
        answer = connection.getresponse()
        answer.read()
        client = Client(connection=connection, cookie=(answer.getheader("Set-Cookie") or "").partition(";")[0])
        try:
            first, _ = client.get("/run/0/rows")
            print(
                f"viewer: it serves after {time.perf_counter() - began:.1f} s; the first page of rows took {first:.2f} s",
                flush=True,
            )
            _time_pages("while the run is read", client, {}, pages)
            while "The run is being read" in client.get("/run/0/evaluations")[1]:
                time.sleep(0.2)
            print(f"  all is read {time.perf_counter() - began:.1f} s after the start", flush=True)
            _time_all(client, pages)
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = re.search(r"VmHWM:\s*(\d+)", status)
            print(f"  at most {int(peak[1]) / 2**20 if peak else 0:.2f} GiB of memory")
        finally:
            process.terminate()


def _time_all(client: Client, pages: int) -> None:
    _, content = client.get("/run/0/rows")
    query = re.findall(r"/run/0/query/([0-9a-f]{16})", content)[0]
    filters: dict[str, dict[str, str]] = {
        "no filter": {},
        "lowest reward first": {"order": "worst"},
        "query": {"query": query},
        "reward from 0.5": {"reward_from": "0.5"},
        "writer": {"writer": _WRITERS[1]},
        "policy steps": {"step_from": "1000", "step_to": "70000"},
        "cut responses, longest first": {"finished": "no", "order": "longest"},
        "text that is frequent": {"text": "1"},
        "text that is nowhere": {"text": "no such text"},
    }
    for name, asked in filters.items():
        _time_pages(name, client, asked, pages)
    seconds = [client.get(f"/run/0/step/{step}")[0] for step in np.random.default_rng(0).integers(1, _STEPS.value, pages)]
    _tell("pages of steps", seconds)
    rows = np.random.default_rng(1).integers(0, _ROWS.value // len(_WRITERS), pages)
    _tell("pages of one row", [client.get(f"/run/0/row/{_WRITERS[2]}/{row}")[0] for row in rows])
    _tell("overview", [client.get("/run/0/")[0] for _ in range(pages)])
    _tell("queries", [client.get(f"/run/0/queries?page={page + 1}")[0] for page in range(pages)])
    _tell(f"one query of {_ROWS.value // _QUERIES} rows", [client.get(f"/run/0/query/{query}")[0] for _ in range(pages)])


def _time_pages(name: str, client: Client, asked: dict[str, str], pages: int) -> None:
    _, content = client.get(f"/run/0/rows?{urlencode(asked)}")
    total = re.search(r"([\d,]+) rows match", content)
    last = max(1, int(total[1].replace(",", "")) // 50) if total else 1
    numbers = np.random.default_rng(0).integers(1, last + 1, pages)
    texts = [urlencode({**asked, "page": number} if total else {**asked, "at": 50 * number}) for number in numbers.tolist()]
    _tell(name, [client.get(f"/run/0/rows?{text}")[0] for text in texts])


def _tell(name: str, seconds: Sequence[float]) -> None:
    ranked = sorted(1000 * each for each in seconds)
    high = ranked[min(len(ranked) - 1, int(0.95 * len(ranked)))]
    print(f"  {name:32} median {statistics.median(ranked):6.0f} ms, 95 % {high:6.0f} ms, worst {ranked[-1]:6.0f} ms", flush=True)


def main(arguments: Sequence[str]) -> None:
    del arguments
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(_FOLDER.value or temporary) / "run"
        if not folder.exists():
            begin = time.perf_counter()
            make(folder, rows=_ROWS.value, steps=_STEPS.value, batch=_BATCH.value)
            print(f"{_ROWS.value:,} rows and {_STEPS.value:,} steps were made in {time.perf_counter() - begin:.0f} s", flush=True)
        time_viewer(folder, pages=_PAGES.value)
        if _REPORT.value:
            time_report(folder)


if __name__ == "__main__":
    app.run(main)
