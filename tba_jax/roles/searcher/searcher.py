"""The searcher: generates responses with the newest policy it can get, scores them, and appends them to the replay log."""

import dataclasses
import functools
import os
import platform
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tba_jax import sharding, trajectory
from tba_jax.decoding import sampling as sampling_lib
from tba_jax.decoding.engine import Engine, Ticket
from tba_jax.decoding.requests import Generation, Request, concatenate
from tba_jax.decoding.slots import row_keys
from tba_jax.decoding.state_values import StateValues
from tba_jax.models import scoring
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.replay.log import LogWriter
from tba_jax.rewards.embeddings import ResponseEmbedder
from tba_jax.roles.searcher.appender import Appender, DecodedBatch, SearchReport
from tba_jax.roles.searcher.stream import QueryStream, writer_number
from tba_jax.run import contract as contract_lib
from tba_jax.run import layout, snapshots
from tba_jax.run.metrics import TimeAccount
from tba_jax.tasks.interface import EncodedQuery, Task
from tba_jax.text import stop_strings
from tba_jax.text.stop_strings import StopStrings
from tba_jax.text.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A query that is being answered: the decoder's ticket, and what its rows will say of how they were drawn."""

    query: EncodedQuery
    ticket: Ticket
    keys: np.ndarray
    sampling: sampling_lib.Sampling


class Searcher:
    """One searcher: a mesh, a decoder, policy snapshots, the reference policy, a stream of queries and a log of its own.

    The decoder goes on with the next queries while the last ones of a batch end. Rows are numbered, and appended, in the order
    in which their queries were asked: rows that end early do not overtake long ones, which would bias what the trainer sees.
    """

    def __init__(
        self,
        config: Any,
        contract: contract_lib.Contract,
        run: layout.RunDir,
        *,
        policy: Policy,
        tokenizer: Tokenizer,
        task: Task,
        queries: Sequence[EncodedQuery],
        name: str,
        account: TimeAccount,
    ):
        self._config, self._contract, self._run = config, contract, run
        self._policy, self._tokenizer = policy, tokenizer
        self._account = account
        devices = sharding.policy_devices(config.searchers.task_devices)
        self._mesh = sharding.make_mesh(tuple(config.searchers.mesh.values()), setting="searchers.mesh", devices=devices)
        self._embedder = ResponseEmbedder(config.task.embedding_path, self._mesh) if contract.embedding else None
        self.writer = f"{name}-{uuid.uuid4().hex[:8]}"
        self._writer_number = writer_number(self.writer)
        self._stream = QueryStream(queries, seed=config.seed, writer=self._writer_number)
        self._rng = np.random.default_rng([config.seed, self._writer_number])
        s = config.searchers
        self.rows_per_batch = s.queries_per_batch * s.samples_per_query
        log = LogWriter(
            run.replay,
            self.writer,
            contract.row_shape(),
            rows_per_append=self.rows_per_batch,
            segment_appends=config.replay.segment_appends,
            info={"host": platform.node(), "pid": os.getpid(), "started": time.time(), "devices": str(self._mesh.devices.size)},
        )
        self._appender = Appender(
            log,
            task=task,
            tokenizer=tokenizer,
            missing_eos_reward=contract.missing_eos_reward,
            most_waiting=1 if config.schedule.mode == "interleaved" else s.reward_batches,
        )
        space = contract.response_space()
        slots = s.slots or self.rows_per_batch
        # Of a response that goes on from one of its states, all tokens but the last may be given.
        given_length = contract.response_length - 1 if contract.step_ends else 0
        self._engine = Engine(
            policy.model,
            space,
            self._mesh,
            slots=slots,
            samples=s.samples_per_query,
            prompt_length=max(len(query.prompt) for query in queries) + given_length,
            given_length=given_length,
            response_length=contract.response_length,
            pad_id=contract.pad_id,
            stop_strings=self._automaton(contract.stop_strings),
            swap=s.swap,
            chunk=s.decode_chunk,
            lockstep=config.schedule.mode == "interleaved",
            weights=s.weights,
        )
        self._value_states = self._make_state_values(slots)
        self._jit_keys = jax.jit(row_keys)
        self._jit_score = scoring.scorer(
            self._mesh,
            graphdef=policy.base.graphdef,
            R=contract.response_length,
            space=space,
            logit_megabytes=s.logit_megabytes,
        )
        # What is sampled may take the snapshot's memory where it is the snapshot.
        self._for_sampling = sharding.on_mesh(
            self._mesh,
            jax.jit(
                functools.partial(policy.for_sampling, weights=s.weights),
                donate_argnums=(0,) if policy.lora is None and s.weights == "full" else (),
            ),
        )
        self._snapshot: dict[str, Any] = dict(
            specs=policy.trained_specs, shardings=policy.trained_shardings(self._mesh), dtype=policy.snapshot_dtype
        )
        self._asked: deque[_Asked] = deque()
        self._newest_step = -1
        self._queries_on_snapshot = 0
        self.reference_id = layout.read_json(run.initial_reference)["id"]
        self._reference = snapshots.load(
            run.reference(self.reference_id),
            policy.model_specs,
            policy.model_shardings(self._mesh),
            dtype=policy.model.compute_dtype,
        )

    def _automaton(self, texts: Sequence[str]) -> StopStrings | None:
        return stop_strings.build(self._tokenizer.token_bytes(), texts, vocab=self._policy.model.vocab) if texts else None

    def _make_state_values(self, slots: int) -> StateValues | None:
        s, step_ends = self._config.searchers, self._automaton(self._contract.step_ends)
        if step_ends is None:
            return None
        return StateValues(
            self._engine,
            step_ends=step_ends,
            sampling=self._plain_sampling(s.value_samples),
            most_states=s.value_states,
            samples_per_query=s.samples_per_query,
            states_at_a_time=2 * slots // s.value_samples,
            reward=self._appender.reward,
        )

    def refresh(self) -> bool:
        """Loads the newest snapshot if it is newer than the last and hands it to the decoder. Returns whether there was one.

        May be called from a thread beside the one that searches: the decoder takes the weights up while it runs.
        """
        if not self._engine.swapped:  # one that waits to be taken up is as much as there is memory for
            return False
        newest = snapshots.load_latest(self._run.policies, **self._snapshot, newer_than=self._newest_step)
        if newest is not None:
            self._take(*newest)
        return newest is not None

    def load_step(self, step: int) -> None:
        """Takes up the snapshot of exactly this trainer step."""
        if step != self._newest_step:
            self._take(step, snapshots.load_step(self._run.policies, step, **self._snapshot))

    def _take(self, step: int, snapshot: Params) -> None:
        self._engine.swap(self._engine.prepare(self._for_sampling(snapshot, self._reference)), step)
        self._newest_step, self._queries_on_snapshot = step, 0

    @property
    def may_search(self) -> bool:
        """Whether there are weights, and queries that are being answered or may be asked (searchers.max_rows_per_snapshot)."""
        return self._newest_step >= 0 and (len(self._asked) > 0 or self._may_ask())

    def _may_ask(self) -> bool:
        """Whether a snapshot may be asked another query. The limit counts in whole batches."""
        limit = self._config.searchers.max_rows_per_snapshot
        return (
            not limit or self._queries_on_snapshot < -(-limit // self.rows_per_batch) * self._config.searchers.queries_per_batch
        )

    def _ask(self) -> None:
        """Hands the next query to the decoder. Its rows are numbered on."""
        samples = self._config.searchers.samples_per_query
        rows = np.arange(self._stream.taken * samples, (self._stream.taken + 1) * samples, dtype=np.uint32)
        query = next(self._stream)
        keys = np.asarray(self._jit_keys(np.uint32(self._config.seed), np.uint32(self._writer_number), rows))
        sampling = self._sampling()
        request = Request(name=query.name, prompt=query.prompt, keys=keys, sampling=sampling)
        self._asked.append(_Asked(query, self._engine.submit(request), keys, sampling))
        self._queries_on_snapshot += 1

    def search(self, *, ahead: Callable[[], bool] = lambda: False) -> SearchReport:
        """One batch, which is in the log when this returns. See advance."""
        self.advance(ahead=ahead)
        return self.appended(wait_seconds=None)[-1]

    def advance(self, *, ahead: Callable[[], bool] = lambda: False) -> None:
        """Decodes one batch, has the reference score it, and hands it on to be rewarded and appended.

        Waits where searchers.reward_batches wait for their rewards already.

        Args:
          ahead: whether the decoder may go on with queries of the next batches where it has room.

        Raises:
          FloatingPointError: the policy or the reference gave log-probs that are not finite; names the query.
          Exception: what appended() raises.
        """
        begin = time.monotonic()

        def feed() -> bool:
            # A lane that is slow does not let the others run ahead without end.
            most = self._config.searchers.queries_per_batch + self._engine.prompts
            if len(self._asked) >= most or not (self._may_ask() and ahead()):
                return False
            self._ask()
            return True

        batch, generation = self._decode(feed)
        queries = [asked.query for asked in batch for _ in range(asked.ticket.request.samples)]
        rows = self._rows(batch, generation)
        with self._account.measure("reference"):
            rows["ref_logprobs"] = self._reference_logprobs(rows, queries)
        texts, scores = self._appender.reward(generation, queries)
        if self._embedder is not None:
            with self._account.measure("embedding"):
                rows["embedding"] = self._embedder(texts)
        values = None
        if self._value_states is not None:
            with self._account.measure("values"):
                values = self._value_states(generation, rows["key"], queries, feed=feed)
        policy_step, slot_idle = self._engine.policy_step, self._engine.usage.idle
        with self._account.measure("wait_rewards"):
            self._appender.put(
                DecodedBatch(rows=rows, scores=scores, values=values, policy_step=policy_step, slot_idle=slot_idle, begin=begin)
            )

    def appended(self, *, wait_seconds: float | None = 0.0) -> list[SearchReport]:
        """Of the batches that were appended since the last call.

        Args: wait_seconds: so long for those that were decoded; None: for as long as it takes.

        Raises:
          OSError: the replay log refused the rows (disk full, say).
          Exception: whatever the task's rewards raised.
        """
        with self._account.measure("wait_rewards"):
            return self._appender.appended(wait_seconds=wait_seconds)

    def close(self) -> None:
        """Ends the threads that reward and append."""
        self._appender.close()

    def _decode(self, feed: Callable[[], bool]) -> tuple[list[_Asked], Generation]:
        """The next queries_per_batch queries, and the responses to them."""
        size = self._config.searchers.queries_per_batch
        with self._account.measure("decode"):
            while len(self._asked) < size:
                self._ask()
            batch = [self._asked[i] for i in range(size)]
            generation = concatenate(self._engine.collect([asked.ticket for asked in batch], feed=feed))
            for _ in batch:
                self._asked.popleft()
        return batch, generation

    def _rows(self, batch: Sequence[_Asked], generation: Generation) -> dict[str, np.ndarray]:
        """The columns that decoding gives."""
        samples = self._config.searchers.samples_per_query
        columns = trajectory.token_columns(
            [asked.query.prompt for asked in batch for _ in range(samples)],
            [tokens[:length] for tokens, length in zip(generation.tokens, generation.length, strict=True)],
            prompt_length=self._contract.prompt_length,
            response_length=self._contract.response_length,
            pad_id=self._contract.pad_id,
        )
        query_id = np.array([trajectory.query_id(asked.query.prompt) for asked in batch], np.uint64)
        sampling = jax.tree.map(lambda *rows: np.concatenate(rows), *[asked.sampling for asked in batch])
        count = self.rows_per_batch
        return {
            "query_id": np.repeat(query_id, samples),
            **columns,
            "finished": generation.finished,
            "reward_version": np.full(count, self._contract.reward_version, np.int32),
            "reference_id": np.full(count, int(self.reference_id, 16), np.uint64),
            "policy_logprobs": generation.policy_logprobs,
            "behavior_logprobs": generation.behavior_logprobs,
            "policy_step": generation.policy_step,
            "key": np.concatenate([asked.keys for asked in batch]),
            **{field.name: getattr(sampling, field.name) for field in dataclasses.fields(sampling)},
        }

    def _reference_logprobs(self, rows: Mapping[str, np.ndarray], queries: Sequence[EncodedQuery]) -> np.ndarray:
        """float32[B, R], nats, 0 where masked. Raises FloatingPointError naming the query where one is not finite."""
        inputs = tuple(rows[name] for name in ("tokens", "prompt_length", "response_length"))
        logprobs = np.asarray(self._jit_score(self._reference, *sharding.put_rows(self._mesh, inputs))[0])
        broken = ~np.isfinite(logprobs).all(1)
        if broken.any():
            raise FloatingPointError(
                f"{broken.sum()} responses have reference log-probs that are not finite; the first to query "
                f"{queries[int(broken.argmax())].name}"
            )
        return logprobs

    def _plain_sampling(self, rows: int) -> sampling_lib.Sampling:
        s = self._config.sampling
        return sampling_lib.constant(rows, temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p)

    def _sampling(self) -> sampling_lib.Sampling:
        """Of the samples of one query."""
        s = self._config.sampling
        return sampling_lib.explore(
            self._plain_sampling(self._config.searchers.samples_per_query),
            self._rng,
            temperature_probability=s.explore_temperature_probability,
            temperature_factor=s.explore_temperature_factor,
            top_p_probability=s.explore_top_p_probability,
            top_p_low=s.explore_top_p_low,
        )
