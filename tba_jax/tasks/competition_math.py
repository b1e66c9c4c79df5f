r"""Competition mathematics (MATH, Hendrycks et al. 2021; MATH-500): the answer in the last \boxed{} of a response.

The reward is 1 if the answer equals the gold one, as text in one way of writing or else by math-verify, and 0 otherwise: without
a box, with braces that do not close, or with an answer that takes longer than the limit to compare (9^{9^{9^{9}}}), which is the
response's own fault. NaN, and so left out of training, is only what the grader itself fails at.

Gold answers are not parsed at the start: at 6 ms each that takes over a minute for all of MATH, in each role, and what
math-verify cannot read is compared as text.
"""

import re
from collections.abc import Sequence

import numpy as np

from tba_jax.tasks import data, gsm8k
from tba_jax.tasks.graders import Graders
from tba_jax.tasks.interface import SPLITS, Query, Scores

_PROBLEM = "{problem}"
HUB_SPLITS = {"train": "train", "heldout": "test"}
_MEMORY_MEGABYTES = 2048  # of a worker: a response may name a number that fills any machine
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?P<open>\{)|\\(?:boxed|fbox)\s+(?P<token>[^\s{}$\\]+)|\\.|(?P<brace>[{}])", re.DOTALL)
_SPACING = re.compile(r"\\(?:left|right|displaystyle|quad|qquad)(?![a-zA-Z])|\\[!,;: ]|~|\s|(?<!\\)\$|\\\$|\\%|(?<=[0-9])%")
_WORDS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|boxed|fbox)\{([^{}\\]*)\}")
_FRACTION = re.compile(r"\\frac(?:([0-9])([0-9])|([0-9])(\{[^{}]*\})|(\{[^{}]*\})([0-9]))")
_SLASHED = re.compile(r"(-?)([0-9]+)/([0-9]+)")
_NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?")


class Math:
    """The rows of train_path train, those of heldout_path are held out; equal problems count once.

    A row is {"problem", "answer"}, or {"problem", "solution"} with the answer in the solution's last \\boxed{}.
    """

    score_name = "accuracy"
    reward_parts = ("correct",)
    reward_version = 1

    def __init__(self, *, train_path: str, heldout_path: str, prompt: str, time_limit: float, retries: int, concurrency: int):
        """Args: files, or hub data sets (splits train and test); prompt: what is asked, with {problem} where the problem stands;
          time_limit, retries, concurrency: see Graders.

        Raises ValueError naming file, line and field (or the answer) where one is missing or malformed.
        """
        if prompt.count(_PROBLEM) != 1:
            raise ValueError(f"task.math.prompt={prompt[:60]!r} must hold {_PROBLEM} once, where the problem stands")
        from tba_jax.tasks import math_verdict

        self._queries: dict[str, list[Query]] = {}
        self._solutions: list[tuple[str, str]] = []
        self._graders = Graders(
            math_verdict.grade,
            time_limit=time_limit,
            retries=retries,
            concurrency=concurrency,
            over_limit=0.0,
            memory_megabytes=_MEMORY_MEGABYTES,
            setting="task.math.",
        )
        for split, source in zip(SPLITS, (train_path, heldout_path), strict=True):
            rows = data.read(
                source,
                fields={"problem": str},
                optional={"answer": str, "solution": str},
                setting=f"task.math.{split}_path",
                split=HUB_SPLITS[split],
            )
            queries = [Query(prompt=prompt.replace(_PROBLEM, row["problem"]), answer=_gold(row)) for row in rows]
            self._queries[split] = list(dict.fromkeys(queries))
            if split == "train":
                self._solutions = [(q.prompt, row["solution"]) for q, row in zip(queries, rows, strict=True) if "solution" in row]

    def queries(self, split: str) -> Sequence[Query]:
        if split not in SPLITS:
            raise ValueError(f"split {split!r} is not one of {SPLITS}")
        return self._queries[split]

    def rewards(self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray) -> Scores:
        """As the module says. Answers that are equal as text, and responses without one, need no worker."""
        answers = [last_boxed(response).strip() for response in responses]
        reward = np.zeros(len(answers), np.float32)
        unsure = []
        for i, (query, answer) in enumerate(zip(queries, answers, strict=True)):
            if answer and normalise(answer) == normalise(query.answer):
                reward[i] = 1
            elif answer:
                unsure.append(i)
        if unsure:
            reward[unsure] = self._graders([queries[i] for i in unsure], [answers[i] for i in unsure])
        return Scores(reward=reward, parts=reward[:, None])

    def worked_examples(self, rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        """Train prompts with their human solutions, in random rounds. Raises ValueError where the data has none."""
        if not self._solutions:
            raise ValueError("task math has no worked examples: no row of task.math.train_path has a field 'solution'")
        rounds = -(-count // len(self._solutions))
        chosen = np.concatenate([np.zeros(0, int), *(rng.permutation(len(self._solutions)) for _ in range(rounds))])
        return [self._solutions[i] for i in chosen[:count]]

    def final_answer(self, response: str) -> str:
        """The text in the last box in one way of writing; "" without one. What is equal by computation alone stays apart."""
        return normalise(last_boxed(response))

    def close(self) -> None:
        """Ends the worker processes."""
        self._graders.close()


def _gold(row: data.Row) -> str:
    """The gold answer. Raises ValueError where the row has none."""
    if "answer" in row:
        answer = row["answer"].strip()
        if not answer or not _balanced(answer):
            raise ValueError(f"{row.where}: field 'answer' must be an answer with closed braces, not {row['answer'][:40]!r}")
    elif "solution" in row:
        answer = last_boxed(row["solution"]).strip()
        if not answer:
            raise ValueError(f"{row.where}: field 'solution' has no \\boxed{{answer}}; it ends in {row['solution'][-40:]!r}")
    else:
        raise ValueError(f"{row.where}: fields 'answer' and 'solution' are both missing: one must give the answer")
    return answer


def last_boxed(text: str) -> str:
    r"""What stands in the \boxed{} (\fbox{}, or as in `\boxed 5`) that closes last, the outer one of two; "" if none closes."""
    answer, opened = "", list[int]()
    for part in _BOX.finditer(text):
        if part["open"]:
            opened.append(part.end())
        elif part["token"]:
            answer = part["token"].rstrip(".,;")
        elif part["brace"] == "{":
            opened.append(-1)
        elif part["brace"] and opened and (start := opened.pop()) >= 0:
            answer = text[start : part.start()]
    return answer


def _balanced(text: str) -> bool:
    depth = 0
    for brace in (part["brace"] or part["open"] for part in _BOX.finditer(text)):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            return False
    return depth == 0


def normalise(answer: str) -> str:
    r"""An answer in one way of writing: without spacing, \left, \right, $ and %, with \frac{a}{b} for \dfrac, \frac12 and 1/2,
    words without \text{}, and a number by its digits (1,000.0 is 1000)."""
    inner = last_boxed(answer)
    if inner and answer.strip() == f"\\boxed{{{inner}}}":
        answer = inner
    answer = _SPACING.sub("", answer)
    answer = answer.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("^{\\circ}", "").replace("^\\circ", "")
    answer = _WORDS.sub(r"\1", _WORDS.sub(r"\1", answer)).rstrip(".")
    answer = _FRACTION.sub(_braced, answer)
    if slashed := _SLASHED.fullmatch(answer):
        return f"{slashed[1]}\\frac{{{slashed[2]}}}{{{slashed[3]}}}"
    if answer and _NUMBER.fullmatch(answer):
        return gsm8k.last_number(answer)
    return answer


def _braced(fraction: re.Match[str]) -> str:
    above, below = (part.strip("{}") for part in fraction.groups() if part is not None)
    return f"\\frac{{{above}}}{{{below}}}"
