"""Writes a policy snapshot of a run as a Hugging Face folder, for transformers, vLLM or lm-eval.

python -m tba_jax export --workdir=DIR --output=DIR [--step=N] [--dtype=float32|bfloat16|float16]
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba_jax.run import layout, places, processes
from tba_jax.run.places import Place

if TYPE_CHECKING:  # what imports JAX is imported late: a mistyped flag is answered at once
    from tba_jax.models.policy import Policy
    from tba_jax.text.tokenizers import Tokenizer


def export(workdir: Path, output: Path, *, step: int | None, dtype: str | None) -> str:
    """Writes the folder; one tensor at a time is in memory. Adapters are merged.

    Args:
      output: outside of workdir, whose folders belong to the run's processes.
      step: of a published snapshot; None: the newest. dtype: of the weights written; None: the snapshot's.

    Returns:
      a sentence that says what was written.

    Raises:
      ValueError: there is no run of this version or no such snapshot, its model, reference or tokenizer is gone, or `output`
        is in use or in the run.
    """
    from tba_jax.models import lora
    from tba_jax.models.hugging_face import export as export_lib
    from tba_jax.models.hugging_face import load
    from tba_jax.run import snapshots
    from tba_jax.text.tokenizers import CharacterTokenizer

    run = layout.open_run_dir(workdir)
    if not places.exists(run.config):
        raise ValueError(f"{workdir} holds no run: there is no {run.config}")
    inside = next(
        (p for p in (run.root, run.shared) if isinstance(p, Path) and output.resolve().is_relative_to(p.resolve())), None
    )
    if inside is not None:
        raise ValueError(f"--output={output} is in the run's folder {inside}, which the trainer sweeps; export to another place")
    config, policy, tokenizer = _read_run(run)
    steps = snapshots.committed_steps(run.policies)
    if not steps:
        raise ValueError(f"{run.policies} holds no snapshot yet")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise ValueError(f"--step={step} is not a snapshot of {workdir}; there are {_listed(steps)}")

    source = load.resolve_folder(config.model.path) if config.model.path else None
    ids = {} if source else {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    if isinstance(tokenizer, CharacterTokenizer):
        ids["bos_token_id"] = tokenizer.bos_id

    def write_tokenizer(folder: Path) -> None:
        if source is not None:
            export_lib.copy_tokenizer(source, folder)
        elif isinstance(tokenizer, CharacterTokenizer):
            export_lib.write_character_tokenizer(
                folder, tokenizer.characters, pad_id=tokenizer.pad_id, bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id
            )

    folder = run.policies / layout.step_name(step)
    with contextlib.ExitStack() as kept:
        kept.enter_context(_committed(folder, f"snapshot {step}"))
        params = snapshots.open_arrays(folder, policy.trained_specs)
        dtype = dtype or str(layout.read_json(folder / snapshots.COMMIT)["dtype"])
        if policy.lora is not None:
            reference = _reference(run)
            kept.enter_context(_committed(reference, "the reference policy, which the adapters belong to,"))
            params = lora.merge_lazily(snapshots.open_arrays(reference, policy.model_specs), params, policy.lora)
        export_lib.save(output, policy.model, params, dtype=dtype, source=source, token_ids=ids, tokenizer=write_tokenizer)
    return f"step {step} of {workdir} is in {output} ({policy.model.architecture}, {dtype})"


def _read_run(run: layout.RunDir) -> "tuple[Any, Policy, Tokenizer]":
    """Config, policy and tokenizer of a run."""
    from ml_collections import config_dict

    from tba_jax.experiment.named_policy import policy_and_tokenizer
    from tba_jax.run import contract

    config = config_dict.ConfigDict(contract.read_run(run)["config"])
    return config, *policy_and_tokenizer(config)


def _reference(run: layout.RunDir) -> Place:
    """The folder of the policy that the run began with."""
    if not places.exists(run.initial_reference):
        raise ValueError(f"{run.initial_reference} is gone: it names the reference policy, which the adapters belong to")
    named = layout.read_json(run.initial_reference)
    if not isinstance(named, dict) or not isinstance(named.get("id"), str):
        raise ValueError(f"{run.initial_reference} names no reference policy: {named!r} has no id")
    return run.reference(named["id"])


@contextlib.contextmanager
def _committed(folder: Place, what: str) -> Iterator[None]:
    """Says of a folder that is removed before or while it is read that it is gone; other failures pass as they are."""
    from tba_jax.run import snapshots

    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        if places.exists(folder / snapshots.COMMIT):
            raise
        raise ValueError(f"{what} is gone: {folder} holds no {snapshots.COMMIT}") from error


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) if len(steps) <= 8 else f"{', '.join(map(str, steps[:4]))} … {steps[-1]}"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tba_jax export", description=__doc__, allow_abbrev=False)
    parser.add_argument("--workdir", type=Path, required=True, help="the run's folder")
    parser.add_argument("--output", type=Path, required=True, help="the folder to write; it must not exist, or be empty")
    parser.add_argument("--step", type=int, help="trainer step of the snapshot; default: the newest")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights; default: the snapshot's")
    given = parser.parse_args(arguments)
    try:
        print(export(given.workdir, given.output, step=given.step, dtype=given.dtype))
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(processes.BAD_INPUT)
    except OSError as error:
        print(f"error: storage failed: {error}", file=sys.stderr)
        sys.exit(processes.STORAGE_FAILED)


if __name__ == "__main__":
    main(sys.argv[1:])
