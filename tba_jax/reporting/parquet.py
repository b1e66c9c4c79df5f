"""The rows of a run's replay log as a Parquet file, with the texts of query and response."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from tba_jax import outputs
from tba_jax.replay.reader import LogCorruption, LogReader
from tba_jax.replay.segment import RowsExpired
from tba_jax.reporting.rows import blocks, steps_of_rows
from tba_jax.text.tokenizers import Tokenizer
from tba_jax.trajectory import Rows, RowShape, response

# Bytes of rows that make a group of the file; rows of few appends, as they are read, may exceed it.
_GROUP_BYTES = 32 << 20
_KEPT_QUERIES = 4096  # whose texts are kept while rows are written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filter:
    """Which rows are written. min_step, max_step: of the newest policy step of a row. writers: names; (): all."""

    min_step: int | None = None
    max_step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    writers: Sequence[str] = ()

    def check(self) -> None:
        """Raises ValueError where no row can match."""
        for name in ("step", "reward"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if least is not None and most is not None and least > most:
                raise ValueError(f"--min_{name}={least} is above --max_{name}={most}: no row can match both")

    def __call__(self, rows: Rows) -> np.ndarray:
        """bool[B]. A reward that is not a number matches no limit."""
        steps, rewards = steps_of_rows(rows)[0], rows["reward"]
        limits = ((steps, self.min_step, self.max_step), (rewards, self.min_reward, self.max_reward))
        found = np.ones(len(steps), bool)
        for column, least, most in limits:
            found &= least is None or column >= least
            found &= most is None or column <= most
        return found


def write(
    output: Path, reader: LogReader, tokenizer: Tokenizer, chosen: Filter, *, flag: str, of_run: str
) -> tuple[int, list[str]]:
    """Writes the committed rows that match, writer by writer, in groups of about 32 MB: memory holds one group.

    Args: output: see outputs.file, as for flag. of_run: the run's id, which the file's metadata holds.

    Returns the number of rows, and sentences about rows that could not be written.

    Raises:
      ValueError: no row matches, a writer is not there, or the file cannot be written. OSError: storage does not answer.
    """
    heads = reader.heads()
    if unknown := sorted(set(chosen.writers) - set(heads)):
        raise ValueError(f"--writer={unknown[0]} has written no rows of this run; there are {', '.join(sorted(heads)) or 'none'}")
    lost: list[RowsExpired | LogCorruption] = []
    schema = schema_of(reader.shape).with_metadata({"tba_jax.run": of_run})
    count = 0
    with outputs.file(output, flag=flag) as file, pa.parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for group in _groups(reader, chosen.writers or sorted(heads), chosen, tokenizer, schema, lost):
            writer.write_table(group)
            count += len(group)
        if not count:
            raise ValueError(f"no row of the {sum(heads.values())} committed ones matches; nothing is written")
    damaged = [error for error in lost if isinstance(error, LogCorruption)]
    rows = sum(error.stop - error.start for error in damaged)
    return count, [f"{rows} damaged rows are left out, such as: {damaged[0]}"] if damaged else []


def _groups(
    reader: LogReader, writers: Sequence[str], chosen: Filter, tokenizer: Tokenizer, schema: pa.Schema, lost: list[Any]
) -> Iterator[pa.Table]:
    decode = functools.lru_cache(_KEPT_QUERIES)(lambda ids: tokenizer.decode([*ids]))
    tables: list[pa.Table] = []
    for writer, span in [(each, span) for each in writers for span in reader.kept(each)]:
        for rows in blocks(reader, writer, span, lost=lost.append):
            matching = chosen(rows)
            if matching.any():
                some = {name: column[matching] for name, column in rows.items()}
                tables.append(table_of(some, writer, reader.shape, tokenizer, decode, schema))
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
