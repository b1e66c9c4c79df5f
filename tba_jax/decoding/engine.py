"""The decoder as searchers and evaluators use it: requests in, generations out, weights exchanged while it runs.

One lane (slots of its own, see slots.py) runs on each way of the mesh's "data" axis, in a thread of its own: lanes share the
requests and the weights and never wait for each other.
"""

import concurrent.futures
import dataclasses
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tba_jax import mesh as mesh_lib
from tba_jax.decoding import slots as slots_lib
from tba_jax.decoding.requests import Generation, Request
from tba_jax.decoding.sampling import Sampling
from tba_jax.decoding.slots import Arrivals, Samples, SlotsConfig, Tokens
from tba_jax.decoding.stop_strings import StopStrings
from tba_jax.models import cached
from tba_jax.models.decoder import DecoderConfig
from tba_jax.models.parameters import Params
from tba_jax.models.scoring import ResponseSpace

# How new weights are taken up: by all sequences at the next decode step, or by new sequences alone.
SWAPS = ("at_once", "new_sequences")
_IDLE_SECONDS = 1e-3
# A prompt is prefilled at the first of these lengths, relative to the longest, that holds it; not shorter than _SHORTEST.
_BUCKETS = (4, 2, 1)
_SHORTEST = 32
# Slots of a group per sample of a query, up to so many samples and beyond. A group has two prompts at a time, so that slots that
# are done with one go on with the next while its longest sample runs; the more samples run side by side, the longer is that one
# compared with the rest. With these shares log-normal lengths of sigma 0.8 keep slots busy; more, smaller groups would have more
# prompts to read in each step.
_HALF_UP_TO = 24


def arrange(slots: int, samples: int, ways: int, *, what: str = "") -> tuple[int, int]:
    """Groups and width of each lane.

    Args: what: how messages call the slots.

    Raises:
      ValueError: the slots cannot be divided by the ways, or only into far smaller groups than wanted; names the numbers.
    """
    if samples < 1:
        raise ValueError(f"samples={samples} of a query must be at least 1")
    if slots < ways or slots % ways:
        raise ValueError(f"{what or f'slots={slots}'} cannot be divided by the {ways} ways of the mesh's data axis")
    lane = slots // ways
    most = max(1, samples // (2 if samples <= _HALF_UP_TO else 4))
    width = max(width for width in range(1, most + 1) if lane % width == 0)
    if lane > most and 2 * width <= most and most > 2:
        raise ValueError(
            f"{what or f'slots={slots}'} over {ways} ways of the mesh are {lane} each, which divide into groups of {width} only; "
            f"a multiple of {most} lets the {samples} samples of a query share its prompt"
        )
    return lane // width, width


@dataclasses.dataclass(frozen=True)
class LaneSizes:
    """Of the slots on one way of a mesh: groups, slots of a group, prompts of a group, prompts of one prefill call."""

    groups: int
    width: int
    buffers: int
    arrivals: int


def lane_sizes(slots: int, samples: int, ways: int, *, what: str = "") -> LaneSizes:
    """Args and errors as those of `arrange`."""
    groups, width = arrange(slots, samples, ways, what=what)
    # One slot has nobody to wait for: the next prompt takes its place.
    buffers = 1 if width == 1 else 2
    return LaneSizes(groups, width, buffers, max(1, groups * buffers // 16))


def buckets(prompt_length: int) -> tuple[int, ...]:
    """Lengths at which prompts are prefilled, ascending; the last is prompt_length."""
    shorter = {-(-prompt_length // part) for part in _BUCKETS[:-1]}
    return (*sorted(length for length in shorter if _SHORTEST <= length < prompt_length), prompt_length)


def windows(entries: int, chunk: int) -> tuple[int, ...]:
    """Parts of the own caches that are read while responses are short: quarters, of at least a chunk each. The last is all."""
    quarter = max(-(-entries // 4), chunk)
    return (*range(quarter, entries, quarter), entries)


@dataclasses.dataclass
class Answer:
    """A request's generation while it is made; left: how many of its samples have not ended."""

    request: Request
    generation: Generation
    left: int


@dataclasses.dataclass(frozen=True)
class _Part:
    """Samples first..first+count of a request, which share a buffer."""

    answer: Answer
    first: int
    count: int


@dataclasses.dataclass
class Usage:
    """slot_steps: slots × decode steps; useful: those that gave a token of a sample."""

    slot_steps: int = 0
    useful: int = 0

    @property
    def idle(self) -> float:
        """Share of slot-steps that gave no token."""
        return 1 - self.useful / self.slot_steps if self.slot_steps else 0.0


class Engine:
    """Generates responses. One thread may call it; `prepare` and `swap` may be called from another."""

    def __init__(
        self,
        model: DecoderConfig,
        space: ResponseSpace,
        mesh: Mesh,
        *,
        slots: int,
        samples: int,
        prompt_length: int,
        response_length: int,
        pad_id: int,
        stop_strings: StopStrings | None = None,
        swap: str = "at_once",
        chunk: int = 32,
        batches: bool = False,
        given_length: int = 0,
    ):
        """
        Args:
          slots: sequences that are decoded side by side, over the whole mesh.
          samples: of each query, usually; those of one request may be more or fewer.
          prompt_length: tokens at most of a prompt with what is given of the response.
          response_length: R, tokens at most, the given ones included.
          swap: one of SWAPS.
          chunk: decode steps between looks at the host, response_length at most: new weights and free buffers wait as long.
          batches: requests come in batches, all slots begin at once: as long as no response is longer than a window, attention
            reads that window of the caches only. One more program to compile for each window, so not worth it for a stream.
          given_length: of prompt_length, tokens that only given ones of the response take: a prompt is shorter by these.

        Raises:
          ValueError: slots do not divide, lengths beyond the model's positions, or an unknown swap; says the limit.
        """
        if swap not in SWAPS:
            raise ValueError(f"swap={swap!r} is not one of {list(SWAPS)}")
        for name, value in (("prompt_length", prompt_length), ("response_length", response_length), ("chunk", chunk)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        longest = prompt_length - given_length
        if model.positions == "learned" and longest + response_length - 1 > model.max_positions:
            raise ValueError(
                f"prompt_length={longest} and response_length={response_length} need more than the model's "
                f"{model.max_positions} positions"
            )
        ways = mesh_lib.data_ways(mesh)
        lane = lane_sizes(slots, samples, len(ways))
        self.config = SlotsConfig(
            model=model,
            space=space,
            groups=lane.groups,
            width=lane.width,
            buffers=lane.buffers,
            places=samples,
            prompt_length=prompt_length,
            response_length=response_length,
            chunk=min(chunk, response_length),
            stop_accept=stop_strings.accept if stop_strings is not None else -1,
        )
        self._pad_id, self._stop_strings, self._longest_prompt = pad_id, stop_strings, longest
        self._lock = threading.Lock()
        self._lanes = [
            _Lane(
                self.config,
                way,
                stop_strings=stop_strings,
                drains=swap == "new_sequences",
                pad_id=pad_id,
                lock=self._lock,
                batches=batches,
                arrivals=lane.arrivals,
            )
            for way in ways
        ]
        self._threads = concurrent.futures.ThreadPoolExecutor(len(ways), thread_name_prefix="decoder") if len(ways) > 1 else None
        self._queue: deque[_Part] = deque()
        self._failed = False

    @property
    def usage(self) -> Usage:
        """Of all lanes since the start."""
        return Usage(sum(lane.usage.slot_steps for lane in self._lanes), sum(lane.usage.useful for lane in self._lanes))

    @property
    def policy_step(self) -> int:
        """Step of the oldest weights in use; -1 before the first."""
        return min(lane.policy_step for lane in self._lanes)

    @property
    def swapped(self) -> bool:
        """Whether all lanes have taken up the weights that they were handed last."""
        return all(lane.incoming is None for lane in self._lanes)

    def prepare(self, params: Params) -> list[Params]:
        """Plain weights of the policy (Policy.for_sampling, on any mesh) as `swap` takes them: one copy for each lane.

        Returns when they are on the devices, so that a thread beside the decoding one can wait for them.
        """
        return jax.block_until_ready([lane.prepare(params) for lane in self._lanes])

    def swap(self, prepared: Sequence[Params], step: int) -> None:
        """Hands over weights: taken up before the next decode steps, or when the running sequences have ended (`swap`)."""
        with self._lock:
            for lane, weights in zip(self._lanes, prepared, strict=True):
                lane.incoming = (weights, step)

    def set_policy(self, params: Params, step: int) -> None:
        """`prepare` and `swap`, for a caller that has nothing running."""
        self.swap(self.prepare(params), step)

    def submit(self, request: Request) -> Answer:
        """Queues a request. Returns what `collect` takes.

        Raises:
          ValueError: a prompt that is empty or longer than the cache, a beginning that leaves no room, or bad sampling settings;
            names the value and the limit.
        """
        c = self.config
        _check_request(request, c, longest_prompt=self._longest_prompt)
        if self._stop_strings is not None and self._stop_strings.run(request.beginning) == self._stop_strings.accept:
            raise ValueError(f"query {request.name}: the given response tokens hold a stop string, which ends a response")
        S, R, given = request.samples, c.response_length, len(request.beginning)
        tokens = np.full((S, R), self._pad_id, np.int32)
        tokens[:, :given] = request.beginning
        zeros = functools.partial(np.zeros, (S, R), np.float32)
        answer = Answer(
            request,
            Generation(
                tokens=tokens,
                length=np.full(S, given, np.int32),
                finished=np.zeros(S, bool),
                policy_logprobs=zeros(),
                behavior_logprobs=zeros(),
                policy_step=np.full((S, R), -1, np.int32),
            ),
            left=S,
        )
        with self._lock:
            for first in range(0, S, c.places):
                self._queue.append(_Part(answer, first, min(c.places, S - first)))
        return answer

    def collect(self, answers: Sequence[Answer], *, feed: Callable[[], bool] = lambda: False) -> list[Generation]:
        """Decodes until these requests are answered; others go on at the next call.

        Args:
          feed: called when there is room for a prompt and the queue is empty: submits another request and returns True, or
            returns False. Never called from two threads at a time.

        Raises:
          FloatingPointError: logits that are not numbers; names the query. The engine cannot be used afterwards.
        """
        if self._failed:
            raise RuntimeError("the decoder stopped on an error before; its slots are in no known state")
        if any(lane.policy_step < 0 and lane.incoming is None for lane in self._lanes):
            raise RuntimeError("the decoder has no weights yet: `swap` or `set_policy` comes first")
        waiting = functools.partial(_any_left, answers)
        feeding = threading.Lock()

        def take(ahead: bool) -> _Part | None:
            """The next prompt. ahead: for a group that has one already, which other lanes' groups without any come before."""
            with feeding:
                if ahead and any(lane.empty_groups for lane in self._lanes):
                    return None
                if not self._queue and not feed():
                    return None
                with self._lock:
                    if not self._queue:
                        return None
                    part = self._queue.popleft()
                    # Where groups would stay empty, they share the samples of a query.
                    empty = sum(lane.empty_groups for lane in self._lanes)
                    if part.count > self.config.width and empty > 1 + len(self._queue):
                        self._queue.appendleft(_Part(part.answer, part.first + self.config.width, part.count - self.config.width))
                        part = _Part(part.answer, part.first, self.config.width)
                    return part

        def work(lane: _Lane) -> None:
            while waiting() and not self._failed:
                try:
                    if not lane.advance(take):
                        # Other lanes have what is left; they may be fed again, and this one with them.
                        time.sleep(_IDLE_SECONDS)
                except BaseException:
                    self._failed = True
                    raise

        if self._threads is None:
            work(self._lanes[0])
        else:
            for future in [self._threads.submit(work, lane) for lane in self._lanes]:
                future.result()
        return [answer.generation for answer in answers]

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Answers these requests; nothing else may be running. Raises: as `submit` and `collect`."""
        return self.collect([self.submit(request) for request in requests])


def _any_left(answers: Sequence[Answer]) -> bool:
    return any(answer.left for answer in answers)


def _check_request(request: Request, config: SlotsConfig, *, longest_prompt: int) -> None:
    tokens, given, S = len(request.prompt) + len(request.beginning), len(request.beginning), request.samples
    if not len(request.prompt) or tokens > config.prompt_length:
        raise ValueError(
            f"query {request.name}: {tokens} tokens of prompt (with {given} of the response) do not fit the cache, which holds 1 "
            f"to {config.prompt_length}"
        )
    if len(request.prompt) > longest_prompt:
        raise ValueError(
            f"query {request.name}: a prompt of {len(request.prompt)} tokens is longer than {longest_prompt}, the rest of the "
            "cache is for given response tokens"
        )
    if given >= config.response_length:
        raise ValueError(
            f"query {request.name}: {given} given response tokens leave none of response_length={config.response_length}"
        )
    if S < 1:
        raise ValueError(f"query {request.name}: no samples are asked for")
    for token in (*request.prompt, *request.beginning):
        if not isinstance(token, int | np.integer) or not 0 <= token < config.model.vocab:
            raise ValueError(f"query {request.name}: token {token!r} is not an id of the vocabulary of {config.model.vocab}")
    barred = {*config.space.banned_tokens, config.space.eos_id}
    if ended := [token for token in request.beginning if token in barred]:
        raise ValueError(f"query {request.name}: the given response tokens hold {ended[0]}, which ends a response or is banned")
    if request.keys.dtype != np.uint32 or request.keys.shape != (S, 2):
        raise ValueError(f"query {request.name}: keys are {request.keys.dtype}{list(request.keys.shape)}, not uint32[{S}, 2]")
    if request.limit is not None and request.limit.shape != (S,):
        raise ValueError(f"query {request.name}: limits have shape {list(request.limit.shape)}, the samples are {S}")
    s = request.sampling
    for name, good, limit in (
        ("temperature", np.isfinite(s.temperature) & (s.temperature >= 0), "at least 0"),
        ("top_k", s.top_k >= 0, "at least 0"),
        ("top_p", (s.top_p > 0) & (s.top_p <= 1), "within (0, 1]"),
        ("min_p", (s.min_p >= 0) & (s.min_p < 1), "within [0, 1)"),
    ):
        values = np.asarray(getattr(s, name))
        if values.shape != (S,):
            raise ValueError(f"query {request.name}: sampling.{name} has shape {values.shape}, the samples are {S}")
        if not np.all(good):
            raise ValueError(f"query {request.name}: {name}={values[int(np.argmin(good))]} must be {limit}")
    if request.limit is not None and not (np.all(request.limit > given) and np.all(request.limit <= config.response_length)):
        raise ValueError(
            f"query {request.name}: limits {request.limit.min()} to {request.limit.max()} must be within {given + 1} to "
            f"{config.response_length} response tokens"
        )


class _Lane:
    """Slots on one way of the mesh, and what the host knows of them. One thread uses it; `incoming` may be set by another."""

    def __init__(
        self,
        config: SlotsConfig,
        mesh: Mesh,
        *,
        stop_strings: StopStrings | None,
        drains: bool,
        pad_id: int,
        lock: threading.Lock,
        batches: bool,
        arrivals: int,
    ):
        self._config, self._mesh, self._pad_id, self._lock = config, mesh, pad_id, lock
        self._stop_strings, self._drains = stop_strings, drains
        self.usage = Usage()
        self.policy_step = -1
        self.incoming: tuple[Params, int] | None = None
        self._weights: Params = {}
        self._windows = windows(slots_lib.own_entries(config), config.chunk) if batches else (slots_lib.own_entries(config),)
        self._batches = batches
        # Decode steps since all slots were idle.
        self._step = 0
        self._arrivals = arrivals
        self._buckets = buckets(config.prompt_length)
        whole = mesh_lib.replicated(mesh)
        prompts, slots = slots_lib.shardings(config, mesh)
        self._prompts, self._slots = mesh_lib.on_mesh(
            mesh, jax.jit(functools.partial(slots_lib.init, config), out_shardings=(prompts, slots))
        )()
        self._stop_table = None if stop_strings is None else jax.device_put(stop_strings.next_state, whole)
        self._prefill = mesh_lib.on_mesh(
            mesh,
            jax.jit(
                functools.partial(slots_lib.prefill, config=config), donate_argnums=(1, 2), out_shardings=(prompts, slots, whole)
            ),
        )
        self._decode = mesh_lib.on_mesh(
            mesh,
            jax.jit(
                functools.partial(slots_lib.decode, config=config),
                donate_argnums=2,
                static_argnames=("buffers", "window"),
                out_shardings=(slots, whole),
            ),
        )
        self._unstack = mesh_lib.on_mesh(mesh, jax.jit(functools.partial(cached.unstack, config=config.model)))
        # (group, buffer) -> what it holds; a free one is not there.
        self._parts: dict[tuple[int, int], _Part] = {}
        # When each buffer was filled, as a count of fills.
        self._filled_at = np.zeros((config.groups, config.buffers), np.int64)
        # Prefilled into which buffers, and the first tokens, which are on their way.
        self._first: list[tuple[tuple[tuple[int, int], ...], Tokens]] = []
        # What places hold so far.
        places = (config.groups, config.buffers * config.places)
        self._status, self._length = np.full(places, slots_lib.CUT, np.int32), np.zeros(places, np.int32)
        self._tokens, self._steps = (np.zeros((*places, config.response_length), np.int32) for _ in range(2))
        self._policy, self._behavior = (np.zeros((*places, config.response_length), np.float32) for _ in range(2))

    def prepare(self, params: Params) -> Params:
        """`params` on this lane's devices, unstacked."""

        def place(leaf: jax.Array | np.ndarray) -> jax.Array:
            sharding = getattr(leaf, "sharding", None)
            split = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
            return jax.device_put(leaf, NamedSharding(self._mesh, split))

        return self._unstack(jax.tree.map(place, params))

    def advance(self, take: Callable[[bool], _Part | None]) -> bool:
        """Fills free buffers, decodes for a while and hands out what was generated. Returns whether there was anything to do."""
        with self._lock:
            if self.incoming is not None and not (self._drains and self._parts):
                (self._weights, self.policy_step), self.incoming = self.incoming, None
        may_fill = self.incoming is None
        filled = may_fill and self._fill(take)
        if not self._parts:
            return False
        # Where nothing more is to come, free buffers are no reason to stop.
        enough = self._arrivals if filled else self._config.groups * self._config.buffers + 1
        self._slots, log = self._decode(
            self._weights,
            self._prompts,
            self._slots,
            self._oldest_first(),
            np.int32(enough),
            self._stop_table,
            buffers=self._buffers_in_use(),
            window=self._window(),
        )
        for buffers, tokens in self._first:
            self._note_first(buffers, jax.device_get(tokens))
        self._first = []
        self._note(jax.device_get(log))
        self._release()
        if not self._parts:
            self._step = 0
        return True

    def _fill(self, take: Callable[[bool], _Part | None]) -> bool:
        """Prefills parts into free buffers. Returns whether there was one for each of them."""
        c = self._config
        free = [(j, u) for u in range(c.buffers) for j in range(c.groups) if (j, u) not in self._parts]
        # Groups with nothing to do come first.
        free.sort(key=lambda buffer: self._in_use(buffer[0]))
        while free:
            arrived: list[tuple[int, int]] = []
            while free and len(arrived) < self._arrivals and (part := take(self._in_use(free[0][0]) > 0)) is not None:
                j, u = buffer = free.pop(0)
                self._filled_at[j, u] = self._filled_at.max() + 1
                self._parts[buffer] = part
                arrived.append(buffer)
            if arrived:
                self._prefill_into(arrived)
            if len(arrived) < self._arrivals and free:
                return False
        return True

    def _buffers_in_use(self) -> int:
        """The first of each group, or as many as any group has something in."""
        return 1 + max(u for _, u in self._parts) if self._batches else self._config.buffers

    def _window(self) -> int:
        """The shortest that the next steps stay within, or the whole ring."""
        return next((window for window in self._windows if window >= self._step + self._config.chunk), self._windows[-1])

    def _in_use(self, group: int) -> int:
        """Buffers of a group that hold a part."""
        return sum((group, u) in self._parts for u in range(self._config.buffers))

    def _oldest_first(self) -> np.ndarray:
        """int32[J, U]: see slots.prefill."""
        return np.argsort(self._filled_at, axis=1).astype(np.int32)

    @property
    def empty_groups(self) -> int:
        return sum(not self._in_use(group) for group in range(self._config.groups))

    def _prefill_into(self, buffers: Sequence[tuple[int, int]]) -> None:
        """One prefill call; what it drew is fetched when the decode call after it has been sent."""
        c, I = self._config, self._arrivals
        parts = [self._parts[buffer] for buffer in buffers]
        contexts = [[*part.answer.request.prompt, *part.answer.request.beginning] for part in parts]
        P = next(length for length in self._buckets if length >= max(map(len, contexts)))
        tokens = np.full((I, P), self._pad_id, np.int32)
        length, given, stop_state = np.ones(I, np.int32), np.zeros(I, np.int32), np.zeros(I, np.int32)
        samples = Samples(
            key=np.zeros((I, c.places, 2), np.uint32),
            sampling=Sampling(
                temperature=np.ones((I, c.places), np.float32),
                top_k=np.zeros((I, c.places), np.int32),
                top_p=np.ones((I, c.places), np.float32),
                min_p=np.zeros((I, c.places), np.float32),
            ),
            limit=np.zeros((I, c.places), np.int32),
        )
        for i, (part, context) in enumerate(zip(parts, contexts, strict=True)):
            request, rows = part.answer.request, slice(part.first, part.first + part.count)
            tokens[i, : len(context)], length[i], given[i] = context, len(context), len(request.beginning)
            stop_state[i] = self._stop_strings.run(request.beginning) if self._stop_strings is not None else 0
            samples.key[i, : part.count] = request.keys[rows]
            for field in dataclasses.fields(Sampling):
                getattr(samples.sampling, field.name)[i, : part.count] = getattr(request.sampling, field.name)[rows]
            samples.limit[i, : part.count] = c.response_length if request.limit is None else request.limit[rows]
        index = np.zeros((I, 2), np.int32)
        index[: len(buffers)] = buffers
        arrivals = Arrivals(
            group=index[:, 0],
            buffer=index[:, 1],
            valid=np.arange(I) < len(buffers),
            tokens=tokens,
            length=length,
            given=given,
            stop_state=stop_state,
            samples=samples,
        )
        self._prompts, self._slots, first = self._prefill(
            self._weights, self._prompts, self._slots, self._oldest_first(), arrivals, np.bool_(self._step == 0), self._stop_table
        )
        for (j, u), part in zip(buffers, parts, strict=True):
            places = slice(u * c.places, (u + 1) * c.places)
            self._status[j, places] = np.where(np.arange(c.places) < part.count, slots_lib.RUNNING, slots_lib.CUT)
        self._first.append((tuple(buffers), first))

    def _note_first(self, buffers: Sequence[tuple[int, int]], tokens: Tokens) -> None:
        M = self._config.places
        for i, (j, u) in enumerate(buffers):
            part = self._parts[j, u]
            place = u * M + np.arange(part.count)
            count = np.full(part.count, len(part.answer.request.beginning))
            self._write(np.full(part.count, j), place, count, jax.tree.map(lambda x, i=i, n=part.count: x[i, :n], tokens))

    def _note(self, log: slots_lib.Log) -> None:
        steps, j, w = np.nonzero(log.place >= 0)
        taken = len(np.unique(steps))
        self._step += taken
        self.usage.slot_steps += log.place[0].size * taken
        self.usage.useful += len(steps)
        at = (steps, j, w)
        self._write(j, log.place[at], log.count[at], jax.tree.map(lambda x: x[at], log.tokens))

    def _write(self, group: np.ndarray, place: np.ndarray, count: np.ndarray, tokens: Tokens) -> None:
        """Notes tokens that are response tokens `count` of their places. A place's tokens stand in their order."""
        broken = ~np.isfinite(tokens.policy_logprob)
        if broken.any():
            first = int(broken.argmax())
            part = self._parts[int(group[first]), int(place[first]) // self._config.places]
            raise FloatingPointError(
                f"the logits of policy step {self.policy_step} are not finite at response token {count[first]} of query "
                f"{part.answer.request.name}"
            )
        self._tokens[group, place, count] = tokens.token
        self._policy[group, place, count] = tokens.policy_logprob
        self._behavior[group, place, count] = tokens.behavior_logprob
        self._steps[group, place, count] = self.policy_step
        self._length[group, place] = count + 1
        self._status[group, place] = tokens.status

    def _release(self) -> None:
        """Hands out the parts of which all samples have ended, and frees their buffers."""
        M = self._config.places
        ended = (self._status != slots_lib.RUNNING).reshape(self._config.groups, self._config.buffers, M).all(axis=2)
        for (j, u), part in [item for item in self._parts.items() if ended[item[0]]]:
            places = slice(u * M, u * M + part.count)
            rows = slice(part.first, part.first + part.count)
            made, given = part.answer.generation, len(part.answer.request.beginning)
            length = self._length[j, places]
            new = (np.arange(self._config.response_length) < length[:, None]) & (np.arange(self._config.response_length) >= given)
            for whole, lane in (
                (made.tokens, self._tokens),
                (made.policy_logprobs, self._policy),
                (made.behavior_logprobs, self._behavior),
                (made.policy_step, self._steps),
            ):
                whole[rows] = np.where(new, lane[j, places], whole[rows])
            made.length[rows] = length
            made.finished[rows] = self._status[j, places] == slots_lib.FINISHED
            del self._parts[j, u]
            with self._lock:
                part.answer.left -= part.count
