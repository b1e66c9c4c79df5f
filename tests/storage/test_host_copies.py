"""Copies on a host: its readers download a snapshot once, whoever dies meanwhile, and can do without copies."""

import gc
import os
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tba_jax.storage import file_systems, host_copies, places
from tba_jax.storage.published import Published
from tests.support import moto_server
from tests.support.small_disk import SmallDisk
from tests.support.tiny_snapshots import SPECS, assert_same_bits, publish, random_params, shardings, withdraw

# A reader whose download stops after three objects.
STALLS = """
import sys, time
from tba_jax.storage import host_copies, places
policies, name = places.place(sys.argv[1]), sys.argv[2]
left, read = [0, 1, 2], places.read_bytes
places.read_bytes = lambda file: read(file) if left and left.pop() >= 0 else time.sleep(600)
host_copies.HostCopies(policies, kept=lambda: [name]).read(lambda nearby: nearby(policies / name))
"""


@pytest.fixture
def policies(s3, tmp_path, monkeypatch) -> places.Bucket:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return places.place(f"s3://{moto_server.BUCKET}/{uuid.uuid4().hex}/policy")


def readers(policies: places.Place, count: int) -> list[Published]:
    return [Published(policies, shares=True) for _ in range(count)]


def load(reader: Published, step: int) -> int:
    """Loads a snapshot, which must be right. Returns how many requests that took (while nobody else sends any)."""
    before = places.sent()
    assert_same_bits(reader.load(step, SPECS, shardings()), random_params(step))
    return places.sent() - before


def copies(tmp_path: Path) -> list[Path]:
    """The copies and drafts on the host."""
    return sorted(each for each in tmp_path.glob("temporary/tba_jax-*/*/*") if each.is_dir())


def until(holds: Any) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_readers_of_a_host_download_a_snapshot_once(policies, tmp_path):
    first = publish(policies, 1)
    objects, several = len(places.files_in(first)), readers(policies, 4)
    before = places.sent()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(load, several, [1] * 4))
    assert places.sent() - before == objects + 1 + 4, "every object once, a listing, and the pointer by each"
    assert [each.name for each in copies(tmp_path)] == [first.name]
    (user,) = (tmp_path / "temporary").iterdir()
    assert user.stat().st_mode & 0o777 == 0o700
    second = publish(policies, 2)
    withdraw(policies, 1)
    assert load(several[0], 2) == objects + 2 and load(several[1], 2) == 1
    assert [each.name for each in copies(tmp_path)] == [second.name], "the pointer does not name the first any more"
    for step in range(3, 3 + host_copies.COPIES):
        publish(policies, step)
        load(several[0], step)
    assert len(copies(tmp_path)) == host_copies.COPIES
    del several[1:]
    gc.collect()
    publish(policies, 9)
    load(several[0], 9)
    assert len(copies(tmp_path)) == host_copies.COPIES, "a reader that is alone copies nothing"
    several.clear()
    gc.collect()
    assert copies(tmp_path) == [], "the last one removes them"


def test_a_download_that_stalls_is_waited_for_and_one_that_dies_is_done_again(policies, tmp_path, monkeypatch, caplog):
    folder = publish(policies, 3)
    several = readers(policies, 2)
    environment = os.environ | {"TMPDIR": tempfile.gettempdir(), "JAX_PLATFORMS": "cpu"}
    stalled = subprocess.Popen([sys.executable, "-c", STALLS, str(policies), folder.name], env=environment)
    try:
        until(lambda: sum(each.is_file() for each in tmp_path.glob(f"temporary/*/*/.{folder.name}/**/*")) == 3)
        with monkeypatch.context() as patch:
            patch.setattr(host_copies, "PATIENCE_SECONDS", 0.3)
            load(several[1], 3)
        (told,) = [record.message for record in caplog.records]
        assert "another process has downloaded nothing" in told and [each.name[0] for each in copies(tmp_path)] == ["."]
        with ThreadPoolExecutor() as pool:
            loads = pool.submit(load, several[0], 3)
            time.sleep(0.5)
            assert not loads.done()
            stalled.kill()
            assert loads.result() == len(places.files_in(folder)) + 2
        assert [each.name for each in copies(tmp_path)] == [folder.name]
    finally:
        stalled.kill()
        stalled.wait()


@pytest.mark.parametrize("case", ["no room", "another user's"])
def test_without_copies_the_bucket_is_read_and_that_is_told_once(policies, tmp_path, monkeypatch, caplog, case):
    if case == "no room":
        monkeypatch.setattr(file_systems, "free", lambda folder: 1 << 20)
    else:
        (tmp_path / "temporary" / f"tba_jax-{os.getuid()}").mkdir(mode=0o755)
    several = readers(policies, 2)
    for step in (1, 2):
        publish(policies, step)
        load(several[0], step)
    told = [record.message for record in caplog.records]
    assert len(told) == (1 if case == "no room" else 2) and copies(tmp_path) == []
    assert all("TMPDIR" in each and ("No space left" in each or "mode 700" in each) for each in told)


def test_a_disk_that_fills_meanwhile_costs_the_copy_alone(policies, tmp_path, monkeypatch, caplog):
    with SmallDisk(tmp_path / "small" / "temporary", megabytes=1) as disk:
        if disk.missing:
            pytest.skip(disk.missing)
        monkeypatch.setattr(tempfile, "tempdir", str(disk.folder))
        monkeypatch.setattr(file_systems, "free", lambda folder: None)
        several = readers(policies, 2)
        publish(policies, 1)
        with disk.full():
            load(several[0], 1)
        assert "No space left" in caplog.text and copies(tmp_path / "small") == []
        load(several[1], 1)
        assert len(copies(tmp_path / "small")) == 1
        several.clear()
        gc.collect()


@pytest.mark.parametrize("left", [-3, 0, None])
def test_a_damaged_copy_goes_and_the_bucket_is_read(policies, tmp_path, caplog, left):
    publish(policies, 1)
    several = readers(policies, 2)
    load(several[0], 1)
    (copy,) = copies(tmp_path)
    torn = copy / "embedding.weight" / "c" / "0" / "0"
    if left is None:
        torn.unlink()
    else:
        torn.write_bytes(torn.read_bytes()[:left])
    load(several[1], 1)
    (told,) = [record.message for record in caplog.records]
    assert str(copy) in told and "embedding.weight" in told and copies(tmp_path) == []


def test_no_object_is_written_outside_of_the_copy(policies, tmp_path, caplog):
    policies = places.place(f"memory://x/{uuid.uuid4().hex}")  # S3's requests cannot spell such a name
    folder, several = publish(policies, 1), readers(policies, 2)
    places.write_bytes(folder / f"/{tmp_path}/escaped", b"x")
    load(several[0], 1)
    assert not (tmp_path / "escaped").exists() and copies(tmp_path) == [] and "lead out of it" in caplog.text


def test_what_killed_readers_left_goes_when_another_run_is_read(policies, tmp_path):
    left = tmp_path / "temporary" / f"tba_jax-{os.getuid()}"
    left.mkdir(mode=0o700)
    (left / "0123" / "00000001-000001-01234567").mkdir(parents=True)
    other = places.place(f"{policies}-other")
    publish(other, 1)
    used = readers(other, 2)
    load(used[0], 1)
    _ = readers(policies, 1)
    assert [each.name for each in copies(tmp_path)] == [each.name for each in used[0].kept().values()]
