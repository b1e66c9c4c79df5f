"""The command that writes a report: where it writes, for whom, and that it reads a run without its task."""

import os
import shutil
import stat
import subprocess
import sys

import pytest

from tba_jax.commands import command_line, report
from tba_jax.storage import layout
from tests.support import hostile_runs, tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return hostile_runs.make(tmp_path_factory.mktemp("reported") / "run")


def test_the_file_is_named_and_its_folder_is_the_current_one(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # a report of the same name is replaced
        assert command_line.execute(report, [f"--workdir={run.root}"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'report.html'} (")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    monkeypatch.chdir(run.metrics("trainer"))
    with pytest.raises(SystemExit, match="2"):
        command_line.execute(report, [f"--workdir={run.root}"])
    assert "name a file by --output" in capsys.readouterr().err, "nothing is written into the run unasked"


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


def test_no_task_is_imported_and_no_device_is_asked_for(finished, tmp_path):
    code = (
        "import sys; from pathlib import Path; from tba_jax.commands import report, show; "
        f"run = Path({str(finished.run.root)!r}); report.write(run, Path({str(tmp_path / 'r.html')!r})); "
        "show.show(run, 'best', 3); import jax; "
        "print([m for m in sys.modules if m.startswith('tba_jax.tasks.')], jax._src.xla_bridge._backends)"
    )
    asked = dict(capture_output=True, text=True, check=True, cwd=tiny_run.ROOT, env=tiny_run.environment())
    assert subprocess.run([sys.executable, "-c", code], **asked).stdout.strip() == "[] {}"
