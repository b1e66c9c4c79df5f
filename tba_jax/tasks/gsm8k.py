r"""Grade-school mathematics (GSM8K, Cobbe et al. 2021) as in the TBA paper: the last number of a response is its answer.

The default prompt is the paper's, `[MATH TASK] Problem:\n{question}\n\nSolution:\n`. The reward is 1 if the last number in the
response equals the number after `####` of the gold answer, else 0. Numbers are compared by their decimal digits, exactly.
"""

import collections
import re
from collections.abc import Sequence

import numpy as np

from tba_jax.tasks import data
from tba_jax.tasks.interface import SPLITS, Query, Scores, SplitTask

FIELDS = {"question": str, "answer": str}
HUB_SPLITS = {"train": "train", "heldout": "test"}
_QUESTION = "{question}"
_CALCULATOR = re.compile(r"<<[^<>]*>>")
MINUS = "-‐‑–−－"  # ASCII's, and the hyphens, the en dash and the minus of Unicode
_CURRENCY = r"(?:\\?\$|[£€])"
_THOUSANDS = r"(?:(?:,|\{,\})(?:\\!)?|\\[,;:!> ]|[~\u00a0\u2007\u2009\u202f])"  # TeX's and Unicode's spaces; a plain one divides
# A sign belongs to the number unless it is a subtraction from the text before it: 48-24 ends in 24. An emphasising _ is no such
# text. TeX's thin space after a sign is part of the number where there is none before the sign.
_NUMBER = re.compile(
    rf"(?:(?<![^\W_])(?<![.,)\]}}%$])(?P<sign>[{MINUS}+])(?:(?<!\\[,;:!>].)\\[,;:!>])*)?"
    rf"{_CURRENCY}?(?:(?P<inner_sign>(?<=[$£€])[{MINUS}])(?:\\[,;:!>])*)?"
    rf"(?P<whole>[0-9]{{1,3}}(?:{_THOUSANDS}[0-9]{{3}})+(?![0-9])|[0-9]+|(?<![^\W_])(?<!\.)(?=\.[0-9]))"
    r"(?:\.(?P<fraction>[0-9]+))?(?:[eE](?P<exponent>[-+]?[0-9]{1,9})(?![0-9]))?"
)
_PLAIN_DIGITS = 40  # a number with more zeros than this is written with an exponent


class GSM8K(SplitTask):
    """The train split has the rows of train_path, the held-out split the rows of heldout_path; equal questions count once."""

    def __init__(self, *, train_path: str, heldout_path: str, prompt: str):
        """Args: train_path, heldout_path: files of rows {"question", "answer"}, or hub data sets with splits train and test;
        prompt: a prompt template with `{question}` once.

        Raises ValueError naming file, line and field if a field or an answer is missing or malformed, or naming the template.
        """
        if prompt.count(_QUESTION) != 1:
            raise ValueError(f"task.gsm8k.prompt={prompt[:60]!r} must hold {_QUESTION} once, where the question belongs")
        self._splits = {}
        for split, source in zip(SPLITS, (train_path, heldout_path), strict=True):
            rows = data.read(source, fields=FIELDS, setting=f"task.gsm8k.{split}_path", split=HUB_SPLITS[split])
            queries = [Query(prompt=prompt.replace(_QUESTION, row["question"]), answer=_gold(row)) for row in rows]
            self._splits[split] = list(dict.fromkeys(queries))
            if split == "train":
                solutions = (_CALCULATOR.sub("", row["answer"]) for row in rows)
                self._solutions = [(query.prompt, text) for query, text in zip(queries, solutions, strict=True)]

    def rewards(self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray) -> Scores:
        """1 if the response's last number equals the gold number, else 0. Responses at the length limit are graded, too."""
        correct = [self.final_answer(response) == query.answer for query, response in zip(queries, responses, strict=True)]
        return Scores.of_one(np.array(correct))

    def worked_examples(self, rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        """Train prompts with their human solutions without calculator annotations (<<48/2=24>>), see data.in_epochs."""
        return data.in_epochs(self._solutions, rng, count)

    def final_answer(self, response: str) -> str:
        """See last_number."""
        return last_number(response)


def _gold(row: data.Row) -> str:
    """The gold number. Raises ValueError unless the text after the last `####` is one number."""
    _, mark, text = row["answer"].rpartition("####")
    number = _NUMBER.fullmatch(text.strip().removesuffix("%"))
    if not mark or number is None:
        raise ValueError(f"{row.where}: the answer must end in #### and a number, not in {row['answer'][-40:]!r}")
    return canonical(number)


def last_number(text: str) -> str:
    """The last number of a text in the form of `canonical`; "" if the text has no number."""
    last = collections.deque(_NUMBER.finditer(text), maxlen=1)
    return canonical(last[0]) if last else ""


def canonical(number: re.Match[str]) -> str:
    """The normal form of a number, which equal numbers share: 1,234.50 and +1234.5 give 1234.5, and 0 has no sign.

    The function works on digits, so its time is linear in the length of the number. An exponent replaces more than 40 zeros.
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
