r"""Grade-school problems (GSM8K, Cobbe et al. 2021) and competition problems (MATH, Hendrycks et al. 2021; MATH-500).

GSM8K: as in the TBA paper, the last number of a response is its answer. The reward is 1 if it equals the number after `####` of
the gold answer, by its decimal digits, else 0.

MATH: the answer is in the last \boxed{} of a response. The reward is 1 if it equals the gold answer, as normalised text or else
by math-verify; 0 otherwise, also without a box or if the comparison exceeds the time limit, as with 9^{9^{9^{9}}}; NaN only if
the grader fails.
"""

import collections
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tba_jax.tasks import data
from tba_jax.tasks.graders import Graders
from tba_jax.tasks.interface import SPLITS, Query, Scores, SplitTask

_HUB_SPLITS = {"train": "train", "heldout": "test"}
MEMORY_MEGABYTES = 2048  # limit of a worker: a response may contain a number that fills any memory

# Numbers in prose.
_CALCULATOR = re.compile(r"<<[^<>]*>>")
MINUS = "-‐‑–−－"  # ASCII's, and the hyphens, the en dash and the minus of Unicode
_CURRENCY = r"(?:\\?\$|[£€])"
_APART = r"(?:(?:,|\{,\})(?:\\!)?|\\[,;:!> ]|[~\u00a0\u2007\u2009\u202f])"  # TeX's and Unicode's spaces; a plain one divides
# A sign belongs to the number unless it is a subtraction from the text before it: 48-24 ends in 24. An emphasising _ is no such
# text. TeX's thin space after a sign is part of the number where there is none before the sign.
_WRITTEN = re.compile(
    rf"(?:(?<![^\W_])(?<![.,)\]}}%$])(?P<sign>[{MINUS}+])(?:(?<!\\[,;:!>].)\\[,;:!>])*)?"
    rf"{_CURRENCY}?(?:(?P<inner_sign>(?<=[$£€])[{MINUS}])(?:\\[,;:!>])*)?"
    rf"(?P<whole>[0-9]{{1,3}}(?:{_APART}[0-9]{{3}})+(?![0-9])|[0-9]+|(?<![^\W_])(?<!\.)(?=\.[0-9]))"
    r"(?:\.(?P<fraction>[0-9]+))?(?:[eE](?P<exponent>[-+]?[0-9]{1,9})(?![0-9]))?"
)
_PLAIN_DIGITS = 40  # a number with more zeros than this is written with an exponent

# Answers in LaTeX.
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?P<open>\{)|\\(?:boxed|fbox)\s+(?P<token>[^\s{}$\\]+)|\\.|(?P<brace>[{}])", re.DOTALL)
_SPACE = re.compile(r"(?:\s|~|(?<!\\)\\[!,;:> ]|\\(?:thinspace|enspace|quad|qquad)(?![a-zA-Z])|\\(?:text|mathrm|mbox)\{\s*\})+")
_HYPHENS = str.maketrans(dict.fromkeys(MINUS, "-"))
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


class _Problems(SplitTask):
    """Problems of two files, or of the splits train and test of two hub data sets. Equal problems of a split count once."""

    _section: str  # of its settings
    _field: str  # of the problem in a row, and of its place in the prompt template
    _fields: tuple[dict[str, type], dict[str, type]]  # that a row has, and that it may have, see data.read

    def __init__(self, prompt: str, *paths: str, gold: Callable[[data.Row], str]):
        """Args: gold: returns a row's gold answer. Raises ValueError naming the template, or file, line and field of a row."""
        place, (fields, optional), self._splits = f"{{{self._field}}}", self._fields, {}
        if prompt.count(place) != 1:
            raise ValueError(f"{self._section}prompt={prompt[:60]!r} must hold {place} once, where the {self._field} belongs")
        for split, source in zip(SPLITS, paths, strict=True):
            setting, part = f"{self._section}{split}_path", _HUB_SPLITS[split]
            rows = data.read(source, fields=fields, optional=optional, setting=setting, split=part)
            queries = [Query(prompt.replace(place, row[self._field]), gold(row)) for row in rows]
            self._splits[split] = list(dict.fromkeys(queries))
            if split == "train":
                self._train = [(query.prompt, row) for query, row in zip(queries, rows, strict=True)]


def _gold_number(row: data.Row) -> str:
    _, mark, text = row["answer"].rpartition("####")
    number = _WRITTEN.fullmatch(text.strip().removesuffix("%"))
    if not mark or number is None:
        raise ValueError(f"{row.where}: the answer must end in #### and a number, not in {row['answer'][-40:]!r}")
    return canonical(number)


class GSM8K(_Problems):
    """A row is {"question", "answer"}. `prompt` holds `{question}` once."""

    _section, _field, _fields = "task.gsm8k.", "question", ({"question": str, "answer": str}, {})

    def __init__(self, *, train_path: str, heldout_path: str, prompt: str):
        super().__init__(prompt, train_path, heldout_path, gold=_gold_number)

    def rewards(self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray) -> Scores:
        """1 if the response's last number equals the gold number, else 0. Responses at the length limit are graded, too."""
        correct = [self.final_answer(response) == query.answer for query, response in zip(queries, responses, strict=True)]
        return Scores.of_one(np.array(correct))

    def worked_examples(self, rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        """Train prompts with their human solutions without calculator annotations (<<48/2=24>>), see data.in_epochs."""
        chosen = data.in_epochs(self._train, rng, count)
        return [(prompt, _CALCULATOR.sub("", row["answer"])) for prompt, row in chosen]

    def final_answer(self, response: str) -> str:
        """See last_number."""
        return last_number(response)


def last_number(text: str) -> str:
    """The last number of a text in the form of `canonical`; "" if the text has no number."""
    last = collections.deque(_WRITTEN.finditer(text), maxlen=1)
    return canonical(last[0]) if last else ""


def canonical(number: re.Match[str]) -> str:
    """The normal form of a number, which equal numbers share: 1,234.50 and +1234.5 give 1234.5, and 0 has no sign.

    Its time is linear in the number of digits. An exponent replaces more than 40 zeros.
    """
    whole, fraction = re.sub("[^0-9]", "", number["whole"]), number["fraction"] or ""
    digits = (whole + fraction).lstrip("0")
    exponent = int(number["exponent"] or 0) - len(fraction) + len(digits)
    digits = digits.rstrip("0")
    exponent -= len(digits)
    if not digits:
        return "0"
    sign = "-" if (number["sign"] or number["inner_sign"] or "+") in MINUS else ""
    if 0 <= exponent <= _PLAIN_DIGITS:
        return f"{sign}{digits}{'0' * exponent}"
    if -_PLAIN_DIGITS <= exponent < 0:
        digits = digits.rjust(1 - exponent, "0")
        return f"{sign}{digits[:exponent]}.{digits[exponent:]}"
    return f"{sign}{digits}e{exponent}"


def _gold_answer(row: data.Row) -> str:
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


class Math(_Problems):
    r"""A row is {"problem", "answer"}, or {"problem", "solution"} with the answer in the solution's last \boxed{}. `prompt` holds
    `{problem}` once; time_limit, retries, concurrency: see Graders."""

    _section, _field, _fields = "task.math.", "problem", ({"problem": str}, {"answer": str, "solution": str})

    def __init__(self, *, train_path: str, heldout_path: str, prompt: str, time_limit: float, retries: int, concurrency: int):
        from tba_jax.tasks import math_verdict

        super().__init__(prompt, train_path, heldout_path, gold=_gold_answer)
        limits: dict[str, Any] = dict(time_limit=time_limit, over_limit=0.0, memory_megabytes=MEMORY_MEGABYTES)
        self._graders = Graders(math_verdict.grade, prefix=self._section, retries=retries, concurrency=concurrency, **limits)
        self.close = self._graders.close  # ends the worker processes

    @property
    def grades(self) -> int:
        """How many answers have been compared by a worker so far."""
        return self._graders.grades

    def rewards(self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray) -> Scores:
        """1, 0 or NaN, see the module. Only answers that differ from the gold answer as text go to a worker."""
        answers = [last_boxed(response).strip() for response in responses]
        pairs = zip(queries, answers, strict=True)
        reward = np.array([answer != "" and normalise(answer) == normalise(query.answer) for query, answer in pairs], np.float32)
        unsure, failure = [i for i, answer in enumerate(answers) if answer and not reward[i]], ""
        if unsure:
            golds = [Query(queries[i].prompt, spelled(queries[i].answer)) for i in unsure]
            reward[unsure], failure = self._graders.graded(golds, [spelled(answers[i]) for i in unsure])
        return Scores.of_one(reward, failure)

    def worked_examples(self, rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        """Train prompts with their human solutions, see data.in_epochs. Raises ValueError if the data has no solutions."""
        solutions = [(prompt, row["solution"]) for prompt, row in self._train if "solution" in row]
        if not solutions:
            raise ValueError("task math has no worked examples: no row of task.math.train_path has a field 'solution'")
        return data.in_epochs(solutions, rng, count)

    def final_answer(self, response: str) -> str:
        """The normalised text of the last box; "" without a box. Answers that only a computation shows to be equal differ."""
        return normalise(last_boxed(response))


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

    A space of TeX or Unicode becomes one plain space, which divides two numbers, but 1 000 becomes 1000 and 2 1/3 becomes
    2\frac{1}{3}. Signs become ASCII's, scripts of digits get braces, and punctuation at the end is dropped.
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
        return last_number(answer)
    return answer


def _braced(fraction: re.Match[str]) -> str:
    above, below = (part.strip("{}") for part in fraction.groups() if part is not None)
    return f"\\frac{{{above}}}{{{below}}}"
