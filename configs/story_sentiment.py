"""Happy endings with a real pretrained model: TinyStories-656K (Llama architecture) against VADER's sentiment score.

Paper:     none; a small stand-in for preference tuning (the TBA paper's preference tuning) that runs on a laptop.
Command:   make stories MODEL=DIR/TinyStories-656K DATA=DIR/tinystories_1000.json
Hardware:  2 CPU cores. Time: 200 steps in 164 s on 4 cores. Score: held-out reward 0.48 -> 0.91 (measured,
           benchmarks/RESULTS.md).
"""

from configs import base, small


def get_config(variant: str = ""):
    c = base.get_config()
    c.task.name = "story_sentiment"
    c.task.prompt_length = 32
    c.task.response_length = 48
    c.task.min_response_length = 48  # the reward is of a continuation of this length, and a story is longer
    c.model.path = "raincandy-u/TinyStories-656K"
    c.searchers.queries_per_batch = 16
    c.searchers.samples_per_query = 8
    c.replay.recent_window = 4
    c.learner.queries = 16
    c.learner.completions = 8
    c.learner.beta_start = 0.05
    c.learner.beta_end = 0.05
    c.learner.learning_rate = 2e-4
    c.learner.steps = 150
    c.publish.keep = 5
    c.evaluation.every_steps = 50
    c.evaluation.queries = 128
    inputs = {"model.path": "llama", "task.story_sentiment.data_path": "stories.json"}
    sizes = dict(task__prompt_length=80, task__min_response_length=0, task__story_sentiment__heldout_queries=4)
    return small.shrink(c, inputs, **sizes) if small.is_the(variant) else c
