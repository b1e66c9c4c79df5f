"""A run whose roles meet on an S3 server that dies and comes back: it goes on, and every row and step is accounted for."""

import time
import urllib.parse
from pathlib import Path

import pytest

from tba_jax.storage import layout, places
from tests.support import moto_server, tiny_run
from tests.support.chaos import ENDLESS, Chaos, check_what_is_left
from tests.support.tcp_proxy import Line

OUTAGE_SECONDS = 20.0

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/cmdline").exists(), reason="finds processes through /proc, which this system lacks"
)


@pytest.mark.slow
def test_a_run_outlives_an_s3_server_that_is_killed_and_started_again(tmp_path):
    """The server is killed, is started again, stops answering, and is killed when the trainer and a searcher die as well.

    A line to moto stands for the server: it is killed and started again, and moto, which keeps objects in memory, keeps them.
    """
    with moto_server.serving() as direct, Line(urllib.parse.urlsplit(direct["AWS_ENDPOINT_URL"]).port) as line:
        shared = f"s3://{moto_server.BUCKET}/outages"
        run = layout.RunDir(tmp_path / "run", places.place(shared))
        arguments = tiny_run.command(
            run.root,
            f"--shared={shared}",
            "--role=all",
            "--config.searchers.count=2",
            "--config.task.missing_eos_reward=-1.0",
            "--config.evaluation.every_steps=20",
            "--config.searchers.poll_seconds=0.5",
            "--config.replay.poll_seconds=0.5",
            "--config.publish.keep=4",
            "--config.supervisor.max_restarts=60",
        )
        environment = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{line.port}"}
        chaos = Chaos(run, arguments, searchers=2, output=tmp_path / "supervisor.log", environment=environment)

        def steps_after(outage: str, begin: float) -> None:
            done = chaos.journalled()[1]
            chaos.wait_until(lambda: chaos.journalled()[1] >= done + 10, f"steps after {outage}")
            print(
                f"{outage}: ten steps more {time.monotonic() - begin:.0f} s after its end, step {chaos.journalled()[1]}",
                flush=True,
            )

        with chaos:
            chaos.start(ENDLESS)
            chaos.wait_until(lambda: chaos.journalled()[1] >= 10, "the first steps")
            line.cut()
            chaos.wait(OUTAGE_SECONDS, "the server to be away for long enough")
            line.connect()
            steps_after("a killed server", time.monotonic())
            line.hold()
            chaos.wait(OUTAGE_SECONDS, "the server to be silent for long enough")
            line.go_on()
            steps_after("a silent server", time.monotonic())
            line.cut()
            assert chaos.kill("trainer") and chaos.kill("searcher-0")
            chaos.wait(OUTAGE_SECONDS, "the server to be away for long enough")
            line.connect()
            steps_after("a killed server, trainer and searcher", time.monotonic())
            steps = chaos.journalled()[1] + 10
            chaos.stop()
            chaos.finish(steps)
        check_what_is_left(run, steps, epochs=chaos.epochs)
        print(f"to step {steps}: {chaos.account()}; every batch rebuilt, the ledger balances, no process is left")
