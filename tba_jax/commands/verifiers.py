"""Plays an environment of the package verifiers with a run's policy: its rollouts are rows, with the rewards of its rubric.

python -m tba_jax verifiers --environment=ID [--arguments=JSON] [--url=http://HOST:PORT/v1]

A searcher serves the policy (python -m tba_jax.main --workdir=DIR --role=searcher --serve=PORT); its key is the variable
TBA_JAX_SERVE_TOKEN. ID is an installed package of the Environments Hub, or a module of the current folder, whose
load_environment(**JSON) returns a vf.Environment. The examples of its dataset come in a random order, again and again until the
searcher ends, and each is asked learner.completions times. A rollout that fails has no reward: its row is counted as unscored.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import math
import os
import random
import sys
import uuid
from collections.abc import Awaitable, Iterator
from typing import Any

from absl import flags

from tba_jax.commands import command_line

log = logging.getLogger(__name__)

_TOKEN = "TBA_JAX_SERVE_TOKEN"


def add_flags(values: flags.FlagValues) -> None:
    what = "a package of an environment, or a module of the current folder, with load_environment"
    flags.DEFINE_string("environment", None, what, flag_values=values, required=True)
    flags.DEFINE_string("arguments", "{}", "of load_environment, a JSON object", flag_values=values)
    flags.DEFINE_string("url", "http://127.0.0.1:8000/v1", "where a searcher serves the policy", flag_values=values)


def run(given: command_line.Given) -> command_line.Job:
    try:
        import httpx
        import openai
        from verifiers import load_environment  # noqa: F401  verifiers 0.4 has none
    except ImportError as error:
        raise ValueError(f"the command verifiers needs pip install -e '.[verifiers]': {error}") from error
    to: dict[str, Any] = dict(base_url=given.url, api_key=os.environ.get(_TOKEN, "none"), max_retries=0)
    to["timeout"] = httpx.Timeout(None, connect=10.0)  # the endpoint itself bounds how long an answer takes
    try:
        (policy,) = openai.OpenAI(**to).models.list().data
        completions, conversations = policy.completions, policy.conversations  # type: ignore[attr-defined]
    except (openai.OpenAIError, ValueError, AttributeError) as error:
        told = f"--url={given.url} must be where a searcher serves (--serve=PORT), and {_TOKEN} its key"
        raise ValueError(f"{told}: {_reason(error)}") from error
    environment = _load(given.environment, given.arguments)

    def job() -> int:
        player = Player(environment, openai.AsyncOpenAI(**to))
        asyncio.run(player.play(completions=completions, conversations=conversations))
        given, mean = len(player.rewards), math.fsum(player.rewards) / max(1, len(player.rewards))
        none = f"{player.begun - given} have none, since they failed or were under way at the end"
        print(f"the searcher at {to['base_url']} has ended: {given} rollouts have a reward, {mean:.4g} on average; {none}")
        return 0

    return job


def _load(name: str, arguments: str) -> Any:
    """The vf.Environment. Raises ValueError: it cannot be loaded, or has no dataset to train on."""
    import verifiers as vf

    try:
        environment = vf.load_environment(name, **json.loads(arguments))
        if not len(environment.get_dataset()):
            raise ValueError("its dataset is empty")
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"--environment={name} --arguments={arguments} cannot be loaded: {_reason(error)}") from error
    logging.getLogger("verifiers").addHandler(logging.NullHandler())  # what fails is told by this module, once
    logger = logging.getLogger(vf.Rubric.__module__)
    logger.setLevel(logging.ERROR)
    logger.addHandler(_Raised())
    return environment


class _Raised(logging.Handler):
    """A rubric logs the error of a reward function, and takes 0 for its reward: here the error goes on."""

    def emit(self, record: logging.LogRecord) -> None:
        if (error := sys.exc_info()[1]) is not None:
            raise error


class Player:
    """Attributes: begun: how many rollouts; rewards: of those that have one."""

    def __init__(self, environment: Any, client: Any):
        """Args: environment: a vf.Environment; client: an openai.AsyncOpenAI that speaks to a searcher."""
        import verifiers as vf

        self._environment, self._client, self._model = environment, client, vf.OpenAIChatCompletionsClient(client)
        self.begun, self.rewards = 0, list[float]()

    async def play(self, *, completions: int, conversations: int) -> None:
        """Until the searcher ends. Args: completions: rollouts of an example; conversations: rollouts at once."""
        together = completions if self._environment.requires_group_rollouts else 1
        examples = self._examples(completions // together)
        await asyncio.gather(*(self._worker(examples, together) for _ in range(max(1, conversations // together))))

    def _examples(self, times: int) -> Iterator[Any]:
        dataset = self._environment.get_dataset()
        while True:
            for i in random.sample(range(len(dataset)), len(dataset)):
                yield from itertools.repeat(dataset[i], times)

    async def _worker(self, examples: Iterator[Any], together: int) -> None:
        for example in examples:
            self.begun += together
            found = await asyncio.gather(*(self._rollout(example) for _ in range(together)), return_exceptions=True)
            if states := [each for each in found if not isinstance(each, BaseException)]:
                found += await asyncio.gather(self._score(states), return_exceptions=True)
            if failures := [each for each in found if isinstance(each, BaseException)]:
                if await self._has_ended():
                    return
                for error in failures:
                    told = "a rollout of example %s failed and has no reward: %s"
                    log.warning(told, example.get("example_id"), _reason(error))
                await asyncio.sleep(1.0)  # an environment that always fails fills no log

    async def _has_ended(self) -> bool:
        """Whether the searcher says so, or does not answer again and again."""
        import openai

        for _ in range(3):
            try:
                await self._client.models.list()
                return False
            except openai.InternalServerError:
                return True
            except openai.OpenAIError:
                await asyncio.sleep(2.0)
        return True

    async def _rollout(self, example: Any) -> Any:
        """Its vf.State. Each is a user of its own: the endpoint never exchanges them. Raises what the environment does."""
        user = uuid.uuid4().hex
        try:
            state = await self._environment.rollout(example, self._model, "policy", {"user": user})
            state["user"] = user
            if state["error"] is None:
                return state
            try:
                raise state["error"]
            finally:
                await self._environment.rubric.cleanup(state)
        except BaseException:
            with contextlib.suppress(Exception):  # its error is told
                await self._end(user, None)
            raise

    async def _score(self, states: list[Any]) -> None:
        """Gives rollouts of an example their rewards, which may compare them."""
        rubric = self._environment.rubric
        grouped = self._environment.requires_group_rollouts
        try:
            await (rubric.score_group(states) if grouped else rubric.score_rollout(states[0]))
            await _all(*(self._reward(state) for state in states))
        except BaseException:
            with contextlib.suppress(Exception):  # those that have their reward have ended
                await _all(*(self._end(state["user"], None) for state in states))
            raise
        finally:
            await _all(*(rubric.cleanup(state) for state in states))

    async def _reward(self, state: Any) -> None:
        if not math.isfinite(state["reward"]):
            raise ValueError(f"its reward is {state['reward']}, which is not finite")
        await self._end(state["user"], float(state["reward"]))
        self.rewards.append(float(state["reward"]))

    async def _end(self, user: str, reward: float | None) -> None:
        """Ends the conversations of a rollout. Args: reward: None where it has failed."""
        await self._client.post("/rewards", body={"user": user, "reward": reward}, cast_to=object)


async def _all(*those: Awaitable[Any]) -> list[Any]:
    """The results of all, once all have ended. Raises the first error among them."""
    found = await asyncio.gather(*those, return_exceptions=True)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def _reason(error: BaseException) -> str:
    """The first cause of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return command_line.sentence_of(f"{type(error).__name__}: {error}")
