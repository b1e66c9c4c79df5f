"""The slots on one way of a mesh, and the host's side of them: which samples run there, and their tokens so far."""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tba_jax import sharding as sharding_lib
from tba_jax.decoding import decode_loop
from tba_jax.decoding import requests as requests_lib
from tba_jax.decoding import sampling as sampling_lib
from tba_jax.decoding import slots as slots_lib
from tba_jax.decoding.requests import Parked, Part, Usage
from tba_jax.decoding.slots import Arrivals, Ring, Samples, SlotsConfig, Tokens
from tba_jax.models import kv_cache
from tba_jax.models.parameters import Params
from tba_jax.programs import Program, shaped
from tba_jax.text.tokenizers import StopStrings


class Lane:
    """Slots on one way of the mesh. One thread uses it; another may call `prepare` and `hand_over`.

    Attributes:
      incoming: weights that were handed over and are not in use yet, with their policy step.
      policy_step: of the weights in use, -1 before the first. usage: since the start.
    """

    def __init__(
        self,
        config: SlotsConfig,
        mesh: Mesh,
        *,
        stop_strings: StopStrings | None,
        drains: bool,
        in_place: bool,
        pad_id: int,
        lockstep: bool,
        arrivals: int,
    ):
        """Args: drains: new weights wait until the running samples have ended; else they take over at the next chunk; in_place:
        incoming weights are stacked, on any devices, and replace those in use one by one, see Engine; arrivals: see Arrivals."""
        self._config, self._mesh, self._pad_id = config, mesh, pad_id
        self._stop_strings, self._lockstep, self._arrivals = stop_strings, lockstep, arrivals
        self._drains, self._in_place = drains, in_place
        self.usage = Usage()
        self.policy_step = -1
        self.incoming: tuple[Params, int] | None = None
        self._lock = threading.Lock()  # over `incoming`
        self._weights: Params = {}
        self._weight_bytes = 0
        self._windows = slots_lib.windows(config.own_entries, config.chunk, tiled=config.tiled)
        self._ring = Ring(self._windows, config.chunk, lockstep=lockstep)
        self._buckets = slots_lib.buckets(config.prompt_length)
        self._short_buckets = slots_lib.short_buckets(config.prompt_length)
        # (group, buffer) -> the part in it. [J, U]: which buffers are filled, and when each was filled last, as a count of fills.
        # Then the buffers that are not prefilled yet, and the first tokens of prefilled ones, on their way from the device.
        self._parts: dict[tuple[int, int], Part] = {}
        self._filled = np.zeros((config.groups, config.buffers), bool)
        self._filled_at = np.zeros(self._filled.shape, np.int64)
        self._arrived: list[tuple[int, int]] = []
        # What lies parked in free buffers, in the order in which it came there; and [J, U]: the tokens that filled buffers kept.
        self._parked: dict[tuple[int, int], Parked] = {}
        self._kept = np.zeros(self._filled.shape, np.int32)
        self._first: list[tuple[tuple[tuple[int, int], ...], Tokens]] = []
        # What the running call is to give, and the bytes that each of its steps reads.
        self._trace: Any = None
        self._step_bytes = 0
        # The samples in the places [J, X]: their status, their given tokens, and their responses, from the first prefill on.
        places = (config.groups, config.buffers * config.places)
        self._status, self._given = np.full(places, slots_lib.CUT, np.int32), np.zeros(places, np.int32)
        self._made: Any = None
        # The programs that make and change the state on the devices. The state itself is made by the first prefill.
        made = {name: sharding_lib.on_mesh(mesh, function) for name, function in decode_loop.make_programs(config, mesh).items()}
        self._init, self._prefill, self._unstack = made["init"], made["prefill"], made["unstack"]
        self._decode, self._rotate = made["decode"], made["rotate"]
        self._prompts: Any = None
        self._slots: Any = None
        self._stop_table: Any = None

    def programs(self, params: Params, *, parks: bool) -> dict[str, Program]:
        """Name -> the programs of this lane: of prompts, the longest bucket, and of windows, the whole caches.

        The rings of the whole caches are never rotated: the next smaller window stands for the rotation.

        Args: params: shapes of what `prepare` takes, on any mesh; parks: whether requests come turn by turn.
        """
        c, whole = self._config, sharding_lib.replicated(self._mesh)
        stacked = jax.tree.map(lambda x: shaped(x, NamedSharding(self._mesh, x.sharding.spec)), params)
        weights = self._as_read(kv_cache.unstacked_shapes(stacked, c.model, self._mesh), shaped)
        prompts, slots = shaped(self._init.lower().out_info, slots_lib.shardings(c, self._mesh))
        table = None if self._stop_strings is None else shaped(self._stop_strings.next_state, whole)
        order, arrivals, number = self._oldest_first(), self._arrivals_of([], tokens=c.prompt_length), np.int32(1)
        found = {
            "caches": Program(function=self._init, arguments=()),
            # One parameter after the other.
            "weights as decoded with": Program(function=self._unstack, arguments=(kv_cache.largest(stacked),)),
            "prefill": Program(function=self._prefill, arguments=(weights, prompts, slots, order, arrivals, table)),
            "decode": Program(
                function=self._decode,
                arguments=(weights, prompts, slots, order, number, number, table),
                options=dict(buffers=c.buffers, window=self._windows[-1]),
            ),
        }
        if parks:
            after = weights, prompts, slots, order, self._arrivals_of([], tokens=self._short_buckets[-1]), table
            found["prefill after parked tokens"] = Program(function=self._prefill, arguments=after, options=dict(after=True))
        if len(self._windows) > 1 and not c.tiled:  # a part of a ring is copied there, the whole is not
            part = dict(buffers=c.buffers, window=self._windows[-2])
            found["decode, part of a ring"] = dataclasses.replace(found["decode"], options=part)
        if len(self._windows) > 1:
            rotated = dict(window=self._windows[-2])
            found["rotation of a ring"] = Program(function=self._rotate, arguments=(slots.own[0], number), options=rotated)
        return found

    def prepare(self, params: Params) -> Params:
        """`params` on this lane's devices, unstacked."""

        def place(leaf: jax.Array | np.ndarray) -> jax.Array:
            sharding = getattr(leaf, "sharding", None)
            split = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
            return jax.device_put(leaf, NamedSharding(self._mesh, split))

        return self._as_read(self._unstack(jax.tree.map(place, params)), functools.partial(jax.device_put, donate=True))

    def _as_read(self, weights: Params, put: Callable[[Any, Any], Any]) -> Params:
        """The weights in the layout that the decode step reads. Args: put: see kv_cache.head_by_head."""
        return kv_cache.head_by_head(weights, self._config.model, put) if self._config.tiled else weights

    def hand_over(self, weights: Params, step: int) -> None:
        """Sets `incoming`."""
        with self._lock:
            self.incoming = (weights, step)

    def take_up(self) -> None:
        """From now on decodes with the weights that were handed over last. A lane that drains ends its running samples first."""
        if self._drains and self.incoming is not None:  # what is begun with new weights has a cache of theirs
            for buffer in list(self._parked):
                self.unpark(buffer)
        with self._lock:
            if self.incoming is None or (self._drains and self._parts):
                return
            (weights, step), self.incoming = self.incoming, None
        if self._in_place:  # each parameter into the memory that the one in use leaves
            for part in kv_cache.one_by_one(weights):
                kv_cache.release(self._weights, part, self._config.model)
                kv_cache.add(self._weights, self.prepare(part))
                part.clear()
                jax.block_until_ready(self._weights)
        else:
            self._weights = weights
        self._weight_bytes = requests_lib.weight_bytes(self._weights, self._config.model)
        self.policy_step = step

    @property
    def is_open(self) -> bool:
        """Whether free buffers may be filled: not before new weights are taken up."""
        return self.incoming is None

    def free(self) -> list[tuple[int, int]]:
        """The free buffers (group, buffer) that may be filled; those of groups that have no part come first, and those where
        something is parked last, what has been there the longest before the others."""
        if not self.is_open:
            return []
        u, j = np.nonzero(~self._filled.T)
        order = np.argsort(self._filled.sum(axis=1)[j], kind="stable")
        found = zip(j[order].tolist(), u[order].tolist(), strict=True)
        return [*(each for each in found if each not in self._parked), *self._parked]

    def put(self, group: int, buffer: int, part: Part) -> None:
        """Fills a free buffer. What another conversation has parked there is lost."""
        request, old = part.ticket.request, self.unpark((group, buffer))
        goes_on = old is not None and old is request.parked and len(request.context) - old.tokens <= self._short_buckets[-1]
        self._kept[group, buffer] = old.tokens if old is not None and goes_on else 0
        self._filled[group, buffer], self._filled_at[group, buffer] = True, self._filled_at.max() + 1
        self._parts[group, buffer] = part
        self._arrived.append((group, buffer))

    def unpark(self, buffer: tuple[int, int]) -> Parked | None:
        """Lets go of what is parked in a free buffer, if anything is, and returns it."""
        old = self._parked.pop(buffer, None)
        if old is not None:
            old.lane = None
        return old

    def begin(self, *, refills: bool) -> bool:
        """Sends a chunk to the devices; `finish` fetches its tokens. Returns whether there is anything to decode.

        Args: refills: whether a prompt is likely to wait for a buffer that becomes free.
        """
        for after in (False, True):
            arrived = [buffer for buffer in self._arrived if (self._kept[buffer] > 0) == after]
            for first in range(0, len(arrived), self._arrivals):
                self._prefill_into(arrived[first : first + self._arrivals], after=after)
        self._arrived = []
        if not self._parts:
            return False
        # Free buffers are a reason to stop decoding only where prompts wait for them.
        enough = self._arrivals if refills else self._config.groups * self._config.buffers + 1
        window = self._fit_ring()
        buffers = 1 + max(u for _, u in self._parts) if self._lockstep else self._config.buffers
        self._step_bytes = requests_lib.step_bytes(self._config, self._weight_bytes, buffers=buffers, window=window)
        self._slots, self._trace = self._decode(
            self._weights,
            self._prompts,
            self._slots,
            self._oldest_first(),
            np.int32(self._ring.position),
            np.int32(enough),
            self._stop_table,
            buffers=buffers,
            window=window,
        )
        return True

    @property
    def is_ready(self) -> bool:
        """Whether the devices have ended the chunk that was begun."""
        return self._trace.place.is_ready()

    def finish(self) -> None:
        """Waits for the chunk that was begun, and hands out generations that are whole."""
        for filled_buffers, tokens in self._first:
            self._note_first(filled_buffers, jax.device_get(tokens))
        self._first = []
        self._note(jax.device_get(self._trace), self._step_bytes)
        self._trace = None
        self._release()
        if not self._parts:
            self._ring.begin()

    def _fit_ring(self) -> int:
        """The window of the next chunk. Rotates the rings where they must be rotated before."""
        made = np.where(self._status == slots_lib.RUNNING, self._made.length - self._given - 1, 0)
        window = self._ring.window
        by = self._ring.choose(int(made.max()))
        if by:
            # Layer by layer: one layer at a time is there twice.
            own = tuple(self._rotate(layer, np.int32(by), window=window) for layer in self._slots.own)
            self._slots = dataclasses.replace(self._slots, own=own)
        return self._ring.window

    def in_use(self, group: int) -> int:
        """How many buffers of a group hold a part."""
        return int(np.count_nonzero(self._filled[group]))

    def _oldest_first(self) -> np.ndarray:
        """int32[J, U], see decode_loop.prefill."""
        return np.argsort(self._filled_at, axis=1).astype(np.int32)

    @property
    def empty_groups(self) -> int:
        """How many groups hold no part and may be given one."""
        return len(self._filled) - int(np.count_nonzero(self._filled.any(axis=1)))

    def _prefill_into(self, buffers: Sequence[tuple[int, int]], *, after: bool) -> None:
        """One prefill call, of buffers that have kept tokens (`after`) or of others. Its first tokens are fetched once the decode
        call after it has been sent."""
        if self._slots is None:
            self._prompts, self._slots = self._init()
            self._made = requests_lib.empty(self._status.shape, response_length=self._config.response_length, pad_id=self._pad_id)
            if self._stop_strings is not None:
                self._stop_table = jax.device_put(self._stop_strings.next_state, sharding_lib.replicated(self._mesh))
        parts = [(buffer, self._parts[buffer]) for buffer in buffers]
        longest = max(len(part.ticket.request.context) - self._kept[buffer] for buffer, part in parts)
        buckets = self._short_buckets if after else self._buckets
        arrivals = self._arrivals_of(parts, tokens=next(bucket for bucket in buckets if bucket >= longest))
        self.usage.prefilled += arrivals.tokens.size
        lengths, kept = arrivals.length[arrivals.valid].tolist(), arrivals.kept[arrivals.valid].tolist()
        self.usage.prompt_tokens += sum(lengths) - sum(kept)
        self.usage.flops += requests_lib.prefill_flops(self._config.model, lengths, kept)
        self._prompts, self._slots, first = self._prefill(
            self._weights, self._prompts, self._slots, self._oldest_first(), arrivals, self._stop_table, after=after
        )
        for (j, u), part in parts:
            at = self._places(j, u, part)
            self._status[at], self._given[at] = slots_lib.RUNNING, part.given
            part.begin(self._made, at)
            self._made.length[at] += 1
        self._first.append((tuple(buffers), first))

    def _arrivals_of(self, parts: Sequence[tuple[tuple[int, int], Part]], *, tokens: int) -> Arrivals:
        """((group, buffer), part) each, as `prefill` takes them: padded to the prompts of a call, of `tokens` tokens each."""
        I, K = self._arrivals, self._config.places
        made = Arrivals(
            group=np.zeros(I, np.int32),
            buffer=np.zeros(I, np.int32),
            valid=np.zeros(I, bool),
            tokens=np.full((I, tokens), self._pad_id, np.int32),
            kept=np.zeros(I, np.int32),
            length=np.ones(I, np.int32),
            given=np.zeros(I, np.int32),
            stop_state=np.zeros(I, np.int32),
            samples=Samples(
                key=np.zeros((I, K, 2), np.uint32),
                sampling=sampling_lib.constant((I, K), temperature=1.0),
                limit=np.zeros((I, K), np.int32),
            ),
        )
        for i, (buffer, part) in enumerate(parts):
            request, context, kept = part.ticket.request, part.ticket.request.context, int(self._kept[buffer])
            made.group[i], made.buffer[i], made.valid[i], made.kept[i] = *buffer, True, kept
            made.tokens[i, : len(context) - kept], made.length[i], made.given[i] = context[kept:], len(context), part.given
            if self._stop_strings is not None:
                made.stop_state[i] = self._stop_strings.run(request.begun)
            made.samples.key[i, : part.count] = request.keys[part.rows]
            made.samples.limit[i, : part.count] = part.ticket.limit[part.rows]
            for name, given in vars(request.sampling).items():
                getattr(made.samples.sampling, name)[i, : part.count] = given[part.rows]
        return made

    def _note_first(self, buffers: Sequence[tuple[int, int]], tokens: Tokens) -> None:
        """Notes the first tokens of the samples that were prefilled into buffers. Args: tokens: leaves [I, K]."""
        parts, (j, u), K = [self._parts[buffer] for buffer in buffers], np.array(buffers).T, self._config.places
        i, k = np.nonzero(np.arange(K) < np.array([part.count for part in parts])[:, None])
        given = np.array([part.given for part in parts])
        self._write(j[i], u[i] * K + k, given[i], jax.tree.map(lambda x: x[i, k], tokens))

    def _note(self, trace: slots_lib.Trace, step_bytes: int) -> None:
        """Notes the tokens of one decode call. Args: step_bytes: that each of its steps read."""
        at = steps, j, _ = np.nonzero(trace.place >= 0)
        taken = len(np.unique(steps))
        self._ring.advance(taken)
        self.usage.slot_steps += trace.place[0].size * taken
        self.usage.useful += len(steps)
        self.usage.bytes += step_bytes * taken
        self._write(j, trace.place[at], trace.count[at], jax.tree.map(lambda x: x[at], trace.tokens))

    def _write(self, group: np.ndarray, place: np.ndarray, count: np.ndarray, tokens: Tokens) -> None:
        """Notes n tokens: token i is response token count[i] of place[i] in group[i], int[n], in the order of each place."""
        broken = ~np.isfinite(tokens.policy_logprob)
        if broken.any():
            first = int(broken.argmax())
            part = self._parts[int(group[first]), int(place[first]) // self._config.places]
            raise FloatingPointError(
                f"the logits of policy step {self.policy_step} are not finite at response token {count[first]} of query "
                f"{part.ticket.request.name}"
            )
        made, at = self._made, (group, place, count)
        made.tokens[at], made.policy_step[at] = tokens.token, self.policy_step
        made.policy_logprobs[at], made.behavior_logprobs[at] = tokens.policy_logprob, tokens.behavior_logprob
        made.length[group, place], self._status[group, place] = count + 1, tokens.status

    def _places(self, group: int, buffer: int, part: Part) -> tuple[int, slice]:
        """Where the samples of a part in a buffer stand in arrays [J, X]."""
        first = buffer * self._config.places
        return group, slice(first, first + part.count)

    def _release(self) -> None:
        """Frees the buffers of parts whose samples have all ended."""
        K = self._config.places
        ended = (self._status != slots_lib.RUNNING).reshape(self._config.groups, self._config.buffers, K).all(axis=2)
        for (j, u), part in [item for item in self._parts.items() if ended[item[0]]]:
            at, prompt = self._places(j, u, part), len(part.ticket.request.context)
            drawn = self._made.length[at] - part.given
            self.usage.flops += requests_lib.decode_flops(self._config.model, prompt=prompt, drawn=drawn)
            self._made.finished[at] = self._status[at] == slots_lib.FINISHED
            part.end(self._made, at)
            self._filled[j, u] = False
            del self._parts[j, u]
            if (parked := part.ticket.request.parked) is not None:
                self._parked[j, u] = parked
                parked.lane, parked.buffer, parked.tokens = self, (j, u), prompt
