"""Reads a task's data from a local file or a data set of the Hugging Face hub, and checks every field."""

import contextlib
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tba_jax.schemas import NO_CHARACTER, holds_surrogate

T = TypeVar("T")

_HUB_ID = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?::([\w.-]+))?")
_NAMES = ("a string", "a whole number", "a number", "true or false", "a list", "an object")
_TYPE_NAMES = dict(zip((str, int, float, bool, list, dict), _NAMES, strict=True))


class Row(dict[str, Any]):
    """The named fields of one row. where: its setting, source and number, with which error messages begin."""

    def __init__(self, values: Mapping[str, Any], where: str):
        super().__init__(values)
        self.where = where


def read(
    source: str, *, fields: Mapping[str, type], setting: str, split: str, optional: Mapping[str, type] | None = None
) -> list[Row]:
    """All rows of a source, in its order, with only the named fields. Code that comes with a data set is never run.

    Args:
      source: a .jsonl (one object a line), .json (a list of objects) or .parquet file, a folder with a hub data set, or the name
        of a hub data set, owner/name or owner/name:config, which is fetched once.
      fields: name -> type: str, int, float (accepts whole numbers), bool, list or dict; optional: fields that a row may lack, and
        lacks where they are null.
      setting: of the source, such as "task.gsm8k.train_path"; split: of a hub data set; files have no splits.

    Raises ValueError naming setting and source and, if a row is malformed, its field and its line or row, from 1.
    """
    where = f"{setting}={source!r}"
    if not source:
        raise ValueError(f"{where} must name a {', '.join(SUFFIXES)} file, or a data set of the hub as owner/name")
    path, optional = Path(source), optional or {}
    columns = functools.partial(_columns, fields=fields, optional=optional, where=where)
    if path.exists() and not path.is_dir():
        if path.suffix not in SUFFIXES:
            raise ValueError(f"{where} must end in one of {', '.join(SUFFIXES)}, which give the file's format")
        read_json = _JSON.get(path.suffix)
        records = read_json(path, where) if read_json else _numbered(where, _parquet(path, where, columns))
    else:
        found = _folder(path, where, split) if path.is_dir() else _hub(source, where, split)
        where = f"{where} (split {split!r})"
        records = _numbered(where, found.select_columns(columns(found.column_names, where=where)))
    rows = [Row(_checked(record, fields, optional, place), place) for place, record in records]
    if not rows:
        raise ValueError(f"{where} holds no rows")
    return rows


def read_lines(path: Path, *, fields: Mapping[str, type], where: str) -> Iterator[Row]:
    """The rows of a file of one object a line. Args, errors: see read; `where` begins every message."""
    for place, record in _lines(path, where):
        yield Row(_checked(record, fields, {}, place), place)


def in_epochs(examples: Sequence[T], rng: np.random.Generator, count: int) -> list[T]:
    """`count` examples: all of them in random order, then all of them again in another order, and so on."""
    epochs = -(-count // len(examples))
    chosen = np.concatenate([np.zeros(0, int), *(rng.permutation(len(examples)) for _ in range(epochs))])
    return [examples[i] for i in chosen[:count]]


def _numbered(where: str, records: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """(place for messages, record) of every row."""
    return ((f"{where} row {number}", record) for number, record in enumerate(records, start=1))


def _lines(path: Path, where: str) -> Iterator[tuple[str, Any]]:
    with named_errors(where), open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{where} line {number}", parsed(line, f"{where} line {number}")


def _list(path: Path, where: str) -> Iterator[tuple[str, Any]]:
    with named_errors(where):
        records = parsed(path.read_bytes(), where)
    if not isinstance(records, list):
        raise ValueError(f"{where} must be a JSON list of objects, not {_shown(records)} (a file of one object a line is .jsonl)")
    return _numbered(where, records)


_JSON = {".jsonl": _lines, ".json": _list}
SUFFIXES = (*_JSON, ".parquet")


def _parquet(path: Path, where: str, columns: Callable[[list[str]], list[str]]) -> list[Any]:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.read_table(path, columns=columns(parquet.read_schema(path).names), partitioning=None).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{where} cannot be read as Parquet: {_one_line(error)}") from error


@contextlib.contextmanager
def named_errors(where: str) -> Iterator[None]:
    """Turns an OSError into a ValueError that begins with `where`."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror}") from error


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
        told = f"cannot be read as a data set: {_one_line(error.__cause__ or error)}; for one file of it, name the file"
        raise ValueError(f"{where} is a folder, and its split {split!r} {told}") from error


def _hub(source: str, where: str, split: str) -> Any:
    import huggingface_hub

    from tba_jax.models.hugging_face import load  # imports JAX, which grading workers do without

    refused = f"{where}: there is no such file, and it was not fetched from the hub"
    match = _HUB_ID.fullmatch(source)
    if match is None or Path(source).suffix in SUFFIXES:
        raise ValueError(f"{refused}: it is not the name of a data set, owner/name or owner/name:config")
    (name, config), away = match.groups(), None
    try:
        ask = functools.partial(huggingface_hub.HfApi().dataset_info, name, timeout=load.HUB_TIMEOUT_SECONDS)
        away = load.unreachable(ask, called=where)
        import datasets  # takes seconds, so it comes after the check that the hub has the data set

        with load.offline() if away else contextlib.nullcontext():
            return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the errors depend on the version of the hub's HTTP client
        told = f"the hub cannot be reached, and its cache has no copy: {_one_line(away)}" if away else _one_line(error)
        setting = where.partition("=")[0]
        with_make = " (with make: DATA=FOLDER, with train.jsonl and test.jsonl)" if setting.startswith("task.gsm8k.") else ""
        advice = f"a local file needs no hub: --config.{setting}=FILE.jsonl{with_make}"
        raise ValueError(f"{refused} (split {split!r}): {told}; {advice}") from error


def _columns(stored: list[str], *, fields: Mapping[str, type], optional: Mapping[str, type], where: str) -> list[str]:
    """The columns to read. Raises ValueError if a field has no column."""
    for field in fields:
        if field not in stored:
            raise ValueError(f"{where}: field {field!r} is missing (it has {', '.join(stored) or 'none'})")
    return [*fields, *(field for field in optional if field in stored)]


def _checked(record: Any, fields: Mapping[str, type], optional: Mapping[str, type], place: str) -> dict[str, Any]:
    """The record's fields. Raises ValueError naming the field that is missing or malformed."""
    if not isinstance(record, dict):
        raise ValueError(f"{place}: expected an object, found {_shown(record)}")
    _columns(list(record), fields=fields, optional={}, where=place)
    present = {**fields} | {field: kind for field, kind in optional.items() if record.get(field) is not None}
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
