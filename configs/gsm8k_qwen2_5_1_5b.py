"""GSM8K with Qwen2.5-1.5B (base) on one node: --config=configs/gsm8k_qwen2_5_1_5b.py[:VARIANT].

VARIANT: a machine of configs/machines.py: 8x80gb (the default: a node of eight GPUs of 80 GB) | 1x80gb (one such GPU, which all
roles share) | 1x24gb | 1x16gb | v5p-8 | v5e-8 | v5e-1 | cpu; --for_this_machine picks one. Or small[-VARIANT] (configs/small.py).

Paper:     no row of its own. Objective, β, batch, temperature, replay and schedule are those of its GSM8K row
           (configs/gsm8k_rho1b.py). The learning rate is that of its other Qwen2.5 model, in its MATH row. Chosen here, because a
           base model has seen no prompt of this task: a prompt that asks for steps, and stop strings. A base model goes on with
           the next question after its answer, and a number in it would count as the answer. Gradients are clipped, because the
           settings also serve other models and adapters.
Command:   python -m tba_jax.main --config=configs/gsm8k_qwen2_5_1_5b.py --workdir=runs/gsm8k_qwen
           Policy and data come from the hub. --config.model.path=FOLDER and --config.task.gsm8k.{train,heldout}_path=FILE.jsonl
           name local files instead. `make gsm8k MODEL=Qwen/Qwen2.5-0.5B` runs the variant for the machine that is there.
Hardware:  8 × 80 GB or 1 × 80 GB; docs/fit.md has the memory of each role. Disk: five snapshots of 3 GB, besides those that were
           evaluated (one every 100 steps), and two checkpoints of 19 GB.
Score:     not measured here. Time: not measured here.
"""

from configs import gsm8k_rho1b, machines, small


def get_config(variant: str = ""):
    is_small, variant = small.asked(variant)
    c = gsm8k_rho1b.get_config()
    c.task.gsm8k.prompt = "Question: {question}\nAnswer: Let's think step by step.\n"
    # A base model ends a turn with this token or with end-of-sequence, or begins a question of its own.
    c.task.stop_strings = ("\nQuestion:", "<|im_end|>")
    c.model.path = "Qwen/Qwen2.5-1.5B"
    c.learner.learning_rate = 1e-6
    c.learner.clip_norm = 1.0
    c.checkpoint.keep = 2
    c = machines.apply(c, variant)
    if not is_small:
        return c
    data = {"task.gsm8k.train_path": "gsm8k.jsonl", "task.gsm8k.heldout_path": "gsm8k.jsonl"}
    return small.shrink(c, {"model.path": "qwen2", **data})
