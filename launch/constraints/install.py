"""pip install with the tested versions of packages, as far as the package index has them.

python -m launch.constraints.install CONSTRAINTS ARGUMENTS-OF-PIP-INSTALL …      from the root of the checkout

CONSTRAINTS is `tested`, which is the file of this Python beside this script; another constraint file; or "" for none. A tested
version that the index lacks is named, and pip chooses another version of that package.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from launch.constraints import pythons

# How pip names a constraint that it cannot keep.
_CONSTRAINT = re.compile(r"\(constraint\) ([\w.-]+)==")
# After so many attempts pip chooses all versions.
_ATTEMPTS = 12


def file_of(constraints: str) -> Path | None:
    """The constraint file that is asked for, None for none: so it is for a Python that tba_jax is not tested with.

    Raises:
      ValueError: the file that is named does not exist.
    """
    if constraints == "tested":
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        file = pythons.constraints_of(version)
        if not file.is_file():
            print(f"There are no tested versions for Python {version}, only for {', '.join(pythons.VERSIONS)}: pip chooses")
            return None
        return file
    if constraints and not Path(constraints).is_file():
        raise ValueError(f"CONSTRAINTS={constraints} is no file; it is `tested`, a constraint file of pip, or empty for none")
    return Path(constraints) if constraints else None


def install(file: Path | None, arguments: Sequence[str]) -> int:
    """The exit code of pip."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
    pins, reason = file.read_text().splitlines() if file else [], ""
    for _ in range(_ATTEMPTS if pins else 0):
        done = _attempt([*command, *arguments], pins)
        if done.returncode == 0:
            return 0
        reason = next((line for line in done.stderr.splitlines() if line.startswith("ERROR: ")), "")
        dropped = {name.lower() for name in _CONSTRAINT.findall(done.stdout + done.stderr)}
        kept = [pin for pin in pins if pin.partition("==")[0].lower() not in dropped]
        if len(kept) == len(pins) or "Retrying (" in done.stderr:  # nobody answers, and pip has already waited
            break
        named = ", ".join(sorted(set(pins) - set(kept)))
        print(f"The package index has no {named} that goes with the other packages, as {file} asks: pip chooses", flush=True)
        pins = kept
    if file:
        print(f"The versions of {file} cannot be installed here: pip chooses all versions. {reason}", flush=True)
    return subprocess.run([*command, "--quiet", *arguments], check=False).returncode


def _attempt(command: Sequence[str], pins: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs pip, which names the constraints in its way only where it is not quiet."""
    loud = [word for word in command if word not in ("-q", "--quiet")]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(pins))
        constraints.flush()
        return subprocess.run([*loud, "-c", constraints.name], capture_output=True, text=True, check=False)


def main(arguments: Sequence[str]) -> int:
    constraints, *rest = arguments
    try:
        return install(file_of(constraints), rest)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
