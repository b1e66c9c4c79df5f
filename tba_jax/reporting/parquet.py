"""The rows of a run's replay log as a Parquet file, with the texts of query and response."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from tba_jax import outputs
from tba_jax.replay.expiry import RowsExpired
from tba_jax.replay.reader import LogCorruption, LogReader
from tba_jax.reporting.rows import blocks, steps_of_rows
from tba_jax.text.tokenizers import Tokenizer
from tba_jax.trajectory import Rows, RowShape, response

# Bytes of rows that make a group of the file; rows of few appends, as they are read, may exceed it.
_GROUP_BYTES = 32 << 20
_KEPT_QUERIES = 4096  # whose texts are kept while rows are written


def write(output: Path, reader: LogReader, tokenizer: Tokenizer, *, flag: str, of_run: str) -> tuple[int, list[str]]:
    """Writes the committed rows, writer by writer, in groups of about 32 MB: memory holds one group.

    Args: output: see outputs.file, as for flag. of_run: the run's id, which the file's metadata holds.

    Returns the number of rows, and sentences about rows that could not be written.

    Raises:
      ValueError: there is no row, or the file cannot be written. OSError: storage does not answer.
    """
    lost: list[RowsExpired | LogCorruption] = []
    schema = schema_of(reader.shape).with_metadata({"tba_jax.run": of_run})
    count = 0
    with outputs.file(output, flag=flag) as file, pa.parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for group in _groups(reader, tokenizer, schema, lost):
            writer.write_table(group)
            count += len(group)
        if not count:
            raise ValueError("the run has no committed row that can be read; nothing is written")
    damaged = [error for error in lost if isinstance(error, LogCorruption)]
    rows = sum(error.stop - error.start for error in damaged)
    return count, [f"{rows} damaged rows are left out, such as: {damaged[0]}"] if damaged else []


def _groups(reader: LogReader, tokenizer: Tokenizer, schema: pa.Schema, lost: list[Any]) -> Iterator[pa.Table]:
    decode = functools.lru_cache(_KEPT_QUERIES)(lambda ids: tokenizer.decode([*ids]))
    tables: list[pa.Table] = []
    for writer, span in [(each, span) for each in sorted(reader.heads()) for span in reader.kept(each)]:
        for rows in blocks(reader, writer, span, lost=lost.append):
            tables.append(table_of(rows, writer, reader.shape, tokenizer, decode, schema))
            if sum(len(each) for each in tables) * reader.shape.row_bytes >= _GROUP_BYTES:
                yield pa.concat_tables(tables)
                tables = []
    if tables:
        yield pa.concat_tables(tables)


def schema_of(shape: RowShape) -> pa.Schema:
    """The columns of the file: those of a row (trajectory.py), with its writer, texts, and newest and oldest policy step.

    Arrays per token hold the row's own tokens, without padding. The rewards' parts are the fields of one column.
    """
    fields = [("writer", pa.dictionary(pa.int32(), pa.string())), ("query", pa.string()), ("response", pa.string())]
    fields += [("newest_step", pa.int32()), ("oldest_step", pa.int32())]
    for name, (dtype, size) in shape.columns().items():
        kind = pa.from_numpy_dtype(np.dtype(dtype))
        if name == "reward_parts":
            kind = pa.struct([(part, kind) for part in shape.reward_parts])
            if not shape.reward_parts:  # Parquet has no column without fields
                continue
        elif size:
            kind = pa.list_(kind)
        fields.append((name, kind))
    return pa.schema(fields)


def table_of(
    rows: Rows, writer: str, shape: RowShape, tokenizer: Tokenizer, decode: Callable[[tuple[int, ...]], str], schema: pa.Schema
) -> pa.Table:
    """Rows of one writer as a table of `schema`. Args: decode: gives the text of a query."""
    P, R = rows["prompt_length"].clip(0), rows["response_length"].clip(0)
    newest, oldest = steps_of_rows(rows)
    prompts = [rows["tokens"][i, : P[i]].tolist() for i in range(len(P))]
    responses = [tokenizer.decode_continuation(prompt, response(rows, i).tolist()) for i, prompt in enumerate(prompts)]
    found: dict[str, Any] = {"writer": pa.DictionaryArray.from_arrays(np.zeros(len(P), np.int32), [writer])}
    found |= {"query": pa.array([decode((*prompt,)) for prompt in prompts]), "response": pa.array(responses)}
    found |= {"newest_step": newest, "oldest_step": oldest}
    for name, (_, size) in shape.columns().items():
        if name == "reward_parts":
            parts = [pa.array(rows[name][:, part]) for part in range(size[0])]
            found[name] = pa.StructArray.from_arrays(parts, list(shape.reward_parts)) if parts else None
        elif size:
            whole = np.full(len(P), size[0])
            lengths = {"tokens": P + R, "key": whole, "embedding": whole}.get(name, R).clip(max=size[0])
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            found[name] = pa.ListArray.from_arrays(offsets, rows[name][np.arange(size[0]) < lengths[:, None]])
        else:
            found[name] = rows[name]
    return pa.table([found[name] for name in schema.names], schema=schema)
