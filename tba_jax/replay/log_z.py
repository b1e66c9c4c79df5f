"""log Z of queries, estimated from the rows of a log that exists; the file that holds them, and what the trainer reads of it."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.schemas import require
from tba_jax.storage import layout
from tba_jax.storage.contract import FREE_OF_ROWS, Contract, differences, in_words

# By which p̃ is defined, apart from the reference.
COEFFICIENTS = ("beta", "ref_temperature", "reward_temperature")


@dataclasses.dataclass(frozen=True)
class QueryLogZ:
    """log_z: of a query, nats; rows: from which it is; effective: (Σ w)² / Σ w² of their weights."""

    log_z: float
    rows: int
    effective: float


def estimate(log_target: np.ndarray, log_behavior: np.ndarray) -> QueryLogZ:
    """log Ẑ(x) = log mean_j w_j,  w = p̃(y_j|x) / μ_j(y_j|x).  Ẑ is unbiased where every μ_j has full support.

    Args: log_target, log_behavior: float64[n], log p̃ and log μ of the rows of one query, nats, n at least 1.
    """
    log_weight = log_target - log_behavior
    most = log_weight.max()
    weight = np.exp(log_weight - most)
    return QueryLogZ(float(most + np.log(weight.mean())), len(weight), float(weight.sum() ** 2 / (weight**2).sum()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenLogZ:
    """log Z of queries by their ids. coefficients: COEFFICIENTS -> value; reference: 16 hex digits, and contract: of the run
    whose rows they are from."""

    log_z: Mapping[int, float]
    coefficients: Mapping[str, float]
    reference: str
    contract: Mapping[str, Any]

    @classmethod
    def read(cls, path: str) -> "FrozenLogZ":
        """Raises ValueError: there is no such file, or it is none of `python -m tba_jax log_z`."""
        try:
            stored = layout.read_json(Path(path))
            found = {int(query, 16): float(each["log_z"]) for query, each in stored["queries"].items()}
            of = {name: float(stored[name]) for name in COEFFICIENTS}
            if odd := [query for query, value in found.items() if not math.isfinite(value)]:
                raise ValueError(f"log_z of query {odd[0]:016x} is {found[odd[0]]}")
            return cls(log_z=found, coefficients=of, reference=str(stored["reference"]), contract=dict(stored["contract"]))
        except OSError as error:
            raise ValueError(f"learner.log_z_path={path!r} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"learner.log_z_path={path!r} is no file of python -m tba_jax log_z: {error!r}") from error

    def write(self, path: Path, estimates: Mapping[int, QueryLogZ]) -> None:
        queries = {f"{query:016x}": dataclasses.asdict(each) for query, each in estimates.items()}
        of = dict(reference=self.reference, contract=dict(self.contract))
        layout.write_json(path, {**self.coefficients, **of, "queries": queries})

    def of(self, query_ids: np.ndarray) -> np.ndarray:
        """float32[B], nats, of the queries of B rows. Args: query_ids: uint64[B]. Raises KeyError for a query without one."""
        return np.array([self.log_z[query] for query in query_ids.tolist()], np.float32)

    def check(self, c: Any, queries: Iterable[int], *, contract: Contract) -> None:
        """Raises ValueError where the file is of another p̃ than that of a run, or lacks some of the queries. Args: c: section
        `learner` of its config."""
        told = f"learner.log_z_path={c.log_z_path!r}"
        for name, there in self.coefficients.items():
            ends = {c[f"{name}_start"] if c[f"{name}_steps"] else c[f"{name}_end"], c[f"{name}_end"]}
            here = " to ".join(f"{value:g}" for value in sorted(ends, reverse=True))
            require(ends == {there}, f"{told} is for learner.{name}={there:g}, and this run has {here}: log Z is of one p̃")
        theirs, ours = (
            {k: v for k, v in of.items() if k not in (*FREE_OF_ROWS, "warm_start")} for of in (self.contract, contract.to_json())
        )
        different = differences(theirs, ours)
        require(not different, f"{told} is from the rows of a run of another contract; {in_words(different)}")
        lacking: Sequence[int] = [query for query in queries if query not in self.log_z]
        first = f"{lacking[0]:016x}" if lacking else ""
        require(
            not lacking, f"{told} has no log Z for {len(lacking)} of the train queries, the first {first}: it needs more rows"
        )

    def check_reference(self, reference: str) -> None:
        """Raises ValueError where the file is of another reference policy than a run's rows. Args: reference: 16 hex digits."""
        told = f"learner.log_z_path is of rows of reference {self.reference}, and this run has {reference}"
        require(self.reference == reference, f"{told}: begin it from the same policy (--init_from=RUN@0)")


def keep(file: Path, there: Path) -> None:
    """Copies the file into the run, once. Raises ValueError where the run began with another one."""
    if not there.exists():
        layout.write_json(there, layout.read_json(file))
    same = layout.read_json(there) == layout.read_json(file)
    require(same, f"learner.log_z_path={str(file)!r} is not what it was when the run began: {there} is a copy of that")
