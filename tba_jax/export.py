"""Writes a policy snapshot of a run as a Hugging Face folder, for transformers, vLLM or lm-eval.

python -m tba_jax.export --workdir=DIR --output=DIR [--step=N] [--dtype=float32|bfloat16|float16]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tba_jax import lifeline


def export(workdir: Path, output: Path, *, step: int | None, dtype: str | None) -> str:
    """Writes the folder; one tensor at a time is in memory. Adapters are merged.

    Args:
      step: of a published snapshot; None: the newest. dtype: of the weights written; None: the snapshot's.

    Returns:
      a sentence that says what was written.

    Raises:
      ValueError: there is no run or no such snapshot, its model or tokenizer is gone, or `output` is in use.
    """
    from ml_collections import config_dict

    from tba_jax import experiment as experiment_lib
    from tba_jax import policy_store, run_config, run_dir
    from tba_jax.models import hugging_face, hugging_face_export, lora
    from tba_jax.tokenizer import CharacterTokenizer

    run = run_dir.RunDir(workdir)
    if not run.config.exists():
        raise ValueError(f"{workdir} holds no run: there is no {run.config}")
    config = config_dict.ConfigDict(run_config.read(run)["config"])
    steps = policy_store.committed_steps(run.policies)
    if not steps:
        raise ValueError(f"{run.policies} holds no snapshot yet")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise ValueError(f"--step={step} is not a snapshot of {workdir}; there are {_listed(steps)}")

    policy, tokenizer = experiment_lib.policy_and_tokenizer(config)
    folder = run.policies / run_dir.step_name(step)
    params = policy_store.open_arrays(folder, policy.trained_specs)
    if policy.lora is not None:
        reference = run.reference(run_dir.read_json(run.initial_reference)["id"])
        params = lora.merge_lazily(policy_store.open_arrays(reference, policy.model_specs), params, policy.lora)
    dtype = dtype or run_dir.read_json(folder / policy_store.COMMIT)["dtype"]
    source = hugging_face.resolve_folder(config.model.path) if config.model.path else None
    ids = {} if source else {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    if isinstance(tokenizer, CharacterTokenizer):
        ids["bos_token_id"] = tokenizer.bos_id
    hugging_face_export.save(output, policy.model, params, dtype=dtype, source=source, token_ids=ids)
    if isinstance(tokenizer, CharacterTokenizer):
        hugging_face_export.write_character_tokenizer(
            output, tokenizer.characters, pad_id=tokenizer.pad_id, bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id
        )
    elif source is not None:
        hugging_face_export.copy_tokenizer(source, output)
    return f"step {step} of {workdir} is in {output} ({policy.model.architecture}, {dtype})"


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) if len(steps) <= 8 else f"{', '.join(map(str, steps[:4]))} … {steps[-1]}"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tba_jax.export", description=__doc__, allow_abbrev=False)
    parser.add_argument("--workdir", type=Path, required=True, help="the run's folder")
    parser.add_argument("--output", type=Path, required=True, help="the folder to write; it must not exist, or be empty")
    parser.add_argument("--step", type=int, help="trainer step of the snapshot; default: the newest")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights; default: the snapshot's")
    given = parser.parse_args(arguments)
    try:
        print(export(given.workdir, given.output, step=given.step, dtype=given.dtype))
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(lifeline.BAD_INPUT)
    except OSError as error:
        print(f"error: storage failed: {error}", file=sys.stderr)
        sys.exit(lifeline.STORAGE_FAILED)


if __name__ == "__main__":
    main(sys.argv[1:])
