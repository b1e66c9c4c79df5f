"""Steps of TRL's GRPOTrainer, in its own environment: python -m benchmarks.peers.run_trl SPEC RESULT.

SPEC is the JSON file that benchmarks.peers.jobs writes; RESULT gets the recording of the steps.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset

from benchmarks.peers import recording


def arguments(spec: dict[str, Any], folder: str) -> dict[str, Any]:
    """What GRPOConfig is given."""
    return dict(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        fp16=False,
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=spec["queries"] * spec["samples"],
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        num_generations=spec["samples"],
        max_completion_length=spec["response_length"],
        max_steps=spec["steps"],
        learning_rate=spec["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta1=spec["adam_betas"][0],
        adam_beta2=spec["adam_betas"][1],
        adam_epsilon=spec["adam_epsilon"],
        weight_decay=0.0,
        max_grad_norm=spec["clip_norm"],
        beta=spec["beta"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=spec["seed"],
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


class Steps(transformers.TrainerCallback):
    def __init__(self, record: recording.Recording):
        self._record = record

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._record.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._record.step_ends()


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    record = recording.Recording()

    def reward(completions: list[str], **_: Any) -> list[float]:
        return recording.digits(completions, seconds=spec["reward_seconds"])

    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=spec["checkpoint"],
            reward_funcs=reward,
            args=trl.GRPOConfig(**arguments(spec, folder)),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in spec["prompts"]]),
            processing_class=transformers.AutoTokenizer.from_pretrained(spec["checkpoint"]),
            callbacks=[Steps(record)],
        )
        record.timed(trainer, "_generate", "generate")
        record.timed(
            trainer,
            "_generate_and_score_completions",
            "score",
            after=lambda batch: record.count(int(batch["completion_mask"].sum())),
        )
        record.timed(trainer, "training_step", "update")
        trainer.train()
    versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    record.write(sys.argv[2], versions=versions)


if __name__ == "__main__":
    main()
