"""GSM8K with Qwen2.5-1.5B (base) on one node: --config=configs/gsm8k_qwen2_5_1_5b.py[:VARIANT].

VARIANT: 8x80gb (the default: a node of eight GPUs of 80 GB) | 1x80gb (one such GPU, which all roles share) | small[-VARIANT]
(configs/small.py).

Paper:     no row of its own. Objective, β, batch, temperature, replay and schedule are those of its GSM8K row
           (configs/gsm8k_rho1b.py). The learning rate is that of its other Qwen2.5 model, in its MATH row. Chosen here, because a
           base model has seen no prompt of this task: a prompt that asks for steps, and stop strings. A base model goes on with
           the next question after its answer, and a number in it would count as the answer. Gradients are clipped, because the
           settings also serve other models and adapters (--for_this_machine).
Command:   python -m tba_jax.main --config=configs/gsm8k_qwen2_5_1_5b.py --workdir=runs/gsm8k_qwen
           Policy and data come from the hub. --config.model.path=FOLDER and --config.task.gsm8k.{train,heldout}_path=FILE.jsonl
           name local files instead. `make gsm8k MODEL=Qwen/Qwen2.5-0.5B` runs it with settings for the machine that is there
           (--for_this_machine): any devices, any model of these sizes.
Hardware:  8 × 80 GB or 1 × 80 GB; docs/fit.md has the memory of each role. Disk: five snapshots of 3 GB, besides those that were
           evaluated (one every 100 steps), and two checkpoints of 19 GB.
Score:     not measured here. Time: not measured here.
"""

from configs import gsm8k_rho1b, small


def get_config(variant: str = ""):
    is_small, variant = small.asked(variant)
    if variant not in ("", "8x80gb", "1x80gb"):
        raise ValueError(f"no variant {variant!r}: --config=configs/gsm8k_qwen2_5_1_5b.py:VARIANT takes 8x80gb, 1x80gb or small")
    c = gsm8k_rho1b.get_config()
    c.task.gsm8k.prompt = "Question: {question}\nAnswer: Let's think step by step.\n"
    # A base model ends a turn with this token or with end-of-sequence, or begins a question of its own.
    c.task.stop_strings = ("\nQuestion:", "<|im_end|>")
    c.model.path = "Qwen/Qwen2.5-1.5B"
    c.learner.learning_rate = 1e-6
    c.learner.clip_norm = 1.0
    c.checkpoint.keep = 2
    if variant == "1x80gb":
        c.searchers.count = 1
        c.searchers.slots = 96
        c.searchers.score_tokens = 16_384
        c.evaluation.score_tokens = 16_384
        c.evaluation.batch_size = 64
        c.learner.micro_batch_tokens = 8_192  # 8 full rows
    if not is_small:
        return c
    data = {"task.gsm8k.train_path": "gsm8k.jsonl", "task.gsm8k.heldout_path": "gsm8k.jsonl"}
    return small.shrink(c, {"model.path": "qwen2", **data})
