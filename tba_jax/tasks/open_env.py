"""Environments that an OpenEnv server runs: a query is a seed, and its prompt what the server says after a reset with it."""

from collections.abc import Mapping, Sequence
from typing import Any

from tba_jax.tasks.environments import EnvironmentTask
from tba_jax.tasks.interface import Query


class Remote:
    """One session with a server. A turn of the policy is the field `action` of an action; the server answers by the field
    `observation` of its observations, and a reward."""

    def __init__(self, *, url: str, action: str, observation: str):
        from openenv.core import GenericEnvClient

        self._client, self._action, self._observation = GenericEnvClient(base_url=url).sync(), action, observation

    def start(self, query: Query) -> str:
        self._client.connect()
        return self._text(self._client.reset(seed=int(query.answer)).observation)

    def step(self, message: str) -> tuple[str | None, float]:
        result = self._client.step({self._action: message})
        return None if result.done else self._text(result.observation), float(result.reward or 0.0)

    def _text(self, told: Mapping[str, Any]) -> str:
        text = told.get(self._observation)
        if not isinstance(text, str):
            raise ValueError(
                f"the observation has no text {self._observation!r} (task.open_env.observation); it has {', '.join(told)}"
            )
        return text

    def close(self) -> None:
        self._client.close()


class OpenEnv(EnvironmentTask):
    """An environment behind a URL. The seeds of the two splits differ."""

    environment = Remote

    def __init__(
        self,
        *,
        url: str,
        action: str,
        observation: str,
        turns: int,
        train_queries: int,
        heldout_queries: int,
        seed: int,
        time_limit: float,
        concurrency: int,
    ):
        """Raises ValueError: there is no URL."""
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError(f"task.open_env.url={url!r} must be the address of a server, such as http://localhost:8000")
        self.most_turns = turns
        seeds = [Query(prompt="", answer=str(seed + i)) for i in range(heldout_queries + train_queries)]
        self._splits = {"heldout": seeds[:heldout_queries], "train": seeds[heldout_queries:]}
        settings = dict(url=url, action=action, observation=observation)
        super().__init__(settings=settings, time_limit=time_limit, concurrency=concurrency, prefix="task.open_env.")

    def episodes(self, split: str) -> Sequence[Query]:
        return self._splits[split]
