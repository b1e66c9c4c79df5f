"""A line between the processes of a run and a server, which a test cuts and mends; the server keeps what it holds meanwhile.

As a program: python -m tests.support.tcp_proxy PORT TARGET passes connections to 127.0.0.1:PORT on to 127.0.0.1:TARGET.
"""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time

from tests.support import tiny_run


class Line:
    """To a server on this machine. port: where the line begins."""

    def __init__(self, target: int):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._command = [sys.executable, "-m", "tests.support.tcp_proxy", str(self.port), str(target)]
        self._process: subprocess.Popen[bytes] | None = None

    def connect(self) -> None:
        """Returns once connections are taken."""
        self._process = subprocess.Popen(self._command, cwd=tiny_run.ROOT)
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            assert time.monotonic() < deadline, "the line takes no connections"
            time.sleep(0.05)

    def cut(self) -> None:
        """As when the server is killed: the kernel ends all connections, and refuses new ones."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def hold(self) -> None:
        """As when the server is stopped: connections are taken, and nothing comes back, until `go_on`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> "Line":
        self.connect()
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self.cut()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError), contextlib.closing(writer):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()


async def _serve(port: int, target: int) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            there = await asyncio.open_connection("127.0.0.1", target)
            await asyncio.gather(_pass_on(reader, there[1]), _pass_on(there[0], writer))

    async with await asyncio.start_server(connected, "127.0.0.1", port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
