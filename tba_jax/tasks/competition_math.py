r"""Competition mathematics (MATH, Hendrycks et al. 2021; MATH-500): the answer in the last \boxed{} of a response.

The reward is 1 if the answer equals the gold answer, as normalised text or else by math-verify; 0 otherwise, also without a box
or if the comparison exceeds the time limit, for which an answer such as 9^{9^{9^{9}}} is to blame; NaN only if the grader fails.
"""

import re
from collections.abc import Sequence

import numpy as np

from tba_jax.tasks import data, gsm8k
from tba_jax.tasks.graders import Graders
from tba_jax.tasks.interface import SPLITS, Query, Scores, SplitTask

_PROBLEM = "{problem}"
HUB_SPLITS = {"train": "train", "heldout": "test"}
MEMORY_MEGABYTES = 2048  # limit of a worker: a response may contain a number that fills any memory
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?P<open>\{)|\\(?:boxed|fbox)\s+(?P<token>[^\s{}$\\]+)|\\.|(?P<brace>[{}])", re.DOTALL)
_SPACE = re.compile(r"(?:\s|~|(?<!\\)\\[!,;:> ]|\\(?:thinspace|enspace|quad|qquad)(?![a-zA-Z])|\\(?:text|mathrm|mbox)\{\s*\})+")
_HYPHENS = str.maketrans(dict.fromkeys(gsm8k.MINUS, "-"))
_THOUSANDS = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:(?:\{,\} ?| )[0-9]{3})+(?![0-9/])")
_ARGUMENTS = re.compile(r"\\([dtc]?frac|[dt]?binom) ?([0-9]) ?([0-9])")
_SCRIPT = re.compile(r"([_^]) ?([0-9]+)")
_BASE = re.compile(r"(?<=[0-9A-F]) ?\\(?:text|mathrm)\{ ?\(?base ?(?:([0-9]+)\)? ?\}|\} ?([0-9]+))")
_MIXED = re.compile(r"(?<![0-9.])([0-9]+) ([0-9]+) ?/ ?([0-9]+)(?![0-9.])")
_END = re.compile(r"(?<=[0-9}\])])[ .,;]+\Z")
_MARKS = re.compile(r"\\(?:left|right|displaystyle)(?![a-zA-Z])|(?<!\\)\$|\\\$|\\%|(?<=[0-9])%")
_SPACES = re.compile(r"((?<=[0-9]) +(?=[0-9]))| +")
_WORDS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|boxed|fbox)\{([^{}\\]*)\}")
_FRACTION = re.compile(r"\\frac(?:([0-9])([0-9])|([0-9])(\{[^{}]*\})|(\{[^{}]*\})([0-9]))")
_SUM = re.compile(r"(-?)([0-9]{1,9})\\frac\{([0-9]{1,9})\}\{([0-9]{1,9})\}")
_SLASHED = re.compile(r"(-?)([0-9]+)/([0-9]+)")
_NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?")


class Math(SplitTask):
    """The train split has the rows of train_path, the held-out split the rows of heldout_path; equal problems count once.

    A row is {"problem", "answer"}, or {"problem", "solution"} with the answer in the solution's last \\boxed{}.
    """

    def __init__(self, *, train_path: str, heldout_path: str, prompt: str, time_limit: float, retries: int, concurrency: int):
        """Args: train_path, heldout_path: files, or hub data sets with splits train and test; prompt: a prompt template with
          {problem}; time_limit, retries, concurrency: see Graders.

        Raises ValueError naming file, line and field if a field or an answer is missing or malformed.
        """
        if prompt.count(_PROBLEM) != 1:
            raise ValueError(f"task.math.prompt={prompt[:60]!r} must hold {_PROBLEM} once, where the problem belongs")
        from tba_jax.tasks import math_verdict

        self._splits = {}
        self._graders = Graders(
            math_verdict.grade,
            time_limit=time_limit,
            retries=retries,
            concurrency=concurrency,
            over_limit=0.0,
            memory_megabytes=MEMORY_MEGABYTES,
            prefix="task.math.",
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
            self._splits[split] = list(dict.fromkeys(queries))
            if split == "train":
                self._solutions = [(q.prompt, row["solution"]) for q, row in zip(queries, rows, strict=True) if "solution" in row]

    @property
    def grades(self) -> int:
        """How many answers have been compared by a worker so far."""
        return self._graders.grades

    def rewards(self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray) -> Scores:
        """1, 0 or NaN, see the module. Only answers that differ from the gold answer as text go to a worker."""
        answers = [last_boxed(response).strip() for response in responses]
        reward = np.zeros(len(answers), np.float32)
        unsure: list[int] = []
        failure = ""
        for i, (query, answer) in enumerate(zip(queries, answers, strict=True)):
            if answer and normalise(answer) == normalise(query.answer):
                reward[i] = 1
            elif answer:
                unsure.append(i)
        if unsure:
            golds = [Query(queries[i].prompt, spelled(queries[i].answer)) for i in unsure]
            reward[unsure], failure = self._graders.graded(golds, [spelled(answers[i]) for i in unsure])
        return Scores.of_one(reward, failure)

    def worked_examples(self, rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        """Train prompts with their human solutions, see data.in_epochs. Raises ValueError if the data has no solutions."""
        if not self._solutions:
            raise ValueError("task math has no worked examples: no row of task.math.train_path has a field 'solution'")
        return data.in_epochs(self._solutions, rng, count)

    def final_answer(self, response: str) -> str:
        """The normalised text of the last box; "" without a box. Answers that only a computation shows to be equal differ."""
        return normalise(last_boxed(response))

    def close(self) -> None:
        """Ends the worker processes."""
        self._graders.close()


def _gold(row: data.Row) -> str:
    """The gold answer. Raises ValueError if the row has none."""
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
    r"""The content of the \boxed{} or \fbox{} that closes last, or of a `\boxed 5`; "" if no box closes."""
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


def spelled(answer: str) -> str:
    r"""An answer whose numbers are written in one way, which `normalise` and math-verify read as the same numbers.

    A space of TeX or Unicode becomes one plain space. Between digits it divides two numbers, except that 1 000 becomes 1000 and
    that 2 1/3 becomes 2\frac{1}{3}. Signs become ASCII's, scripts of digits get braces, and punctuation at the end is dropped.
    """
    answer = _SPACE.sub(" ", answer.translate(_HYPHENS).replace(",\\!", "{,}"))
    answer = _SCRIPT.sub(r"\1{\2}", _BASE.sub(r"_{\1\2}", _ARGUMENTS.sub(r"\\\1{\2}{\3}", answer)))
    answer = _THOUSANDS.sub(lambda number: re.sub("[^0-9]", "", number[0]), answer).replace("{,}", ",")
    return _END.sub("", _MIXED.sub(r"\1\\frac{\2}{\3}", answer).strip())


def normalise(answer: str) -> str:
    r"""The normal form of an answer: without spacing, \left, \right, $ and %, with \frac{a}{b} for \dfrac, \frac12 and 1/2, with
    words outside of \text{}, and with numbers as plain digits (1,000.0 is 1000) and mixed ones as fractions; see spelled."""
    inner = last_boxed(answer)
    if inner and answer.strip() == f"\\boxed{{{inner}}}":
        answer = inner
    answer = _MARKS.sub(" ", spelled(answer))
    answer = _SPACES.sub(lambda space: " " if space[1] else "", _WORDS.sub(r"\1", _WORDS.sub(r"\1", answer))).rstrip(".,;")
    answer = answer.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("^{\\circ}", "").replace("^\\circ", "")
    answer = _FRACTION.sub(_braced, answer)
    if mixed := _SUM.fullmatch(answer):
        whole, above, below = (int(part) for part in mixed.groups()[1:])
        return f"{mixed[1]}\\frac{{{whole * below + above}}}{{{below}}}"
    if slashed := _SLASHED.fullmatch(answer):
        return f"{slashed[1]}\\frac{{{slashed[2]}}}{{{slashed[3]}}}"
    if answer and _NUMBER.fullmatch(answer):
        return gsm8k.last_number(answer)
    return answer


def _braced(fraction: re.Match[str]) -> str:
    above, below = (part.strip("{}") for part in fraction.groups() if part is not None)
    return f"\\frac{{{above}}}{{{below}}}"
