"""Happy endings with a real pretrained model: TinyStories-656K (Llama architecture) against VADER's sentiment score.

Command:   python -m tba_jax.main --config=configs/story_sentiment.py --workdir=runs/stories
               --config.model.path=TinyStories-656K --config.task.story_sentiment.data_path=stories.json
"""

from configs import base


def get_config():
    c = base.get_config()
    c.task.name = "story_sentiment"
    c.task.prompt_length = 32
    c.task.response_length = 48
    c.model.path = "../shared/data/models/TinyStories-656K"
    c.task.story_sentiment.data_path = "../shared/data/tinystories/tinystories_1000.json"
    c.sampling.temperature = 1.0
    c.learner.queries = 8
    c.learner.completions = 8
    c.searchers.samples_per_query = 8
    c.learner.beta_start = 0.05
    c.learner.beta_end = 0.05
    c.learner.learning_rate = 3e-4
    c.learner.steps = 200
    return c
