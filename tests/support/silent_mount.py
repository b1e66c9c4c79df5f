"""A mount that never answers: a file system of FUSE that nobody serves, as a server that is away. For processes of their own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Mounts in a namespace of its own, and becomes the command: the mount lives and dies with it.
_PROGRAM = """
import ctypes, os, sys
folder, *command = sys.argv[1:]
served_by = os.open("/dev/fuse", os.O_RDWR)
os.set_inheritable(served_by, True)
options = f"fd={served_by},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"nobody", folder.encode(), b"fuse", 0, options.encode()):
    sys.exit(f"cannot mount: {os.strerror(ctypes.get_errno())}")
os.execv(command[0], command)
"""


def command(folder: Path, arguments: list[str]) -> list[str]:
    """The command line of a process for which `folder`, which exists, is such a mount. Skips the test where none can be made."""
    if shutil.which("unshare") is None:
        pytest.skip("a mount of a test's own needs the program unshare")
    mounted = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", _PROGRAM, str(folder)]
    tried = subprocess.run([*mounted, shutil.which("true") or "/bin/true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"this machine allows no mount of a test's own: {tried.stderr.strip()}")
    return [*mounted, *arguments]
