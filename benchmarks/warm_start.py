"""Runs of one recipe that begin from the same warm start, so that they differ in nothing else."""

import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

from tba_jax.storage import layout


def ensure(root: Path, *arguments: str, recipe: str, checkout: Path = Path()) -> None:
    """Makes root/warm/reference, unless it is there. arguments: further ones of tba_jax.main; checkout: whose code makes it."""
    if (root / "warm" / "reference" / "initial.json").exists():
        return
    print(f"warm start begins, its output is in {root / 'warm.out'}", file=sys.stderr, flush=True)
    begin = time.monotonic()
    command = [sys.executable, "-m", "tba_jax.main", f"--config={recipe}", f"--workdir={root / 'warm'}", "--role=reference"]
    root.mkdir(parents=True, exist_ok=True)
    with open(root / "warm.out", "w") as output:
        subprocess.run([*command, *arguments], check=True, stdout=output, stderr=subprocess.STDOUT, cwd=checkout)
    print(f"warm start: {time.monotonic() - begin:.0f} s\n", file=sys.stderr)


def begin(root: Path, name: str) -> None:
    """A fresh workdir root/name that holds the warm start and nothing else."""
    workdir = clear(root, name)
    shutil.copytree(root / "warm" / "reference", workdir / "reference")
    # A workdir with folders of a run needs its config.json. At step 0 every setting of the schedule may change.
    stored = layout.read_json(root / "warm" / "config.json")
    layout.write_json(workdir / "config.json", stored | {"id": uuid.uuid4().hex})


def clear(root: Path, name: str) -> Path:
    """The workdir root/name, which does not exist; the folder that it will be in does."""
    workdir = root / name
    shutil.rmtree(workdir, ignore_errors=True)
    workdir.parent.mkdir(parents=True, exist_ok=True)
    return workdir
