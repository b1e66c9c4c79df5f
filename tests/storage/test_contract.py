"""config.json, and the contract that roles share."""

import json
import os

import pytest

from tba_jax.experiment import composition
from tba_jax.run import processes
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout
from tba_jax.storage.layout import RunDir
from tests.support import tiny_run


def join(tmp_path, overrides: dict[str, object] | None = None, **options):
    config = tiny_run.config_with(overrides or {})
    contract_lib.join(RunDir(tmp_path / "run"), config, composition.build(config).contract, **options)
    return config


def test_the_first_role_writes_the_config_and_others_join_and_write_nothing(tmp_path, monkeypatch):
    config = join(tmp_path)
    stored = (tmp_path / "run" / "config.json").read_bytes()
    assert json.loads(stored)["config"] == json.loads(json.dumps(config.to_dict())) and json.loads(stored)["changes"] == []

    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    # A role that is started again while storage refuses must not be told that its user made a mistake.
    monkeypatch.setattr(layout, "create_json", refuse)
    join(tmp_path, {"learner.learning_rate": 1.0, "searchers.count": 7, "model.compute_dtype": "bfloat16"})
    assert (tmp_path / "run" / "config.json").read_bytes() == stored
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]
    with pytest.raises(ValueError, match="cannot be written: No space left on device"):
        join(tmp_path / "elsewhere")
    (tmp_path / "file" / "run").parent.mkdir()
    (tmp_path / "file" / "run").write_text("not a folder")
    with pytest.raises(ValueError, match=rf"workdir '{tmp_path}/file/run' cannot be written: .*/run is a file"):
        join(tmp_path / "file")


def test_a_run_of_another_version_is_refused(tmp_path):
    join(tmp_path)
    run = RunDir(tmp_path / "run")
    stored = contract_lib.read(run)
    for there in (None, contract_lib.FORMAT + 1):
        layout.write_json(run.config, stored | {"format": there})
        for attempt in (join, lambda _: contract_lib.read_run(run)):
            with pytest.raises(ValueError, match=rf"config\.json has format {there}, .* {contract_lib.FORMAT}: .* new --workdir"):
                attempt(tmp_path)
    layout.write_json(run.config, stored | {"contract": {"supervised": "sft"}})
    with pytest.raises(ValueError, match="run' holds supervised training"):
        join(tmp_path)
    del stored["config"]["searchers"]["swap"]
    layout.write_json(run.config, stored)
    with pytest.raises(ValueError, match=r"config\.json has no setting searchers\.swap: .* new --workdir"):
        join(tmp_path)


def test_another_contract_is_refused_by_field(tmp_path):
    join(tmp_path)
    changed = {"task.response_length": 33, "sampling.scoring_temperature": 0.7, "model.width": 64, "task.arithmetic.seed": 1}
    with pytest.raises(ValueError, match="belongs to a run of another contract") as refused:
        join(tmp_path, changed)
    different, _, advice = str(refused.value).partition(". A run keeps its contract: ")
    assert advice == "take its settings, or begin another run in a new --workdir"
    assert different.split("; ")[1:] == [
        "model.max_positions: 48 there, 49 here",
        "model.width: 128 there, 64 here",
        "task.response_length: 32 there, 33 here",
        "sampling.scoring_temperature: 1.0 there, 0.7 here",
        "task.arithmetic.seed: 0 there, 1 here",
    ]
    # Another task is told first: its settings follow from it. Of long lists, what one of them holds.
    there = {"banned_tokens": list(range(500)), "task": {"digits": 2}, "task_name": "arithmetic"}
    told = contract_lib.differences(there, {"banned_tokens": list(range(3, 501)), "task": {}, "task_name": "countdown"})
    assert told[0] == "task.name: 'arithmetic' there, 'countdown' here" and len(told) == 2
    assert told[1] == "banned_tokens: 500 values there, 498 here; 0, 1, 2 only there, 500 only here"


def test_where_a_run_began_cannot_change(tmp_path):
    join(tmp_path)
    with pytest.raises(ValueError, match=r"--init_from=/other@6: .* exists and began from what its config says"):
        join(tmp_path, init_from="/other@6")


@pytest.mark.parametrize("name", ["policy", "journal"])
def test_folders_of_others_are_left_alone(tmp_path, name):
    """A trainer would remove from policy/ what is no snapshot of its own."""
    notes = tmp_path / "run" / name / "mine" / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("precious")
    with pytest.raises(ValueError, match=rf"workdir '{tmp_path}/run' holds no run, .*run/config.json, and yet has {name}/"):
        join(tmp_path)
    assert notes.read_text() == "precious" and not (tmp_path / "run" / "config.json").exists()
    (tmp_path / "run" / name / "mine").rename(tmp_path / "run" / "mine")
    join(tmp_path)  # an empty folder of that name, and others beside it, are no obstacle


def test_a_run_that_is_away_is_never_made_again_nor_taken_for_another(tmp_path):
    assert contract_lib.known(RunDir(tmp_path / "run"), "") == RunDir(tmp_path / "run")
    config = join(tmp_path)
    run = contract_lib.known(RunDir(tmp_path / "run"), "")
    assert run.id and contract_lib.known(run, run.id) == run
    contract = composition.build(config).contract
    error = FileNotFoundError(2, "x")
    with pytest.raises(processes.RunIsAway, match="is not there") as away, contract_lib.failures_of_storage(run):
        run.root.rename(tmp_path / "away")
        raise error
    assert away.value.__cause__ is error
    for attempt in (lambda: contract_lib.known(RunDir(run.root), run.id), lambda: contract_lib.join(run, config, contract)):
        with pytest.raises(processes.RunIsAway, match=r"workdir .*run is not there: it has no config\.json") as refused:
            attempt()
        assert processes.is_storage_failure(refused.value)
    assert not run.root.exists()
    join(tmp_path)
    with pytest.raises(processes.RunIsAway, match=rf"workdir .*run holds another run: .* expected {run.id}"):
        contract_lib.join(run, config, contract)
    layout.write_json(run.finished, {"step": 500})
    with pytest.raises(processes.RunIsAway, match="holds another run"):
        contract_lib.is_finished(run)
    assert contract_lib.is_finished(contract_lib.known(RunDir(tmp_path / "run"), ""))
    with pytest.raises(ValueError, match="no such file"), contract_lib.failures_of_storage(RunDir(tmp_path / "run")):
        raise ValueError("no such file")


def test_a_new_workdir_joins_the_place_where_a_run_meets(tmp_path):
    config, there = tiny_run.config_with({}), tmp_path / "meets"
    contract = composition.build(config).contract
    contract_lib.join(RunDir(tmp_path / "a", there), config, contract)
    run = contract_lib.known(RunDir(tmp_path / "b", there), "")
    assert not run.id
    contract_lib.join(run, config, contract)
    assert layout.open_run_dir(tmp_path / "b") == RunDir(tmp_path / "b", there)
    joined = contract_lib.known(run, "")
    assert joined.id == contract_lib.known(RunDir(tmp_path / "a", there), "").id
    (tmp_path / "b").rename(tmp_path / "away")
    with pytest.raises(processes.RunIsAway, match=r"b is not there: it has no shared\.json"):
        contract_lib.check_is_there(joined)


@pytest.mark.parametrize(
    "make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to(path), lambda path: path.write_text("[" * 200_000)]
)
def test_what_is_no_config_is_told_in_a_sentence(tmp_path, make):
    make(tmp_path / "config.json")
    with pytest.raises(ValueError, match=r"config\.json (cannot be read|is no file|is not valid JSON)"):
        contract_lib.read_run(RunDir(tmp_path))
