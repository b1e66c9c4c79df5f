"""What a supervisor knows of the processes that it starts, as the terminal asks for it."""

import dataclasses
import enum
from collections.abc import Mapping


class State(enum.Enum):
    BEFORE = enum.auto()  # not started yet: it starts once others have compiled
    RUNS = enum.auto()
    PAUSES = enum.auto()  # has died, and is started again
    RESTS = enum.auto()  # has ended, and is not started again
    DONE = enum.auto()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Life:
    """began: when the role was started last, unix seconds, 0 before. due_in: seconds until it is started again.

    deaths: how often it has died without ten minutes of life between; refusals: how often its storage has refused in a row.
    """

    state: State
    began: float = 0.0
    due_in: float = 0.0
    deaths: int = 0
    refusals: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Supervised:
    """lives: of the roles, by name. is_away: whether the workdir does not hold the run now. stops: whether all roles end now."""

    lives: Mapping[str, Life] = dataclasses.field(default_factory=dict)
    is_away: bool = False
    stops: bool = False
