"""The command that writes a report: where it writes, what it refuses, and that it reads runs wherever they are."""

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import uuid

import pytest

from tba_jax.commands import command_line, report
from tba_jax.experiment import stored_run
from tba_jax.run import processes
from tba_jax.storage import layout, places
from tests.support import hostile_runs, tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return hostile_runs.make(tmp_path_factory.mktemp("reported") / "run")


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        command_line.execute(report, arguments)
    told = capsys.readouterr().err
    assert ended.value.code == processes.BAD_INPUT and told.count("\n") == 1 and told.startswith("error: "), told
    return told


def test_the_file_is_named_and_its_folder_is_the_current_one(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # a report of the same name is replaced
        assert command_line.execute(report, [f"--workdir={run.root}"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'report.html'} (")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    monkeypatch.chdir(run.metrics("trainer"))
    assert "--output" in refused(capsys, f"--workdir={run.root}"), "nothing is written into the run unasked"


@pytest.mark.parametrize("name, words", [("", "is a folder"), ("absent/r.html", "no folder"), ("mine.html", "is no report")])
def test_a_place_that_holds_no_report_is_refused(run, tmp_path, capsys, name, words):
    (tmp_path / "mine.html").write_text("<!doctype html>\nmine")
    assert words in refused(capsys, f"--workdir={run.root}", f"--output={tmp_path / name}")
    assert (tmp_path / "mine.html").read_text().endswith("mine")


def test_a_recipe_is_compared_with(run, tmp_path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from configs import base\ndef get_config():\n    c = base.get_config()\n    c.learner.steps = 4321\n    return c\n"
    )
    report.write(run.root, tmp_path / "report.html", recipe=str(recipe))
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<td>4321</td>" in text and f"<th>{recipe}</th>" in text


@pytest.mark.parametrize(("private", "mode"), [(True, 0o600), (False, 0o644)])
def test_a_report_of_a_private_run_is_for_its_owner_alone(run, tmp_path, private, mode):
    folder, output = tmp_path / "run", tmp_path / "report.html"
    shutil.copytree(run.root, folder)
    stored = layout.read_json(folder / "config.json")
    stored["contract"]["private_files"] = private
    layout.write_json(folder / "config.json", stored)
    before = os.umask(0o022)
    try:
        report.write(folder, output)
    finally:
        os.umask(before)
    assert stat.S_IMODE(output.stat().st_mode) == mode


def test_a_run_of_another_kind_is_one_sentence(run, tmp_path, capsys):
    stored = layout.read_json(run.config)
    (tmp_path / "run").mkdir()
    for text, words in ((json.dumps(stored | {"contract": {"supervised": {}}}), "supervised training"), ("{", "not valid JSON")):
        (tmp_path / "run" / "config.json").write_text(text)
        assert words in refused(capsys, f"--workdir={tmp_path / 'run'}", f"--output={tmp_path / 'r.html'}")
    assert not (tmp_path / "r.html").exists()


def test_a_run_whose_roles_meet_in_an_object_store_is_read_there(tmp_path, monkeypatch):
    place, shared = places.place, places.place(f"memory://runs/{uuid.uuid4().hex}")
    monkeypatch.setattr(
        places, "place", lambda text: shared if text == str(shared) else place(text)
    )  # memory is each object's own
    run = hostile_runs.make(tmp_path / "run", shared)
    _, problems = report.write(run.root, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert problems == [] and "· w0:0</p>" in text and f"rows and policies in {shared}" in text


def test_a_store_that_does_not_answer_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stored_run, "DRY_RUN_SECONDS", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        (tmp_path / "shared.json").write_text('{"shared": "s3://runs/away"}')
        told = refused(capsys, f"--workdir={tmp_path}", f"--output={tmp_path / 'r.html'}")
    assert "s3://runs/away has not answered within 0.5 s" in told


def test_no_task_is_imported_and_no_device_is_asked_for(run, tmp_path):
    code = (
        "import sys; from pathlib import Path; from tba_jax.commands import report; "
        f"report.write(Path({str(run.root)!r}), Path({str(tmp_path / 'r.html')!r})); "
        "import jax; print([m for m in sys.modules if m.startswith('tba_jax.tasks.')], jax._src.xla_bridge._backends)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tiny_run.ROOT, env=tiny_run.environment()
    )
    assert done.stdout.strip() == "[] {}"
