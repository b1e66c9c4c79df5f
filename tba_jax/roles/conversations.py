"""Responses of several turns: the decoder and the environments of a task take turns, and none of them waits for another response.

A turn of the policy is a request of one sample, whose given tokens are the turns before it and what the environment said between
them. While the environment is asked, the cache of a turn stays parked where it is, unless another response needs its place; then
the prefill of the next turn computes all of it again.
"""

import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from tba_jax.decoding.engine import Engine
from tba_jax.decoding.requests import Generation, Parked, Request, Ticket, empty
from tba_jax.decoding.sampling import Sampling
from tba_jax.decoding.served import ServedEngine
from tba_jax.roles.searcher.endpoint import Endpoint, Talk
from tba_jax.storage.contract import Contract
from tba_jax.tasks.environments import Answer, Environments, Session
from tba_jax.tasks.interface import EncodedQuery, Scores
from tba_jax.text.tokenizers import Tokenizer
from tba_jax.text.turns import Between

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.002  # between two looks at environments, while nothing is to be decoded


@dataclasses.dataclass(eq=False, kw_only=True)
class Conversation:
    """A response, as far as it has come. generation: of one row; tokens of the environment have policy_step −1.

    ticket: of the turn that is being decoded; answer: what the environment is asked; neither once it has ended. is_cut: the
    policy goes on no more. turns: begun so far. reward: sum so far, NaN where the environment has failed, for the reason
    `failure`. seconds: in which the environment was waited for.
    """

    query: EncodedQuery
    keys: np.ndarray
    sampling: Sampling
    session: Session | Talk
    generation: Generation
    parked: Parked = dataclasses.field(default_factory=Parked)
    ticket: Ticket | None = None
    answer: Future[Answer] | None = None
    is_cut: bool = False
    turns: int = 0
    reward: float = 0.0
    tool_calls: int = 0
    errors: int = 0
    seconds: float = 0.0
    failure: str = ""

    @property
    def left(self) -> bool:
        """Whether the response has not ended."""
        return self.ticket is not None or self.answer is not None

    @property
    def environment(self) -> tuple[float, ...]:
        """See trajectory.ENVIRONMENT."""
        return self.tool_calls, self.errors, self.seconds


class Unending:
    """In the place of conversations that `decode` goes on until: it never ends."""

    left = True


class Conversations:
    """The conversations that an engine and the environments of a task have. One thread uses it.

    Rows have at most R tokens after the prompt, those of the environment included, and most_turns turns of the policy: what is
    longer is cut, and counts as not finished. Attributes: most: how many may be under way.
    """

    def __init__(
        self,
        engine: Engine | ServedEngine,
        environments: Environments | Endpoint,
        tokenizer: Tokenizer,
        contract: Contract,
        *,
        most: int,
    ):
        """Args: engine: of single samples, whose given_length has room for all of a response but its last token. most: how many
        conversations are to be under way at a time."""
        self._engine, self._environments, self._tokenizer, self._contract = engine, environments, tokenizer, contract
        self._between = Between(tokenizer, chat_template=bool(contract.chat_template))
        self.most, self._open = most, list[Conversation]()
        self._is_told = False

    @property
    def room(self) -> int:
        """How many more conversations may begin."""
        return max(0, self.most - len(self._open))

    def begin(self, query: EncodedQuery, keys: np.ndarray, sampling: Sampling) -> Conversation:
        """Begins a response. Args: keys: uint32[1, 2]; sampling: leaves [1]."""
        made = empty((1,), response_length=self._contract.response_length, pad_id=self._contract.pad_id)
        session, answer = self._environments.start(query.query)
        begun = Conversation(query=query, keys=keys, sampling=sampling, session=session, generation=made, answer=answer)
        self._open.append(begun)
        return begun

    def have(self, queries: Sequence[EncodedQuery], keys: np.ndarray, sampling: Sampling) -> list[Conversation]:
        """A conversation about each query, once all have ended. Args: keys: uint32[n, 2]; sampling: of all, leaves [1]."""
        had: list[Conversation] = []
        while len(had) < len(queries):
            for _ in range(min(self.room, len(queries) - len(had))):
                had.append(self.begin(queries[len(had)], keys[len(had)][None], sampling))
            for _ in self.decode(had):
                if self.room and len(had) < len(queries):
                    break
        return had

    def decode(self, wanted: Sequence[Conversation | Unending]) -> Iterator[int]:
        """Goes on with all conversations until these have ended. Pauses and yields as Engine.decode does: how many more
        conversations may begin."""
        while any(each.left for each in wanted):
            self._look()
            tickets = [each.ticket for each in self._open if each.ticket is not None]
            if not tickets:
                yield self.room
                time.sleep(_LOOK_SECONDS)
            for _ in self._engine.decode(tickets):
                self._look()
                yield self.room
                if not any(each.left for each in wanted):
                    break

    def _look(self) -> None:
        """Takes what the decoder and the environments have given since the last look."""
        for each in self._open:
            if each.ticket is not None and not each.ticket.left:
                self._take_turn(each, each.ticket)
            if each.answer is not None and each.answer.done():
                self._take_answer(each, each.answer.result())
        for each in self._open:
            if not each.left:
                self._engine.unpark(each.parked)
        self._open = [each for each in self._open if each.left]

    def _take_turn(self, its: Conversation, ticket: Ticket) -> None:
        its.ticket, made, turn = None, its.generation, ticket.generation
        begin, end = int(made.length[0]), int(turn.length[0])
        for name in ("tokens", "policy_logprobs", "behavior_logprobs", "policy_step"):
            getattr(made, name)[0, begin:end] = getattr(turn, name)[0, begin:end]
        made.length[0] = end
        context = [*its.query.prompt, *made.tokens[0, :begin].tolist()]
        text = self._tokenizer.decode_continuation(context, made.tokens[0, begin:end].tolist())
        if turn.finished[0]:
            its.answer = its.session.step(text)
        else:
            self._cut(its, text)

    def _cut(self, its: Conversation, text: str) -> None:
        its.is_cut, its.answer = True, its.session.cut(text)

    def _take_answer(self, its: Conversation, answer: Answer) -> None:
        its.answer, its.seconds = None, its.seconds + answer.seconds
        its.reward += answer.reward
        its.tool_calls, its.errors = answer.tool_calls, answer.errors
        if answer.failure:
            self._fail(its, answer.failure)
        its.generation.finished[0] = answer.done and not its.is_cut
        if answer.failure or answer.done or its.is_cut:
            its.session.close()
        elif its.turns == self._contract.turns or not self._next_turn(its, answer):
            if its.failure:
                its.session.close()
            else:
                self._cut(its, "")

    def _fail(self, its: Conversation, failure: str) -> bool:
        its.reward, its.failure = float("nan"), failure
        return False

    def _next_turn(self, its: Conversation, answer: Answer) -> bool:
        """Has the policy go on. Returns whether its row has room for what the environment says, and a token after it."""
        made, length = its.generation, int(its.generation.length[0])
        if length:  # what `start` says is in the prompt
            try:
                said = self._between.encode(answer.messages, after=int(made.tokens[0, length - 1]))
            except ValueError as error:
                return self._fail(its, str(error))
            if not said:
                return self._fail(its, "step() gave the policy nothing to read, and no end")
            if length + len(said) >= self._contract.response_length:
                if not self._is_told:
                    told = (
                        "a response of query %s is cut: %d tokens of its environment do not fit task.response_length=%d after %d"
                    )
                    log.warning(told, its.query.name, len(said), self._contract.response_length, length)
                self._is_told = True
                return False
            made.tokens[0, length : length + len(said)] = said
            made.length[0] = length = length + len(said)
        its.turns += 1
        given: dict[str, Any] = dict(beginning=made.tokens[0, :length].tolist(), turn=length, parked=its.parked)
        request = Request(name=its.query.name, prompt=its.query.prompt, keys=its.keys, sampling=its.sampling, **given)
        its.ticket = self._engine.submit(request)
        return True

    def scores(self, ended: Sequence[Conversation]) -> Scores:
        """The rewards of conversations. A response that is cut has the reward that reward_texts would give it."""
        reward = np.array([each.reward for each in ended], np.float32)
        missing = self._contract.missing_eos_reward
        if missing is not None:
            finished = np.array([each.generation.finished[0] for each in ended])
            reward = np.where(~finished & ~np.isnan(reward), np.float32(missing), reward)
        parts = np.repeat(np.array([[each.reward] for each in ended], np.float32), len(self._contract.reward_parts), axis=1)
        return Scores(reward, parts, next((each.failure for each in ended if each.failure), ""))
