"""The benchmark of long journals, on a short one."""

import re
import subprocess
import sys

from tests.support.tiny_run import ROOT


def test_it_writes_a_journal_and_reads_as_a_resume_does(tmp_path):
    command = [sys.executable, "-m", "benchmarks.journal", "--steps=1000", "--after=10", "--repeats=1", f"--folder={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (
        re.findall(r"(\S+) lines", done.stdout) == ["10", "1,000"] and "1,000 steps of 64 rows by 5 epochs, 1 MB" in done.stdout
    )
    assert not list(tmp_path.iterdir())
