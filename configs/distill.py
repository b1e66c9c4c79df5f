"""On-policy distillation: a small policy learns the distribution of a teacher from its own responses.

Paper:     none. With the teacher as the reference and no reward, log p̃ is log π_teacher, as with the reward
           log π_teacher − log π_ref at β = 1: p* is the teacher, whoever drew the rows.
Command:   python -m tba_jax.main --config=configs/distill.py --workdir=runs/distill --config.model.path=STUDENT \
               --config.task.prompts.train_path=PROMPTS --config.task.prompts.heldout_path=PROMPTS
Hardware:  2 CPU cores for TinyStories-656K and smaller policies. KL to the teacher: benchmarks/RESULTS.md, "Distillation".
"""

from configs import base, small


def get_config(variant: str = ""):
    c = base.get_config()
    c.task.name = "prompts"
    c.task.prompt_length = 32
    c.task.response_length = 48
    # A student that may end its response learns to end early, because few tokens have little KL. So the teacher has no ends here.
    c.task.min_response_length = 48
    c.model.path = ""  # the policy: a Hugging Face folder with the teacher's tokenizer
    c.learner.reference.kind = "teacher"
    c.learner.reference.path = "raincandy-u/TinyStories-656K"
    c.learner.beta_start = 1.0  # without rewards, it is only the unit of gradients
    c.learner.beta_end = 1.0
    c.searchers.queries_per_batch = 16
    c.searchers.samples_per_query = 8
    c.searchers.max_updates_ahead = 2
    c.replay.merge_duplicates = False
    c.replay.recent_window = 4
    c.learner.queries = 16
    c.learner.completions = 8
    c.learner.learning_rate = 1e-3
    c.learner.schedule = "linear"
    c.learner.steps = 300
    c.publish.keep = 5
    c.evaluation.every_steps = 100
    c.evaluation.queries = 64
    inputs = {"model.path": "llama", "learner.reference.path": "llama"}
    inputs |= {f"task.prompts.{split}_path": "prompts.jsonl" for split in ("train", "heldout")}
    return small.shrink(c, inputs, task__prompt_length=80, task__min_response_length=0) if small.is_the(variant) else c
