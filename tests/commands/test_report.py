"""The command that writes a report: where it writes, and for whom."""

import os
import stat

import pytest

from tba_jax.commands import command_line, report
from tba_jax.storage import layout
from tests.commands.test_command_line import refusal
from tests.support import hostile_runs


@pytest.mark.parametrize(("private", "mode"), [(True, 0o600), (False, 0o644)])
def test_the_file_is_in_the_current_folder_and_that_of_a_private_run_for_its_owner_alone(
    tmp_path, monkeypatch, capsys, private, mode
):
    run = hostile_runs.make(tmp_path / "run")
    stored = layout.read_json(run.config)
    stored["contract"]["private_files"] = private
    layout.write_json(run.config, stored)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = os.umask(0o022)
    try:
        for _ in range(2):  # a report of the same name is replaced
            assert command_line.execute(report, [f"--workdir={run.root}"]) == 0
    finally:
        os.umask(before)
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'here' / 'report.html'} (")
    (file,) = (tmp_path / "here").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == mode
    monkeypatch.chdir(run.metrics("trainer"))
    said = refusal(capsys, report, f"--workdir={run.root}")
    assert "name a file by --output" in said, "nothing is written into the run unasked"
