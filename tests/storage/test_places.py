"""The one seam under everything that roles share: the same promises on a folder, in memory, and on an S3 server."""

import concurrent.futures
import dataclasses
import os
import threading
from pathlib import Path

import pytest
import tensorstore as ts

from tba_jax.storage import layout, places


def test_files_are_written_read_replaced_and_removed(root):
    file = root / "a" / "b.json"
    assert not places.exists(file)
    if isinstance(root, Path):  # a folder is made below an existing one alone
        for make in (places.make_folder, lambda folder: places.create(folder / "b.json", b"")):
            with pytest.raises(FileNotFoundError):
                make(file.parent)
        assert not root.exists()
    with pytest.raises(FileNotFoundError, match=r"b\.json"):
        places.read_bytes(file)
    places.make_folder(file.parent, below=2)
    places.write_bytes(file, b"first")
    places.write_bytes(file, b"")
    assert places.exists(file) and places.read_bytes(file) == b""
    places.write_bytes(file, bytes(range(256)) * 1000)
    assert places.read_bytes(file) == bytes(range(256)) * 1000
    assert (file.name, str(file.parent)) == ("b.json", f"{root}/a") and file.parent == root / "a"
    for _ in range(2):
        places.remove(file)
        assert not places.exists(file)


def test_of_all_that_create_a_file_at_once_one_does(root):
    start = threading.Barrier(8)
    places.make_folder(root / "claims", below=2)

    def create(number: int) -> bool:
        start.wait()
        return places.create(root / "claims" / "one", f"{number}".encode())

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(8)))
    assert won.count(True) == 1
    assert places.read_bytes(root / "claims" / "one") == f"{won.index(True)}".encode()
    assert not places.create(root / "claims" / "one", b"late")
    assert places.names_in(root / "claims") == ["one"], "a draft is left"


@pytest.mark.parametrize("before", [b"", b"another's"])
def test_a_creation_whose_reply_is_lost_has_won_if_it_has(root, before, monkeypatch):
    file = root / "claims" / "one"
    places.make_folder(file.parent, below=2)
    if isinstance(root, Path):
        link = os.link

        def link_twice(*paths):
            if before:
                file.write_bytes(before)
            else:
                link(*paths)
            link(*paths)

        monkeypatch.setattr(os, "link", link_twice)
        assert places.create(file, b"mine") == (not before)
    else:
        assert _LosingReplies(root, before).create(file, b"mine") == (not before)
    assert places.read_bytes(file) == (before or b"mine") and places.names_in(root / "claims") == ["one"]


class _LosingReplies:
    """A bucket whose conditional write is carried out, or loses to another's, and is then answered as a lost race."""

    def __init__(self, root: places.Bucket, before: bytes):
        self._store, self._before = root.store, before

    def create(self, file: places.Bucket, content: bytes) -> bool:
        return places.create(dataclasses.replace(file, store=self), content)

    def read(self, path: str) -> ts.Future:
        return self._store.read(path)

    def write(self, path: str, content: bytes, *, if_equal: bytes) -> ts.Future:
        self._store.write(path, self._before or content).result()
        return self._store.write(path, content, if_equal=if_equal)


def test_listings_name_what_is_directly_inside_a_folder(root, tmp_path):
    for name in ("00000001/commit.json", "00000001/c/0/0", "00000002/c/0", "00000010/commit.json", "00000010.json", "z"):
        places.make_folder((root / name).parent, below=4)
        places.write_bytes(root / name, b"x")
    assert places.names_in(root) == ["00000001", "00000002", "00000010", "00000010.json", "z"]
    assert places.names_in(root, after="00000001") == ["00000002", "00000010", "00000010.json", "z"]
    assert places.names_in(root, after="00000010") == ["z"]
    assert places.names_in(root / "none") == [] == places.files_in(root / "none")
    assert places.folders_with(root, "commit.json") == ["00000001", "00000010"]
    assert places.files_in(root / "00000001") == ["c/0/0", "commit.json"]
    assert layout.steps_in(root) == [1, 2, 10] and layout.steps_in(root, newer_than=1) == [2, 10]
    places.remove_tree(root / "00000001")
    places.remove_tree(root / "none")
    assert places.names_in(root) == ["00000002", "00000010", "00000010.json", "z"]
    # By parts of the path: a folder a.b comes after a/x although a dot sorts before a slash.
    for name in (names := ["a/x", "a-b/x", "a.b/x"]):
        places.make_folder((root / "deep" / name).parent, below=3)
        places.write_bytes(root / "deep" / name, name.encode())
    places.copy_tree(root / "deep", tmp_path / "copy", last="a/x")
    assert places.files_in(root / "deep") == names == places.files_in(tmp_path / "copy")
    assert all((tmp_path / "copy" / name).read_bytes() == name.encode() for name in names)


def test_changed_names_what_is_not_as_it_was(root):
    files = {number: root / "many" / f"{number}" for number in range(70)}  # more than are in flight at once
    unseen = {number: (file, b"") for number, file in files.items()}
    assert places.changed(unseen) == {}
    places.make_folder(root / "many", below=2)
    for number in (3, 69):
        places.write_bytes(files[number], b"one")
    first = places.changed(unseen)
    assert set(first) == {3, 69} and all(first.values())
    seen = unseen | {number: (files[number], version) for number, version in first.items()}
    assert places.changed(seen) == {}
    places.write_bytes(files[3], b"two")
    places.remove(files[69])
    second = places.changed(seen)
    assert second.keys() == {3, 69} and second[3] not in (None, first[3]) and second[69] is None


def test_places_are_parsed_and_written_back(tmp_path, monkeypatch):
    for url in ("memory://store/a/b", "memory://store/a/b/"):
        place = places.place(url)
        assert str(place) == "memory://store/a/b" == places.absolute(url)
        assert place == places.place(url) and place != place / "c" and place.parent / "b" == place
    assert places.place("a/b") == Path.cwd() / "a" / "b" and places.absolute("a/b/") == str(Path.cwd() / "a" / "b")
    assert places.place("../b") == Path.cwd().resolve().parent / "b", "tensorstore takes no path with .."
    for wrong in ("ftp://host/path", "S3://bucket/x", "gs://", "s3:///path", "://x"):
        with pytest.raises(ValueError, match=r"must be a folder, or one of gs://bucket/prefix, s3://bucket/prefix"):
            places.place(wrong)
    assert "gcs" in str(places.kvstore(places.place("gs://bucket/runs/1")))
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    spec = places.kvstore(places.place("s3://bucket/runs/1"))
    assert spec["bucket"] == "bucket" and spec["path"] == "runs/1/" and spec["aws_region"] == "eu-central-1"


def test_a_store_that_refuses_is_an_os_error(s3):
    nobody = places.place("s3://no-such-bucket/run")
    for refused in (
        lambda: places.write_bytes(nobody / "a", b"x"),
        lambda: places.create(nobody / "a", b"x"),
        lambda: places.names_in(nobody),
    ):
        with pytest.raises(OSError, match=r"s3://no-such-bucket/run.*(NoSuchBucket|is there such a bucket)"):
            refused()


def test_a_workdir_says_where_its_run_meets(tmp_path):
    workdir = tmp_path / "run"
    assert layout.open_run_dir(workdir).shared == workdir
    assert layout.open_run_dir(workdir, str(workdir)) == layout.RunDir(workdir)
    elsewhere = layout.open_run_dir(workdir, str(tmp_path / "met"))
    assert elsewhere.config == tmp_path / "met" / "config.json" and elsewhere.replay == tmp_path / "met" / "replay"
    assert elsewhere.checkpoints == workdir / "checkpoints" and elsewhere.metrics("a") == workdir / "metrics" / "a"
    workdir.mkdir()
    layout.note_shared(elsewhere)
    for given in ("", str(tmp_path / "met"), f"{tmp_path}/met/"):
        assert layout.open_run_dir(workdir, given) == elsewhere
    with pytest.raises(ValueError, match=r"--shared=memory://store/x: the roles of the run in .*run meet in .*met"):
        layout.open_run_dir(workdir, "memory://store/x")
    (tmp_path / "plain").mkdir()
    layout.write_json(tmp_path / "plain" / "config.json", {})
    with pytest.raises(ValueError, match=r"--shared=memory://store/x: the roles of the run in .*plain meet in .*plain"):
        layout.open_run_dir(tmp_path / "plain", "memory://store/x")
    known_by_url = layout.open_run_dir("memory://store/x")
    assert str(known_by_url.config) == "memory://store/x/config.json" and not known_by_url.checkpoints.is_dir()
    assert dataclasses.replace(known_by_url, root=workdir).policies == known_by_url.policies


def test_removing_a_folder_follows_no_link(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "run" / "00000001").mkdir(parents=True)
    for link in (tmp_path / "run" / "00000001" / "link", tmp_path / "run" / "00000002"):
        link.symlink_to(tmp_path / "precious")
    for folder in ("00000001", "00000002"):
        places.remove_tree(tmp_path / "run" / folder)
    assert (tmp_path / "precious").is_dir() and not (tmp_path / "run" / "00000001").exists()
