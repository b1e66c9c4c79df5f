"""How the processes of a trainer find each other: process 0 awaits the others at the coordinator's address.

They meet before JAX looks for devices. Each proves that it has read a key that process 0 leaves in the workdir, and so is of the
same run. Process 0 compares what each of them would compute; then JAX' own runtime is started on a port that it has found free.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tba_jax.roles import wire as wire_lib
from tba_jax.roles.process_group import Leader, Member
from tba_jax.roles.wire import Message, Wire
from tba_jax.run import processes
from tba_jax.run.world import World

log = logging.getLogger(__name__)

# A host that is gone answers nothing, and the name of process 0 may lead to another one meanwhile.
_ATTEMPT_SECONDS = 5.0
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "numpy")
# After a refusal process 0 waits so long for processes that come later than the others, and tells them as well.
_REFUSE_SECONDS = 15.0
_SHOWN = 5  # differences that a sentence lists


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """trainer.connect_seconds and trainer.heartbeat_seconds."""

    connect_seconds: float
    heartbeat_seconds: float


def meet(world: World, *, workdir: Path, settings: Mapping[str, Any], visible_gpus: int, limits: Limits) -> Leader | Member:
    """Returns once all processes of the trainer are there, and JAX knows the devices of all of them.

    Args: workdir: absolute. settings: what must be the same in all processes, name -> JSON. visible_gpus: of this process.

    Raises ValueError, by the same sentence in every process that is there: the processes do not come together, do not see the
    same workdir, or would not compute the same.
    """
    devices = world.local_devices(visible_gpus)
    hello = {
        "process": world.process,
        "processes": world.processes,
        "host": socket.gethostname(),
        "workdir": str(workdir),
        "versions": _versions(),
        "settings": json.loads(json.dumps(settings)),
    }
    beats = limits.heartbeat_seconds
    group: Leader | Member
    if world.process == 0:
        wires, hosts, address = _await_others(world, workdir, hello, limits)
        group = Leader(wires, hosts, heartbeat_seconds=beats)
    else:
        wire, host, address = _join(world, workdir, hello, limits)
        group = Member(wire, host, process=world.process, processes=world.processes, heartbeat_seconds=beats)
    with group.guard(ValueError):
        _start_jax(world, address, devices, limits)
    return group


def _start_jax(world: World, address: str, devices: Sequence[int], limits: Limits) -> None:
    import jax

    # It would swallow SIGTERM; the process group agrees about signals by itself.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator_address=address,
        num_processes=world.processes,
        process_id=world.process,
        local_device_ids=devices,
        initialization_timeout=max(1, int(limits.connect_seconds)),
        # The group sees the end of a process, and says so. JAX, which aborts the process instead, is the last to see it.
        heartbeat_timeout_seconds=10 + int(3 * limits.heartbeat_seconds),
    )
    if devices and jax.local_device_count() != len(devices):
        raise ValueError(
            f"process {world.process} of the trainer has {len(devices)} GPUs, and JAX finds {jax.local_device_count()} × "
            f"{jax.local_devices()[0].device_kind}: install JAX' support for them, or ask for the CPU by JAX_PLATFORMS=cpu"
        )
    log.info(
        "process %d of %d of the trainer (found by %s) with %d of %d devices, coordinator %s",
        *(world.process, world.processes, world.source, jax.local_device_count(), jax.device_count(), world.coordinator),
    )


def _versions() -> dict[str, str]:
    """What a process computes with: a digest of this package's code, and the versions of the libraries below it."""
    package, digest = Path(__file__).parent.parent, hashlib.blake2b(digest_size=8)
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode())
        digest.update(path.read_bytes())
    return {"tba_jax": digest.hexdigest()} | {name: importlib.metadata.version(name) for name in _PACKAGES}


# Process 0


class _Missing(ValueError):
    """Processes have not come within trainer.connect_seconds."""


def _await_others(
    world: World, workdir: Path, hello: Mapping[str, Any], limits: Limits
) -> tuple[dict[int, Wire], dict[int, str], str]:
    """Connection and host of each other process, and the address of JAX' coordinator."""
    wires: dict[int, Wire] = {}
    hosts: dict[int, str] = {}
    deadline = time.monotonic() + limits.connect_seconds
    with _listener(world) as listener, wire_lib.key(workdir) as key, wire_lib.Reception(listener, key, hello) as reception:
        try:
            while len(wires) < world.processes - 1 or _forget_gone(wires):
                came = reception.next(deadline)
                if came is None:
                    raise _Missing(_missing(world, wires, reception.strangers, limits))
                wire, theirs = came
                number = theirs["process"]
                _forget_gone(wires)
                if number in wires or number == 0:
                    wire.send("refused", {"sentence": (sentence := f"two processes of this trainer have --process={number}")})
                    raise ValueError(sentence)
                wires[number], hosts[number] = wire, theirs["host"]
                if sentence := _difference(hello, theirs):
                    raise ValueError(sentence)
            address = f"{world.coordinator.rpartition(':')[0]}:{_free_port()}"
            for wire in wires.values():
                wire.send("start", {"address": address})
                wire.limit(None)
        except ValueError as error:
            late = 0.0 if isinstance(error, _Missing) else min(limits.connect_seconds, _REFUSE_SECONDS)
            _refuse(wires, str(error), reception, world, seconds=late)
            raise
        except OSError as error:
            raise processes.PeerLost(f"a process of this trainer ended when all of them had met ({error})") from error
    return wires, hosts, address


def _refuse(wires: Mapping[int, Wire], sentence: str, reception: wire_lib.Reception, world: World, *, seconds: float) -> None:
    """Tells all processes of the trainer why they do not begin, also those that come within so many seconds."""
    told, deadline = set(wires), time.monotonic() + seconds
    for wire in wires.values():
        with contextlib.suppress(OSError):
            wire.send("refused", {"sentence": sentence})
    while len(told) < world.processes - 1:
        try:
            came = reception.next(deadline)
        except ValueError:
            continue  # it has refused by itself
        if came is None:
            return
        told.add(came[1]["process"])
        with contextlib.suppress(OSError):
            came[0].send("refused", {"sentence": sentence})


def _forget_gone(wires: dict[int, Wire]) -> bool:
    """Forgets processes that have come and ended again: others may come in their place. Returns whether there were any."""
    gone = [number for number, wire in wires.items() if wire.is_gone()]
    for number in gone:
        log.warning("process %d of the trainer has ended while it waited for the others", number)
        wires.pop(number).close()
    return bool(gone)


@contextlib.contextmanager
def _listener(world: World) -> Iterator[socket.socket]:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        listener = socket.create_server(
            ("", world.address[1]), family=family, backlog=max(16, world.processes), dualstack_ipv6=both
        )
    except OSError as error:
        raise ValueError(
            f"--coordinator={world.coordinator}: process 0 cannot listen on port {world.address[1]} "
            f"({os.strerror(error.errno or 0)}): another run uses it, or another process of this one also has --process=0"
        ) from error
    with listener:
        yield listener


def _missing(world: World, wires: Mapping[int, Wire], strangers: Sequence[str], limits: Limits) -> str:
    missing = sorted(set(range(1, world.processes)) - set(wires))
    listed = ", ".join(map(str, missing[:_SHOWN])) + (" …" if len(missing) > _SHOWN else "")
    return (
        f"--processes={world.processes}: after trainer.connect_seconds={limits.connect_seconds:g} process {listed} has not "
        f"come to --coordinator={world.coordinator}" + "".join(f"; {sentence}" for sentence in strangers[:1])
    )


def _difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The sentence about what another process would compute otherwise than process 0; "" where it would not."""
    who = f"process {theirs['process']} ({theirs['host']})"
    if theirs["processes"] != ours["processes"]:
        return f"--processes={theirs['processes']} of {who} and --processes={ours['processes']} of process 0 must be the same"
    for called, part in (("versions", "versions"), ("settings", "settings")):
        mine, other = ours[part], theirs[part]
        different = [name for name in sorted({*mine, *other}) if mine.get(name) != other.get(name)]
        if different:
            listed = "; ".join(f"{name}: {other.get(name)!r} there, {mine.get(name)!r} here" for name in different[:_SHOWN])
            more = f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
            return f"{who} has other {called} than process 0 ({ours['host']}), and all processes need the same: {listed}{more}"
    return ""


def _free_port() -> int:
    with socket.create_server(("", 0)) as free:
        return int(free.getsockname()[1])


# The other processes


def _join(world: World, workdir: Path, hello: Mapping[str, Any], limits: Limits) -> tuple[Wire, str, str]:
    """The connection to process 0, its host, and the address of JAX' coordinator."""
    wire = _connect(world, limits)
    try:
        greeting = wire.receive(longest=wire_lib.LONGEST_HELLO).content
        greeting["host"], greeting["id"], greeting["nonce"]
    except (EOFError, OSError, ValueError, KeyError, TypeError) as error:
        wire.close()
        raise ValueError(
            f"--coordinator={world.coordinator} has not greeted process {world.process} ({error}): it is no trainer's process 0"
        ) from error
    try:
        key = wire_lib.find_key(workdir, greeting["id"], wire, seconds=min(limits.connect_seconds / 2, wire_lib.VISIBLE_SECONDS))
        if key is None:
            wire.send("unseen", {"hello": {name: hello[name] for name in ("process", "host", "workdir")}})
            raise ValueError(wire_lib.unseen(hello, greeting["host"]))
        nonce = secrets.token_hex(16)
        wire.send("hello", {"hello": hello, "nonce": nonce, "proof": wire_lib.proof(key, greeting["nonce"], hello)})
        _expect(wire.receive(), "welcome", proof=wire_lib.proof(key, nonce, {}))
        address: str = _expect(wire.receive(), "start")["address"]
    except (EOFError, OSError) as error:
        wire.close()
        raise processes.PeerLost(
            f"process 0 ({greeting.get('host')}) of this trainer ended before all processes had met ({error})"
        ) from error
    except KeyError as error:
        wire.close()
        raise ValueError(f"--coordinator={world.coordinator} says nothing of {error}: it is no process 0 of a trainer") from error
    wire.limit(None)
    return wire, greeting["host"], address


def _connect(world: World, limits: Limits) -> Wire:
    """A connection to process 0, which may begin later than this process."""
    deadline = time.monotonic() + limits.connect_seconds
    while True:
        try:
            left = max(0.1, deadline - time.monotonic())
            wire = Wire(socket.create_connection(world.address, timeout=min(left, _ATTEMPT_SECONDS)))
            wire.limit(limits.connect_seconds + wire_lib.VISIBLE_SECONDS)
            return wire
        except OSError as error:
            if time.monotonic() + wire_lib.TRY_AGAIN_SECONDS > deadline:
                raise ValueError(
                    f"--coordinator={world.coordinator} has not answered process {world.process} for "
                    f"trainer.connect_seconds={limits.connect_seconds:g} ({error.strerror or error}): process 0 listens there"
                ) from error
            time.sleep(wire_lib.TRY_AGAIN_SECONDS)


def _expect(message: Message, kind: str, **content: str) -> dict[str, Any]:
    """The content of a message of process 0. Raises ValueError by the sentence with which it refuses."""
    if message.kind == "refused":
        raise ValueError(message.content["sentence"])
    if message.kind != kind or any(message.content.get(name) != value for name, value in content.items()):
        raise ValueError(f"the coordinator's {message.kind} is not of a trainer that has this workdir's {wire_lib.KEY_FILE}")
    return message.content
