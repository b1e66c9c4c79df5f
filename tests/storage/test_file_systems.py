"""The sentence about a full file system."""

import errno
import os

from tba_jax.storage import file_systems


def test_the_full_file_system_is_named(tmp_path):
    room = os.statvfs(tmp_path)
    total = f"of {room.f_frsize * room.f_blocks / 2**30:.2f} GiB left"
    point, kind = file_systems.mount(tmp_path)
    gone = tmp_path / "not yet there" / "rows"
    for error in (OSError(errno.ENOSPC, "No space left on device", str(gone)), OSError(errno.EDQUOT, "Disk quota exceeded")):
        told = file_systems.no_room(error, tmp_path)
        assert told.startswith(f"the file system of {tmp_path} ({kind} at {point}) has ") and total in told
        assert told.endswith("keep less of the run (publish.keep, checkpoint.keep, replay.retention=checkpoints)")


def test_a_full_disk_behind_another_error_is_found(tmp_path):
    try:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as cause:
            raise ValueError("a checkpoint could not be written") from cause
    except ValueError as error:
        assert str(tmp_path) in file_systems.no_room(error, tmp_path)
        assert file_systems.no_room(error, None).startswith("free some")
    assert "left" in file_systems.no_room(ValueError("RESOURCE: No space left on device"), tmp_path)
    assert file_systems.no_room(OSError(errno.EROFS, "Read-only file system"), tmp_path) == ""
