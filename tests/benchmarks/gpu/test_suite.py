"""The suite: it holds its time, keeps what it has, and a case that fails costs its own row alone."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.gpu import cases, device, suite, table
from benchmarks.gpu.device import Device
from benchmarks.gpu.suite import Case, Row

CPU = Device(platform="cpu", kind="cpu", bytes=0, driver="", versions={"jax": "1"}, torch=False)
H200 = Device(platform="gpu", kind="NVIDIA H200", bytes=100 << 30, driver="580.1", versions={"jax": "1"}, torch=True)
WRITES = "import json, sys; json.dump([{'figure': 'speed', 'value': '3'}], open(sys.argv[1], 'w'))"


def make_case(folder, name: str, code: str, *, least: float = 0.0, most: float = 60.0) -> Case:
    answer = folder / f"{name}.json"
    return Case(
        name=name,
        kind="decode",
        command=("-c", code, str(answer)),
        answer=answer,
        read=suite.read_figures,
        least=least,
        most=most,
    )


def test_a_case_that_fails_or_hangs_costs_its_own_row(tmp_path):
    hangs = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).wait()"
    wanted = [
        make_case(tmp_path, "broken", "raise SystemExit('RESOURCE_EXHAUSTED: out of memory')"),
        make_case(tmp_path, "hangs", hangs, most=1.0),
        make_case(tmp_path, "silent", "pass"),
        make_case(tmp_path, "odd", "import sys; open(sys.argv[1], 'w').write('{')"),
        make_case(tmp_path, "fine", WRITES),
    ]
    suite.run(wanted, tmp_path, seconds=300)
    found = suite.rows(tmp_path)
    assert [row.figure for row in found["fine"]] == ["speed"] and found["fine"][0].value == "3"
    assert "RESOURCE_EXHAUSTED" in found["broken"][0].value and "stopped after 1 s" in found["hangs"][0].value
    assert found["silent"][0].value == "no figures" and "cannot be read" in found["odd"][0].value


def test_cases_without_time_are_left_out_and_others_are_kept(tmp_path, capsys):
    first, second = make_case(tmp_path, "first", WRITES), make_case(tmp_path, "second", WRITES, least=1000.0)
    suite.run([second, first], tmp_path, seconds=100)
    assert suite.rows(tmp_path).keys() == {"first"}
    assert "second: left out, it takes 1000 s and" in capsys.readouterr().out
    before = (tmp_path / suite.ROWS).read_text()
    with (tmp_path / suite.ROWS).open("a") as file:
        file.write('{"case": "sec')  # the suite was killed while it wrote
    suite.run([first], tmp_path, seconds=100)
    assert (tmp_path / suite.ROWS).read_text().startswith(before) and len(suite.rows(tmp_path)["first"]) == 1
    told = table.text(H200, [first, second], suite.rows(tmp_path))
    assert "| first | speed | 3 |" in told and "| second |  | not measured |" in told
    assert "NVIDIA H200, 100 GiB, driver 580.1; jax 1" in told and "CPU form" not in told


def test_the_table_names_the_fastest_setting_of_the_sweep(tmp_path):
    wanted = [case for case in cases.of(H200, tmp_path, model="", data="") if case.kind in ("update", "sweep")]
    found = {case.name: [Row(case=case.name, figure="an update", value=f"{30 - i}.5 ms")] for i, case in enumerate(wanted)}
    best = wanted[-1].name.removeprefix("sweep: ")
    assert f"Of the settings swept, {best} had the fastest update: {30 - len(wanted) + 1}.5 ms." in table.text(
        H200, wanted, found
    )
    assert "swept" not in table.text(H200, wanted, {})


def test_an_interrupted_suite_ends_its_case_and_keeps_its_rows(tmp_path):
    marker = tmp_path / "alive"
    sleeps = f"import pathlib, time\nwhile True: pathlib.Path({str(marker)!r}).touch(); time.sleep(.05)"
    program = f"""
import signal, sys
from pathlib import Path
from benchmarks.gpu import suite
from tests.benchmarks.gpu.test_suite import WRITES, make_case
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
folder = Path({str(tmp_path)!r})
suite.run([make_case(folder, "first", WRITES), make_case(folder, "endless", {sleeps!r})], folder, seconds=300)
"""
    process = subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": "."})
    try:
        until = time.monotonic() + 60
        while not marker.exists() and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143
    finally:
        process.kill()
    assert suite.rows(tmp_path).keys() == {"first"}
    marker.unlink()
    time.sleep(0.5)
    assert not marker.exists(), "the case's process goes on"


@pytest.mark.parametrize(
    "found", [CPU, H200, Device(platform="tpu", kind="TPU v5e", bytes=0, driver="", versions={}, torch=False)]
)
def test_each_device_has_every_kind_of_case_but_torch(tmp_path, found):
    wanted = cases.of(found, tmp_path, model="", data="")
    assert len({case.name for case in wanted}) == len({case.answer for case in wanted}) == len(wanted)
    assert {case.kind for case in wanted} == {*cases.KINDS} - (set() if found.torch else {"torch"})
    assert wanted[0].kind == "tests" and all(str(case.answer) in " ".join(case.command) for case in wanted)
    tiny = [case for case in wanted if "--tiny" in case.command]
    assert bool(tiny) == (found.platform == "cpu")
    settings = " ".join(" ".join(case.command) for case in wanted)
    assert "--attention=xla" in settings and "--remat=none" in settings and "--nodonate" in settings
    assert ("--attention=cudnn" in settings) == (found.platform == "gpu")
    flags = " ".join(case.environment.get("XLA_FLAGS", "") for case in wanted)
    assert ("latency_hiding" in flags and "command_buffer" in flags) == (found.platform == "gpu")


def test_decode_rows_have_the_share_of_the_bandwidth_and_the_ratio(tmp_path):
    figures = {"tokens_per_second": 100.0, "share_of_bandwidth": 0.5, "share_of_bound": 0.4}
    decoders = {"ours": figures, "static": figures | {"tokens_per_second": 40.0}}
    case = cases.of(H200, tmp_path, model="", data="")[1]
    case.answer.write_text(json.dumps({"cases": {"pythia_s1": {"decoders": decoders}}}))
    ours, theirs = case.read(case.answer, case)
    assert ours == Row(
        case=case.name, figure="ours", value="100 tokens/s", beside="50 % of the measured bandwidth, 40 % of the bound"
    )
    assert theirs.value == "40 tokens/s" and theirs.beside.endswith("ours × 2.50")


def test_the_driver_is_what_nvidia_smi_says(tmp_path, monkeypatch):
    assert device.driver() == "" or device.driver()[0].isdigit()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 580.65.06\necho 580.65.06\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert device.driver() == "580.65.06"


@pytest.mark.parametrize(
    "flag, sentence", [("--only=fast", "--only=fast is none of tests, decode"), ("--model=none", "--model=none does not exist")]
)
def test_mistakes_are_one_sentence(flag, sentence):
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu", flag], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.strip().splitlines()[-1].startswith(f"error: {sentence}")


@pytest.mark.slow
def test_the_cpu_form_measures_every_case(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--minutes=20", f"--output={tmp_path / 'gpu'}"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    assert "this is the CPU form" in done.stdout
    found = suite.rows(tmp_path / "gpu")
    wanted = cases.of(device.find(), tmp_path / "gpu", model="", data="")
    assert found.keys() == {case.name for case in wanted}
    failed = [
        row for rows in found.values() for row in rows if row.figure in ("failed", "left out") or "exit status" in row.beside
    ]
    assert not failed
    assert "not measured" not in (tmp_path / "gpu" / "results.md").read_text()
