"""The sentence about a full file system, and folders that are followed where they are moved."""

import errno
import os
import shutil
import sys

import pytest
import tensorstore as ts

from tba_jax.storage import file_systems, places


def test_the_full_file_system_is_named(tmp_path):
    room = os.statvfs(tmp_path)
    total = f"of {room.f_frsize * room.f_blocks / 2**30:.2f} GiB left"
    point, kind = file_systems.mount(tmp_path)
    gone = tmp_path / "not yet there" / "rows"
    for error in (OSError(errno.ENOSPC, "No space left on device", str(gone)), OSError(errno.EDQUOT, "Disk quota exceeded")):
        told = file_systems.no_room(error, tmp_path)
        assert told.startswith(f"the file system of {tmp_path} ({kind} at {point}) has ") and total in told
        assert told.endswith("keep less of the run (publish.keep, checkpoint.keep, replay.retention=checkpoints)")
    full = ValueError("a checkpoint could not be written")
    full.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert str(tmp_path) in file_systems.no_room(full, tmp_path) and file_systems.no_room(full, None).startswith("free some")
    assert file_systems.no_room(OSError(errno.EROFS, "Read-only file system"), tmp_path) == ""


@pytest.mark.skipif(sys.platform != "linux", reason="a held folder is a descriptor of /proc")
def test_a_held_folder_is_followed_where_it_goes(tmp_path):
    (tmp_path / "run" / "log").mkdir(parents=True)
    held = file_systems.hold(tmp_path / "run" / "log")
    store = ts.KvStore.open({"driver": "file", "path": f"{held}/"}).result()
    (tmp_path / "run").rename(tmp_path / "away")
    store.write("deep/x", b"1").result()
    assert (tmp_path / "away" / "log" / "deep" / "x").exists() and not (tmp_path / "run").exists()
    shutil.rmtree(tmp_path / "away")
    with pytest.raises(places.STORAGE_ERRORS):
        store.write("deep/y", b"1").result()
    assert not any(tmp_path.iterdir())
    file_systems.let_go(held)
