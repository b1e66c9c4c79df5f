"""How processes are asked to stop, and what happens when they do not."""

import os
import signal
import subprocess
import sys
import time

import pytest

# The main thread is inside one long call into C, as it is while a compiled program runs.
PROGRAM = """
import hashlib, sys
from tba_jax import lifeline
stop = lifeline.StopSignal(patience_seconds={patience})
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"x", b"y", {iterations})
print("finished, asked:", stop(), flush=True)
"""


def start(patience: float | None, iterations: int) -> subprocess.Popen:
    program = PROGRAM.format(patience=patience, iterations=iterations)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("patience", [0.0, 0.5])
def test_what_takes_too_long_is_abandoned(patience):
    process = start(patience, 1_000_000_000)  # many minutes
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 0 and output == ""
    assert patience <= time.monotonic() - begin < patience + 5


@pytest.mark.parametrize("patience", [None, 60.0])
def test_what_is_in_flight_is_finished(patience):
    process = start(patience, 1_000_000)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and output == "finished, asked: True\n"


def test_a_second_signal_ends_the_process():
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time\nfrom tba_jax import lifeline\nlifeline.StopSignal(patience_seconds=60.0)\n"
            "print('ready', flush=True)\nwhile True: time.sleep(0.01)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.3)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGINT
