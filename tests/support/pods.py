"""The pods of a JobSet as processes of this machine: what kubelet and the controllers of Job and JobSet would do with them.

The containers' very commands are run, with their variables. Folders of the machine stand for the volumes, and 127.0.0.1 for the
names that the headless service gives to pods.
"""

import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support import manifests
from tests.support.manifests import Resource

ROOT = Path(__file__).parent.parent.parent
_JOBSET_LABEL = "metadata.labels['jobset.sigs.k8s.io/jobset-name']"


@dataclasses.dataclass
class Pod:
    """One pod of an index."""

    process: subprocess.Popen[bytes]
    log: Path
    disrupted: bool = False  # the condition DisruptionTarget
    deadline: float = float("inf")  # when it is killed that was asked to stop

    def words(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-12:])


@dataclasses.dataclass
class Job:
    """An Indexed Job and its pods."""

    name: str
    spec: Resource
    pods: dict[int, Pod] = dataclasses.field(default_factory=dict)
    lives: dict[int, int] = dataclasses.field(default_factory=dict)  # pods that an index has had
    succeeded: set[int] = dataclasses.field(default_factory=set)
    failures: int = 0
    failed: str = ""
    next_start: dict[int, float] = dataclasses.field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return len(self.succeeded) == self.spec["completions"]

    def judge(self, index: int, pod: Pod, code: int) -> None:
        """Applies the podFailurePolicy to a pod that has ended."""
        if code == 0:
            self.succeeded.add(index)
            return
        code = 128 - code if code < 0 else code
        for rule in self.spec["podFailurePolicy"]["rules"]:
            conditions, codes = rule.get("onPodConditions"), rule.get("onExitCodes")
            if (conditions and pod.disrupted) or (codes and code in codes["values"]):
                if rule["action"] == "FailJob":
                    self.failed = f"{self.name}-{index} ended with code {code}"
                return
        self.failures += 1
        if self.failures > self.spec.get("backoffLimit", 2**31 - 1):
            self.failed = f"{self.name} has failed {self.failures} times"


class Cluster:
    """Runs one JobSet. Call `close` at the end."""

    def __init__(
        self, resources: Sequence[Resource], volume: Path, *, environment: dict[str, str], pause_seconds: float = 1.0
    ) -> None:
        """Args: volume: stands for what is mounted at /runs. environment: of every container, beside its own variables."""
        (self._jobset,) = (one for one in resources if one["kind"] == "JobSet")
        (self._settings,) = (one["data"] for one in resources if one["kind"] == "ConfigMap")
        self.jobs = {name: Job(name, spec) for name, spec in manifests.jobs(self._jobset).items()}
        self._volume, self.environment, self._pause_seconds = volume, environment, pause_seconds
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]

    @property
    def failed(self) -> str:
        """Why the JobSet has failed, "" where it has not: maxRestarts is 0, so any Job's failure is its own."""
        return next((job.failed for job in self.jobs.values() if job.failed), "")

    @property
    def is_done(self) -> bool:
        return all(self.jobs[name].is_done for name in self._jobset["spec"]["successPolicy"]["targetReplicatedJobs"])

    def sync(self) -> None:
        """One look of the controllers at all pods."""
        for job in self.jobs.values():
            for index in range(job.spec["completions"]):
                self._sync(job, index)

    def _sync(self, job: Job, index: int) -> None:
        if index in job.succeeded or job.failed:
            return
        pod = job.pods.get(index)
        if pod is None:
            if time.monotonic() >= job.next_start.get(index, 0.0):
                job.pods[index] = self._start(job, index)
                job.lives[index] = job.lives.get(index, 0) + 1
            return
        if time.monotonic() > pod.deadline:
            self._kill(pod)
        if (code := pod.process.poll()) is not None:
            self._kill(pod)  # what a container leaves behind ends with it
            job.judge(index, pod, code)
            del job.pods[index]
            job.next_start[index] = time.monotonic() + self._pause_seconds

    def run_until(self, condition: Callable[[], object], what: str, *, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert not self.failed, f"{self.failed} before {what}\n{self.words()}"
            assert time.monotonic() < deadline, f"{seconds} s went by without {what}\n{self.words()}"
            self.sync()
            time.sleep(0.05)

    def words(self) -> str:
        """The last lines of every pod that is there."""
        pods = ((job.name, index, pod) for job in self.jobs.values() for index, pod in job.pods.items())
        return "\n".join(f"== {name}-{index}:\n{pod.words()}" for name, index, pod in pods)

    def log(self, name: str, index: int) -> str:
        """What all pods of an index have written."""
        return self._log(name, index).read_text(errors="replace")

    def evict(self, name: str, index: int) -> None:
        """SIGTERM to the container, and SIGKILL after the grace period: a node is drained, or something more urgent needs it."""
        job = self.jobs[name]
        pod = job.pods[index]
        pod.disrupted = True
        pod.deadline = time.monotonic() + manifests.pod(job.spec)["terminationGracePeriodSeconds"]
        pod.process.send_signal(signal.SIGTERM)  # process 1 of the container alone

    def lose(self, name: str, index: int) -> None:
        """The pod's node is gone: no process hears of it."""
        pod = self.jobs[name].pods[index]
        pod.disrupted = True
        self._kill(pod)

    def crash(self, name: str, index: int) -> None:
        """SIGKILL to the role inside the container: it has no memory left, say."""
        pod = self.jobs[name].pods[index]
        group = os.getpgid(pod.process.pid)
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                line = (entry / "cmdline").read_bytes()
                if os.getpgid(int(entry.name)) == group and line.split(b"\0")[1:3] == [b"-m", b"tba_jax.main"]:
                    os.kill(int(entry.name), signal.SIGKILL)

    def close(self) -> None:
        """Ends all pods, as the end of a JobSet does."""
        for job in self.jobs.values():
            for pod in job.pods.values():
                self._kill(pod)
            job.pods.clear()

    def _kill(self, pod: Pod) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pod.process.pid, signal.SIGKILL)
        pod.process.wait()

    def _log(self, name: str, index: int) -> Path:
        return self._volume / "pods" / f"{name}-{index}.log"

    def _start(self, job: Job, index: int) -> Pod:
        (container,) = manifests.pod(job.spec)["containers"]
        variables = self._variables(container, index)
        words = [self._expand(word, variables) for word in [*container["command"], *container["args"]]]
        path = self._log(job.name, index)
        path.parent.mkdir(exist_ok=True, parents=True)
        with open(path, "ab") as log:
            process = subprocess.Popen(
                words, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        return Pod(process, path)

    def _variables(self, container: Resource, index: int) -> dict[str, str]:
        """The environment of the container; what the image has is the machine's."""
        found = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": os.environ["HOME"]} | self.environment
        (mount,) = (one["mountPath"] for one in container["volumeMounts"] if one["name"] == "runs")
        assert container["envFrom"] == [{"configMapRef": {"name": "tba-run"}}]
        for name, value in self._settings.items():
            found[name] = re.sub(rf"(^|=){mount}/", rf"\g<1>{self._volume}/", value)
        for one in container["env"]:
            assert one["valueFrom"] == {"fieldRef": {"fieldPath": _JOBSET_LABEL}}, one
            found[one["name"]] = self._jobset["metadata"]["name"]
        return found | {"JOB_COMPLETION_INDEX": str(index)}

    def _expand(self, word: str, variables: dict[str, str]) -> str:
        """$(NAME) as Kubernetes replaces it, and then the name of the trainer's first pod by an address of this machine."""
        whole = re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), word)
        jobset = self._jobset["metadata"]["name"]
        return re.sub(rf"{jobset}-trainer-0-0\.{jobset}:\d+$", f"127.0.0.1:{self._port}", whole)
