"""Which rows a page of the viewer shows, and in which order: asked for by the address of the page, answered by the table."""

import dataclasses
import math
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from tba_jax.reporting.rows import Columns

# Name in an address -> name on the page.
ORDERS = {
    "newest": "newest policy first",
    "oldest": "oldest policy first",
    "worst": "lowest reward first",
    "best": "highest reward first",
    "longest": "longest first",
    "shortest": "shortest first",
    "above": "most above the reference first",
    "below": "most below the reference first",
}
FINISHED = {"": "any end", "yes": "ended by itself", "no": "cut at the length limit"}
_LONGEST_TEXT = 200
_ORDERS_KEPT = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filter:
    """What an address asks for; "" or None: nothing.

    query: query_id as 16 hex digits. reward_from, reward_to: inclusive. step_from, step_to: of the newest weights of the row,
    inclusive. finished: see FINISHED. text: in prompt or response, whatever its case. page: from 1. of: rows of the table that
    are looked at, the first ones, so that pages stay as they were while the table grows; 0: all. at: of a search for text, how
    many rows of the order were searched before.
    """

    query: str = ""
    writer: str = ""
    reward_from: float | None = None
    reward_to: float | None = None
    step_from: int | None = None
    step_to: int | None = None
    finished: str = ""
    text: str = ""
    order: str = "newest"
    page: int = 1
    of: int = 0
    at: int = 0

    def address(self, **changes: object) -> dict[str, str]:
        """The arguments of the address of this filter with changes, without what is not asked for."""
        values = dataclasses.asdict(dataclasses.replace(self, **changes))  # type: ignore[arg-type]
        default = dataclasses.asdict(Filter())
        return {name: str(value) for name, value in values.items() if value != default[name]}


def parse(given: Mapping[str, str]) -> Filter:
    """The filter of an address. Args: given: name -> text; unknown names are left out.

    Raises:
      ValueError: a value is nonsense; names it and what it must be.
    """
    text = {name: given.get(name, "").strip() for name in ("query", "writer", "finished", "text", "order")}
    query = text["query"].lower()
    if query and not (len(query) <= 16 and all(digit in "0123456789abcdef" for digit in query)):
        raise ValueError(f"query={text['query'][:60]!r} must be up to 16 hex digits, as pages name queries")
    if text["order"] not in ("", *ORDERS):
        raise ValueError(f"order={text['order'][:60]!r} must be one of {', '.join(ORDERS)}")
    if text["finished"] not in FINISHED:
        raise ValueError(f"finished={text['finished'][:60]!r} must be yes, no, or left out")
    if len(text["text"]) > _LONGEST_TEXT:
        raise ValueError(f"text has {len(text['text'])} characters, at most {_LONGEST_TEXT} are searched for")
    return Filter(
        query=query.rjust(16, "0") if query else "",
        writer=text["writer"],
        reward_from=number(given, "reward_from"),
        reward_to=number(given, "reward_to"),
        step_from=whole(given, "step_from", least=-1),
        step_to=whole(given, "step_to", least=-1),
        finished=text["finished"],
        text=text["text"],
        order=text["order"] or "newest",
        page=whole(given, "page", least=1) or 1,
        of=whole(given, "of", least=0) or 0,
        at=whole(given, "at", least=0) or 0,
    )


def number(given: Mapping[str, str], name: str) -> float | None:
    """A number of an address, None where it is not given. Raises ValueError."""
    text = given.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ValueError(f"{name}={text[:60]!r} must be a number")
    return value


def whole(given: Mapping[str, str], name: str, *, least: int) -> int | None:
    """A whole number of an address, None where it is not given. Raises ValueError."""
    text = given.get(name, "").strip()
    if not text:
        return None
    if not (text.lstrip("-").isdecimal() and text.isascii() and len(text) <= 15 and int(text) >= least):
        raise ValueError(f"{name}={text[:60]!r} must be a whole number of at least {least}")
    return int(text)


class Orders:
    """Sorts the table, and remembers the newest few orders: pages of one address share one."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], np.ndarray] = {}
        self._lock = threading.Lock()

    def matching(self, columns: Columns, writers: Sequence[str], asked: Filter) -> np.ndarray:
        """int[n]: the indices of the rows that are asked for, in order. Text is not looked at.

        Args: columns: the first `asked.of` rows of the table. writers: of the table.
        """
        order = self._order(columns, asked.order)
        keep = _kept(columns, writers, asked)
        return order if keep is None else order[keep[order]]

    def _order(self, columns: Columns, name: str) -> np.ndarray:
        key = (name, len(columns))
        with self._lock:
            if key not in self._known:
                self._known[key] = _sorted(columns, name)
                while len(self._known) > _ORDERS_KEPT:
                    self._known.pop(next(iter(self._known)))
            return self._known[key]


def _kept(columns: Columns, writers: Sequence[str], asked: Filter) -> np.ndarray | None:
    """bool[n]: whether each row is asked for; None: all are."""
    conditions = []
    if asked.query:
        conditions.append(columns.query_id == np.uint64(int(asked.query, 16)))
    if asked.writer:
        conditions.append(columns.writer == (writers.index(asked.writer) if asked.writer in writers else -1))
    if asked.reward_from is not None:
        conditions.append(columns.reward >= np.float32(asked.reward_from))
    if asked.reward_to is not None:
        conditions.append(columns.reward <= np.float32(asked.reward_to))
    if asked.step_from is not None:
        conditions.append(columns.newest_step >= asked.step_from)
    if asked.step_to is not None:
        conditions.append(columns.newest_step <= asked.step_to)
    if asked.finished:
        conditions.append(columns.finished == (asked.finished == "yes"))
    return np.logical_and.reduce(conditions) if conditions else None


def _sorted(columns: Columns, name: str) -> np.ndarray:
    """int32[n]: the indices of all rows in an order; among equals the newest policy first, then in the order of reading."""
    step = columns.newest_step.astype(np.int64) + 1
    newest_first = np.uint64(2**32 - 1) - step.astype(np.uint64)
    if name in ("newest", "oldest"):
        # Rows of a writer come in the order of their numbers within one policy.
        row = columns.row.astype(np.uint64) & np.uint64(2**32 - 1)
        key = step.astype(np.uint64) << np.uint64(32) | row
        key = key if name == "oldest" else ~key
    else:
        sign, values = {
            "worst": (1, columns.reward),
            "best": (-1, columns.reward),
            "longest": (-1, columns.response_length),
            "shortest": (1, columns.response_length),
            "above": (-1, columns.policy_logprob_sum - columns.ref_logprob_sum),
            "below": (1, columns.policy_logprob_sum - columns.ref_logprob_sum),
        }[name]
        key = _ascending(sign * values.astype(np.float32)).astype(np.uint64) << np.uint64(32) | newest_first
    return np.argsort(key, kind="stable").astype(np.int32)


def _ascending(values: np.ndarray) -> np.ndarray:
    """uint32[n] that sort as float32[n] do; what is not a number comes last."""
    # -0.0 and 0.0 are one number, and two patterns of bits.
    bits = np.where(np.isnan(values), np.float32(np.inf), values + np.float32(0.0)).astype(np.float32).view(np.uint32)
    return np.where(bits >> 31 == 1, ~bits, bits | np.uint32(2**31))
