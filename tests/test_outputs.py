"""What --output may name: links, the current folder, mount points; and disks that are full or read-only. Characters that printed
text may not hold: escaped for people and for JSON, and nothing else is touched."""

import json
import unicodedata
from pathlib import Path

import pytest

from tba_jax import outputs
from tba_jax.outputs import visible, visible_json, visible_line
from tba_jax.run import processes
from tba_jax.storage import file_systems
from tests.support.small_disk import SmallDisk


def fill(output: Path) -> None:
    outputs.check_folder(output)
    with outputs.folder(output) as whole:
        (whole / "config.json").write_text("{}")
        (whole / "deep").mkdir()
        (whole / "deep" / "weights").write_text("1")


def assert_filled(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {"config.json", "deep"}
    assert (folder / "deep" / "weights").read_text() == "1"


@pytest.mark.parametrize("name", ["new/deep", "empty", "link to empty", "dangling", "link to empty/new"])
def test_a_folder_is_written_where_its_name_leads(name, tmp_path):
    (tmp_path / "empty").mkdir()
    before = (tmp_path / "empty").stat().st_ino
    (tmp_path / "link to empty").symlink_to("empty")
    (tmp_path / "dangling").symlink_to(tmp_path / "absent" / "target")
    fill(tmp_path / name)
    assert_filled(tmp_path / name)
    assert (tmp_path / "link to empty").is_symlink() and (tmp_path / "dangling").is_symlink()
    assert (tmp_path / "empty").stat().st_ino == before
    assert not list(tmp_path.rglob(".*"))


def test_a_link_to_a_file_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to("report")
    for content in (b"first", b"second"):
        outputs.check_file(tmp_path / "link")
        outputs.write(tmp_path / "link", content)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "report").read_bytes() == content
    assert {path.name for path in tmp_path.iterdir()} == {"link", "report"}


def test_what_cannot_be_an_output_is_refused_by_name(tmp_path):
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    refused = [(outputs.check_folder, each) for each in ("circle", "file", "full", "file/model", "n" * 250)]
    refused += [(outputs.check_file, each) for each in ("circle", "full", "absent/report", "file/report", "/dev/null")]
    for check, name in refused:
        with pytest.raises(ValueError, match=f"--output={tmp_path / name}") as error:
            check(tmp_path / name)
        assert not processes.is_storage_failure(error.value)
    for check in (outputs.check_folder, outputs.check_file):
        with pytest.raises(ValueError, match="is in the run's folder"):
            check(tmp_path / "full" / "new", outside=(tmp_path / "full", None))
    assert {path.name for path in tmp_path.iterdir()} == {"circle", "file", "full"}


@pytest.mark.parametrize("is_there", [True, False])
def test_an_error_leaves_what_was_there_and_finished_work_stays(is_there, tmp_path):
    output = tmp_path / "model"
    if is_there:
        output.mkdir()
    with pytest.raises(ZeroDivisionError), outputs.folder(output) as whole:
        (whole / "part").touch()
        raise ZeroDivisionError
    assert [*tmp_path.rglob("*")] == [output] * is_there
    with pytest.raises(ValueError, match="what is finished stays in ") as error, outputs.folder(output) as whole:
        (whole / "weights").write_text("1")
        output.mkdir(exist_ok=True)
        (output / "other").touch()  # its place was taken meanwhile
    kept = Path(str(error.value).rpartition(" stays in ")[2])
    assert (kept / "weights").read_text() == "1" and (output / "other").exists()


def test_a_full_disk_is_named_and_keeps_no_part(tmp_path):
    with SmallDisk(tmp_path / "disk", megabytes=1) as disk:
        if disk.missing:
            pytest.skip(disk.missing)
        fill(disk.folder)  # a mount point
        assert_filled(disk.folder)
        output, report = disk.folder / "model", disk.folder / "report"
        report.write_bytes(b"old")
        with pytest.raises(ValueError) as midway, outputs.folder(output) as whole:
            (whole / "weights").write_bytes(bytes(2**21))
        with pytest.raises(ValueError) as at_the_end:
            outputs.write(report, bytes(2**21))
        with disk.full():
            with pytest.raises(ValueError) as before:
                outputs.check_folder(output)
            with pytest.raises(ValueError) as before_a_file:
                outputs.check_file(report)
        for error in (midway, at_the_end, before, before_a_file):
            assert processes.is_storage_failure(error.value) and str(error.value).startswith(f"--output={disk.folder}")
            assert f"tmpfs at {disk.folder})" in file_systems.no_room(error.value, tmp_path / "run")
        assert report.read_bytes() == b"old"
        assert {path.name for path in disk.folder.iterdir()} == {"config.json", "deep", "report"}
        with disk.read_only(), pytest.raises(ValueError, match="no writable folder") as refused:
            outputs.check_folder(output)
        assert not processes.is_storage_failure(refused.value)


def test_no_control_or_bidirectional_character_is_left():
    everything = map(chr, range(0x110000))
    controls = {c for c in everything if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")} - {"\n", "\t"}
    directed = {c for c in map(chr, range(0x3000)) if unicodedata.bidirectional(c) in ("LRE", "RLE", "LRO", "RLO", "PDF")}
    isolates = {c for c in map(chr, range(0x3000)) if unicodedata.bidirectional(c) in ("LRI", "RLI", "FSI", "PDI")}
    for character in controls | directed | isolates:
        assert visible(character).isascii() and visible(character) != character
    given = "x".join(sorted(controls | directed | isolates))
    document = visible_json(json.dumps([given], ensure_ascii=False))
    assert visible(document) == document and json.loads(document) == [given]
    assert visible("\x1b[2J\u202e\ud800") == r"\x1b[2J\u202e\ud800"


def test_other_text_stays():
    text = "x = \\frac{1}{2}\n\té 日本 🙂 שלום \u200d \xa0 \\x1b"
    assert visible(text) == text == visible_json(text)
    assert visible_line("a\n\tb") == r"a\x0a\x09b"
