"""config.json, and the contract that roles share."""

import json
import os

import pytest

from configs import base
from tba_jax.experiment import composition
from tba_jax.run import processes
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout
from tba_jax.storage.layout import RunDir
from tests.support import tiny_run


def join(tmp_path, overrides: dict[str, object] | None = None):
    config = tiny_run.config_with(overrides or {})
    contract_lib.join(RunDir(tmp_path / "run"), config, composition.build(config).contract)
    return config


def test_the_first_role_writes_the_config_and_others_join(tmp_path):
    config = join(tmp_path)
    stored = (tmp_path / "run" / "config.json").read_bytes()
    assert json.loads(stored)["config"] == json.loads(json.dumps(config.to_dict()))
    assert json.loads(stored)["changes"] == []
    join(tmp_path)
    # Per-role and schedule settings are no part of the contract, nor is the number format of computing.
    join(
        tmp_path,
        {"learner.learning_rate": 1.0, "searchers.count": 7, "model.compute_dtype": "bfloat16", "sampling.temperature": 2.0},
    )
    assert (tmp_path / "run" / "config.json").read_bytes() == stored
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]


def test_a_run_of_another_version_is_refused(tmp_path):
    join(tmp_path)
    run = RunDir(tmp_path / "run")
    stored = contract_lib.read(run)
    for there in (None, contract_lib.FORMAT + 1):
        layout.write_json(run.config, stored | {"format": there})
        for attempt in (join, lambda _: contract_lib.read_run(run)):
            with pytest.raises(ValueError, match=rf"config\.json has format {there}, .* {contract_lib.FORMAT}: .* new --workdir"):
                attempt(tmp_path)
    del stored["config"]["searchers"]["swap"]
    layout.write_json(run.config, stored)
    with pytest.raises(ValueError, match=r"config\.json has no setting searchers\.swap: .* new --workdir"):
        join(tmp_path)


def test_supervised_training_is_no_run_to_join(tmp_path):
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    layout.write_json(run.config, {"format": contract_lib.FORMAT, "config": {}, "contract": {"supervised": "sft"}})
    with pytest.raises(ValueError, match="run' holds supervised training"):
        join(tmp_path)


def test_another_contract_is_refused_by_field(tmp_path):
    join(tmp_path)
    changed = {
        "task.response_length": 33,
        "sampling.scoring_temperature": 0.7,
        "model.width": 64,
        "task.arithmetic.seed": 1,
        "task.missing_eos_reward": -1.0,
        "warm_start.steps": 600,
    }
    with pytest.raises(ValueError, match="belongs to a run of another contract") as refused:
        join(tmp_path, changed)
    different, _, advice = str(refused.value).partition(". A run keeps its contract: ")
    assert advice == "take its settings, or begin another run in a new --workdir"
    assert different.split("; ")[1:] == [
        "task.missing_eos_reward: None there, -1.0 here",
        "model.max_positions: 48 there, 49 here",
        "model.width: 128 there, 64 here",
        "task.response_length: 32 there, 33 here",
        "sampling.scoring_temperature: 1.0 there, 0.7 here",
        "task.arithmetic.seed: 0 there, 1 here",
        "warm_start.steps: 0 there, 600 here",
    ]


def test_another_task_is_told_first():
    there = {"banned_tokens": [1], "model": {"width": 8}, "task": {"digits": 2}, "task_name": "arithmetic"}
    told = contract_lib.differences(there, {"banned_tokens": [], "model": {"width": 16}, "task": {}, "task_name": "countdown"})
    assert told[0] == "task.name: 'arithmetic' there, 'countdown' here" and len(told) == 3
    assert [each.partition(":")[0] for each in told[1:]] == ["banned_tokens", "model.width"]  # settings follow from the task


def test_two_long_lists_are_told_by_what_one_of_them_holds():
    there = {"banned_tokens": list(range(500)), "stop_strings": ["a"]}
    (told,) = contract_lib.differences(there, there | {"banned_tokens": list(range(3, 501))})
    assert told == "banned_tokens: 500 values there, 498 here; 0, 1, 2 only there, 500 only here"
    (told,) = contract_lib.differences(there, there | {"banned_tokens": []})
    assert "500 values there, 0 here" in told and "(500) only there, none only here" in told and len(told) < 150
    (told,) = contract_lib.differences(there, there | {"stop_strings": ["b"]})
    assert told == "task.stop_strings: ['a'] there, ['b'] here"


def test_a_role_that_joins_writes_nothing(tmp_path, monkeypatch):
    """So that one which is started again while storage refuses is not told that its user made a mistake."""
    join(tmp_path)

    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(layout, "create_json", refuse)
    join(tmp_path)
    with pytest.raises(ValueError, match="cannot be written: No space left on device"):
        join(tmp_path / "elsewhere")


def test_where_a_run_began_cannot_change(tmp_path):
    contract = composition.build(tiny_run.config_with({})).contract
    run = RunDir(tmp_path / "run")
    contract_lib.join(run, tiny_run.config_with({}), contract, init_from="/other@5")
    for same in ("/other@5", ""):
        contract_lib.join(run, tiny_run.config_with({}), contract, init_from=same)
    with pytest.raises(ValueError, match=r"--init_from=/other@6: .* exists and began from the policy /other@5"):
        contract_lib.join(run, tiny_run.config_with({}), contract, init_from="/other@6")
    join(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"--init_from=/other@6: .* exists and began from what its config says"):
        contract_lib.join(RunDir(tmp_path / "plain" / "run"), tiny_run.config_with({}), contract, init_from="/other@6")


@pytest.mark.parametrize("inside", ["", "below"])
def test_a_workdir_that_cannot_be_written_is_refused(tmp_path, inside):
    (tmp_path / "file").write_text("not a folder")
    root = tmp_path / "file" / inside
    config = base.get_config()
    with pytest.raises(ValueError, match=rf"workdir '{root}' cannot be written: {tmp_path}/file is a file"):
        contract_lib.join(RunDir(root), config, composition.build(config).contract)


@pytest.mark.parametrize("name", ["policy", "reference", "replay", "checkpoints", "journal"])
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


def test_a_run_is_known_by_its_id(tmp_path):
    run = RunDir(tmp_path / "run")
    assert contract_lib.known(run, "") == run
    join(tmp_path)
    found = contract_lib.known(run, "")
    assert found.id and contract_lib.known(run, found.id) == found


def test_a_run_that_is_away_is_never_made_again(tmp_path):
    """Whoever knows its id says so, as a failure of storage, and leaves its place empty."""
    config = join(tmp_path)
    run = contract_lib.known(RunDir(tmp_path / "run"), "")
    run.root.rename(tmp_path / "away")
    contract = composition.build(config).contract
    for attempt in (
        lambda: contract_lib.known(RunDir(tmp_path / "run"), run.id),
        lambda: contract_lib.join(run, config, contract),
    ):
        with pytest.raises(processes.RunIsAway, match=r"workdir .*run is not there: it has no config\.json") as refused:
            attempt()
        assert processes.is_storage_failure(refused.value)
    assert not run.root.exists()
    join(tmp_path)
    with pytest.raises(processes.RunIsAway, match=rf"workdir .*run holds another run: .* expected {run.id}"):
        contract_lib.join(run, config, contract)


@pytest.mark.parametrize("error", [FileNotFoundError(2, "x"), NotADirectoryError(20, "x"), ValueError("no such file")], ids=repr)
def test_an_error_while_the_run_is_away_is_one_of_storage(tmp_path, error):
    join(tmp_path)
    run = contract_lib.known(RunDir(tmp_path / "run"), "")
    with pytest.raises(type(error)) as raised, contract_lib.failures_of_storage(run):
        raise error
    assert raised.value is error
    with pytest.raises(processes.RunIsAway, match="is not there") as away, contract_lib.failures_of_storage(run):
        run.root.rename(tmp_path / "away")
        raise error
    assert away.value.__cause__ is error


def test_a_new_workdir_joins_the_place_where_a_run_meets(tmp_path):
    """It has no shared.json yet, and remembers the place from then on; once it has joined, its own folder must be there too."""
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


def test_the_end_of_another_run_in_its_place_is_not_its_own(tmp_path):
    join(tmp_path)
    run = contract_lib.known(RunDir(tmp_path / "run"), "")
    layout.write_json(run.finished, {"step": 500})
    assert contract_lib.is_finished(run)
    layout.write_json(run.config, layout.read_json(run.config) | {"id": "another"})
    with pytest.raises(processes.RunIsAway, match="holds another run"):
        contract_lib.is_finished(run)


@pytest.mark.parametrize("kind", ["folder", "fifo", "loop", "deep", "torn"])
def test_what_is_no_config_is_told_in_a_sentence(tmp_path, kind):
    run = RunDir(tmp_path)
    make = {
        "folder": lambda: run.config.mkdir(),
        "fifo": lambda: os.mkfifo(run.config),
        "loop": lambda: run.config.symlink_to(run.config),
        "deep": lambda: run.config.write_text("[" * 200_000),
        "torn": lambda: run.config.write_text('{"config": '),
    }
    make[kind]()
    with pytest.raises(ValueError, match=r"config\.json (cannot be read|is no file|is not valid JSON)"):
        contract_lib.read_run(run)
