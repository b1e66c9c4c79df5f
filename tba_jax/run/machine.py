"""The memory of this machine and of its GPUs, without initialising a GPU: a process that does so takes memory of it."""

import dataclasses
import os
import shutil
import subprocess
from pathlib import Path

_FIELDS = ("index", "uuid", "name", "memory.total", "memory.used")
_NO_LIMIT = 1 << 60  # cgroups of version 1 write a number near 2^63 where there is no limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as nvidia-smi tells of it. kind: its name; total, used: bytes."""

    index: str
    uuid: str
    kind: str
    total: int
    used: int


def gpus() -> list[Gpu]:
    """All GPUs of this machine; [] where there are none or nvidia-smi does not answer."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    rows = [[value.strip() for value in line.split(",")] for line in listed.splitlines()]
    return [
        Gpu(index=index, uuid=uuid, kind=kind, total=int(total) << 20, used=int(used) << 20)
        for index, uuid, kind, total, used in (row for row in rows if len(row) == len(_FIELDS))
        if total.isdecimal() and used.isdecimal()
    ]


def gpu(name: str) -> Gpu | None:
    """The GPU that CUDA_VISIBLE_DEVICES calls `name`, a number or the beginning of a UUID; None where it is not known."""
    return next((each for each in gpus() if name == each.index or (len(name) > 4 and each.uuid.startswith(name))), None)


def memory() -> int:
    """Bytes of memory that this process may take: of the machine, or of its control group where that is less."""
    return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_group_limits())


def _group_limits(*, list_file: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """The limits of the control groups that this process is in (Linux, versions 1 and 2)."""
    found = [_NO_LIMIT]
    try:
        lines = list_file.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(base) and (folder / name).is_file():
                text = (folder / name).read_text().strip()
                found.append(int(text) if text.isdecimal() else _NO_LIMIT)
    return found
