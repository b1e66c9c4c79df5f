"""Rows of a task's data: a local file, or a data set of the Hugging Face hub; every field is checked before anything runs."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

SUFFIXES = (".jsonl", ".json", ".parquet")
_HUB_ID = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?::([\w.-]+))?")
_HUB_TIMEOUT = 10.0  # seconds for the hub's first answer; the library itself would try for minutes
_TYPE_NAMES = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


class Row(dict[str, Any]):
    """The named fields of one row. where: setting, source and line (or row) of it, to begin a sentence with."""

    def __init__(self, values: Mapping[str, Any], where: str):
        super().__init__(values)
        self.where = where


class Wanted(NamedTuple):
    """Fields of every row, and those that a row may lack: name -> type."""

    fields: Mapping[str, type]
    optional: Mapping[str, type]


def read(
    source: str, *, fields: Mapping[str, type], setting: str, split: str, optional: Mapping[str, type] | None = None
) -> list[Row]:
    """All rows of a source, in its order, with the named fields alone.

    Args:
      source: a local .jsonl (an object a line; blank lines are passed over), .json (a list of objects) or .parquet file, a
        folder that holds a data set of the hub, or a data set of the hub, owner/name or owner/name:config, which is fetched once
        and then found in the cache of `datasets`. Code that comes with a data set is never run.
      fields: name -> type: str, int, float (whole numbers pass), bool, list or dict.
      setting: what the source is called by in messages, such as "task.gsm8k.train_path".
      split: of a data set of the hub; files have none.
      optional: fields that a row may lack, or hold as null; they are left out of it then.

    Raises:
      ValueError: one sentence that names setting and source, and line (from 1; of JSON lists, Parquet and the hub: row) and field
        where a row is malformed.
    """
    where = f"{setting}={source!r}"
    if not source:
        raise ValueError(f"{where} must name a {', '.join(SUFFIXES)} file, or a data set of the hub as owner/name")
    wanted = Wanted(fields, optional or {})
    path = Path(source).expanduser()
    if path.is_dir():
        records = _read_folder(path, where, wanted, split)
    elif path.exists():
        records = _read_file(path, where, wanted)
    else:
        records = _read_hub(source, where, wanted, split)
    rows = [Row(_checked(record, wanted, place), place) for place, record in records]
    if not rows:
        raise ValueError(f"{where} holds no rows")
    return rows


def _read_file(path: Path, where: str, wanted: Wanted) -> Iterator[tuple[str, Any]]:
    """(place, record) of every row."""
    readers = {".jsonl": _read_lines, ".json": _read_list, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise ValueError(f"{where} ends in none of {', '.join(SUFFIXES)}, which say how a file is read")
    return readers[path.suffix](path, where, wanted)


def _read_lines(path: Path, where: str, wanted: Wanted) -> Iterator[tuple[str, Any]]:
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{where} line {number}", _parse(line, f"{where} line {number}", first=number == 1)
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror}") from error


def _read_list(path: Path, where: str, wanted: Wanted) -> Iterator[tuple[str, Any]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror}") from error
    records = _parse(content, where, first=True)
    if not isinstance(records, list):
        raise ValueError(f"{where} must be a JSON list of objects, not {_shown(records)} (an object a line is .jsonl)")
    for number, record in enumerate(records, start=1):
        yield f"{where} row {number}", record


def _parse(content: bytes, place: str, *, first: bool) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig" if first else "utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not valid JSON in UTF-8: {error}") from error


def _read_parquet(path: Path, where: str, wanted: Wanted) -> Iterator[tuple[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        there = parquet.read_schema(path).names
        columns = _columns(there, wanted, where)
        records = parquet.read_table(path, columns=columns, partitioning=None).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{where} cannot be read as Parquet: {_one_line(error)}") from error
    for number, record in enumerate(records, start=1):
        yield f"{where} row {number}", record


def _read_folder(path: Path, where: str, wanted: Wanted, split: str) -> Iterator[tuple[str, Any]]:
    import datasets

    try:
        records = datasets.load_dataset(str(path), split=split)
    except Exception as error:  # the library raises its own errors, and those of the formats that it reads
        raise ValueError(f"{where} (split {split!r}) cannot be read as a data set: {_one_line(error)}") from error
    return _read_records(records, f"{where} (split {split!r})", wanted)


def _read_hub(source: str, where: str, wanted: Wanted, split: str) -> Iterator[tuple[str, Any]]:
    import huggingface_hub.constants

    refused = f"{where}: there is no such file, and it was not fetched from the hub"
    match = _HUB_ID.fullmatch(source)
    if match is None or Path(source).suffix in SUFFIXES:
        raise ValueError(f"{refused}: it is not the name of a data set, owner/name or owner/name:config")
    name, config = match.groups()
    try:
        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            huggingface_hub.HfApi().dataset_info(name, timeout=_HUB_TIMEOUT)
        import datasets  # takes seconds: after the question whether there is anything to fetch

        records = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the hub's HTTP client changes with its version, and so do the errors that pass through
        hint = "with HF_HUB_OFFLINE=1 what was fetched before is used"
        raise ValueError(f"{refused} (split {split!r}): {_one_line(error)}; {hint}") from error
    return _read_records(records, f"{where} (split {split!r})", wanted)


def _read_records(records: Any, where: str, wanted: Wanted) -> Iterator[tuple[str, Any]]:
    columns = _columns(records.column_names, wanted, where)
    for number, record in enumerate(records.select_columns(columns), start=1):
        yield f"{where} row {number}", record


def _columns(there: list[str], wanted: Wanted, where: str) -> list[str]:
    """The columns to read. Raises ValueError where a field is none."""
    for field in wanted.fields:
        if field not in there:
            raise ValueError(f"{where}: field {field!r} is missing (it has {', '.join(there) or 'none'})")
    return [*wanted.fields, *(field for field in wanted.optional if field in there)]


def _checked(record: Any, wanted: Wanted, place: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ValueError(f"{place}: expected an object, found {_shown(record)}")
    for field in wanted.fields:
        if field not in record:
            raise ValueError(f"{place}: field {field!r} is missing (it has {', '.join(record) or 'none'})")
    present = {**wanted.fields} | {field: kind for field, kind in wanted.optional.items() if record.get(field) is not None}
    for field, kind in present.items():
        value = record[field]
        if not _is(value, kind):
            raise ValueError(f"{place}: field {field!r} must be {_TYPE_NAMES[kind]}, found {_shown(value)}")
        if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError(f"{place}: field {field!r} holds half of a UTF-16 pair, which is no character")
    return {field: record[field] for field in present}


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)[:40]


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
