"""Reading a task's data: every kind of source, and every way in which one is wrong."""

import contextlib
import json
import re

import pytest

from tba_jax.tasks import data

ROWS = [{"q": "one", "n": 1, "extra": [1]}, {"q": "zwei 二", "n": 2, "extra": None}]
FIELDS = {"q": str, "n": int}


def read(source, fields=FIELDS, **settings):
    return data.read(str(source), fields=fields, setting="task.x.path", split="train", **settings)


def write(path, rows=ROWS):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("suffix", data.SUFFIXES)
def test_only_the_named_fields_are_read(tmp_path, suffix):
    path = write(tmp_path / f"rows{suffix}")
    rows = read(path)
    assert rows == [{"q": "one", "n": 1}, {"q": "zwei 二", "n": 2}]
    place = "line" if suffix == ".jsonl" else "row"
    assert [row.where for row in rows] == [f"task.x.path={str(path)!r} {place} {number}" for number in (1, 2)]
    assert read(path, {"q": str}, optional={"n": int, "m": str, "extra": list}) == [
        {"q": "one", "n": 1, "extra": [1]},
        {"q": "zwei 二", "n": 2},
    ]


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("a.jsonl", b'{"q": "a", "n": 1}\n{"q": "b"\n', " line 2: not valid JSON in UTF-8: Expecting ',' delimiter"),
        ("a.jsonl", b'\n["q"]\n', ' line 2: expected an object, found ["q"]'),
        ("a.jsonl", b'{"n": 1, "m": 2}', " line 1: field 'q' is missing (it has n, m)"),
        ("a.jsonl", b'{"q": 3, "n": 1}', " line 1: field 'q' must be a string, found 3"),
        ("a.jsonl", b'{"q": "a", "n": true}', " line 1: field 'n' must be a whole number, found true"),
        ("a.jsonl", b'{"q": "a", "n": 1, "m": 1}', " line 1: field 'm' must be true or false, found 1"),
        ("a.jsonl", b'{"q": "\\ud800", "n": 1}', " line 1: field 'q' holds half of a UTF-16 surrogate pair"),
        ("a.json", b"[]", " holds no rows"),
        ("a.json", b'{"q": "a", "n": 1}', " must be a JSON list of objects, not {"),
        ("a.parquet", b"PAR1", " cannot be read as Parquet: "),
        ("a.csv", b"q,n\n", " must end in one of .jsonl, .json, .parquet"),
    ],
)
def test_bad_files_are_refused_in_one_sentence(tmp_path, name, content, sentence):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match="^" + re.escape(f"task.x.path={str(path)!r}{sentence}")) as caught:
        read(path, optional={"m": bool})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("source", ["nowhere.jsonl", "a/b/c", "https://x/y"])
def test_what_is_neither_a_file_nor_a_name_says_both(source):
    sentence = "there is no such file, and it was not fetched from the hub: it is not the name of a data set, owner/name or"
    with pytest.raises(ValueError, match="^" + re.escape(f"task.x.path={source!r}: {sentence}")):
        read(source)
    with pytest.raises(ValueError, match=re.escape("task.x.path='' must name a .jsonl, .json, .parquet file")):
        read("")


def test_a_folder_that_holds_a_data_set(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "train.jsonl")
    write(folder / "test.jsonl", ROWS[1:])
    rows = read(folder)
    assert rows == [{"q": "one", "n": 1}, {"q": "zwei 二", "n": 2}]
    assert rows[1].where == f"task.x.path={str(folder)!r} (split 'train') row 2"
    with pytest.raises(ValueError, match=re.escape("(split 'train'): field 'z' is missing (it has q, n, extra)")):
        read(folder, {"z": str})
    with pytest.raises(ValueError, match="its split 'dev' cannot be read as a data set: ValueError: Unknown split"):
        data.read(str(folder), fields=FIELDS, setting="task.x.path", split="dev")


def test_code_in_the_folder_of_a_data_set_is_not_executed(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("set.py", "dataset_infos.py", "__init__.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()\n")
    with pytest.raises(ValueError, match="cannot be read as a data set"):
        read(folder)
    write(folder / "train.jsonl")
    with contextlib.suppress(ValueError):  # whether it reads the rows beside the code depends on the version of `datasets`
        read(folder)
    assert not (tmp_path / "executed").exists()
