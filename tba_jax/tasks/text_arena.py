"""Games of TextArena for one player (Guertler et al. 2025): a query is a seed, and its prompt what the game says first."""

from collections.abc import Sequence

from tba_jax.tasks.environments import EnvironmentTask
from tba_jax.tasks.interface import Query

_GAME = -1  # who speaks in a game that is no player


class Game:
    """One game. Its messages are those that the game has added since the last turn, without the player's own."""

    def __init__(self, *, game: str):
        import textarena

        self._game = textarena.make(f"{game}-raw")

    def start(self, query: Query) -> str:
        self._game.reset(num_players=1, seed=int(query.answer))
        return self._said()

    def step(self, message: str) -> tuple[str | None, float]:
        done, _ = self._game.step(action=message)
        if not done:
            return self._said(), 0.0
        rewards, _ = self._game.close()
        return None, float(rewards[0])

    def _said(self) -> str:
        _, told = self._game.get_observation()
        return "\n".join(text for speaker, text, *_ in told if speaker == _GAME)


class TextArena(EnvironmentTask):
    """A game by its name in TextArena, such as GuessTheNumber-v0. The seeds of the two splits differ."""

    environment = Game

    def __init__(
        self, *, game: str, turns: int, train_queries: int, heldout_queries: int, seed: int, time_limit: float, concurrency: int
    ):
        """Raises ValueError: there is no such game for one player."""
        from textarena.envs.registration import ENV_REGISTRY

        if f"{game}-raw" not in ENV_REGISTRY:
            raise ValueError(f"task.text_arena.game={game!r} is no game of TextArena; its names end in -v0, as GuessTheNumber-v0")
        self.most_turns = turns
        seeds = [Query(prompt="", answer=str(seed + i)) for i in range(heldout_queries + train_queries)]
        self._splits = {"heldout": seeds[:heldout_queries], "train": seeds[heldout_queries:]}
        super().__init__(settings={"game": game}, time_limit=time_limit, concurrency=concurrency, prefix="task.text_arena.")

    def episodes(self, split: str) -> Sequence[Query]:
        return self._splits[split]
