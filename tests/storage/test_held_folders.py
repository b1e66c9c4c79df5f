"""A held folder is followed where it is moved, and nothing is made in its place."""

import shutil
import sys

import pytest
import tensorstore as ts

from tba_jax.storage import held_folders, places


@pytest.mark.skipif(sys.platform != "linux", reason="a held folder is a descriptor of /proc")
def test_a_held_folder_is_followed_where_it_goes(tmp_path):
    (tmp_path / "run" / "log").mkdir(parents=True)
    held = held_folders.hold(tmp_path / "run" / "log")
    store = ts.KvStore.open({"driver": "file", "path": f"{held}/"}).result()
    (tmp_path / "run").rename(tmp_path / "away")
    store.write("deep/x", b"1").result()
    assert (tmp_path / "away" / "log" / "deep" / "x").exists() and not (tmp_path / "run").exists()
    shutil.rmtree(tmp_path / "away")
    with pytest.raises(places.STORAGE_ERRORS):
        store.write("deep/y", b"1").result()
    assert not any(tmp_path.iterdir())
    held_folders.let_go(held)
