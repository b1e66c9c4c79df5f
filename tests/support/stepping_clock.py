"""A wall clock that a test steps while processes run: see stepping_clock.c."""

import shutil
import struct
import subprocess
import time
from pathlib import Path

HERE = Path(__file__).parent


class SteppingClock:
    """steps: how often it has stepped.

    environment: for processes whose time of day is to step. missing: why this machine has no such clock, "" where it has.
    """

    def __init__(self, folder: Path):
        """Args: folder: an empty place for the library and the offset."""
        self._offset, library = folder / "offset", folder / "stepping_clock.so"
        folder.mkdir(parents=True)
        self.steps = 0
        self._tell(0)
        self.environment: dict[str, str] = {}
        self.missing = _compile(library)
        if not self.missing:
            self.environment = {"LD_PRELOAD": str(library), "STEPPING_CLOCK": str(self._offset)}

    def step_to(self, seconds: int) -> None:
        """All clocks are so far ahead of the time of day from now on; negative: behind it."""
        self._tell(seconds)
        self.steps += 1

    def _tell(self, seconds: int) -> None:
        with self._offset.open("r+b" if self._offset.exists() else "wb", buffering=0) as file:
            file.write(struct.pack("=q", seconds))

    def shown(self) -> float:
        """Seconds by which a new process of this environment sees its clock ahead."""
        asked = ["python3", "-c", "import time; print(time.time())"]
        answer = subprocess.run(asked, env=self.environment, capture_output=True, text=True, check=True)
        return float(answer.stdout) - time.time()


def _compile(library: Path) -> str:
    if (compiler := shutil.which("cc")) is None:
        return "a clock that steps is a library written in C, and there is no compiler cc"
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(HERE / "stepping_clock.c"), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"cc does not compile {HERE / 'stepping_clock.c'}: {done.stderr}" if done.returncode else ""
