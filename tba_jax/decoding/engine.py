"""The decoder as searchers and evaluators use it: requests in, generations out, weights exchanged while it runs.

One lane runs on each way of the mesh's "data" axis. Lanes share the queue of requests, and the engine goes on with whichever lane
has its results first.
"""

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from tba_jax import sharding
from tba_jax.decoding import slots as slots_lib
from tba_jax.decoding.lane import Lane
from tba_jax.decoding.requests import Generation, Parked, Part, Request, Ticket, Usage
from tba_jax.decoding.slots import SlotsConfig
from tba_jax.models import hardware, kv_cache
from tba_jax.models.config import DecoderConfig, ResponseSpace
from tba_jax.models.parameters import Params
from tba_jax.programs import Program
from tba_jax.text.tokenizers import StopStrings


class Engine:
    """Generates responses. One thread may call it; `prepare` and `swap` may be called from another.

    Args:
      slots: sequences that are decoded side by side, over the whole mesh. samples: usual number of samples of a query.
      prompt_length: the most tokens of a prompt together with the given tokens of the response.
      response_length: R, the most tokens of a response, the given tokens included.
      swap: how new weights are taken up. at_once: by all sequences at the next decode step; new_sequences: by new ones alone.
      chunk: decode steps of a call, for which new weights and free buffers wait; 0: by the kind of device (models.hardware).
      lockstep: requests come in batches and all slots begin at once, so that the samples of a query share a group, and each
        batch begins with the shortest window of the caches (slots.Ring). A stream of requests begins with the whole caches.
      given_length: the part of prompt_length that is kept free for given response tokens; a prompt is shorter by it.
      weights: precision of the weights that `prepare` takes, "full" or "int8".
      swap_memory: where weights that were handed over wait. beside: on the devices. in_place: where they were given, best in
        host memory; a lane that takes them up puts one parameter after the other in the place of the one in use.

    Raises ValueError: slots do not divide, or lengths are beyond the model's positions; says the limit.
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
        if model.positions == "learned" and self._longest_prompt + response_length - 1 > model.max_positions:
            raise ValueError(
                f"prompt_length={self._longest_prompt} and response_length={response_length} need more than the model's "
                f"{model.max_positions} positions"
            )
        ways, platform, tiled = sharding.data_ways(mesh), mesh.devices.flat[0].platform, slots_lib.are_tiled(mesh)
        lane = slots_lib.lane_sizes(slots, samples, len(ways), lockstep=lockstep)
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
            tiled=tiled,
            together=slots_lib.heads_together(model.kv_heads, model.head_size, mesh.shape["tensor"], tiled=tiled),
        )
        self._queue: deque[Part] = deque()
        self._parks = samples == 1 and given_length > 0
        self._in_place = swap_memory == "in_place"
        of_lane: dict[str, Any] = dict(stop_strings=stop_strings, pad_id=pad_id, lockstep=lockstep, arrivals=lane.arrivals)
        of_lane |= dict(drains=swap == "new_sequences", in_place=self._in_place)
        self._lanes = [Lane(self.config, way, **of_lane) for way in ways]
        # Lanes whose call is running on their devices, the oldest call first.
        self._running: list[Lane] = []

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
        """How many prompts there is room for."""
        return len(self._lanes) * self.config.groups * self.config.buffers

    @property
    def swapped(self) -> bool:
        """Whether all lanes have taken up the weights that they were handed last."""
        return all(lane.incoming is None for lane in self._lanes)

    def programs(self, params: Params) -> dict[str, Program]:
        """Name -> the programs of a lane, see Lane.programs. Args: params: shapes of what `prepare` takes."""
        return self._lanes[0].programs(params, parks=self._parks)

    def prepare(self, params: Params, *, consume: bool = False) -> list[Params]:
        """Returns weights as `swap` takes them, one copy for each lane, on the devices; `params` with swap_memory=in_place.

        Args:
          params: plain weights of the policy (Policy.for_sampling), on any mesh.
          consume: takes the parameters out of `params` one after the other, so that devices hold one parameter twice at most.
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
        for lane, weights in zip(self._lanes, prepared, strict=True):
            lane.hand_over(weights, step)

    def set_policy(self, params: Params, step: int) -> None:
        """Prepares weights and hands them over, for a caller that has nothing running."""
        self.swap(self.prepare(params), step)

    def submit(self, request: Request) -> Ticket:
        """Queues a request and returns its ticket, which `decode` takes. May be called while `decode` pauses.

        Raises ValueError: the prompt is empty or too long, or the beginning leaves no room or holds a stop string; names the
        limit.
        """
        c, prompt, given = self.config, len(request.prompt), len(request.beginning)
        if not 1 <= prompt <= self._longest_prompt or prompt + given > c.prompt_length or given >= c.response_length:
            raise ValueError(
                f"query {request.name}: {prompt} tokens of prompt and {given} of the response are not within 1 to "
                f"{self._longest_prompt} and 0 to {min(c.prompt_length - prompt, c.response_length - 1)}"
            )
        if self._stop_strings is not None and self._stop_strings.run(request.begun) == self._stop_strings.accept:
            raise ValueError(f"query {request.name}: the given response tokens hold a stop string, which ends a response")
        ticket = Ticket(request, response_length=c.response_length, pad_id=self._pad_id)
        for first in range(0, request.samples, c.places):
            self._queue.append(Part(ticket, first, min(c.places, request.samples - first)))
        return ticket

    def decode(self, tickets: Sequence[Ticket]) -> Iterator[int]:
        """Decodes until these requests are answered. Other requests that are running go on at the next call.

        Pauses before each chunk and yields how many more prompts there is room for: the caller may submit so many.

        Raises FloatingPointError: logits that are not numbers; names the query. The engine cannot be used afterwards.
        """
        if any(lane.policy_step < 0 and lane.incoming is None for lane in self._lanes):
            raise RuntimeError("the decoder has no weights yet: `swap` or `set_policy` comes first")
        while any(ticket.left for ticket in tickets):
            idle = [lane for lane in self._lanes if lane not in self._running]
            for lane in idle:
                lane.take_up()
            yield max(0, sum(len(lane.free()) for lane in idle) - len(self._queue))
            for lane in idle:
                if lane.begin(refills=self._fill(lane)):
                    self._running.append(lane)
            if self._running:  # else weights came during the pause, and idle lanes take them up first
                self._finish(next((lane for lane in self._running if lane.is_ready), self._running[0]))
        for lane in self._running[:]:
            self._finish(lane)
        # An idle lane that begins no further chunk would keep the old weights.
        for lane in self._lanes:
            lane.take_up()

    def _finish(self, lane: Lane) -> None:
        self._running.remove(lane)
        lane.finish()

    def _fill(self, lane: Lane) -> bool:
        """Puts queued prompts into the free buffers of a lane. Returns whether it may go on to take prompts, and each got one."""
        if self._parks and lane.is_open:
            mine = [(part, its.buffer) for part in self._queue if (its := part.parked) is not None and its.lane is lane]
            for part, place in mine:
                lane.put(*place, part)
            taken = {id(part) for part, _ in mine}
            self._queue = deque(part for part in self._queue if id(part) not in taken)
        for group, buffer in lane.free():
            following = self._next_part(ahead=lane.in_use(group) > 0)
            if following is None:
                return False
            lane.put(group, buffer, following)
        return lane.is_open

    def _next_part(self, *, ahead: bool) -> Part | None:
        """The next prompt for a group of a lane, None for none. ahead: whether the group has one; empty groups come first."""
        empty, width = sum(lane.empty_groups for lane in self._lanes), self.config.width
        # What another lane has parked is better waited for.
        at = next((i for i, queued in enumerate(self._queue) if queued.parked is None), None)
        if at is None or (ahead and empty):
            return None
        part = self._queue[at]
        del self._queue[at]
        # Where groups would stay empty, they share the samples of a query.
        if part.count > width and empty > 1 + len(self._queue):
            self._queue.appendleft(Part(part.ticket, part.first + width, part.count - width))
            part = Part(part.ticket, part.first, width)
        return part

    def unpark(self, parked: Parked) -> None:
        """A conversation has ended: its buffer is as free as others."""
        if parked.lane is not None:
            parked.lane.unpark(parked.buffer)

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Answers these requests; nothing else may be running. Raises: as `submit` and `decode`."""
        tickets = [self.submit(request) for request in requests]
        for _ in self.decode(tickets):
            pass
        return [ticket.generation for ticket in tickets]
