"""The decoder as searchers and evaluators use it: requests in, generations out, weights exchanged while it runs.

One lane runs on each way of the mesh's "data" axis, in a thread of its own and with slots of its own (slots.py). Lanes share the
queue of requests and never wait for each other.
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
from jax.sharding import Mesh

from tba_jax import sharding
from tba_jax.decoding import requests as requests_lib
from tba_jax.decoding import sizes
from tba_jax.decoding import slots as slots_lib
from tba_jax.decoding.lane import Lane
from tba_jax.decoding.requests import Generation, Part, Request, Ticket
from tba_jax.decoding.slots import SlotsConfig, Usage
from tba_jax.models import hardware, kv_cache
from tba_jax.models.config import DecoderConfig, ResponseSpace
from tba_jax.models.parameters import Params
from tba_jax.programs import Program
from tba_jax.text.stop_strings import StopStrings

_IDLE_SECONDS = 1e-3


class Engine:
    """Generates responses. One thread may call it; `prepare` and `swap` may be called from another.

    Args:
      slots: sequences that are decoded side by side, over the whole mesh.
      samples: usual number of samples of a query; one request may ask for more or fewer.
      prompt_length: the most tokens of a prompt together with the given tokens of the response.
      response_length: R, the most tokens of a response, the given tokens included.
      swap: how new weights are taken up. at_once: by all sequences at the next decode step; new_sequences: by new ones alone.
      chunk: decode steps between two looks at the host: so long do new weights and free buffers wait. At most response_length; 0:
        by the kind of device, see models.hardware.
      lockstep: requests come in batches and all slots begin at once, so that the samples of a query share a group, and each
        batch begins with the shortest window of the caches (sizes.Ring). For a stream of requests the window is the whole caches
        until it shows that all responses are shorter: each window is one more program to compile.
      given_length: the part of prompt_length that is kept free for given response tokens; a prompt is shorter by it.
      weights: precision of the weights that `prepare` takes, one of kv_cache.WEIGHTS.
      swap_memory: where weights that were handed over wait. beside: on the devices, as they are decoded with. in_place: where
        they were given, best in host memory; a lane that takes them up puts one parameter after the other in the place of the
        one in use, and decodes nothing meanwhile.

    Raises:
      ValueError: slots do not divide, or lengths are beyond the model's positions; says the limit.
    """

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
        chunk: int = 0,
        lockstep: bool = False,
        given_length: int = 0,
        weights: str = "full",
        swap_memory: str = "beside",
    ):
        self._pad_id, self._stop_strings, self._longest_prompt = pad_id, stop_strings, prompt_length - given_length
        _check_positions(model, longest_prompt=self._longest_prompt, response_length=response_length)
        ways, platform = sharding.data_ways(mesh), mesh.devices.flat[0].platform
        lane = sizes.lane_sizes(slots, samples, len(ways), lockstep=lockstep)
        self.config = SlotsConfig(
            model=model,
            graphdef=kv_cache.define(model, weights).graphdef,
            space=space,
            groups=lane.groups,
            width=lane.width,
            buffers=lane.buffers,
            places=samples,
            prompt_length=prompt_length,
            response_length=response_length,
            chunk=min(hardware.value("searchers.decode_chunk", chunk, platform), response_length),
            stop_accept=stop_strings.accept if stop_strings is not None else -1,
            tiled=slots_lib.in_tiles(mesh),
            together=slots_lib.heads_together(model, mesh),
        )
        self._queue: deque[Part] = deque()
        # Over the queue, the lanes' incoming weights, and the counts of samples that have not ended.
        self._lock = threading.Lock()
        # One lane at a time asks for prompts.
        self._feeding = threading.Lock()
        make_lane = functools.partial(Lane, self.config, stop_strings=stop_strings, pad_id=pad_id, lock=self._lock)
        drains, self._in_place = swap == "new_sequences", swap_memory == "in_place"
        make_lane = functools.partial(make_lane, drains=drains, in_place=self._in_place)
        self._lanes = [make_lane(way, lockstep=lockstep, arrivals=lane.arrivals) for way in ways]
        self._threads = concurrent.futures.ThreadPoolExecutor(len(ways), thread_name_prefix="decoder") if len(ways) > 1 else None
        self._failed = False

    @property
    def usage(self) -> Usage:
        """The sums of all lanes since the start."""
        counts = zip(*(dataclasses.astuple(lane.usage) for lane in self._lanes), strict=True)
        return Usage(*map(sum, counts))

    @property
    def policy_step(self) -> int:
        """Step of the oldest weights in use; -1 before the first."""
        return min(lane.policy_step for lane in self._lanes)

    @property
    def prompts(self) -> int:
        """How many prompts there is room for, over all lanes."""
        return len(self._lanes) * self.config.groups * self.config.buffers

    @property
    def swapped(self) -> bool:
        """Whether all lanes have taken up the weights that they were handed last."""
        return all(lane.incoming is None for lane in self._lanes)

    def programs(self, params: Params) -> dict[str, Program]:
        """Name -> the programs of a lane, see Lane.programs. Args: params: shapes of what `prepare` takes."""
        return self._lanes[0].programs(params)

    def prepare(self, params: Params, *, consume: bool = False) -> list[Params]:
        """Returns weights as `swap` takes them, one copy for each lane, once they are on the devices; `params` with
        swap_memory=in_place.

        May be called from a thread beside the one that decodes, which then waits for nothing.

        Args:
          params: plain weights of the policy (Policy.for_sampling), on any mesh.
          consume: takes the parameters out of `params` one after the other, so that devices hold no more than one parameter
            twice. The caller must have no other use for the arrays.
        """
        if self._in_place:
            return [jax.tree.map(lambda x: x, params) for _ in self._lanes]  # lanes empty their trees
        if not consume:
            return jax.block_until_ready([lane.prepare(params) for lane in self._lanes])
        prepared: list[Params] = [{} for _ in self._lanes]
        for part in kv_cache.one_by_one(params):
            for whole, lane in zip(prepared, self._lanes, strict=True):
                kv_cache.add(whole, lane.prepare(part))
            part.clear()
            jax.block_until_ready(prepared)
        return prepared

    def swap(self, prepared: Sequence[Params], step: int) -> None:
        """Hands over weights. Lanes take them up before the next chunk, or when the running sequences have ended (`swap`)."""
        with self._lock:
            for lane, weights in zip(self._lanes, prepared, strict=True):
                lane.incoming = (weights, step)

    def set_policy(self, params: Params, step: int) -> None:
        """Prepares weights and hands them over, for a caller that has nothing running."""
        self.swap(self.prepare(params), step)

    def submit(self, request: Request) -> Ticket:
        """Queues a request and returns its ticket, which `collect` takes.

        Raises:
          ValueError: a prompt that is empty or longer than the cache, a beginning that leaves no room, or bad sampling settings;
            names the value and the limit.
        """
        c = self.config
        requests_lib.check(request, c, longest_prompt=self._longest_prompt)
        if self._stop_strings is not None and self._stop_strings.run(request.beginning) == self._stop_strings.accept:
            raise ValueError(f"query {request.name}: the given response tokens hold a stop string, which ends a response")
        ticket = Ticket(request, self._empty_generation(request), left=request.samples)
        with self._lock:
            for first in range(0, request.samples, c.places):
                self._queue.append(Part(ticket, first, min(c.places, request.samples - first)))
        return ticket

    def _empty_generation(self, request: Request) -> Generation:
        """The generation of a request that has only its given tokens yet; lanes fill it in."""
        S, R, given = request.samples, self.config.response_length, len(request.beginning)
        tokens = np.full((S, R), self._pad_id, np.int32)
        tokens[:, :given] = request.beginning
        return Generation(
            tokens=tokens,
            length=np.full(S, given, np.int32),
            finished=np.zeros(S, bool),
            policy_logprobs=np.zeros((S, R), np.float32),
            behavior_logprobs=np.zeros((S, R), np.float32),
            policy_step=np.full((S, R), -1, np.int32),
        )

    def collect(self, tickets: Sequence[Ticket], *, feed: Callable[[], bool] | None = None) -> list[Generation]:
        """Decodes until these requests are answered. Other requests that are running go on at the next call.

        Args:
          feed: called when there is room for a prompt and the queue is empty: submits another request and returns True, or
            returns False. Never called from two threads at a time. Without it no prompts come but those that are queued, and
            the last samples move into fewer slots (lane_programs.py).

        Raises:
          FloatingPointError: logits that are not numbers; names the query. The engine cannot be used afterwards.
        """
        if self._failed:
            raise RuntimeError("the decoder stopped on an error before; its slots are in no known state")
        if any(lane.policy_step < 0 and lane.incoming is None for lane in self._lanes):
            raise RuntimeError("the decoder has no weights yet: `swap` or `set_policy` comes first")
        take = functools.partial(self._take, feed=feed or (lambda: False))
        work = functools.partial(self._work, tickets=tickets, take=take, ends=lambda: feed is None and not self._queue)
        if self._threads is None:
            work(self._lanes[0])
        else:
            for future in [self._threads.submit(work, lane) for lane in self._lanes]:
                future.result()
        # A lane takes up weights where it advances. An idle one that is asked no more would keep the old ones for ever.
        for lane in self._lanes:
            lane.take_up()
        return [ticket.generation for ticket in tickets]

    def _work(
        self, lane: Lane, *, tickets: Sequence[Ticket], take: Callable[[bool], Part | None], ends: Callable[[], bool]
    ) -> None:
        """Advances a lane until these requests are answered, by whichever lane."""
        while any(ticket.left for ticket in tickets) and not self._failed:
            try:
                if not lane.advance(take, ends=ends):
                    # Other lanes have the samples that are left. They may be fed again, and this lane with them.
                    time.sleep(_IDLE_SECONDS)
            except BaseException:
                self._failed = True
                raise

    def _take(self, ahead: bool, *, feed: Callable[[], bool]) -> Part | None:
        """The next prompt for a group of a lane, None where there is none.

        Args: ahead: whether the group has a prompt already; groups without any, of whichever lane, come before it.
        """
        with self._feeding:
            if ahead and any(lane.empty_groups for lane in self._lanes):
                return None
            if not self._queue and not feed():
                return None
            with self._lock:
                if not self._queue:
                    return None
                part, width = self._queue.popleft(), self.config.width
                # Where groups would stay empty, they share the samples of a query.
                empty = sum(lane.empty_groups for lane in self._lanes)
                if part.count > width and empty > 1 + len(self._queue):
                    self._queue.appendleft(Part(part.ticket, part.first + width, part.count - width))
                    part = Part(part.ticket, part.first, width)
                return part

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Answers these requests; nothing else may be running. Raises: as `submit` and `collect`."""
        return self.collect([self.submit(request) for request in requests])


def _check_positions(model: DecoderConfig, *, longest_prompt: int, response_length: int) -> None:
    """Raises ValueError where the model has too few positions."""
    if model.positions == "learned" and longest_prompt + response_length - 1 > model.max_positions:
        raise ValueError(
            f"prompt_length={longest_prompt} and response_length={response_length} need more than the model's "
            f"{model.max_positions} positions"
        )
