"""launch/Dockerfile: its layers and its user; and its pip lines in a new environment, since nothing here runs Docker."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import dockerfiles, kustomize, manifests, tiny_run

ROOT = tiny_run.ROOT
TEXT = (ROOT / "launch" / "Dockerfile").read_text()
IGNORED = (ROOT / "launch" / "Dockerfile.dockerignore").read_text()
INSTALL = 'python -m launch.constraints.install "${CONSTRAINTS}"'


def test_the_image_fits_the_manifests():
    instructions = dockerfiles.parse(TEXT)
    (user,) = (rest for name, rest in instructions if name == "USER")
    (jobset,) = (one for one in kustomize.build(ROOT / "launch/kubernetes/base") if one["kind"] == "JobSet")
    for job in manifests.jobs(jobset).values():
        wanted = manifests.pod(job)["securityContext"]
        assert user == f"{wanted['runAsUser']}:{wanted['runAsGroup']}"
        (program,) = manifests.pod(job)["containers"][0]["command"]
        assert os.access(ROOT / program, os.X_OK)


def test_the_image_gets_what_it_needs_and_nothing_else(tmp_path):
    for source in ("requirements.txt", "pyproject.toml", "."):
        dockerfiles.copy(source, ROOT, IGNORED, tmp_path)
    there = {path.name for path in tmp_path.iterdir()}
    assert there == {"tba_jax", "configs", "launch", "requirements.txt", "pyproject.toml", "README.md", "LICENSE"}
    assert not list(tmp_path.rglob("__pycache__")) and (tmp_path / "launch/kubernetes/role.sh").is_file()
    with pytest.raises(ValueError, match="tests"):
        dockerfiles.copy("tests", ROOT, IGNORED, tmp_path)


class Image:
    """A folder and an environment in which instructions are executed."""

    def __init__(self, root: Path) -> None:
        self.root, self.venv = root / "tba_jax", root / "venv"
        self.root.mkdir()
        subprocess.run([sys.executable, "-m", "venv", str(self.venv)], check=True)

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        ours = {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV"}
        known = {name: value for name, value in tiny_run.environment().items() if name not in ours}
        environment = known | {"PATH": f"{self.venv / 'bin'}:{os.environ['PATH']}"} | variables
        return subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=1200, check=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_steps_make_an_environment_that_runs_roles(tmp_path):
    image = Image(tmp_path)
    probe = image.run(
        "pip", "download", "--quiet", "--no-deps", "--retries=1", "--timeout=15", "--dest", str(tmp_path), "absl-py"
    )
    if probe.returncode and not os.environ.get("REQUIRE_PACKAGES"):
        pytest.skip(f"packages cannot be fetched here: {' '.join(probe.stderr.split())[-200:]}")
    instructions = dockerfiles.parse(TEXT)
    # Without the accelerators' gigabytes: for these pip says below what it would install.
    values = dockerfiles.arguments(instructions, EXTRAS="stories sentencepiece")
    done = []
    for name, rest in instructions:
        if name == "COPY":
            dockerfiles.copy(rest.split()[0], ROOT, IGNORED, image.root)
        if name == "RUN" and ("pip install" in rest or INSTALL in rest):
            done.append(rest)
            step = image.run("sh", "-c", rest, **values)
            assert step.returncode == 0, step.stderr
    assert len(done) == 3
    said = image.run("python", "-m", "tba_jax.main", "--help")
    assert "--workdir" in said.stdout and "configs/demo.py" in said.stdout, said.stderr
    dry = image.run("python", "-m", "tba_jax.main", "--config=configs/demo.py", f"--workdir={tmp_path / 'run'}", "--dry_run")
    assert dry.returncode == 0 and "trainer" in dry.stdout, dry.stderr
    stories = ("python", "-c", "import vaderSentiment, sentencepiece, tba_jax; print(tba_jax.__file__)")
    assert image.run(*stories).stdout.strip() == str(image.root / "tba_jax" / "__init__.py")
    for cuda in ("12", "13"):
        _check_accelerator(image, instructions, cuda)


def _check_accelerator(image: Image, instructions: list[dockerfiles.Instruction], cuda: str) -> None:
    """What pip would install for this CUDA, with the JAX that is installed already."""
    values = dockerfiles.arguments(instructions, CUDA=cuda)
    (line,) = (rest for name, rest in instructions if name == "RUN" and "extras.txt" in rest)
    tested = f"launch/constraints/python{sys.version_info[0]}.{sys.version_info[1]}.txt"
    asked = image.run("sh", "-c", line.replace(INSTALL, f"python -m pip install --dry-run -c {tested}"), **values)
    assert asked.returncode == 0, asked.stderr
    (would,) = (words for words in asked.stdout.splitlines() if words.startswith("Would install"))
    jax = image.run("python", "-c", "import jax; print(jax.__version__)").stdout.strip()
    assert f"jax-cuda{cuda}-plugin-{jax}" in would, would
