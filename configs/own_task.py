"""Your own task and its recipe, in one file: continue stories so that they mention given words.

Command:   python -m tba_jax.main --config=configs/own_task.py --config.model.path=FOLDER --workdir=runs/own_task
             --config.task.custom.train_path=train.jsonl --config.task.custom.heldout_path=heldout.jsonl
Hardware:  as the model needs it; --for_this_machine takes the variant of configs/machines.py for what is here. Time and score:
           not measured here.
"""

from configs import base, machines, small
from tba_jax.tasks import data
from tba_jax.tasks.graders import GradedTask
from tba_jax.tasks.interface import Query


def mentioned(query: Query, response: str) -> float:
    """The share of the wanted words that the response holds. A grade may be slow, fail or call a service: see GradedTask."""
    wanted = query.answer.split()
    return sum(word in response for word in wanted) / max(len(wanted), 1)


class Mention(GradedTask):
    score_name = "mentioned"
    grade = staticmethod(mentioned)

    def __init__(self, *, train_path: str, heldout_path: str):
        super().__init__(time_limit=5.0, retries=2, concurrency=1)
        self._paths = {"train": train_path, "heldout": heldout_path}

    def queries(self, split: str) -> list[Query]:
        path, setting = self._paths[split], f"task.custom.{split}_path"
        rows = data.read(path, fields={"opening": str, "words": str}, setting=setting, split=split)
        return [Query(prompt=row["opening"], answer=row["words"]) for row in rows]


def get_config(variant: str = ""):
    c = base.get_config()
    c.task.name = f"{__file__}:Mention"
    c.task.custom.train_path = c.task.custom.heldout_path = ""
    c.task.prompt_length, c.task.response_length, c.learner.learning_rate = 48, 48, 2e-4
    c.publish.keep, c.publish.dtype = 5, "bfloat16"  # all 251 snapshots of a model of 1.5B would take 1.5 TB in float32
    # --config=configs/own_task.py:small tries everything out, with a tiny model on a few rows.
    inputs = {"model.path": "llama", "task.custom.train_path": "openings.jsonl", "task.custom.heldout_path": "openings.jsonl"}
    return small.shrink(c, inputs) if small.asked(variant)[0] else machines.apply(c, variant)
