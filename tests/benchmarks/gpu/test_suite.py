"""The suite: it holds its time, keeps what it has, and a case that fails costs its own row alone."""

import os
import subprocess
import sys
import time

import pytest

from benchmarks.gpu import cases, device, suite, table
from benchmarks.gpu.device import Device
from benchmarks.gpu.suite import Case

SIZES = dict(memory=140 << 30, bytes=105 << 30)
H200 = Device(platform="gpu", kind="NVIDIA H200", **SIZES, driver="580.1", versions={"jax": "1"})
WRITES = "import json, sys; json.dump([{'figure': 'speed', 'value': '3'}], open(sys.argv[1], 'w'))"


def run(cases, folder, *, seconds: float = 300.0) -> None:
    """The suite with the rows that are kept, as its command runs it."""
    suite.run(cases, folder, suite.rows(folder, ""), until=time.monotonic() + seconds, device="")


def make_case(folder, name: str, code: str, *, least: float = 0.0, most: float = 60.0) -> Case:
    answer = folder / f"{name}.json"
    command, limits = ("-c", code, str(answer)), dict(least=least, most=most)
    return Case(name=name, kind="decode", command=command, answer=answer, read=suite.read_figures, **limits)


def test_a_case_that_fails_or_hangs_costs_its_own_row(tmp_path):
    hangs = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).wait()"
    traceback = "print('ValueError: in the middle'); print('jaxlib.XlaRuntimeError: INTERNAL: no kernel'); print('--'); exit(3)"
    (tmp_path / "unwritable.log").mkdir()
    wanted = [
        make_case(tmp_path, "broken", traceback),
        make_case(tmp_path, "hangs", hangs, most=1.0),
        make_case(tmp_path, "silent", "pass"),
        make_case(tmp_path, "odd", "import sys; open(sys.argv[1], 'w').write('{')"),
        make_case(tmp_path, "unwritable", WRITES),
        make_case(tmp_path, "fine", WRITES),
    ]
    run(wanted, tmp_path)
    found = suite.rows(tmp_path)
    assert [row.figure for row in found["fine"]] == ["speed"] and found["fine"][0].value == "3"
    assert found["broken"][0].value == "exit status 3: jaxlib.XlaRuntimeError: INTERNAL: no kernel"
    assert "stopped after 1 s" in found["hangs"][0].value and "cannot be written" in found["unwritable"][0].value
    assert found["silent"][0].value == "no figures" and "cannot be read" in found["odd"][0].value
    assert {row.figure for name, (row,) in found.items() if name != "fine"} == {suite.FAILED}


def test_cases_without_time_are_left_out_and_others_are_kept(tmp_path, capsys):
    first, second = make_case(tmp_path, "first", WRITES), make_case(tmp_path, "second", WRITES, least=1000.0)
    run([second, first], tmp_path, seconds=100)
    assert suite.rows(tmp_path).keys() == {"first"}
    assert "second: left out, it takes 1000 s and" in capsys.readouterr().out
    run([make_case(tmp_path, "first", "exit(1)")], tmp_path)
    assert len(suite.rows(tmp_path)["first"]) == 1 and "first: kept from before" in capsys.readouterr().out
    told = table.text(H200, [first, second], suite.rows(tmp_path))
    assert "| first | speed | 3 |" in told and "| second |  | not measured |" in told
    assert "NVIDIA H200, 140 GiB, of which JAX may take 105, driver 580.1; jax 1" in told and "CPU form" not in told


def test_a_gpu_that_jax_does_not_use_is_a_mistake(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 0, GPU-1, NVIDIA H200, 143771, 143000\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ValueError, match="NVIDIA H200, but JAX finds only the CPU"):
        device.find()


@pytest.mark.slow
def test_the_cpu_form_measures_every_case(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--minutes=20", f"--output={tmp_path / 'gpu'}"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    assert "this is the CPU form" in done.stdout
    found = suite.rows(tmp_path / "gpu", "cpu")
    wanted = cases.of(device.find(), tmp_path / "gpu", model="", data="")
    assert found.keys() == {case.name for case in wanted}
    bad = [row for rows in found.values() for row in rows if row.figure in ("failed", "left out") or "exit status" in row.beside]
    assert not bad
    assert "not measured" not in (tmp_path / "gpu" / "results.md").read_text()
