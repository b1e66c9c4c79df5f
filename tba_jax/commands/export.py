"""Writes a policy snapshot of a run as a Hugging Face folder, or the rows of its replay log as a Parquet file.

python -m tba_jax export --workdir=DIR --output=DIR [--step=best|last|N] [--dtype=float32|bfloat16|float16] [--adapter]
python -m tba_jax export --workdir=DIR --rows=FILE.parquet [--min_step=N] [--max_step=N] [--min_reward=X] [--max_reward=X]
  [--writer=NAME]

Adapters are merged into the weights; with --adapter they are written alone, as a folder that peft reads. Both have a model card.
The run may go on meanwhile.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from tba_jax import outputs
from tba_jax.commands import command_line, existing_run
from tba_jax.storage import layout, places, privacy
from tba_jax.text.visible import visible

if TYPE_CHECKING:  # what imports JAX is imported late: a mistyped flag is answered at once
    from tba_jax.reporting.parquet import Filter


def export(workdir: Path, output: Path, *, step: existing_run.AskedStep, dtype: str | None, adapter: bool = False) -> str:
    """Writes the folder, with a model card; one tensor at a time is in memory. Adapters are merged.

    Args:
      output: see outputs.folder; outside of workdir, whose folders belong to the run's processes.
      step: of a published snapshot, see existing_run.chosen_step. dtype: of the weights written; None: the snapshot's.
      adapter: writes the adapters alone, for peft.

    Returns a sentence that says what was written. Raises:
      ValueError: there is no run of this version or no such snapshot, its model, reference or tokenizer is gone, or `output`
        is in use or in the run; or `adapter` of a run without adapters, or whose adapters belong to no published checkpoint.
    """
    from tba_jax.experiment import stored_run
    from tba_jax.models.hugging_face import export as export_lib
    from tba_jax.models.hugging_face import load
    from tba_jax.models.policy import merge_lazily
    from tba_jax.reporting import model_card
    from tba_jax.storage import snapshots

    run = layout.open_run_dir(workdir)
    stored = stored_run.read(run, called=str(workdir))
    outputs.check_folder(output, outside=(run.root, run.shared))
    config, policy, tokenizer = stored.config, stored.policy, stored.tokenizer
    step = existing_run.chosen_step(run, step, called=str(workdir))
    source = load.resolve_folder(config.model.path) if config.model.path else None
    base = _adapted_checkpoint(run, config) if adapter else ""
    write_tokenizer, token_ids = _tokenizer_files(tokenizer, source)
    folder = run.policies / layout.step_name(step)
    params = snapshots.open_arrays(folder, policy.trained_specs)
    dtype = dtype or str(layout.read_json(folder / snapshots.COMMIT)["dtype"])
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
        reference = run.reference(layout.reference_id(run))
        if not places.exists(reference / snapshots.COMMIT):
            raise ValueError(
                f"the reference policy, which the adapters belong to, is gone: {reference} holds no {snapshots.COMMIT}"
            )
        params = merge_lazily(snapshots.open_arrays(reference, policy.model_specs), params, policy.lora)
    export_lib.save(output, policy.model, params, dtype=dtype, source=source, token_ids=token_ids, more=[write_more])
    return f"step {step} of {workdir} is in {output} ({policy.model.architecture}, {dtype})"


def _tokenizer_files(tokenizer: Any, source: Path | None) -> tuple[Callable[[Path], None], dict[str, int]]:
    """A function that writes the tokenizer into a folder, and the token ids for config.json, {} if `source` has its own."""
    from tba_jax.models.hugging_face import export as export_lib

    if source:
        return functools.partial(export_lib.copy_tokenizer, source), {}
    ids = {name: getattr(tokenizer, name) for name in ("pad_id", "bos_id", "eos_id")}
    write = functools.partial(export_lib.write_character_tokenizer, characters=tokenizer.characters, **ids)
    return write, {name.replace("_id", "_token_id"): token for name, token in ids.items()}


def _adapted_checkpoint(run: layout.RunDir, config: Any) -> str:
    """The checkpoint that the run's adapters belong to, as model.path names it. Raises ValueError where there is none."""
    from tba_jax.storage import contract

    if not config.lora.rank:
        raise ValueError("--adapter: this run has no adapters (lora.rank=0); without the flag its weights are written")
    if not config.model.path or contract.read(run)["init_from"] or config.replay.mount:
        raise ValueError(
            f"--adapter: the adapters of this run belong to the policy it began with, which is not the checkpoint "
            f"model.path={config.model.path!r}; without the flag they are merged into it"
        )
    return str(config.model.path)


def export_rows(workdir: Path, output: Path, chosen: "Filter") -> str:
    """Writes rows of the replay log, see reporting.parquet. Returns a sentence that says what was written.

    Raises:
      ValueError: there is no run of this version or no row that matches, its tokenizer is gone, or `output` exists, is in the run
        or cannot be written.
    """
    from tba_jax.replay.reader import LogReader
    from tba_jax.reporting import parquet
    from tba_jax.reporting.gathering import tokenizer_of
    from tba_jax.storage import contract

    run = layout.open_run_dir(workdir)
    stored = contract.read_run(run, called=str(workdir))
    outputs.check_file(output, outside=(run.root, run.shared), flag="--rows", may_exist=False)
    reader = LogReader(run.replay, contract.of(stored, called=str(workdir)).row_shape())
    count, problems = parquet.write(output, reader, tokenizer_of(stored), chosen, flag="--rows", of_run=str(stored["id"]))
    return "; ".join([f"{count} rows of {workdir} are in {output} ({output.stat().st_size / 1e6:.1f} MB)", *problems])


_OF_ROWS = ("min_step", "max_step", "min_reward", "max_reward", "writer")


def add_flags(values: flags.FlagValues) -> None:
    command_line.add_workdir(values)
    command_line.add_path(values, "output", "the folder to write a policy to; it must not exist, or be empty")
    existing_run.add_step(values)
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
        from tba_jax.reporting.parquet import Filter

        chosen = Filter(**{name: getattr(given, name) for name in _OF_ROWS[:-1]}, writers=tuple(dict.fromkeys(given.writer)))
        chosen.check()
    privacy.follow(given.workdir)
    if given.rows:
        told = export_rows(given.workdir, given.rows, chosen)
    else:
        told = export(given.workdir, given.output, step=given.step, dtype=given.dtype, adapter=given.adapter)
    print(visible(told))
    return 0
