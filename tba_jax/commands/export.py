"""Writes a policy snapshot of a run as a Hugging Face folder, or the rows of its replay log as a Parquet file.

python -m tba_jax export --workdir=DIR --output=DIR [--step=best|last|N] [--dtype=float32|bfloat16|float16] [--adapter]
python -m tba_jax export --workdir=DIR --rows=FILE.parquet [--min_step=N] [--max_step=N] [--min_reward=X] [--max_reward=X]
  [--writer=NAME]

Adapters are merged into the weights; with --adapter they are written alone, as a folder that peft reads. Both have a model card.
The run may go on meanwhile.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from absl import flags

from tba_jax import outputs
from tba_jax.commands import command_line
from tba_jax.outputs import visible
from tba_jax.replay.reader import LogCorruption, LogReader, RowsGone
from tba_jax.reporting.gathering import blocks, damage_of, steps_of_rows, tokenizer_of
from tba_jax.schemas import require
from tba_jax.storage import contract, layout, places
from tba_jax.text.tokenizers import Tokenizer
from tba_jax.trajectory import Rows, RowShape, response

_GROUP_BYTES, _KEPT_QUERIES = 32 << 20, 4096  # of rows in a group of the Parquet file; queries whose texts are kept meanwhile


def export(workdir: Path, output: Path, *, step: command_line.AskedStep, dtype: str | None, adapter: bool = False) -> str:
    """Writes the folder, with a model card; one tensor at a time is in memory. Adapters are merged.

    Args: output: outside of workdir; step: see command_line.chosen_step; dtype: of the weights written, None: the snapshot's;
      adapter: writes the adapters alone, for peft.

    Returns a sentence that says what was written. Raises ValueError where something that it needs is not there, or `output` is in
    use, or adapters belong to no published checkpoint.
    """
    from tba_jax.experiment import stored_run
    from tba_jax.models import parameters
    from tba_jax.models.hugging_face import export as export_lib
    from tba_jax.models.hugging_face import load
    from tba_jax.models.policy import merge_lazily
    from tba_jax.reporting import model_card
    from tba_jax.storage import published, snapshots

    run = layout.open_run_dir(workdir)
    stored = stored_run.read(run, called=str(workdir))
    outputs.check_folder(output, outside=(run.root, run.shared))
    config, policy, tokenizer = stored.config, stored.policy, stored.tokenizer
    step = command_line.chosen_step(run, step, called=str(workdir))
    source = load.resolve_folder(config.model.path) if config.model.path else None
    base = _adapted_checkpoint(run, config) if adapter else ""
    write_tokenizer, token_ids = export_lib.tokenizer_files(tokenizer, source)
    folder = published.kept(run.policies)[step]
    with _still_there(run, step, folder):
        params = snapshots.open_arrays(folder, policy.trained_specs)
        dtype = dtype or next(iter(parameters.flatten(params).values())).dtype.name
        exported = model_card.Exported(name=output.resolve().name, step=step, dtype=dtype, adapter=adapter)

        def write_more(made: Path) -> None:
            write_tokenizer(made)
            card = model_card.text(run, config, base=model_card.base_of(str(config.model.path), source), exported=exported)
            (made / model_card.CARD).write_text(card, encoding="utf-8")

        if adapter:
            assert policy.lora is not None
            export_lib.save_adapters(output, policy.model, params, policy.lora, base=base, dtype=dtype, more=[write_more])
            return f"the adapters of step {step} of {workdir} are in {output}, for {base} ({policy.model.architecture}, {dtype})"
        if policy.lora is not None:
            names = run.initial_reference
            require(places.exists(names), f"{names} is gone: it names the reference policy, which the adapters belong to")
            reference = run.reference(layout.reference_id(run))
            params = merge_lazily(snapshots.open_arrays(reference, policy.model_specs), params, policy.lora)
        export_lib.save(output, policy.model, params, dtype=dtype, source=source, token_ids=token_ids, more=[write_more])
    return f"step {step} of {workdir} is in {output} ({policy.model.architecture}, {dtype})"


@contextlib.contextmanager
def _still_there(run: layout.RunDir, step: int, folder: places.Place) -> Iterator[None]:
    """Raises ValueError where the run removes a snapshot that is read inside, or the reference policy is gone."""
    from tba_jax.storage import published, snapshots

    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        if published.kept(run.policies).get(step) != folder:
            raise ValueError(f"snapshot {step} is gone: the run does not keep {folder} any more") from error
        if places.exists(run.initial_reference):
            base = run.reference(layout.reference_id(run))
            if not places.exists(base / snapshots.COMMIT):
                raise ValueError(f"the reference policy is gone: {base} holds no {snapshots.COMMIT}") from error
        raise


def _adapted_checkpoint(run: layout.RunDir, config: Any) -> str:
    """The checkpoint that the run's adapters belong to, as model.path names it. Raises ValueError where there is none."""
    if not config.lora.rank:
        raise ValueError("--adapter: this run has no adapters (lora.rank=0); without the flag its weights are written")
    if not config.model.path or contract.read(run)["init_from"] or config.replay.mount:
        raise ValueError(
            f"--adapter: the adapters of this run belong to the policy it began with, which is not the checkpoint "
            f"model.path={config.model.path!r}; without the flag they are merged into it"
        )
    return str(config.model.path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filter:
    """Which rows are written. min_step, max_step: of the newest policy step of a row. writer: names; (): all."""

    min_step: int | None = None
    max_step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    writer: Sequence[str] = ()

    def check(self) -> None:
        """Raises ValueError where no row can match."""
        for name in ("step", "reward"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if least is not None and most is not None and least > most:
                raise ValueError(f"--min_{name}={least} is above --max_{name}={most}: no row can match both")

    def __call__(self, rows: Rows) -> np.ndarray:
        """bool[B]. A reward that is not a number matches no limit."""
        limits = ((steps_of_rows(rows)[0], self.min_step, self.max_step), (rows["reward"], self.min_reward, self.max_reward))
        found = np.ones(len(rows["reward"]), bool)
        for column, least, most in limits:
            found &= least is None or column >= least
            found &= most is None or column <= most
        return found


def export_rows(workdir: Path, output: Path, chosen: Filter) -> str:
    """Writes the committed rows that match, writer by writer. Returns a sentence that says what was written.

    Raises ValueError where no row matches, there is no run or no such writer, its tokenizer is gone, or `output` exists.
    """
    run = layout.open_run_dir(workdir)
    stored = contract.read_run(run, called=str(workdir))
    outputs.check_file(output, outside=(run.root, run.shared), flag="--rows", may_exist=False)
    reader = LogReader(run.replay, contract.of(stored, called=str(workdir)).row_shape())
    count, problems = write_rows(output, reader, tokenizer_of(stored), chosen, of_run=str(stored["id"]))
    return "; ".join([f"{count} rows of {workdir} are in {output} ({output.stat().st_size / 1e6:.1f} MB)", *problems])


def write_rows(output: Path, reader: LogReader, tokenizer: Tokenizer, chosen: Filter, *, of_run: str) -> tuple[int, list[str]]:
    """Writes a Parquet file in groups of about 32 MB: memory holds one of them. Returns the count, and what is damaged."""
    heads = reader.heads()
    if unknown := sorted(set(chosen.writer) - set(heads)):
        raise ValueError(f"--writer={unknown[0]} has written no rows of this run; there are {', '.join(sorted(heads)) or 'none'}")
    lost: list[RowsGone | LogCorruption] = []
    schema = _schema(reader.shape).with_metadata({"tba_jax.run": of_run})
    count = 0
    with outputs.file(output, flag="--rows") as file, pyarrow.parquet.ParquetWriter(file, schema, compression="zstd") as written:
        for group in _groups(reader, chosen, tokenizer, schema, lost):
            written.write_table(group)
            count += len(group)
        if not count:
            raise ValueError(f"no row of the {sum(heads.values())} committed ones matches; nothing is written")
    return count, damage_of(lost)


def _groups(reader: LogReader, chosen: Filter, tokenizer: Tokenizer, schema: pa.Schema, lost: list[Any]) -> Iterator[pa.Table]:
    decode = functools.lru_cache(_KEPT_QUERIES)(lambda ids: tokenizer.decode([*ids]))
    tables: list[pa.Table] = []
    for writer, span in [(each, span) for each in chosen.writer or sorted(reader.heads()) for span in reader.kept(each)]:
        for rows in blocks(reader, writer, span, lost=lost.append):
            matching = chosen(rows)
            if matching.any():
                some = {name: column[matching] for name, column in rows.items()}
                tables.append(_table(some, writer, reader.shape, tokenizer, decode, schema))
            if sum(len(each) for each in tables) * reader.shape.row_bytes >= _GROUP_BYTES:
                yield pa.concat_tables(tables)
                tables = []
    if tables:
        yield pa.concat_tables(tables)


def _schema(shape: RowShape) -> pa.Schema:
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


def _table(
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
            lengths = {"tokens": P + R, "key": whole, "embedding": whole, "environment": whole}.get(name, R).clip(max=size[0])
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            found[name] = pa.ListArray.from_arrays(offsets, rows[name][np.arange(size[0]) < lengths[:, None]])
        else:
            found[name] = rows[name]
    return pa.table([found[name] for name in schema.names], schema=schema)


_OF_ROWS = ("min_step", "max_step", "min_reward", "max_reward", "writer")


def add_flags(values: flags.FlagValues) -> None:
    command_line.add_workdir(values)
    command_line.add_path(values, "output", "the folder to write a policy to; it must not exist, or be empty")
    command_line.add_step(values)
    dtypes = ("float32", "bfloat16", "float16")
    flags.DEFINE_bool("adapter", False, "writes the adapters alone, as a folder of peft", flag_values=values)
    flags.DEFINE_enum("dtype", None, dtypes, "of the weights; default: the snapshot's", flag_values=values)
    command_line.add_path(values, "rows", "the Parquet file to write rows to, in place of a policy; it must not exist")
    for name, text in (("min_step", "rows of policies of this trainer step and later"), ("max_step", "of this step and earlier")):
        flags.DEFINE_integer(name, None, text, flag_values=values)
    for name, text in (("min_reward", "rows of this reward and above"), ("max_reward", "of this reward and below")):
        flags.DEFINE_float(name, None, text, flag_values=values)
    flags.DEFINE_multi_string("writer", [], "rows of this writer; may be given again", flag_values=values)


def run(given: command_line.Given) -> int:
    if (given.output is None) == (given.rows is None):
        raise ValueError("name what to write: a policy by --output=FOLDER, or rows by --rows=FILE.parquet")
    others = ("step", "dtype", "adapter") if given.rows else _OF_ROWS
    if odd := next((name for name in others if getattr(given, name) not in (None, False, [])), ""):
        goes, of = ("rows", "policies") if given.rows else ("output", "rows")
        raise ValueError(f"--{odd} does not go with --{goes}: it is of {of}")
    if given.rows:
        chosen = Filter(**{name: getattr(given, name) for name in _OF_ROWS} | {"writer": tuple(dict.fromkeys(given.writer))})
        chosen.check()
    contract.follow_privacy(given.workdir)
    if given.rows:
        told = export_rows(given.workdir, given.rows, chosen)
    else:
        told = export(given.workdir, given.output, step=given.step, dtype=given.dtype, adapter=given.adapter)
    print(visible(told))
    return 0
