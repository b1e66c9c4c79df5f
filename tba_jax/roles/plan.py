"""What the processes of one trainer share. All of them run the same program, and process 0 decides what depends on time, on
storage or on chance.

A decision is one immutable file in the workdir, `plan/<start>/<number>`. The others find it by listing the folder, and ask for it
in the order in which process 0 made it; so a batch can be shared one step ahead, while the devices compute. Where every process
has something to tell, they gather it over the devices, which have nothing else to do then.

Nothing here looks whether the others live. JAX' coordination service does: where a process ends, or is silent for
trainer.heartbeat_seconds, it ends the others, all are started again, and all resume where the journal ends.
"""

import atexit
import contextlib
import errno
import json
import logging
import math
import os
import re
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tba_jax.run import processes as processes_lib
from tba_jax.run.world import World
from tba_jax.telemetry.status import code_digest, versions

log = logging.getLogger(__name__)

_FOLDER, _FAILED, _STOP = "plan", "failed", "stop"
_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.005, 0.1
# A failure is looked for so long where a collective has failed, which a process that ends lets happen before it can say why.
_REASON_SECONDS = 2.0
# A folder that another host has made shows after so long: network file systems keep what they have listed.
_VISIBLE_SECONDS = 60.0
_LOOK_FOR_STOP_SECONDS = 0.5
_SHOWN = 5  # differences that a sentence lists
_AGAIN = "started again together, all of them resume where the journal ends"
# What JAX says where a collective has lost a process.
_COLLECTIVE = re.compile(r"Gloo|NCCL|nccl|coordination service|Connection (reset|closed|refused)")

T = TypeVar("T")


class Plan:
    """The plan of a trainer of one process, which decides alone. SharedPlan is that of several."""

    process, processes = 0, 1

    @property
    def leads(self) -> bool:
        """Whether this process decides, and writes what is not of a single process."""
        return self.process == 0

    def share(self, decide: Callable[[], T]) -> T:
        """What process 0 decides: JSON, or a dict whose values may be dicts of arrays. `decide` is called in process 0 alone; the
        others wait for what it returns, with arrays that are read-only. An error of it ends all of them."""
        return decide()

    def is_updated(self) -> None:
        """Tells that an update has its result, for which each process has read what was shared before the update before it had
        its own: these decisions are removed."""

    def gather(self, content: T) -> list[T]:
        """What each process gives, JSON, by process. All must call it, and it waits for what the devices compute."""
        return [content]

    def is_asked_to_stop(self) -> bool:
        """Of process 0: whether a signal has asked another process of the trainer to stop."""
        return False

    def on_stop(self, stop: Callable[[], bool]) -> None:
        """Args: stop: whether a signal has asked this process to stop, of which process 0 is told."""

    def guard(self, *mistakes: type[BaseException]) -> contextlib.AbstractContextManager[None]:
        """An error in this context ends the other processes as well. Args: mistakes: errors that are mistakes of the user."""
        return contextlib.nullcontext()

    def tell(self, name: str, content: Mapping[str, Any]) -> None:
        """Tells process 0 that the part of this process of something is written, from any thread. Args: content: JSON."""

    def told(self, name: str) -> list[dict[str, Any]]:
        """Of process 0: what each of the others has told of their parts, once all of them have; [] without other processes."""
        return []

    def end(self) -> None:
        """Returns once all processes have come here."""


class SharedPlan(Plan):
    """The plan of a trainer of several processes. Args: folder: of this start, which all of them see."""

    def __init__(self, folder: Path, *, process: int, processes: int):
        self.process, self.processes = process, processes
        self._folder, self._next = folder, 0
        self._oldest, self._shared_before = 0, 0  # of the decisions that are there; and before the last update's result
        self._stop: Callable[[], bool] = lambda: False
        self._has_told = self._has_failed = False
        self._looked = 0.0
        self._asked = False

    def share(self, decide: Callable[[], T]) -> T:
        name, self._next = f"{self._next:08d}", self._next + 1
        if not self.leads:
            return _decoded(self._await(name))
        decided = decide()
        self._write(name, *_encoded(decided))
        return decided

    def is_updated(self) -> None:
        if self.leads:
            for number in range(self._oldest, self._shared_before):
                (self._folder / f"{number:08d}").unlink(missing_ok=True)
        self._oldest, self._shared_before = self._shared_before, self._next

    def _write(self, name: str, *parts: bytes | memoryview) -> None:
        draft = self._folder / f".{name}.{self.process}"
        with open(draft, "wb") as file:
            file.writelines(parts)
        draft.rename(self._folder / name)

    def _await(self, *names: str) -> bytes:
        """The content of the last of these files, once all are there. Raises what another process tells of its failure."""
        pause = _POLL_SECONDS
        while True:
            there = os.listdir(self._folder)
            if set(names) <= set(there):
                return (self._folder / names[-1]).read_bytes()
            self._raise_failure(there)
            if self._has_failed:  # a thread that writes a snapshot would keep the process until JAX aborts it
                raise processes_lib.PeerLost(f"process {self.process} of this trainer has failed")
            self._tell_stop()
            time.sleep(pause)
            pause = min(1.1 * pause, _LONGEST_POLL_SECONDS)

    def _raise_failure(self, there: Sequence[str]) -> None:
        for name in sorted(each for each in there if each.startswith(f"{_FAILED}-") and each != f"{_FAILED}-{self.process}"):
            told = json.loads((self._folder / name).read_bytes())
            raise _error(told["sentence"], told["code"])

    def gather(self, content: T) -> list[T]:
        from jax.experimental import multihost_utils

        told = np.frombuffer(json.dumps(content).encode(), np.uint8)
        lengths = multihost_utils.process_allgather(np.int32(len(told)))
        padded = np.zeros(lengths.max(), np.uint8)
        padded[: len(told)] = told
        gathered = multihost_utils.process_allgather(padded)
        return [json.loads(each[:length].tobytes()) for each, length in zip(gathered, lengths.tolist(), strict=True)]

    def is_asked_to_stop(self) -> bool:
        if not self._asked and time.monotonic() - self._looked > _LOOK_FOR_STOP_SECONDS:
            self._asked = any(name.startswith(f"{_STOP}-") for name in os.listdir(self._folder))
            self._looked = time.monotonic()
        return self._asked

    def on_stop(self, stop: Callable[[], bool]) -> None:
        self._stop = stop

    def _tell_stop(self) -> None:
        if not self.leads and not self._has_told and self._stop():
            self._write(f"{_STOP}-{self.process}", b"")
            self._has_told = True

    @contextlib.contextmanager
    def guard(self, *mistakes: type[BaseException]) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._has_failed = True
            is_mistake = isinstance(error, mistakes) and not processes_lib.is_storage_failure(error)
            code = processes_lib.BAD_INPUT if is_mistake else processes_lib.exit_code(error)
            reason = self._reason(error) if code == 1 else None
            if reason is None and not isinstance(error, (processes_lib.PeerLost, _Told)):
                told = " ".join(str(error).split()) or type(error).__name__
                sentence = f"process {self.process} ({socket.gethostname()}) of this trainer failed: {told}"
                with contextlib.suppress(OSError):
                    self._write(f"{_FAILED}-{self.process}", json.dumps({"code": code, "sentence": sentence}).encode())
                if self.leads:  # JAX' coordinator ends with this process, and aborts those that have not read it by then
                    time.sleep(_REASON_SECONDS)
            # JAX would wait at the exit of the interpreter for processes that are gone.
            atexit.register(_exit_at_once, processes_lib.exit_code(reason) if reason else code)
            if reason is not None:
                raise reason from error
            raise

    def _reason(self, error: BaseException) -> BaseException | None:
        """The failure of another process, which may be the cause of an error of this process that has no known one."""
        deadline = time.monotonic() + _REASON_SECONDS
        while time.monotonic() < deadline:
            try:
                self._raise_failure(os.listdir(self._folder))
            except Exception as reason:
                return reason
            time.sleep(_LONGEST_POLL_SECONDS)
        if _COLLECTIVE.search(str(error)):
            told = f"a process of this trainer has ended, and a collective of process {self.process} failed"
            return processes_lib.PeerLost(f"{told} ({_first_line(error)}); {_AGAIN}")
        return None

    def tell(self, name: str, content: Mapping[str, Any]) -> None:
        self._write(f"part-{name}.{self.process}", json.dumps(content).encode())

    def told(self, name: str) -> list[dict[str, Any]]:
        names = [f"part-{name}.{process}" for process in range(1, self.processes)]
        self._await(*names)
        told = [json.loads((self._folder / each).read_bytes()) for each in names]
        for each in names:
            (self._folder / each).unlink()
        return told

    def end(self) -> None:
        import jax

        jax.distributed.shutdown()


class _Told(Exception):
    """A failure that another process has told."""


class _ToldMistake(processes_lib.BadInput, _Told):
    """A mistake of the user, or what else would end this process in the same way."""


class _ToldNotFinite(FloatingPointError, _Told):
    pass


class _ToldStorage(OSError, _Told):
    pass


def _error(sentence: str, code: int) -> BaseException:
    """The error by which this process ends with the code of another one, which told the sentence."""
    if code == processes_lib.BAD_INPUT:
        return _ToldMistake(sentence)
    if code == processes_lib.NOT_FINITE:
        return _ToldNotFinite(sentence)
    if code in (processes_lib.STORAGE_FAILED, processes_lib.STORAGE_FORBIDS):
        return _ToldStorage(errno.EACCES if code == processes_lib.STORAGE_FORBIDS else errno.EIO, sentence)
    return processes_lib.PeerLost(f"{sentence}; this one ends as well: {_AGAIN}")


def _exit_at_once(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _encoded(decided: Any) -> list[bytes | memoryview]:
    """The parts of a decision's file: a line of JSON, which names the arrays, and the arrays as they lie in memory."""
    of_arrays: dict[str, dict[str, np.ndarray]] = {}
    if isinstance(decided, dict):
        of_arrays = {name: each for name, each in decided.items() if isinstance(each, dict) and _are_arrays(each)}
        decided = {name: each for name, each in decided.items() if name not in of_arrays}
    arrays = [(of, name, np.asarray(array, order="C")) for of, each in of_arrays.items() for name, array in each.items()]
    told = [decided, [(of, name, array.dtype.str, array.shape) for of, name, array in arrays]]
    return [json.dumps(told).encode() + b"\n", *(array.data for _, _, array in arrays)]


def _are_arrays(found: dict[str, Any]) -> bool:
    return bool(found) and all(isinstance(each, np.ndarray) for each in found.values())


def _decoded(content: bytes) -> Any:
    at = content.index(b"\n") + 1
    decided, arrays = json.loads(content[:at])
    for of, name, dtype, shape in arrays:
        array = np.frombuffer(content, dtype, math.prod(shape), at).reshape(shape)
        decided.setdefault(of, {})[name] = array
        at += array.nbytes
    return decided


# The start


def start(
    world: World,
    *,
    workdir: Path,
    settings: Mapping[str, Any],
    devices: Sequence[int],
    connect_seconds: float,
    heartbeat_seconds: float,
) -> Plan:
    """Returns once all processes of the trainer are there, and JAX knows the devices of all of them.

    Args: settings: what must be the same in all processes, name -> JSON. devices: local GPUs of this process, by number.
    connect_seconds, heartbeat_seconds: see trainer.connect_seconds and trainer.heartbeat_seconds.

    Raises ValueError, by the same sentence in every process: they do not see the same workdir, or would not compute the same.
    PeerLost: they have not come together.
    """
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM; the plan tells of signals
    log.info(
        "process%s of the trainer (told by %s) meets the others%s; where they do not come within trainer.connect_seconds=%g, or "
        "two have one number, JAX aborts it",
        "" if world.process is None else f" {world.process} of {world.processes}",
        *(world.source, f" at --coordinator={world.coordinator}" if world.coordinator else "", connect_seconds),
    )
    try:
        jax.distributed.initialize(
            coordinator_address=world.coordinator or None,
            num_processes=world.processes,
            process_id=world.process,
            local_device_ids=devices or None,
            initialization_timeout=max(1, int(connect_seconds)),
            heartbeat_timeout_seconds=max(2, int(heartbeat_seconds)),
        )
    except Exception as error:  # jax raises RuntimeErrors of its own kinds
        raise processes_lib.PeerLost(
            f"process {world.process} of --processes={world.processes} has not met the others at "
            f"--coordinator={world.coordinator} within trainer.connect_seconds={connect_seconds:g}: {_first_line(error)}"
        ) from error
    if jax.process_count() == 1:
        return Plan()
    process, processes = jax.process_index(), jax.process_count()
    if devices and jax.local_device_count() != len(devices):
        raise ValueError(
            f"process {process} of the trainer has {len(devices)} GPUs, and JAX finds {jax.local_device_count()} × "
            f"{jax.local_devices()[0].device_kind}: install JAX' support for them, or ask for the CPU by JAX_PLATFORMS=cpu"
        )
    log.info(
        "process %d of %d of the trainer with %d of %d devices",
        *(process, processes, jax.local_device_count(), jax.device_count()),
    )
    plan = SharedPlan(workdir, process=process, processes=processes)
    told = plan.gather({"host": socket.gethostname(), "workdir": str(workdir), "id": uuid.uuid4().hex[:16]})
    everyone = plan.gather({"versions": {"tba_jax": code_digest(), **versions()}, "settings": dict(settings)})
    for number, each in enumerate(everyone):
        _check_same(everyone[0], each, who=f"process {number} ({told[number]['host']})", first=told[0]["host"])
    plan._folder = workdir / _FOLDER / told[0]["id"]
    if plan.leads:
        shutil.rmtree(workdir / _FOLDER, ignore_errors=True)
        plan._folder.mkdir(parents=True)
    plan.gather(None)  # it is there from here on
    sees = plan.gather(_appears(plan._folder))
    if False in sees:
        blind = told[number := sees.index(False)]
        raise ValueError(
            f"process {number} ({blind['host']}) does not see in --workdir={blind['workdir']} what process 0 "
            f"({told[0]['host']}) has written into --workdir={told[0]['workdir']}: all processes of a trainer need one workdir, "
            "on storage that they share"
        )
    return plan


def _appears(folder: Path) -> bool:
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while not folder.parent.is_dir() or folder.name not in os.listdir(folder.parent):
        if time.monotonic() > deadline:
            return False
        time.sleep(_LONGEST_POLL_SECONDS)
    return True


def _check_same(ours: Mapping[str, Any], theirs: Mapping[str, Any], *, who: str, first: str) -> None:
    """Raises ValueError about what another process would compute otherwise than process 0."""
    for part in ("versions", "settings"):
        mine, other = ours[part], theirs[part]
        different = [name for name in sorted({*mine, *other}) if mine.get(name) != other.get(name)]
        if different:
            listed = "; ".join(f"{name}: {other.get(name)!r} there, {mine.get(name)!r} here" for name in different[:_SHOWN])
            more = f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
            raise ValueError(f"{who} has other {part} than process 0 ({first}), and all processes need the same: {listed}{more}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
