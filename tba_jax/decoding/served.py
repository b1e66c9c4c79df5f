"""A decoder whose samples an inference server draws, with the interface of Engine: requests in, generations out.

A sample is one call of the server. New weights wait until all that is under way has been drawn, since no server tells which
weights drew a token. Then the server reads them from a folder, and its log-probs of a fixed text must be those of the new ones.
With LoRA the server runs the policy of step 0, and the folder holds the adapters alone, where servers can have them. A server
that is away, late or full is asked again; one that this process has started is started anew where it ended or hangs.
"""

import concurrent.futures
import dataclasses
import functools
import logging
import os
import platform
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tba_jax import sharding
from tba_jax.decoding.requests import Generation, Parked, Request, Ticket, Usage
from tba_jax.decoding.server_process import ServerProcess
from tba_jax.decoding.servers import Draw, Drawn, Refused, Server, Unavailable
from tba_jax.models import scoring
from tba_jax.models.config import DecoderConfig, ResponseSpace
from tba_jax.models.hugging_face import export
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy, merge_lazily
from tba_jax.run.threads import Threads
from tba_jax.text.tokenizers import StopStrings

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05
_PROBE_TOKENS = 64
_SAME = 1e-6  # nats per token, in the mean, that log-probs of the same weights may differ by
_WEIGHTS = "tba_jax-weights-"
# Nats per token that a server's log-probs may be off in the mean, by compute dtype.
GAP_LIMITS = {"float32": 1e-3, "bfloat16": 0.1}
_TRIES = 3  # of a load of weights, and of starts one after the other
_TAKES_ADAPTERS = ("llama", "mistral", "qwen2", "qwen3", "gemma3")  # architectures, in vLLM and SGLang
_MOST_RANK = 512  # that vLLM takes
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds before a server that is away or full is asked again


def weights_folder(root: Path) -> Path:
    """The folder in `root` for the weights that this process has a server read."""
    return root / f"{_WEIGHTS}{platform.node()}-{os.getpid()}"


def _remove_weights_of_the_dead(folder: Path) -> None:
    """Removes the folders of processes of this host that have ended without removing theirs."""
    for other in folder.parent.glob(f"{_WEIGHTS}{platform.node()}-*"):
        number = other.name.rpartition("-")[2]
        if number == str(os.getpid()) or (number.isdecimal() and not Path(f"/proc/{number}").exists()):
            shutil.rmtree(other, ignore_errors=True)


def served_rank(policy: Policy) -> int:
    """The rank of the adapters that a server loads; 0: it loads whole weights, with the adapters merged if there are some."""
    if policy.lora is None or policy.lora.rank > _MOST_RANK or policy.model.architecture not in _TAKES_ADAPTERS:
        return 0
    return 0 if "lm_head" in policy.trained_specs else policy.lora.rank


class WrongWeights(ValueError):
    """The server's log-probs are not those of the weights that it was given."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Weights as the server takes them. logprobs: float32[P − 1], nats, of the probe under them."""

    folder: Path
    logprobs: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class _Row:
    """A sample of a request that the server is asked, or is to be asked."""

    ticket: Ticket
    row: int


def _is_full(error: Unavailable) -> bool:
    return getattr(error.__cause__, "code", 0) == 429


class ServedEngine:
    """Generates responses. One thread may call it; `prepare` and `swap` may be called from another.

    Attributes: usage: since the start; its slots and bytes are not known. gap: nats per token, in the mean, between server and
    learner on the probe, of the weights in use; NaN before the first. update_seconds: in which nothing was drawn because of new
    weights, of the last; restarts: of the server. trouble: why the server is not asked now, "" where it is.
    """

    def __init__(
        self,
        policy: Policy,
        base: Params,
        space: ResponseSpace,
        mesh: Mesh,
        *,
        server: Server | ServerProcess,
        folder: Path,
        write: Callable[[Path, DecoderConfig, Params], None],
        slots: int,
        prompt_length: int,
        response_length: int,
        pad_id: int,
        stop_texts: Sequence[str] = (),
        stop_strings: StopStrings | None = None,
        given_length: int = 0,
        request_seconds: float = 300.0,
        give_up_seconds: float = 300.0,
        gap_limit: float = 1e-3,
    ):
        """Args:
        base: weights of step 0, {} without adapters. server: one that runs, or how one is started; it takes adapters where
        `served_rank` gives a rank. folder: for weights, which the server can read, see `weights_folder`.
        write: writes a Hugging Face folder of a model and its plain weights. slots: samples that the server is asked at a time.
        request_seconds: that a sample may take; give_up_seconds: without an answer of any server.
        gap_limit: the largest `gap` of the right weights. Others: see Engine.
        """
        self._policy, self._base, self._space, self._slots = policy, base, space, slots
        self._rank = served_rank(policy)
        self._process = server if isinstance(server, ServerProcess) else None
        self._server = None if isinstance(server, ServerProcess) else server
        self._folder, self._write, self._number = folder, write, 0
        self._longest_prompt, self._longest, self._R, self._pad_id = (
            prompt_length - given_length,
            prompt_length,
            response_length,
            pad_id,
        )
        self._stop_texts, self._stop_strings = tuple(stop_texts), stop_strings
        self._request_seconds, self._give_up_seconds, self._gap_limit = request_seconds, give_up_seconds, gap_limit
        self.usage, self.policy_step, self.gap, self.update_seconds, self.restarts = Usage(), -1, float("nan"), 0.0, 0
        self.trouble = ""
        self._lock = threading.Lock()  # over `incoming`
        self._incoming: tuple[Prepared, int] | None = None
        self._in_use: Prepared | None = None
        self._told: np.ndarray | None = None  # the server's log-probs of the probe, when it was checked last
        self._queue: deque[_Row] = deque()
        self._asked: dict[concurrent.futures.Future[Drawn], _Row] = {}
        self._threads = Threads(slots, "server")
        self._pause, self._pauses_until, self._away_since = _FIRST_PAUSE, 0.0, 0.0
        allowed = np.setdiff1d(np.arange(policy.model.vocab), [*space.banned_tokens, space.eos_id, pad_id])
        count = min(_PROBE_TOKENS, prompt_length + response_length - given_length - 1)
        self._probe = np.random.default_rng(0).choice(allowed, count).astype(np.int32)
        plain = ResponseSpace(temperature=1.0, banned_tokens=(), eos_id=-1)

        def logprobs(trained: Params, base: Params) -> jax.Array:
            its = policy.for_training(trained, base)
            tokens, one, rest = (jnp.asarray(x, jnp.int32) for x in (self._probe[None], [1], [count - 1]))
            how: dict[str, Any] = dict(R=count - 1, space=plain, logit_bytes=1 << 27, remat="none")
            return scoring.response_logprobs(its, tokens, one, rest, **how)[0][0]

        self._logprobs = sharding.on_mesh(mesh, jax.jit(logprobs))
        _remove_weights_of_the_dead(folder)

    @property
    def figures(self) -> dict[str, float]:
        """What a searcher's metrics tell of the server."""
        return {"gap": self.gap, "update_seconds": self.update_seconds, "restarts": float(self.restarts)}

    @property
    def prompts(self) -> int:
        """How many samples the server is asked at a time."""
        return self._slots

    @property
    def swapped(self) -> bool:
        """Whether the server has the weights that it was handed last."""
        return self._incoming is None

    def prepare(self, trained: Params, *, consume: bool = False) -> list[Prepared]:
        """Writes weights for `swap`. Args: trained: what snapshots hold, adapters alone with LoRA; consume: see Engine."""
        self._number += 1
        logprobs, folder = np.asarray(self._logprobs(trained, self._base), np.float64), self._folder / f"{self._number}"
        model, lora = self._policy.model, self._policy.lora
        if lora is not None and self._rank:
            export.save_adapters(folder, model, trained, lora, base=str(self._started_from), dtype="float32")
        else:
            merged = trained if lora is None else merge_lazily(self._base, trained, lora)
            self._write(folder, *export.untied(model, merged))
        return [Prepared(folder, logprobs)]

    @property
    def _started_from(self) -> Path:
        return self._folder / "base"  # the model that adapters belong to

    def swap(self, prepared: Sequence[Prepared], step: int) -> None:
        """Hands over weights, which the server gets when all that is under way has been drawn."""
        with self._lock:
            self._incoming = (prepared[0], step)

    def set_policy(self, trained: Params, step: int) -> None:
        """Prepares weights and hands them over, for a caller that has nothing running."""
        self.swap(self.prepare(trained), step)

    def submit(self, request: Request) -> Ticket:
        """Queues a request and returns its ticket, which `decode` takes. May be called while `decode` pauses.

        Raises ValueError: the prompt is empty or too long, or the beginning leaves no room; names the limit.
        """
        prompt, given = len(request.prompt), len(request.beginning)
        if not 1 <= prompt <= self._longest_prompt or prompt + given > self._longest or given >= self._R:
            raise ValueError(
                f"query {request.name}: {prompt} tokens of prompt and {given} of the response are not within 1 to "
                f"{self._longest_prompt} and 0 to {min(self._longest - prompt, self._R - 1)}"
            )
        ticket = Ticket(request, response_length=self._R, pad_id=self._pad_id)
        self._queue += [_Row(ticket, row) for row in range(request.samples)]
        return ticket

    def decode(self, tickets: Sequence[Ticket]) -> Iterator[int]:
        """As Engine.decode: draws until these requests are answered, and yields how many more samples there is room for.

        Raises Refused: the server gives what the run cannot have; WrongWeights: it does not take new weights; Unavailable: it has
        been away for longer than give_up_seconds, or cannot be started.
        """
        if self.policy_step < 0 and self._incoming is None:
            raise RuntimeError("the decoder has no weights yet: `swap` or `set_policy` comes first")
        while any(ticket.left for ticket in tickets):
            self._take_up()
            yield max(0, self._slots - len(self._asked) - len(self._queue)) if self.swapped else 0
            self._ask()
            self._collect()
        self._take_up()

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Answers these requests; nothing else may be running. Raises: as `submit` and `decode`."""
        tickets = [self.submit(request) for request in requests]
        for _ in self.decode(tickets):
            pass
        return [ticket.generation for ticket in tickets]

    def unpark(self, parked: Parked) -> None:
        """A conversation has ended. The server keeps caches by itself."""

    def close(self) -> None:
        """Ends the server if this process has started it, and removes the weights that were written for it."""
        if self._process is not None:
            self._process.kill()
        elif self._server is not None:
            self._server.drop_adapter()
        self._threads.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ask(self) -> None:
        """Sends what waits, as far as there is room: nothing while weights wait, or the server is away."""
        if self._incoming is not None or time.monotonic() < self._pauses_until:
            return
        while self._queue and len(self._asked) < self._slots:
            row = self._queue.popleft()
            assert self._server is not None
            ask = functools.partial(self._server.draw, self._draw(row), seconds=self._request_seconds)
            self._asked[self._threads.submit(ask)] = row

    def _draw(self, row: _Row) -> Draw:
        request, i, space = row.ticket.request, row.row, self._space
        s, context, given = request.sampling, request.context, len(request.beginning)
        return Draw(
            context=context,
            limit=int(row.ticket.limit[i]) - given,
            least=max(0, space.min_length - 1 - given),
            temperature=float(s.temperature[i]),
            top_k=int(s.top_k[i]),
            top_p=float(s.top_p[i]),
            min_p=float(s.min_p[i]),
            eos_id=space.eos_id,
            banned=space.banned_tokens,
            stop=self._stop_texts,
        )

    def _collect(self) -> None:
        """Takes what the server has answered, and waits a little for it."""
        if not self._asked:
            time.sleep(_LOOK_SECONDS)
            return
        done, _ = concurrent.futures.wait(self._asked, timeout=_LOOK_SECONDS, return_when=concurrent.futures.FIRST_COMPLETED)
        failures = []
        for future in done:
            row = self._asked.pop(future)
            try:
                self._take(row, future.result())
            except Unavailable as error:
                self._queue.appendleft(row)
                failures.append(error)
            else:
                self.trouble, self._pause, self._away_since = "", _FIRST_PAUSE, 0.0
        if failures:
            self._mend(failures[0])

    def _mend(self, error: Unavailable) -> None:
        """The server has not answered: it is started anew where it is this process' own and ended or hangs, and asked later."""
        self.trouble, now = str(error), time.monotonic()
        self._away_since = self._away_since or now
        if now - self._away_since > self._give_up_seconds:
            raise Unavailable(
                f"{error}; no answer has come within searchers.give_up_seconds={self._give_up_seconds:g}"
            ) from error
        if self._process is not None and (not self._process.is_alive or self._hangs(error)):
            log.warning("the server is started anew: %s", error)
            self._process.kill()  # what is asked fails at once
            for future, row in self._asked.items():
                concurrent.futures.wait([future])
                self._queue.appendleft(row)
            self._asked.clear()
            assert self._in_use is not None
            self._start(self._in_use)
            return
        if self._process is None and not _is_full(error):  # it may come back with the weights that it began with
            with self._lock:
                if self._incoming is None and self._in_use is not None:
                    self._incoming = self._in_use, self.policy_step
        log.warning("%s; it is asked again in %.1f s", error, self._pause)
        self._pauses_until = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _hangs(self, error: Unavailable) -> bool:
        assert self._server is not None
        try:
            self._server.check_there()
        except Unavailable:
            return True
        return isinstance(error.__cause__, TimeoutError)

    def _start(self, prepared: Prepared) -> None:
        """Starts the server, with these weights."""
        assert self._process is not None
        if self._rank and not self._started_from.exists():
            self._write(self._started_from, self._policy.model, self._base)
        for attempt in range(_TRIES):
            try:
                self._server, self._told = self._process.start(self._started_from if self._rank else prepared.folder), None
                if self._rank:
                    self._load(prepared)
                self.gap = self._check(prepared)
                self.restarts += self._in_use is not None
                return
            except (Unavailable, WrongWeights) as error:
                if attempt == _TRIES - 1:
                    raise
                log.warning("%s; once more", error)

    def _load(self, prepared: Prepared) -> None:
        assert self._server is not None
        if self._rank:
            self._server.load_adapter(prepared.folder, rank=self._rank, seconds=self._request_seconds)
        else:
            self._server.load(prepared.folder, seconds=self._request_seconds)

    def _take_up(self) -> None:
        """Gives the server the weights that wait, if all that is under way has been drawn."""
        with self._lock:
            if self._incoming is None or self._asked or time.monotonic() < self._pauses_until:
                return
            prepared, step = self._incoming
        begun = time.monotonic()
        for attempt in range(_TRIES):
            try:
                if self._server is None or (attempt == _TRIES - 1 and self._process is not None):
                    self._start(prepared)
                else:
                    self._load(prepared)
                    self.gap = self._check(prepared)
                break
            except (Unavailable, WrongWeights) as error:
                if self._process is None and isinstance(error, Unavailable):
                    self._mend(error)
                    return
                if attempt == _TRIES - 1:
                    raise
                log.warning("the server did not take the weights of step %d: %s; once more", step, error)
                time.sleep(_FIRST_PAUSE)
        self.trouble, self._pause, self._away_since = "", _FIRST_PAUSE, 0.0
        with self._lock:
            before, self._in_use, self.policy_step = self._in_use, prepared, step
            if self._incoming == (prepared, step):
                self._incoming = None
        self.update_seconds = time.monotonic() - begun
        if before is not None and before is not prepared:
            shutil.rmtree(before.folder, ignore_errors=True)

    def _check(self, prepared: Prepared) -> float:
        """The gap on the probe. Raises WrongWeights where it is too large, or the log-probs stayed though the weights moved."""
        assert self._server is not None
        told = np.array(self._server.logprobs(self._probe.tolist(), seconds=self._request_seconds))
        gap = float(np.abs(told - prepared.logprobs).mean())
        if not gap <= self._gap_limit:
            raise WrongWeights(
                f"{self._server.url} gives a fixed text log-probs that are {gap:.3g} nats per token off the policy's, above "
                f"{self._gap_limit:g}: it has another model, other weights or another precision"
            )
        before, self._told = self._told, told
        if before is None or self._in_use is None or self._in_use is prepared:
            return gap
        # Kernels may be further off than small updates reach: only log-probs that have not moved at all are those of before.
        moves = np.abs(prepared.logprobs - self._in_use.logprobs).mean()
        if moves > _SAME and np.abs(told - before).mean() < min(_SAME, moves / 10):
            raise WrongWeights(f"{self._server.url} has the weights before, not those that it was given")
        return gap

    def _take(self, row: _Row, drawn: Drawn) -> None:
        """Writes a sample into the generation of its ticket. Raises Refused where the run cannot have it."""
        request, i, made, space = row.ticket.request, row.row, row.ticket.generation, self._space
        given, limit = len(request.beginning), int(row.ticket.limit[i])
        tokens, n, server = (
            drawn.tokens,
            len(drawn.tokens),
            f"{self._server.url if self._server else 'the server'}, query {request.name}",
        )
        if drawn.context != request.context:
            raise Refused(
                f"{server}: it continued {len(drawn.context)} tokens that are not the {len(request.context)} it was given: it "
                "must neither truncate prompts nor put them into a template"
            )
        if not 1 <= n <= limit - given or len(drawn.logprobs) != n:
            raise Refused(
                f"{server}: it gave {n} tokens and {len(drawn.logprobs)} log-probs, where 1 to {limit - given} were asked"
            )
        if wrong := [token for token in tokens if not 0 <= token < self._policy.model.vocab or token in space.banned_tokens]:
            raise Refused(
                f"{server}: token {wrong[0]} is not of the policy's {self._policy.model.vocab}, or one of task.banned_tokens"
            )
        if not np.isfinite(drawn.logprobs).all():
            raise Refused(f"{server}: log-probs are not finite")
        ended = tokens[-1] == space.eos_id
        if self._stop_strings is not None:
            state = self._stop_strings.run(request.begun)
            for last, token in enumerate(tokens):
                state = self._stop_strings.next_state[state, token]
                if state == self._stop_strings.accept:
                    tokens, n, ended = tokens[: last + 1], last + 1, True
                    break
        if not ended and n < limit - given:
            raise Refused(f"{server}: it ended a response after {n} of {limit - given} tokens, without an end of sequence")
        at = slice(given, given + n)
        behavior, s = np.minimum(np.array(drawn.logprobs[:n], np.float32), 0.0), request.sampling
        greedy = float(s.temperature[i]) == 0
        made.tokens[i, at], made.policy_step[i, at] = tokens, self.policy_step
        made.behavior_logprobs[i, at] = 0.0 if greedy else behavior
        plain = s.temperature[i] == np.float32(space.temperature) and not s.top_k[i] and s.top_p[i] == 1 and not s.min_p[i]
        made.policy_logprobs[i, at] = behavior if plain else 0.0
        made.length[i], made.finished[i] = given + n, ended
        row.ticket.left -= 1
        self.usage.useful += n
        self.usage.slot_steps += n
        self.usage.prompt_tokens += len(request.context)
        self.usage.prefilled += len(request.context)
