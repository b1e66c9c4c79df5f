"""The entry: bad input is one sentence and exit code 2, with nothing compiled or written."""

import json
import os
import signal
from pathlib import Path

import jax
import pytest

from tba_jax import main
from tba_jax.commands import command_line
from tba_jax.run import processes
from tba_jax.storage import contract, layout
from tests.commands.test_command_line import refusal
from tests.support import random_checkpoints, tiny_run

REFUSALS = {
    "misspelt key": (["--config.learner.learning_rat=1"], ["'learner.learning_rat'", "did you mean 'learner.learning_rate'"]),
    "recipe without its baseline": (
        ["--config=configs/demo_baselines.py"],
        ["no baseline is named", "takes one of reinforce, rloo"],
    ),
    "mesh without devices": (["--config.searchers.mesh.data=4"], ["searchers.mesh data=4", "1 devices"]),
    "profile without a window": (["--profile=5"], ["--profile=5 is not START:STEPS, two numbers from 1 on"]),
    "worked examples": (["--config.warm_start.steps=5", "--config.task.response_length=3"], ["tokens", "(task.response_length)"]),
    "role": (["--role=nobody"], ["nobody", "trainer"]),
    "role of a topology": (["--dry_run", "--topology=nobody=v5p:2x2x1"], ["'nobody'", "trainer, searcher, evaluator"]),
    "unknown GPU": (["--dry_run", "--topology=X100x8"], ["the memory of X100 is not known: say it as X100x8@GIB"]),
    "compiling a run": (["--compile"], ["--compile needs --dry_run"]),
    "kernel": (["--dry_run", "--compile", "--config.model.attention=splash"], ["model.attention=splash needs a TPU", "cpu"]),
    "name": (["--role=searcher", "--name=../other"], ["--name='../other'", "lower-case letters, digits and hyphens"]),
    "name of a file's responses": (["--role=searcher", "--name=given"], ["--name='given'", "responses of a file"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_is_one_sentence(case, tmp_path, capsys, one_device):
    flags, words = REFUSALS[case]
    # In one process no other is started, should a mistake pass.
    interleaved = ["--config.schedule.mode=interleaved"]
    said = refusal(capsys, main, *tiny_run.command(tmp_path / "run", *interleaved, *flags)[3:])
    for word in words:
        assert word in said
    assert not (tmp_path / "run").exists(), "bad input must not write"


@pytest.fixture
def pretrained(tmp_path) -> Path:
    return random_checkpoints.write(tmp_path / "model", "llama-3.2-1b", random_checkpoints.byte_tokenizer(tmp_path / "tokenizer"))


@pytest.mark.parametrize("dry", [[], ["--dry_run"]], ids=["run", "dry_run"])
def test_a_damaged_checkpoint_is_refused_by_its_setting(pretrained, dry, tmp_path, capsys, one_device):
    flags = [f"--config.model.path={pretrained}", "--config.schedule.mode=interleaved", *dry]
    weights = pretrained / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-7])
    command = tiny_run.command(tmp_path / "run", *flags)[3:]
    said = refusal(capsys, main, *command)
    assert said.startswith(f"error: model.path='{pretrained}': ") and "model.safetensors is damaged or not whole" in said
    weights.unlink()
    if dry:  # which fetches no weights, and says what it has not read
        assert command_line.execute(main, command) == 0
        assert f"weights of model.path={pretrained}, which are not on this machine" in capsys.readouterr().out
    else:
        assert "holds no weights" in refusal(capsys, main, *command)
    assert not (tmp_path / "run").exists()


def test_a_run_is_resumed_from_any_folder(pretrained, tmp_path, monkeypatch, capsys, one_device):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    arguments = tiny_run.command(Path("~/run"), f"--config.model.path={pretrained.name}", "--config.task.prompt_length=32")[3:]
    assert command_line.execute(main, [*arguments, "--role=reference"]) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["config"]["model"]["path"] == str(pretrained)
    (tmp_path / "other" / pretrained.name).mkdir(parents=True)  # of the same name, and without a model
    monkeypatch.chdir(tmp_path / "other")
    capsys.readouterr()
    assert command_line.execute(main, ["--workdir=~/run", "--dry_run"]) == 0
    assert "trainer    fits: " in capsys.readouterr().out
    assert not list(tmp_path.rglob("~"))


def told(arguments: list[str], capsys) -> list[str]:
    """The lines of several mistakes."""
    with pytest.raises(SystemExit, match="2"):
        command_line.execute(main, arguments)
    said = capsys.readouterr()
    first, *listed = said.err.splitlines()
    assert not said.out and first == f"error: {len(listed)} mistakes:", said.err
    return listed


FLAGS = {
    "--init_from=nowhere": "--init_from='nowhere' must be RUN@STEP",
    "--profile=12:2": "--profile=12:2 asks for steps up to 13, and learner.steps=12 ends the run",
}
TOGETHER = {
    "--config.searchers.samples_per_query=3": "searchers.samples_per_query=3 is less than learner.completions=4",
    "--config.replay.capacity=2": "replay.capacity=2 cannot hold",
    "--config.replay.merge_cosine_distance=0.1": "replay.merge_cosine_distance=0.1 compares embeddings",
    "--config.learner.clip_low=0.1": "learner.clip_low=0.1 would not be used",
}
NAMED = {
    "--config.task.embedding_path=/nowhere": "task.embedding_path='/nowhere'",
    "--config.model.path=/nowhere": "model.path='/nowhere'",
}
OF_RUN = {
    "--config.replay.mount=('/nowhere', '/elsewhere')": "replay.mount: /nowhere holds no run",
    "--config.task.response_length=9": "belongs to a run of another contract",
    "--allow_change=learner.stepz": "learner.stepz",
}


@pytest.mark.parametrize("mistakes", [FLAGS, TOGETHER, NAMED, OF_RUN], ids=["flags", "settings", "what they name", "the run"])
def test_all_mistakes_of_a_stage_are_told_together(mistakes, tmp_path, capsys, one_device):
    made = tiny_run.settings(tmp_path / "run", tiny_run.config(learner__steps=12))
    contract.join(made.run, made.config, made.experiment.contract)
    before = made.run.config.read_bytes()
    flags = [*mistakes, "--dry_run"]
    listed = told(tiny_run.command(tmp_path / "run", *flags)[3:], capsys)
    assert len(listed) == len(mistakes) + (mistakes is OF_RUN)
    for words in mistakes.values():
        assert sum(words in line for line in listed) == 1, (words, listed)
    assert made.run.config.read_bytes() == before


def test_types_of_cpu_share_no_compiled_programs(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compilation_cache"))
    chosen: list[str] = []
    monkeypatch.setattr(jax.config, "update", lambda name, value: chosen.append(os.path.realpath(value)))
    for cpu in ("new", "old"):
        monkeypatch.setattr(processes, "cpu_type", lambda cpu=cpu: cpu)
        main._hold_compilation_cache(layout.open_run_dir(tmp_path, ""))
    os.close(main._CACHE_DESCRIPTOR)
    assert chosen == [str(tmp_path / "compilation_cache" / cpu) for cpu in ("new", "old")]


def test_ctrl_c_ends_a_warm_start_at_once(tmp_path):
    settings = {"schedule.mode": "interleaved", "warm_start.steps": 10**6, "warm_start.report_every_steps": 10}
    settings |= {"task.response_length": 24}  # which the worked examples need
    flags = [f"--config.{name}={value}" for name, value in settings.items()]
    process = tiny_run.start(tiny_run.command(tmp_path / "run", *flags))
    try:
        assert process.stdout is not None
        told = next(line for line in process.stdout if "warm start: step" in line or "error" in line)
        assert "warm start" in told
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == processes.STOPPED and "Traceback" not in rest and rest.rstrip().endswith("stopped"), rest
