"""Steps of TRL's asynchronous trainer, in TRL's environment: python -m benchmarks.peers.run_trl_async SPEC RESULT. See run_trl.

The trainer asks a vLLM server for responses, and sends it new weights by NCCL, so it needs vLLM and two CUDA devices: one for the
server (`vllm serve CHECKPOINT --weight-transfer-config '{"backend": "nccl"}'`, started beforehand) and one for itself. It ends
with the error that names what is missing otherwise.
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
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from benchmarks.peers import recording
from benchmarks.peers.run_trl import Steps

# The sentence is in the table, and other cases would end alike.
UNAVAILABLE = 3


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    record = recording.Recording()

    def reward(completions: list[Any], **_: Any) -> list[float]:
        texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
        return recording.digits(texts, seconds=spec["reward_seconds"])

    with tempfile.TemporaryDirectory() as folder:
        try:
            trainer = AsyncGRPOTrainer(
                model=spec["checkpoint"],
                reward_funcs=reward,
                args=AsyncGRPOConfig(
                    output_dir=folder,
                    use_cpu=not torch.cuda.is_available(),
                    bf16=False,
                    per_device_train_batch_size=spec["queries"] * spec["samples"],
                    num_generations=spec["samples"],
                    max_completion_length=spec["response_length"],
                    max_steps=spec["steps"],
                    learning_rate=spec["learning_rate"],
                    temperature=1.0,
                    seed=spec["seed"],
                    save_strategy="no",
                    report_to="none",
                    disable_tqdm=True,
                ),
                train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in spec["prompts"]]),
                processing_class=transformers.AutoTokenizer.from_pretrained(spec["checkpoint"]),
                callbacks=[Steps(record)],
            )
        except (AssertionError, ImportError, RuntimeError, TimeoutError, ConnectionError) as error:  # no CUDA, vLLM or server
            print(f"it needs CUDA and a vLLM server: {type(error).__name__}: {error}", file=sys.stderr)
            sys.exit(UNAVAILABLE)
        trainer.train()
    record.write(sys.argv[2], versions={"trl": trl.__version__, "torch": torch.__version__})


if __name__ == "__main__":
    main()
