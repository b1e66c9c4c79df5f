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
from tba_jax.decoding import decode_loop, sizes
from tba_jax.decoding import slots as slots_lib
from tba_jax.decoding.requests import Part, arrivals_of
from tba_jax.decoding.sizes import Ring
from tba_jax.decoding.slots import Arrivals, SlotsConfig, Tokens, Usage
from tba_jax.models import kv_cache
from tba_jax.models.parameters import Params
from tba_jax.programs import Program, shaped
from tba_jax.text.stop_strings import StopStrings


class Lane:
    """Slots on one way of the mesh. One thread uses it; another may set `incoming`.

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
        """
        Args:
          stop_strings: the automaton whose table the config names.
          drains: new weights wait until the running samples have ended; else they take over at the next chunk.
          in_place: incoming weights are stacked, on any devices, and replace those in use one by one, see Engine.
          lockstep: see Engine. arrivals: I, prompts of one prefill call.
        """
        self._config, self._mesh, self._pad_id = config, mesh, pad_id
        self._stop_strings, self._lockstep, self._arrivals = stop_strings, lockstep, arrivals
        self._drains, self._in_place = drains, in_place
        self.usage = Usage()
        self.policy_step = -1
        self.incoming: tuple[Params, int] | None = None
        self._lock = threading.Lock()  # over `incoming`
        self._weights: Params = {}
        self._weight_bytes = 0
        self._windows = sizes.windows(config.own_entries, config.chunk, tiled=config.tiled)
        self._ring = Ring(self._windows, config.chunk, lockstep=lockstep)
        self._buckets = sizes.buckets(config.prompt_length)
        # The sizes that the state may have, falling, and which of them it has; the groups that it holds.
        self._sizes = [config, *sizes.narrower(config)]
        self._size = 0
        self._groups = np.arange(config.groups)
        # (group, buffer) -> the part in it; a free buffer has no entry.
        self._parts: dict[tuple[int, int], Part] = {}
        # When each buffer was filled, as a count of fills.
        self._filled_at = np.zeros((config.groups, config.buffers), np.int64)
        # Buffers that were filled and not prefilled yet.
        self._arrived: list[tuple[int, int]] = []
        # What the running call is to give, and the bytes that each of its steps reads.
        self._trace: Any = None
        self._step_bytes = 0
        # Buffers that were prefilled, and their first tokens, which are on their way from the device.
        self._first: list[tuple[tuple[tuple[int, int], ...], Tokens]] = []
        # Of the samples in the places [J, X]: status, response tokens so far, given ones, and the most that there may be.
        places = (config.groups, config.buffers * config.places)
        self._status = np.full(places, slots_lib.CUT, np.int32)
        self._length, self._given, self._limit = (np.zeros(places, np.int32) for _ in range(3))
        # The programs that make and change the state on the devices. The state itself is made by the first prefill.
        on_mesh = functools.partial(sharding_lib.on_mesh, self._mesh)
        self._made = [
            {name: on_mesh(function) for name, function in decode_loop.make_programs(config, mesh).items()}
            for config in self._sizes
        ]
        self._init, self._prefill, self._unstack = (self._made[0][name] for name in ("init", "prefill", "unstack"))
        self._decode = [made["decode"] for made in self._made]
        self._rotate = [made["rotate"] for made in self._made]
        self._prompts: Any = None
        self._slots: Any = None
        self._stop_table: Any = None

    def _make_state(self) -> None:
        self._prompts, self._slots = self._init()
        if self._stop_strings is not None:
            self._stop_table = jax.device_put(self._stop_strings.next_state, sharding_lib.replicated(self._mesh))

    def programs(self, params: Params) -> dict[str, Program]:
        """Name -> the programs of this lane: of prompts, the longest bucket, and of windows, the whole caches.

        The rings of the whole caches are never rotated: the next smaller window stands for the rotation.

        Args: params: shapes of what `prepare` takes, on any mesh.
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
                function=self._decode[0],
                arguments=(weights, prompts, slots, order, number, number, table),
                options=dict(buffers=c.buffers, window=self._windows[-1]),
            ),
        }
        if len(self._windows) > 1 and not c.tiled:  # a part of a ring is copied there, the whole is not
            part = dict(buffers=c.buffers, window=self._windows[-2])
            found["decode, part of a ring"] = dataclasses.replace(found["decode"], options=part)
        if len(self._windows) > 1:
            rotated = dict(window=self._windows[-2])
            found["rotation of a ring"] = Program(function=self._rotate[0], arguments=(slots.own[0], number), options=rotated)
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
        with self._lock:
            if self.incoming is None or (self._drains and self._parts):
                return
            (weights, step), self.incoming = self.incoming, None
        if self._in_place:
            self._replace_weights(weights)
        else:
            self._weights = weights
        self._weight_bytes = slots_lib.weight_bytes(self._weights, self._config.model)
        self.policy_step = step

    def _replace_weights(self, params: Params) -> None:
        """Takes the parameters out of `params`, and each into the memory that the one in use leaves."""
        for part in kv_cache.one_by_one(params):
            kv_cache.release(self._weights, part, self._config.model)
            kv_cache.add(self._weights, self.prepare(part))
            part.clear()
            jax.block_until_ready(self._weights)

    @property
    def is_open(self) -> bool:
        """Whether free buffers may be filled: not before new weights are taken up, and not in fewer slots."""
        return self.incoming is None and not self._size

    def free(self) -> list[tuple[int, int]]:
        """The free buffers (group, buffer) that may be filled; those of groups that have no part come first."""
        if not self.is_open:
            return []
        c = self._config
        free = [(j, u) for u in range(c.buffers) for j in range(c.groups) if (j, u) not in self._parts]
        return sorted(free, key=lambda buffer: self.in_use(buffer[0]))

    def put(self, group: int, buffer: int, part: Part) -> None:
        """Fills a free buffer."""
        self._filled_at[group, buffer] = self._filled_at.max() + 1
        self._parts[group, buffer] = part
        self._arrived.append((group, buffer))

    def begin(self, *, refills: bool, last: bool) -> bool:
        """Sends a chunk to the devices; `finish` fetches its tokens. Returns whether there is anything to decode.

        Args:
          refills: whether a prompt is likely to wait for a buffer that becomes free.
          last: whether no prompts are left, for any lane.
        """
        for first in range(0, len(self._arrived), self._arrivals):
            self._prefill_into(self._arrived[first : first + self._arrivals])
        self._arrived = []
        if not self._parts:
            return False
        # Free buffers are a reason to stop decoding only where prompts wait for them, or where fewer slots are then enough.
        enough = self._arrivals if refills else len(self._groups) * self._config.buffers + 1
        if last:
            self._narrow()
            enough = self._enough_to_narrow() or enough
        window, buffers, config = self._fit_ring(), self._buffers_in_use(), self._sizes[self._size]
        self._step_bytes = slots_lib.step_bytes(config, self._weight_bytes, buffers=buffers, window=window)
        self._slots, self._trace = self._decode[self._size](
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
            self._widen()

    def _running(self) -> np.ndarray:
        """int[J], the samples of each group that have not ended."""
        return np.count_nonzero(self._status == slots_lib.RUNNING, axis=1)

    def _goes_on(self) -> bool:
        """Whether a sample may run for long enough that fewer slots are worth a move."""
        left = np.where(self._status == slots_lib.RUNNING, self._limit - self._length, 0)
        return int(left.max()) >= sizes.WORTHWHILE_STEPS

    def _narrow(self) -> None:
        """Moves the running samples into fewer slots where they fit; layer by layer, so that one is there twice at a time."""
        running = self._running()
        fitting = [i for i, config in enumerate(self._sizes) if i > self._size and sizes.holds(config, running)]
        if not fitting or not self._goes_on():
            return
        self._size = fitting[-1]
        # Positions of the groups among those that the state holds: the ones that run come first.
        chosen = np.argsort(running[self._groups] == 0, kind="stable")[: self._sizes[self._size].groups].astype(np.int32)
        made = self._made[self._size]
        prompts, own = list(self._prompts.cache), list(self._slots.own)
        small = dataclasses.replace(self._prompts, cache=()), dataclasses.replace(self._slots, own=())
        self._prompts = self._slots = None
        new_prompts, new_slots, rows = made["move"](*small, chosen)
        for i in range(len(own)):
            prompts[i], own[i] = made["move_prompt"](prompts[i], chosen), made["move_own"](own[i], rows)
        self._prompts = dataclasses.replace(new_prompts, cache=tuple(prompts))
        self._slots = dataclasses.replace(new_slots, own=tuple(own))
        self._groups = self._groups[chosen]

    def _enough_to_narrow(self) -> int:
        """How many free buffers let the running samples move into fewer slots; 0 where that does not depend on free buffers."""
        if self._size + 1 == len(self._sizes) or self._config.buffers > 1 or not self._goes_on():
            return 0
        return len(self._groups) - self._sizes[self._size + 1].groups

    def _widen(self) -> None:
        """Back to all slots, which are idle."""
        if not self._size:
            return
        self._size, self._groups = 0, np.arange(self._config.groups)
        self._prompts = self._slots = None

    def _buffers_in_use(self) -> int:
        """How many buffers of each group the next chunk reads, from the first on."""
        return 1 + max(u for _, u in self._parts) if self._lockstep else self._config.buffers

    def _fit_ring(self) -> int:
        """The window of the next chunk. Rotates the rings where they must be rotated before."""
        made = np.where(self._status == slots_lib.RUNNING, self._length - self._given - 1, 0)
        window = self._ring.window
        by = self._ring.choose(int(made.max()))
        if by:
            # Layer by layer, so that the copies of one layer are there at a time.
            rotate = self._rotate[self._size]
            own = tuple(rotate(layer, np.int32(by), window=window) for layer in self._slots.own)
            self._slots = dataclasses.replace(self._slots, own=own)
        return self._ring.window

    def in_use(self, group: int) -> int:
        """How many buffers of a group hold a part."""
        return sum((group, u) in self._parts for u in range(self._config.buffers))

    def _oldest_first(self) -> np.ndarray:
        """int32[J, U], for the groups that the state holds: see decode_loop.prefill."""
        return np.argsort(self._filled_at[self._groups], axis=1).astype(np.int32)

    @property
    def empty_groups(self) -> int:
        """How many groups hold no part and may be given one."""
        return 0 if self._size else sum(not self.in_use(group) for group in range(self._config.groups))

    def _prefill_into(self, buffers: Sequence[tuple[int, int]]) -> None:
        """One prefill call. Its first tokens are fetched once the decode call after it has been sent, so as not to wait twice."""
        if self._slots is None:
            self._make_state()
        parts = [(buffer, self._parts[buffer]) for buffer in buffers]
        longest = max(len(part.ticket.request.context) for _, part in parts)
        arrivals = self._arrivals_of(parts, tokens=next(bucket for bucket in self._buckets if bucket >= longest))
        self.usage.prefilled += arrivals.tokens.size
        lengths = arrivals.length[arrivals.valid].tolist()
        self.usage.prompt_tokens += sum(lengths)
        self.usage.flops += slots_lib.prefill_flops(self._config.model, lengths)
        self._prompts, self._slots, first = self._prefill(
            self._weights, self._prompts, self._slots, self._oldest_first(), arrivals, self._stop_table
        )
        K = self._config.places
        for (j, u), part in parts:
            places = slice(u * K, (u + 1) * K)
            self._status[j, places] = np.where(np.arange(K) < part.count, slots_lib.RUNNING, slots_lib.CUT)
            self._given[j, places], self._length[j, places] = part.given, part.given + 1
            self._limit[j, u * K : u * K + part.count] = part.ticket.limit[part.rows]
        self._first.append((tuple(buffers), first))

    def _arrivals_of(self, parts: Sequence[tuple[tuple[int, int], Part]], *, tokens: int) -> Arrivals:
        its: dict[str, Any] = dict(config=self._config, stop_strings=self._stop_strings, pad_id=self._pad_id)
        return arrivals_of(parts, prompts=self._arrivals, tokens=tokens, **its)

    def _note_first(self, buffers: Sequence[tuple[int, int]], tokens: Tokens) -> None:
        """Notes the first tokens of the samples that were prefilled into buffers. Args: tokens: leaves [I, K]."""
        K = self._config.places
        for i, (j, u) in enumerate(buffers):
            part = self._parts[j, u]
            place = u * K + np.arange(part.count)
            count = np.full(part.count, part.given)
            self._write(np.full(part.count, j), place, count, jax.tree.map(lambda x, i=i, n=part.count: x[i, :n], tokens))

    def _note(self, trace: slots_lib.Trace, step_bytes: int) -> None:
        """Notes the tokens of one decode call. Args: step_bytes: that each of its steps read."""
        at = steps, j, _ = np.nonzero(trace.place >= 0)
        taken = len(np.unique(steps))
        self._ring.advance(taken)
        self.usage.slot_steps += trace.place[0].size * taken
        self.usage.useful += len(steps)
        self.usage.bytes += step_bytes * taken
        self._write(self._groups[j], trace.place[at], trace.count[at], jax.tree.map(lambda x: x[at], trace.tokens))

    def _write(self, group: np.ndarray, place: np.ndarray, count: np.ndarray, tokens: Tokens) -> None:
        """Notes n tokens; several tokens of one place stand in their order.

        Args: group, place, count: int[n]: token i is response token count[i] of place[i] in group[i].

        Raises: FloatingPointError: a log-prob is not finite; names the query.
        """
        broken = ~np.isfinite(tokens.policy_logprob)
        if broken.any():
            first = int(broken.argmax())
            part = self._parts[int(group[first]), int(place[first]) // self._config.places]
            raise FloatingPointError(
                f"the logits of policy step {self.policy_step} are not finite at response token {count[first]} of query "
                f"{part.ticket.request.name}"
            )
        self._length[group, place] = count + 1
        self._status[group, place] = tokens.status
        for (j, u), part in self._parts.items():
            at = np.flatnonzero((group == j) & (place // self._config.places == u))
            of_part = jax.tree.map(lambda x, at=at: x[at], tokens)
            part.write(place[at] % self._config.places, count[at], of_part, self.policy_step)

    def _release(self) -> None:
        """Frees the buffers of parts whose samples have all ended."""
        K = self._config.places
        ended = (self._status != slots_lib.RUNNING).reshape(self._config.groups, self._config.buffers, K).all(axis=2)
        for (j, u), part in [item for item in self._parts.items() if ended[item[0]]]:
            places = slice(u * K, u * K + part.count)
            length = self._length[j, places]
            prompt = len(part.ticket.request.context)
            self.usage.flops += slots_lib.decode_flops(self._config.model, prompt=prompt, drawn=length - part.given)
            part.end(length, self._status[j, places] == slots_lib.FINISHED)
            del self._parts[j, u]
