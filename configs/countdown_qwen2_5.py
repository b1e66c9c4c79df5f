"""Countdown in words: four numbers up to 99, a pretrained base model that thinks aloud, TBA′: --config=FILE[:small].

Paper:     the row of TBA′ (MATH, Qwen2.5-7B): learning rate, β, T, Q × K, reset of the reference, steps, K of S and a high m.
           Task and model size come from public experiments with Countdown, in which models from 1.5B on learn to search.
Command:   python -m tba_jax.main --config=configs/countdown_qwen2_5.py --workdir=runs/countdown_qwen2_5
           [--config.model.path=FOLDER]
Hardware:  accelerators with the memory that --dry_run prints for each role. Time and score: not measured here.
"""

from configs import base, small


def get_config(variant: str = ""):
    """The recipe, or configs/small.py of it. Raises ValueError for any other variant."""
    c = base.get_config()
    c.task.name = "countdown"
    c.task.countdown.style = "text"
    c.task.countdown.numbers = 4
    c.task.countdown.largest = 99
    c.task.countdown.operations = "+-*/"
    c.task.countdown.train_queries = 10_000
    c.task.countdown.heldout_queries = 512
    c.task.prompt_length = 128
    c.task.response_length = 1024
    # A base model continues after its answer.
    c.task.stop_strings = ("</answer>",)
    c.model.path = "Qwen/Qwen2.5-3B"
    c.model.compute_dtype = "bfloat16"
    c.searchers.queries_per_batch = 8
    c.searchers.samples_per_query = 16
    c.learner.objective = "tba_prime"
    c.learner.reference.kind = "reset"
    c.learner.reference.reset_steps = 50
    c.learner.queries = 32
    c.learner.completions = 16
    c.learner.micro_batch_tokens = 18_432  # 16 full rows
    c.learner.learning_rate = 1e-6
    c.learner.beta_start = 0.005
    c.learner.beta_end = 0.005
    c.learner.steps = 400
    c.replay.merge_duplicates = False
    c.publish.dtype = "bfloat16"
    c.publish.keep = 5
    c.evaluation.queries = 512
    return small.shrink(c, {"model.path": "qwen2"}, task__prompt_length=384) if small.is_the(variant) else c
