"""A run in whose every text stands something that a page or a terminal must not obey. Nothing is trained."""

import json
from pathlib import Path

import numpy as np

from tba_jax import trajectory
from tba_jax.experiment import composition
from tba_jax.replay import journal
from tba_jax.replay.log import LogWriter
from tba_jax.storage import contract, layout, places
from tba_jax.telemetry.alarms import Alarms
from tba_jax.text.tokenizers import CharacterTokenizer
from tests.support import tiny_run

# Each would set window.owned, load an image or change the order of the text that follows.
STRINGS = (
    "<script>window.owned=1</script>",
    "</script><script>window.owned=2</script>",
    '"><img src=http://127.0.0.1:9/x onerror="window.owned=3">',
    "'><svg onload=window.owned=4>",
    '<a href="javascript:window.owned=5">x</a>',
    "{{7*7}}{% raw %}${7*7}",
    "\u202e\u2066txet\x1b]0;owned\x07",
    "<!--</style><style>*{display:none}</style>",
)
_ALPHABET = "".join(sorted({character for text in STRINGS for character in text} | set("0123456789+=")))
LENGTH = max(map(len, STRINGS)) + 1
ROWS = 2 * len(STRINGS)  # the first half has the strings as prompts, the second as responses


def make(workdir: Path, shared: places.Place | None = None) -> layout.RunDir:
    """The run, whose roles meet in `shared`, None: in the workdir.

    Its one writer is `w0`; step 1 drew its first four rows, step 2 the first two again.
    """
    run, config = layout.RunDir(workdir, shared), tiny_run.config()
    contract.join(run, config, composition.build(config).contract)
    _rewrite_config(run)
    shape = contract.of(contract.read_run(run), called="the test").row_shape()
    info = {"host": STRINGS[0], "devices": STRINGS[2], "pid": 1, "started": 1_000.0}
    log = LogWriter(run.replay, "w0", shape, info=info)
    rows = _rows(shape)
    for start in range(0, ROWS, 4):
        log.append({name: column[start : start + 4] for name, column in rows.items()})
    history = journal.Journal(run.journal, 1)
    for step, drawn in ((1, 4), (2, 2)):
        batch = {name: column[:drawn] for name, column in rows.items()}
        visible = [{"heads": {"w0": ROWS}, "skipped": {}}]
        ids = [("w0", row) for row in range(drawn)]
        history.append(journal.journal_line(step=step, visible=visible, ids=ids, reward_version=1, key=step, rows=batch))
    history.close()
    _write_roles(run)
    return run


def _rewrite_config(run: layout.RunDir) -> None:
    """An alphabet that can spell the strings, and the strings as values of settings."""
    stored = layout.read_json(run.config)
    stored["contract"] |= {"alphabet": _ALPHABET, "tokenizer": CharacterTokenizer(_ALPHABET).fingerprint}
    stored["contract"] |= {"prompt_length": LENGTH, "response_length": LENGTH}
    stored["contract"] |= {"stop_strings": [STRINGS[1]], "reward_parts": ["correct", STRINGS[3]]}
    stored["config"]["task"]["custom"] = {f"text{i}": text for i, text in enumerate(STRINGS)}
    stored["config"]["task"] |= {"prompt_length": LENGTH, "response_length": LENGTH, "name": STRINGS[1]}
    stored["init_from"], stored["changes"] = STRINGS[2], [{"setting": STRINGS[0], "to": STRINGS[6]}]
    layout.write_json(run.config, stored)


def _rows(shape: trajectory.RowShape) -> dict[str, np.ndarray]:
    tokenizer = CharacterTokenizer(_ALPHABET)
    plain, rng = tokenizer.encode("1+1="), np.random.default_rng(0)
    hostile = [tokenizer.encode(text) for text in STRINGS]
    prompts = [*hostile, *[plain] * len(STRINGS)]
    responses = [*[[tokenizer.eos_id]] * len(STRINGS), *([*text[1:], tokenizer.eos_id] for text in hostile)]
    rows = {name: np.zeros((ROWS, *size), dtype) for name, (dtype, size) in shape.columns().items()}
    P, R = shape.prompt_length, shape.response_length
    rows |= trajectory.token_columns(prompts, responses, prompt_length=P, response_length=R, pad_id=0)
    mask = trajectory.response_mask(rows["response_length"], R)
    rows["row"] = np.arange(ROWS)
    rows["query_id"] = np.array([trajectory.query_id(prompt) for prompt in prompts], np.uint64)
    rows["reward"] = np.linspace(-1, 1, ROWS, dtype=np.float32)
    rows["policy_step"] = np.where(mask, np.arange(ROWS)[:, None] // 8, -1).astype(np.int32)
    rows["reference_id"] = np.full(ROWS, 7, np.uint64)
    rows["reference_id"][3] = 0  # it has no reference's score
    for name in ("ref_logprobs", "policy_logprobs", "behavior_logprobs"):
        rows[name] = np.where(mask, -rng.exponential(size=mask.shape), 0.0).astype(np.float32)
    return rows


def _write_roles(run: layout.RunDir) -> None:
    """Metrics, statuses and alarms of a trainer, and of a role whose name is one of the strings."""
    for role in ("trainer", STRINGS[2].replace("/", "∕")):
        folder = run.metrics(role)
        folder.mkdir(parents=True)
        lines = []
        for step in range(1, 21):
            shares = {f"time_{STRINGS[2]}": 0.5, "time_wait_rows": 0.25, "time_other": 0.25}
            lines.append({"step": step, "time": 1_000.0 + step, "reward": step / 20, "loss": 1.0, STRINGS[0]: 1.0, **shares})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        process = {"started": 1_000.0, "host": STRINGS[0], "devices": STRINGS[2], "pid": 1}
        process |= {"versions": {STRINGS[0]: STRINGS[3]}, "code": {"version": STRINGS[2], "commit": STRINGS[1]}}
        status = {"waits": STRINGS[0], "since": 1_000.0, "trouble": STRINGS[2], "phase": STRINGS[3], "process": process}
        (folder / "status.json").write_text(json.dumps(status))
        Alarms(folder).tell(kind=STRINGS[5], sentence=STRINGS[2], advice=STRINGS[1], step=3)


def more_rows(run: layout.RunDir, writer: str, **columns: object) -> None:
    """Four rows of another writer, zero but for the columns given."""
    shape = contract.of(contract.read_run(run), called="the test").row_shape()
    rows = {name: np.zeros((4, *size), dtype) for name, (dtype, size) in shape.columns().items()}
    for name, values in ({"row": np.arange(4)} | columns).items():
        rows[name][:] = values
    LogWriter(run.replay, writer, shape, info={"started": 1e300}).append(rows)
