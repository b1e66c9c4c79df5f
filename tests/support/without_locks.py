"""A file system without locks, for processes that are started with LD_PRELOAD set to the library that is built here."""

import shutil
import subprocess
from pathlib import Path

import pytest

# Locks of files fail, as on Lustre that is mounted without flock.
_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
int flock(int file, int operation) { errno = ENOSYS; return -1; }
static int passed(const char *name, int file, int command, void *argument) {
  if (command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW)
    return errno = ENOSYS, -1;
  int (*real)(int, int, ...) = dlsym(RTLD_NEXT, name);
  return real(file, command, argument);
}
#define PASS(name) int name(int file, int command, ...) { \\
  va_list rest; va_start(rest, command); void *argument = va_arg(rest, void *); va_end(rest); \\
  return passed(#name, file, command, argument); }
PASS(fcntl)
PASS(fcntl64)
"""


def built(folder: Path) -> Path:
    """The library, built in a folder. Skips a test where there is no C compiler."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("needs a C compiler")
    (folder / "shim.c").write_text(_SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "shim.so", folder / "shim.c", "-ldl"], check=True)
    return folder / "shim.so"
