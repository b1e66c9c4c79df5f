"""The command that writes a report: where it writes, for whom, and that it reads a run without its task."""

import os
import stat
import subprocess
import sys

import pytest

from tba_jax.commands import command_line, report
from tba_jax.storage import layout
from tests.support import hostile_runs, tiny_run


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
    with pytest.raises(SystemExit, match="2"):
        command_line.execute(report, [f"--workdir={run.root}"])
    assert "name a file by --output" in capsys.readouterr().err, "nothing is written into the run unasked"


def test_no_task_is_imported_and_no_device_is_asked_for(finished, tmp_path):
    code = (
        "import sys; from pathlib import Path; from tba_jax.commands import report, show; "
        f"run = Path({str(finished.run.root)!r}); report.write(run, Path({str(tmp_path / 'r.html')!r})); "
        "show.show(run, 'best', 3); import jax; "
        "print([m for m in sys.modules if m.startswith('tba_jax.tasks.')], jax._src.xla_bridge._backends)"
    )
    asked = dict(capture_output=True, text=True, check=True, cwd=tiny_run.ROOT, env=tiny_run.environment())
    assert subprocess.run([sys.executable, "-c", code], **asked).stdout.strip() == "[] {}"
