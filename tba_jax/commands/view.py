"""Serves the report of a run, live or ended, on this machine, and makes it again as the run goes on. The run is only read.

python -m tba_jax view --workdir=DIR [--port=PORT]

The address that is printed holds a random token; whoever has it sees the run until Ctrl-C. From another machine:
ssh -L PORT:127.0.0.1:PORT HOST, and then the same address. No task is imported.
"""

import signal
import time

from absl import flags

from tba_jax.commands import command_line

_WAIT_SECONDS = 0.1


def add_flags(values: flags.FlagValues) -> None:
    command_line.add_workdir(values)
    what = "of 127.0.0.1; 0: a free one"
    flags.DEFINE_integer("port", 0, what, lower_bound=0, upper_bound=65535, flag_values=values)


def run(given: command_line.Given) -> command_line.Job:
    from tba_jax.reporting import server
    from tba_jax.reporting.gathering import Source

    source, listening = Source(given.workdir), server.listen(given.port)

    def job() -> int:
        # The handler takes no lock, which it could find taken. A signal that a thread of tensorstore receives does not end a wait
        # of this one, which has a limit therefore.
        ended: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: ended.append(number))
        with server.serving(source, listening) as address:
            print(f"{address}\nCtrl-C ends it.", flush=True)
            while not ended:
                time.sleep(_WAIT_SECONDS)
        print("stopped", flush=True)
        return 0

    return job
