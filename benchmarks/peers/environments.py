"""The virtual environments of the peers: made once below a folder, with pinned versions, and used again."""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Environment:
    """requirements: what pip installs."""

    name: str
    requirements: tuple[str, ...]


# Where pip's index offers several builds of this torch, PIP_EXTRA_INDEX_URL can name the one of builds for CPUs.
TRL = Environment("trl", ("trl==1.16.0", "torch==2.13.0", "transformers==5.23.0"))
TUNIX = Environment("tunix", ("google-tunix==0.1.7",))


class NotInstalled(Exception):
    """An environment cannot be made; the message says why in one sentence."""


def python(environment: Environment, root: Path) -> Path:
    """The environment's Python; the environment is made unless it is there.

    Raises:
      NotInstalled: venv or pip failed, with its last line. What was made is removed, so that the next call tries again.
    """
    folder, log = root / environment.name, root / f"{environment.name}.log"
    made, interpreter = folder / "requirements.txt", folder / "bin" / "python"
    wanted = "\n".join(environment.requirements)
    if made.exists() and made.read_text() == wanted:  # written last
        return interpreter
    shutil.rmtree(folder, ignore_errors=True)
    root.mkdir(parents=True, exist_ok=True)
    print(f"installs {' '.join(environment.requirements)} into {folder}", file=sys.stderr, flush=True)
    # Other code than the environment's own could otherwise be imported.
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(interpreter), "-m", "pip", "install", *environment.requirements],
    ):
        with open(log, "w") as output:
            ended = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=clean, check=False)
        if ended.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            raise NotInstalled(f"{' '.join(environment.requirements)} cannot be installed: {reason(log)}")
    made.write_text(wanted)
    return interpreter


def reason(log: Path) -> str:
    """The last line of a log that says something, without pip's word ERROR; of a traceback that is the error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    said = [line for line in lines if line and not line.startswith(("WARNING", "[notice]", "hint:"))]
    return said[-1].removeprefix("ERROR: ") if said else "it said nothing"
