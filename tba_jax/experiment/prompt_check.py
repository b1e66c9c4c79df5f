"""Looks at the start of a run whether the tokenizer keeps the text of prompts, and tells an alarm where it does not."""

from typing import NamedTuple

from tba_jax.experiment.composition import Experiment
from tba_jax.tasks.interface import SPLITS
from tba_jax.telemetry.alarms import Alarms
from tba_jax.text import lost_text


class Finding(NamedTuple):
    """See Alarms.tell."""

    sentence: str
    advice: str


KIND = "prompts_change"
# Of each split, evenly spread: decoding a data set takes minutes where it has many prompts.
PROMPTS = 256


def find(e: Experiment) -> Finding | None:
    """What the tokenizer makes of prompts, None where it keeps them."""
    changes = []
    for split in SPLITS:
        queries = e.queries[split]
        chosen = range(0, len(queries), max(1, -(-len(queries) // PROMPTS)))
        lost = lost_text.find([queries[i].query.prompt for i in chosen], e.tokenizer)
        if lost.count:
            of = f"{len(chosen)} {split} prompts" + (f" (of {len(queries):,})" if len(chosen) < len(queries) else "")
            changes.append(f"{lost.count} of {of}, such as '{lost.text}', which the policy reads as '{lost.read}'")
    if not changes:
        return None
    return Finding(
        sentence=f"the tokenizer changes the text of {', and '.join(changes)}",
        advice="take a model whose tokenizer has these characters, or write prompts without them (the task's prompt setting)",
    )


def tell(e: Experiment, alarms: Alarms) -> None:
    """Tells the alarm, once a run."""
    if not alarms.is_told(KIND) and (found := find(e)) is not None:
        alarms.tell(kind=KIND, **found._asdict(), step=0)
