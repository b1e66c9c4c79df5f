"""Searchers that come and go while a run trains: other devices than the trainer's, asked to stop, or of another contract."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tba_jax import trajectory
from tba_jax.commands import audit
from tba_jax.replay import journal
from tba_jax.replay.log import REGISTER
from tba_jax.run import layout
from tests.support import tiny_run

PATIENCE_SECONDS = 120  # for anything: only a hang takes that long
FIXTURES = Path(__file__).parent.parent / "fixtures"

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc, which this system lacks"),
    pytest.mark.slow,  # by default a searcher joins and leaves in test_end_to_end
]


@dataclasses.dataclass
class Role:
    """A process of the run with its log."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def cpu_seconds(self) -> float:
        """Time that it has computed, whatever else the machine does."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def fail(self, sentence: str) -> NoReturn:
        words = self.log.read_text(errors="replace").splitlines()[-8:]
        pytest.fail("\n".join([f"{self.name}: {sentence}; its last words:", *words]), pytrace=False)

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if self.process.poll() is not None:
                self.fail(f"it ended with {self.process.returncode} before {what}")
            if time.monotonic() > deadline:
                self.fail(f"{PATIENCE_SECONDS} s went by without {what}")
            time.sleep(0.1)

    def wait_for_end(self) -> int:
        """Its exit code."""
        try:
            return self.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.fail(f"it was asked to stop {PATIENCE_SECONDS} s ago and runs on")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclasses.dataclass
class Run:
    """A trainer of one device, and whoever joins it. stuck: why no test can use it any more, "" while they can."""

    root: Path
    roles: dict[str, Role] = dataclasses.field(default_factory=dict)
    stuck: str = ""

    def start(self, role: str, name: str, *flags: str, devices: int = 1) -> Role:
        environment = tiny_run.environment()
        environment["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={devices}"
        command = tiny_run.command(self.root, *SETTINGS, f"--role={role}", f"--name={name}", *flags)
        path = self.root.parent / f"{name}.log"
        with open(path, "wb") as log:
            process = subprocess.Popen(command, cwd=tiny_run.ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self.roles[name] = Role(name, process, path)
        return self.roles[name]

    def lineage(self) -> list[dict]:
        return journal.read_lineage(self.root / "journal")

    def writer(self, name: str) -> str:
        """Id of the log of the searcher `name`; "" before it has one."""
        return next((writer for writer in self.writers() if writer.startswith(name)), "")

    def writers(self) -> list[str]:
        """Ids of all logs."""
        return sorted(path.stem for path in (self.root / "replay" / REGISTER).glob("[!.]*.json"))

    def head(self, name: str) -> int:
        """Committed rows of the searcher `name`."""
        return audit.open_run(self.root).reader.heads().get(self.writer(name), 0)

    def wait_for_steps(self, count: int = 3) -> None:
        """Until the trainer has done some more steps."""
        done = len(self.lineage())
        try:
            self.roles["trainer"].wait_until(lambda: len(self.lineage()) >= done + count, "further steps")
        except pytest.fail.Exception:
            self.stuck = f"the run of this file got stuck after {done} steps, in a test before this one"
            raise


# The trainer waits for fresh rows, and searchers pause where they are far ahead, yet no two can wait for each other for ever: a
# searcher samples 16 queries of each snapshot, 8 different ones or more as its passes over the 40 are permutations, and the two
# updates until the next snapshot take 3 each, all of whose rows are there because none is merged with another.
SETTINGS = (
    "--config.learner.steps=1000000",
    "--config.publish.every_steps=2",
    "--config.evaluation.every_steps=1000000",
    "--config.replay.max_draws_per_row=1",
    "--config.replay.merge_duplicates=False",
    "--config.searchers.max_rows_per_snapshot=64",
    "--config.task.missing_eos_reward=-1.0",
)
PERMANENT = {"first": 0, "trainer": 130}  # the roles that all tests share -> exit code of each once it is asked to stop


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory) -> Iterator[Run]:
    """A trainer and a searcher at work. At the end both stop when asked to, and every row is accounted for."""
    run = Run(tmp_path_factory.mktemp("elastic") / "run")
    try:
        run.start("trainer", "trainer")
        run.roles["trainer"].wait_until((run.root / "reference" / "initial.json").exists, "the reference policy")
        run.start("searcher", "first")
        run.wait_for_steps()
        yield run
        for name, code in PERMANENT.items():
            run.roles[name].process.send_signal(signal.SIGTERM)
            assert run.roles[name].wait_for_end() == code, run.roles[name].log.read_text(errors="replace")
        text, balanced = audit.describe_ledger(audit.open_run(run.root))
        assert balanced, text
    finally:
        for role in run.roles.values():
            role.kill()


@pytest.fixture
def run(shared_run) -> Iterator[Run]:
    """The run, if it is still at work. Whoever joined it for a test is gone after it, also where the test failed."""
    if shared_run.stuck:
        pytest.fail(shared_run.stuck, pytrace=False)
    for name in PERMANENT:
        if shared_run.roles[name].process.poll() is not None:
            shared_run.roles[name].fail("it ended in a test before this one")
    yield shared_run
    for name in shared_run.roles.keys() - PERMANENT.keys():
        shared_run.roles.pop(name).kill()


def newest_snapshot(run: Run, *, before: float) -> int:
    """The newest step whose snapshot was committed before a time (of the files' clock)."""
    commits = {int(path.parent.name): path.stat().st_mtime for path in run.root.glob("policy/[0-9]*/commit.json")}
    return max(step for step, committed in commits.items() if committed < before)


def test_a_searcher_of_two_devices_joins_a_trainer_of_one(run):
    """It begins with the newest snapshot there is, and what it finds is trained on."""
    joined = run.start("searcher", "second", "--config.searchers.mesh.data=2", devices=2)
    joined.wait_until(lambda: run.writer("second"), "its log")
    writer = run.writer("second")
    description = run.root / "replay" / REGISTER / f"{writer}.json"
    assert layout.read_json(description)["info"]["devices"] == "2"
    joined.wait_until(lambda: any(writer in line["writers"] for line in run.lineage()), "a draw of its rows")
    opened = audit.open_run(run.root)
    first = opened.reader.read(writer, 0, 16)
    mask = trajectory.response_mask(first["response_length"], first["policy_step"].shape[1])
    # The log is claimed just before weights are loaded: snapshots that were committed by then are not passed over. A newer
    # one may be taken up within the batch.
    assert 0 < newest_snapshot(run, before=description.stat().st_mtime) <= first["policy_step"][mask].min()
    step = next(line["step"] for line in opened.lines if writer in line["writers"])
    text, same = audit.rebuild_batch(opened, step)
    assert same and f"{writer}:" in text
    joined.process.send_signal(signal.SIGTERM)
    assert joined.wait_for_end() == 0


ROWS = 64 * 64  # of a batch that takes a while


@pytest.mark.parametrize("stop_seconds", [100.0, 0.0], ids=["finishes", "abandons"])
def test_a_searcher_that_is_asked_to_stop_leaves_whole_appends(run, stop_seconds):
    name = f"stopped-{stop_seconds:.0f}"
    batch = ("--config.searchers.queries_per_batch=64", "--config.searchers.samples_per_query=64")
    role = run.start(
        "searcher", name, *batch, "--config.replay.segment_appends=2", f"--config.searchers.stop_seconds={stop_seconds}"
    )
    role.wait_until(lambda: run.head(name) >= 2 * ROWS, "its first batches")
    before = freeze_in_a_batch(run, name)
    begin = time.monotonic()
    role.process.send_signal(signal.SIGTERM)
    role.process.send_signal(signal.SIGCONT)
    assert role.wait_for_end() == 0, role.log.read_text(errors="replace")
    assert time.monotonic() - begin < stop_seconds + 30
    head = run.head(name)
    # A batch that is abandoned may just have been done: then it is there as a whole.
    assert head in ({before + ROWS} if stop_seconds else {before, before + ROWS})
    rows = audit.open_run(run.root).reader.read(run.writer(name), 0, head)
    assert rows["row"].tolist() == list(range(head)) and (rows["response_length"] > 0).all()
    run.wait_for_steps()


def freeze_in_a_batch(run: Run, name: str) -> int:
    """Stops the process where it has computed for a while without an append: between two batches it does next to nothing.

    Returns:
      the rows committed by then.
    """
    role, before = run.roles[name], -1
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        role.process.send_signal(signal.SIGSTOP)
        head = run.head(name)
        if head == before:
            return head
        before, since = head, role.cpu_seconds()
        role.process.send_signal(signal.SIGCONT)
        while role.cpu_seconds() < since + 0.03:
            if time.monotonic() > deadline or role.process.poll() is not None:
                role.fail(f"in {PATIENCE_SECONDS} s it was not found in the middle of a batch")


@pytest.fixture(scope="module")
def other_model(tmp_path_factory) -> Path:
    """A pretrained policy with a vocabulary and a tokenizer of its own, which knows the characters of sums too."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    folder = shutil.copytree(FIXTURES / "tiny_llama_tied", tmp_path_factory.mktemp("other") / "model")
    tokens = ["<end>", "<unk>", *"0123456789+=,#"]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.add_special_tokens(["<end>"])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_searcher_of_another_contract_disturbs_nobody(run, other_model):
    other = (f"--config.model.path={other_model}", "--config.task.response_length=7", "--config.sampling.scoring_temperature=0.7")
    config, writers = (run.root / "config.json").read_bytes(), run.writers()
    refused = tiny_run.call(tiny_run.command(run.root, *SETTINGS, "--role=searcher", *other))
    assert refused.returncode == 2 and len(refused.stderr.strip().splitlines()) == 1, refused.stderr
    assert "belongs to a run of another contract" in refused.stderr
    differences = ("model.vocab: 17 there, 48 here", "tokenizer: ", "response_length: 6 there, 7 here")
    for word in (*differences, "scoring_temperature: 1.0 there, 0.7 here"):
        assert word in refused.stderr
    assert (run.root / "config.json").read_bytes() == config and run.writers() == writers
    run.wait_for_steps()
    assert all(run.roles[name].process.poll() is None for name in PERMANENT)
