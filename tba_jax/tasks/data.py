"""Reads a task's data from a local file or a data set of the Hugging Face hub, and checks every field."""

import contextlib
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tba_jax.models.hugging_face import hub
from tba_jax.schemas import NO_CHARACTER, holds_surrogate

T = TypeVar("T")

_HUB_ID = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?::([\w.-]+))?")
_NAMES = ("a string", "a whole number", "a number", "true or false", "a list", "an object")
_TYPE_NAMES = dict(zip((str, int, float, bool, list, dict), _NAMES, strict=True))


class Row(dict[str, Any]):
    """The named fields of one row. where: its setting, source and line or row number, with which error messages begin."""

    def __init__(self, values: Mapping[str, Any], where: str):
        super().__init__(values)
        self.where = where


class Schema(NamedTuple):
    """name -> type, of the fields that every row has, and of the fields that a row may lack."""

    fields: Mapping[str, type]
    optional: Mapping[str, type]


def read(
    source: str, *, fields: Mapping[str, type], setting: str, split: str, optional: Mapping[str, type] | None = None
) -> list[Row]:
    """All rows of a source, in the source's order, with only the named fields. Code that comes with a data set is never run.

    Args:
      source: a .jsonl (one object a line), .json (a list of objects) or .parquet file, a folder with a hub data set, or the name
        of a hub data set, owner/name or owner/name:config, which is fetched once.
      fields: name -> type: str, int, float (accepts whole numbers), bool, list or dict.
      setting: name of the source's setting in messages, such as "task.gsm8k.train_path".
      split: the split of a hub data set; files have no splits.
      optional: fields that a row may lack. A field that is null is left out of its row.

    Raises:
      ValueError: one sentence with setting and source and, if a row is malformed, its field and its line or row, from 1.
    """
    where = f"{setting}={source!r}"
    if not source:
        raise ValueError(f"{where} must name a {', '.join(SUFFIXES)} file, or a data set of the hub as owner/name")
    schema, path = Schema(fields, optional or {}), Path(source)
    if path.is_dir():
        records = _of_data_set(_folder(path, where, split), f"{where} (split {split!r})", schema)
    elif path.exists():
        if path.suffix not in SUFFIXES:
            raise ValueError(f"{where} must end in one of {', '.join(SUFFIXES)}, which give the file's format")
        records = _READERS[path.suffix](path, where, schema)
    else:
        records = _of_data_set(_hub(source, where, split), f"{where} (split {split!r})", schema)
    rows = [Row(_checked(record, schema, place), place) for place, record in records]
    if not rows:
        raise ValueError(f"{where} holds no rows")
    return rows


def read_lines(path: Path, *, fields: Mapping[str, type], where: str) -> Iterator[Row]:
    """The rows of a file of one object a line, one after the other. Args, errors: see read; `where` begins every message."""
    schema = Schema(fields, {})
    for place, record in _lines(path, where, schema):
        yield Row(_checked(record, schema, place), place)


def in_epochs(examples: Sequence[T], rng: np.random.Generator, count: int) -> list[T]:
    """`count` examples: all of them in random order, then all of them again in another order, and so on."""
    epochs = -(-count // len(examples))
    chosen = np.concatenate([np.zeros(0, int), *(rng.permutation(len(examples)) for _ in range(epochs))])
    return [examples[i] for i in chosen[:count]]


# Each reader yields (place for messages, record) of every row.
def _lines(path: Path, where: str, schema: Schema) -> Iterator[tuple[str, Any]]:
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{where} line {number}", parsed(line, f"{where} line {number}")
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror}") from error


def _list(path: Path, where: str, schema: Schema) -> Iterator[tuple[str, Any]]:
    try:
        records = parsed(path.read_bytes(), where)
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror}") from error
    if not isinstance(records, list):
        raise ValueError(f"{where} must be a JSON list of objects, not {_shown(records)} (a file of one object a line is .jsonl)")
    yield from ((f"{where} row {number}", record) for number, record in enumerate(records, start=1))


def _parquet(path: Path, where: str, schema: Schema) -> Iterator[tuple[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        columns = _columns(parquet.read_schema(path).names, schema, where)
        records = parquet.read_table(path, columns=columns, partitioning=None).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{where} cannot be read as Parquet: {_one_line(error)}") from error
    yield from ((f"{where} row {number}", record) for number, record in enumerate(records, start=1))


_READERS = {".jsonl": _lines, ".json": _list, ".parquet": _parquet}
SUFFIXES = tuple(_READERS)


def _of_data_set(records: Any, where: str, schema: Schema) -> Iterator[tuple[str, Any]]:
    rows = records.select_columns(_columns(records.column_names, schema, where))
    yield from ((f"{where} row {number}", record) for number, record in enumerate(rows, start=1))


def parsed(content: bytes, place: str) -> Any:
    """A JSON value. Raises ValueError beginning with `place`."""
    try:
        return json.loads(content)  # bytes, which may begin with a byte order mark
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not valid JSON in UTF-8: {error}") from error


def _folder(path: Path, where: str, split: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(str(path), split=split)
    except Exception as error:  # the library raises its own errors and errors of the format's parsers
        why = _one_line(error.__cause__ or error)  # the library's own error may only say that there was another
        told = f"cannot be read as a data set: {why}; for one file of it, name the file"
        raise ValueError(f"{where} is a folder, and its split {split!r} {told}") from error


def _hub(source: str, where: str, split: str) -> Any:
    import huggingface_hub

    refused = f"{where}: there is no such file, and it was not fetched from the hub"
    match = _HUB_ID.fullmatch(source)
    if match is None or Path(source).suffix in SUFFIXES:
        raise ValueError(f"{refused}: it is not the name of a data set, owner/name or owner/name:config")
    name, config = match.groups()
    away: BaseException | None = None
    try:
        ask = functools.partial(huggingface_hub.HfApi().dataset_info, name, timeout=hub.TIMEOUT_SECONDS)
        away = hub.away(ask, called=where)
        import datasets  # takes seconds, so it comes after the check that the hub has the data set

        with hub.offline() if away else contextlib.nullcontext():
            return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the errors depend on the version of the hub's HTTP client
        told = f"the hub cannot be reached, and its cache has no copy: {_one_line(away)}" if away else _one_line(error)
        setting = where.partition("=")[0]
        with_make = " (with make: DATA=FOLDER, with train.jsonl and test.jsonl)" if setting.startswith("task.gsm8k.") else ""
        advice = f"a local file needs no hub: --config.{setting}=FILE.jsonl{with_make}"
        raise ValueError(f"{refused} (split {split!r}): {told}; {advice}") from error


def _columns(stored: list[str], schema: Schema, where: str) -> list[str]:
    """The columns to read. Raises ValueError if a field has no column."""
    for field in schema.fields:
        if field not in stored:
            raise ValueError(f"{where}: field {field!r} is missing (it has {', '.join(stored) or 'none'})")
    return [*schema.fields, *(field for field in schema.optional if field in stored)]


def _checked(record: Any, schema: Schema, place: str) -> dict[str, Any]:
    """The record's fields. Raises ValueError naming the field that is missing or malformed."""
    if not isinstance(record, dict):
        raise ValueError(f"{place}: expected an object, found {_shown(record)}")
    _columns(list(record), schema, place)
    present = {**schema.fields} | {field: kind for field, kind in schema.optional.items() if record.get(field) is not None}
    for field, kind in present.items():
        value = record[field]
        if not _has_type(value, kind):
            raise ValueError(f"{place}: field {field!r} must be {_TYPE_NAMES[kind]}, found {_shown(value)}")
        if holds_surrogate(value):
            raise ValueError(f"{place}: field {field!r} {NO_CHARACTER}")
    return {field: record[field] for field in present}


def _has_type(value: Any, kind: type) -> bool:
    """JSON's types: booleans are not numbers, and numbers are finite."""
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)[:40]


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
