"""How the processes of a trainer find each other: process 0 awaits the others at the coordinator's address.

They meet before JAX looks for devices. Process 0 leaves a key in the workdir: a process that can read it sees the same workdir,
and is of the same run. Each proves to the other that it has read the key. Process 0 compares what each of them would compute,
and only then JAX' own runtime is started among them, on a port that process 0 has found free.
"""

import contextlib
import dataclasses
import functools
import hashlib
import hmac
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

from tba_jax.run import layout, processes
from tba_jax.run.process_group import Leader, Member
from tba_jax.run.wire import Message, Wire
from tba_jax.run.world import World

log = logging.getLogger(__name__)

_KEY_FILE = "trainer.key"
# Network file systems show a new file to other hosts after this time at the latest.
_VISIBLE_SECONDS = 60.0
_TRY_AGAIN_SECONDS = 0.2
# A host that is gone answers nothing, and the name of process 0 may lead to another one meanwhile.
_ATTEMPT_SECONDS = 5.0
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "numpy")
_SHOWN = 5  # differences that a sentence lists


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """trainer.connect_seconds and trainer.heartbeat_seconds."""

    connect_seconds: float
    heartbeat_seconds: float


def meet(world: World, *, workdir: Path, settings: Mapping[str, Any], visible_gpus: int, limits: Limits) -> Leader | Member:
    """Returns once all processes of the trainer are there, and JAX knows the devices of all of them.

    JAX must not have looked for devices before.

    Args:
      workdir: of the run, absolute. settings: what must be the same in all processes, name -> a value of JSON.
      visible_gpus: GPUs that this process sees.

    Raises:
      ValueError: the processes do not come together, do not see the same workdir, or would not compute the same; in every
        process that is there, by the same sentence.
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
    if world.process == 0:
        wires, hosts, address = _await_others(world, workdir, hello, limits)
        _start_jax(world, address, devices, limits)
        return Leader(wires, hosts, heartbeat_seconds=limits.heartbeat_seconds)
    wire, host, address = _join(world, workdir, hello, limits)
    _start_jax(world, address, devices, limits)
    return Member(wire, host, process=world.process, processes=world.processes, heartbeat_seconds=limits.heartbeat_seconds)


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
        heartbeat_timeout_seconds=max(2, int(limits.heartbeat_seconds)),
    )
    if jax.default_backend() == "cpu":
        # A CPU program from the cache does not keep the order of its collectives (jaxlib 0.10.2): processes mix up their data.
        jax.config.update("jax_enable_compilation_cache", False)
    log.info(
        "process %d of %d of the trainer (found by %s) with %d of %d devices, coordinator %s",
        *(world.process, world.processes, world.source, jax.local_device_count(), jax.device_count(), world.coordinator),
    )


@functools.cache
def _versions() -> dict[str, str]:
    """What a process computes with: a digest of this package's code, and the versions of the libraries below it."""
    package, digest = Path(__file__).parent.parent, hashlib.blake2b(digest_size=8)
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode())
        digest.update(path.read_bytes())
    return {"tba_jax": digest.hexdigest()} | {name: importlib.metadata.version(name) for name in _PACKAGES}


# Process 0


def _await_others(
    world: World, workdir: Path, hello: Mapping[str, Any], limits: Limits
) -> tuple[dict[int, Wire], dict[int, str], str]:
    """Connection and host of each other process, and the address of JAX' coordinator."""
    wires: dict[int, Wire] = {}
    hosts: dict[int, str] = {}
    strangers: list[str] = []
    deadline = time.monotonic() + limits.connect_seconds
    with _listener(world) as listener, _key(workdir) as key:
        try:
            while len(wires) < world.processes - 1 or _forget_gone(wires):
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    wire = Wire(listener.accept()[0])
                except TimeoutError as error:
                    raise ValueError(_missing(world, wires, strangers, limits)) from error
                wire.limit(_VISIBLE_SECONDS + 5)
                if (theirs := _greet(wire, key, hello, strangers)) is None:
                    wire.close()
                    continue
                number = theirs["process"]
                _forget_gone(wires)
                if number in wires or number == 0:
                    wire.send("refused", {"sentence": (sentence := f"two processes of this trainer have --process={number}")})
                    raise ValueError(sentence)
                wires[number], hosts[number] = wire, theirs["host"]
                if sentence := _difference(hello, theirs):
                    raise ValueError(sentence)
            address = f"{world.address[0]}:{_free_port()}"
            for wire in wires.values():
                wire.send("start", {"address": address})
                wire.limit(None)
        except ValueError as error:
            for wire in wires.values():
                with contextlib.suppress(OSError):
                    wire.send("refused", {"sentence": str(error)})
            raise
        except OSError as error:
            raise processes.PeerLost(f"a process of this trainer ended when all of them had met ({error})") from error
    return wires, hosts, address


def _forget_gone(wires: dict[int, Wire]) -> bool:
    """Forgets processes that have come and ended again: others may come in their place. Returns whether there were any."""
    gone = [number for number, wire in wires.items() if wire.is_gone()]
    for number in gone:
        log.warning("process %d of the trainer has ended while it waited for the others", number)
        wires.pop(number).close()
    return bool(gone)


@contextlib.contextmanager
def _listener(world: World) -> Iterator[socket.socket]:
    try:
        listener = socket.create_server(("", world.address[1]), backlog=max(16, world.processes), reuse_port=False)
    except OSError as error:
        raise ValueError(
            f"--coordinator={world.coordinator}: process 0 cannot listen on port {world.address[1]} ({error.strerror}); another "
            "run may use it: name another port"
        ) from error
    with listener:
        yield listener


@contextlib.contextmanager
def _key(workdir: Path) -> Iterator[dict[str, str]]:
    """The key of this meeting, in a file of the workdir that only this user can read; it is removed at the end."""
    is_new = not workdir.exists()
    path, key = workdir / _KEY_FILE, {"id": secrets.token_hex(8), "key": secrets.token_hex(32)}
    draft = path.with_name(f".{_KEY_FILE}.{key['id']}")
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(key, file)
        draft.replace(path)
    except OSError as error:
        raise ValueError(f"workdir {str(workdir)!r} cannot be written: {error.strerror}") from error
    try:
        yield key
    except BaseException:
        _remove(path, key)
        with contextlib.suppress(OSError):  # another process may have begun a run there
            if is_new:
                workdir.rmdir()
        raise
    _remove(path, key)


def _remove(path: Path, key: Mapping[str, str]) -> None:
    with contextlib.suppress(OSError):
        if _read_key(path.parent).get("id") == key["id"]:
            path.unlink()


def _greet(wire: Wire, key: Mapping[str, str], hello: Mapping[str, Any], strangers: list[str]) -> dict[str, Any] | None:
    """What a process that has connected says of itself; None where it does not prove to be of this trainer.

    Raises:
      ValueError: it is, and says that it does not see this workdir.
    """
    nonce = secrets.token_hex(16)
    try:
        wire.send("greeting", {"id": key["id"], "nonce": nonce, "workdir": hello["workdir"], "host": hello["host"]})
        answer = wire.receive()
        theirs: dict[str, Any] = answer.content["hello"]
        unseen = _unseen(theirs, hello) if answer.kind == "unseen" else ""
        if not unseen:
            if not hmac.compare_digest(answer.content["proof"], _proof(key, nonce, theirs)):
                return None
            wire.send("welcome", {"proof": _proof(key, answer.content["nonce"], {})})
    except (EOFError, OSError, KeyError, TypeError, ValueError) as error:
        log.warning("something that is no process of this trainer has connected to the coordinator: %s", error)
        return None
    if unseen and theirs["workdir"] == hello["workdir"]:
        raise ValueError(unseen)
    if unseen:
        strangers.append(unseen)
        log.warning("%s", unseen)
        return None
    return theirs


def _unseen(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """The sentence about a process that does not see the key. Args: theirs: what it says of itself; ours: process 0."""
    return (
        f"process {theirs['process']} ({theirs['host']}) does not see {_KEY_FILE} of process 0 ({ours['host']}): workdir "
        f"{theirs['workdir']!r} there and {ours['workdir']!r} here must be one folder on storage that all processes share; or "
        "another run uses this --coordinator"
    )


def _proof(key: Mapping[str, str], nonce: str, content: Mapping[str, Any]) -> str:
    told = json.dumps([nonce, content], sort_keys=True).encode()
    return hmac.new(bytes.fromhex(key["key"]), told, "sha256").hexdigest()


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
        greeting = wire.receive().content
    except (EOFError, OSError) as error:
        wire.close()
        raise ValueError(
            f"--coordinator={world.coordinator} has ended the connection without a word ({error}): it is no trainer's process 0"
        ) from error
    try:
        key = _find_key(workdir, greeting["id"], wire, seconds=min(limits.connect_seconds, _VISIBLE_SECONDS))
        if key is None:
            wire.send("unseen", {"hello": {name: hello[name] for name in ("process", "host", "workdir")}})
            raise ValueError(_unseen(hello, greeting))
        nonce = secrets.token_hex(16)
        wire.send("hello", {"hello": hello, "nonce": nonce, "proof": _proof(key, greeting["nonce"], hello)})
        _expect(wire.receive(), "welcome", proof=_proof(key, nonce, {}))
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
            wire.limit(limits.connect_seconds + _VISIBLE_SECONDS)
            return wire
        except OSError as error:
            if time.monotonic() + _TRY_AGAIN_SECONDS > deadline:
                raise ValueError(
                    f"--coordinator={world.coordinator} has not answered process {world.process} for "
                    f"trainer.connect_seconds={limits.connect_seconds:g} ({error.strerror or error}): process 0 listens there"
                ) from error
            time.sleep(_TRY_AGAIN_SECONDS)


def _find_key(workdir: Path, identity: str, wire: Wire, *, seconds: float) -> dict[str, str] | None:
    """The key of the meeting with this id, once the workdir shows it; None where it does not within so many seconds.

    Raises:
      EOFError: process 0, at the other end of the wire, has ended, and its key with it.
    """
    deadline = time.monotonic() + seconds
    while (key := _read_key(workdir)).get("id") != identity:
        if wire.is_gone():
            raise EOFError("the other end of the connection is gone")
        if time.monotonic() > deadline:
            return None
        time.sleep(_TRY_AGAIN_SECONDS)
    return key


def _read_key(workdir: Path) -> dict[str, str]:
    try:
        if _KEY_FILE not in os.listdir(workdir):  # a listing is newer than what a network file system remembers of a name
            return {}
        found: dict[str, str] = layout.read_json(workdir / _KEY_FILE)
    except (OSError, ValueError):
        return {}
    return found


def _expect(message: Message, kind: str, **content: str) -> dict[str, Any]:
    """The content of a message of process 0. Raises ValueError by the sentence with which it refuses."""
    if message.kind == "refused":
        raise ValueError(message.content["sentence"])
    if message.kind != kind or any(message.content.get(name) != value for name, value in content.items()):
        raise ValueError(f"the coordinator's {message.kind} is not of a trainer that has this workdir's {_KEY_FILE}")
    return message.content
