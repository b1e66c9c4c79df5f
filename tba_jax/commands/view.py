"""Serves the report of a run, live or ended, on this machine, and makes it again as the run goes on. The run is only read.

python -m tba_jax view --workdir=DIR [--port=PORT]

The address that is printed holds a token; whoever has it sees the run until Ctrl-C. Afar: ssh -L PORT:127.0.0.1:PORT HOST.
"""

import signal

from absl import flags

from tba_jax.commands import command_line


def add_flags(values: flags.FlagValues) -> None:
    command_line.add_workdir(values)
    flags.DEFINE_integer("port", 0, "of 127.0.0.1; 0: a free one", lower_bound=0, upper_bound=65535, flag_values=values)


def run(given: command_line.Given) -> command_line.Job:
    from tba_jax.reporting.gathering import Source
    from tba_jax.reporting.server import Server

    server = Server(Source(given.workdir), given.port)

    def job() -> int:
        ended: list[int] = []  # the handler takes no lock, which it could find taken
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: ended.append(number))
        with server:
            print(f"{server.address}\nCtrl-C ends it.", flush=True)
            while not ended:
                server.handle_request()
        print("stopped", flush=True)
        return 0

    return job
