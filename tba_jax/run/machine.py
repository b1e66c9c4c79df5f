"""The memory of this machine, and its type of CPU."""

import hashlib
import os
import platform
from pathlib import Path

_NO_LIMIT = 1 << 60  # cgroups of version 1 write a number near 2^63 where there is no limit


def memory() -> int:
    """Bytes of memory that this process may take: of the machine, or of its control group where that is less."""
    return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_group_limits())


# Lines of /proc/cpuinfo that say for which CPU a compiler makes programs here, on x86 and on ARM.
_CPU_LINES = (
    *("vendor_id", "cpu family", "model", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
)


def cpu_type(*, list_file: Path = Path("/proc/cpuinfo")) -> str:
    """A name of the CPU's model and instructions, such as "x86_64-0f3a9c51": programs compiled for one may not run on others."""
    try:
        lines = {line.strip() for line in list_file.read_text().splitlines() if line.partition(":")[0].strip() in _CPU_LINES}
    except OSError:
        lines = {platform.processor()}
    return f"{platform.machine()}-{hashlib.blake2b(repr(sorted(lines)).encode(), digest_size=4).hexdigest()}"


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
