"""The searcher: generates responses with the newest policy it can get, scores them, and appends them to the replay log."""

import dataclasses
import functools
import hashlib
import logging
import os
import platform
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tba_jax import mesh as mesh_lib
from tba_jax import policy_store, run_config, run_dir, storage, trajectory
from tba_jax.decoding import sampling as sampling_lib
from tba_jax.decoding import stop_strings
from tba_jax.decoding.embeddings import ResponseEmbedder
from tba_jax.decoding.engine import Answer, Engine
from tba_jax.decoding.requests import Request, concatenate
from tba_jax.decoding.rewards import reward_generation
from tba_jax.decoding.slots import row_keys
from tba_jax.decoding.state_values import StateValues
from tba_jax.decoding.stop_strings import StopStrings
from tba_jax.metrics import MetricWriter, TimeAccount
from tba_jax.models import scoring
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.replay.log import LogWriter
from tba_jax.tasks.interface import EncodedQuery, Task
from tba_jax.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def query_order(count: int, *, seed: int, writer: int, epoch: int) -> np.ndarray:
    """int64[count]: the order in which a searcher takes the queries in pass `epoch`, a permutation of its own."""
    return np.random.Generator(np.random.Philox(key=[seed, (writer << 32) | epoch])).permutation(count)


def writer_number(writer: str) -> int:
    """uint32 that stands for a writer id in random keys."""
    return int.from_bytes(hashlib.blake2b(writer.encode(), digest_size=4).digest(), "little")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchReport:
    """One batch: rows written, response tokens in them, mean reward, share that ended by itself, seconds it took.

    policy_step: of the weights in use at its end; slot_idle: share of the decoder's slot-steps so far that gave no token;
    value_tokens: generated besides the rows to value their states.
    """

    rows: int
    tokens: int
    reward: float
    finished: float
    policy_step: int
    slot_idle: float
    seconds: float
    value_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A query that is being answered: the decoder's ticket, and what its rows will say of how they were drawn."""

    query: EncodedQuery
    answer: Answer
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
        contract: run_config.Contract,
        run: run_dir.RunDir,
        *,
        policy: Policy,
        tokenizer: Tokenizer,
        task: Task,
        queries: Sequence[EncodedQuery],
        name: str,
        account: TimeAccount,
    ):
        self._config, self._contract, self._run = config, contract, run
        self._policy, self._tokenizer, self._task, self._queries = policy, tokenizer, task, queries
        self._account = account
        self._mesh = mesh_lib.make_mesh(tuple(config.searchers.mesh.values()), setting="searchers.mesh")
        self._embedder = ResponseEmbedder(config.task.embedding_path, self._mesh) if contract.embedding else None
        self.writer = f"{name}-{uuid.uuid4().hex[:8]}"
        self._writer_number = writer_number(self.writer)
        self._rng = np.random.default_rng([config.seed, self._writer_number])
        s = config.searchers
        self.rows_per_batch = s.queries_per_batch * s.samples_per_query
        self._log = LogWriter(
            run.replay,
            self.writer,
            contract.row_shape(),
            rows_per_append=self.rows_per_batch,
            segment_appends=config.replay.segment_appends,
            info={"host": platform.node(), "pid": os.getpid(), "started": time.time(), "devices": str(self._mesh.devices.size)},
        )
        space = scoring.ResponseSpace.of(contract)
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
            chunk=s.decode_steps,
            batches=config.schedule.mode == "interleaved",
        )
        self._value_states = self._make_state_values(slots)
        self._jit_keys = jax.jit(row_keys)
        score = functools.partial(
            scoring.response_logprobs,
            config=policy.model,
            space=space,
            logit_bytes=(s.logit_megabytes << 20) * self._mesh.size,
            remat="none",
        )
        self._jit_score = mesh_lib.on_mesh(self._mesh, jax.jit(score))
        # What is sampled may take the snapshot's memory where it is the snapshot.
        self._for_sampling = mesh_lib.on_mesh(
            self._mesh,
            jax.jit(
                functools.partial(policy.for_sampling, weights=s.weights),
                donate_argnums=(0,) if policy.lora is None and s.weights == "full" else (),
            ),
        )
        self._snapshot: dict[str, Any] = dict(
            specs=policy.trained_specs, shardings=policy.trained_shardings(self._mesh), dtype=policy.snapshot_dtype
        )
        self._taken = 0
        self._order = np.zeros(0, np.int64)
        self._asked: deque[_Asked] = deque()
        self._newest_step = -1
        self._queries_on_snapshot = 0
        self.reference_id = run_dir.read_json(run.initial_reference)["id"]
        self._reference = policy_store.load(
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
            task=self._task,
            tokenizer=self._tokenizer,
            missing_eos_reward=self._contract.missing_eos_reward,
        )

    def refresh(self) -> bool:
        """Loads the newest snapshot if it is newer than the last and hands it to the decoder. Returns whether there was one.

        May be called from a thread beside the one that searches: the decoder takes the weights up while it runs.
        """
        if not self._engine.swapped:  # one that waits to be taken up is as much as there is memory for
            return False
        newest = policy_store.load_latest(self._run.policies, **self._snapshot, newer_than=self._newest_step)
        if newest is not None:
            self._take(*newest)
        return newest is not None

    def load_step(self, step: int) -> None:
        """Takes up the snapshot of exactly this trainer step."""
        if step != self._newest_step:
            self._take(step, policy_store.load_step(self._run.policies, step, **self._snapshot))

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

    def _next_query(self) -> EncodedQuery:
        """The next query of this searcher's stream: every query once before any comes again."""
        epoch, position = divmod(self._taken, len(self._queries))
        if position == 0:
            self._order = query_order(len(self._queries), seed=self._config.seed, writer=self._writer_number, epoch=epoch)
        self._taken += 1
        return self._queries[self._order[position]]

    def _ask(self) -> None:
        """Hands the next query to the decoder. Its rows are numbered on."""
        samples = self._config.searchers.samples_per_query
        rows = np.arange(self._taken * samples, (self._taken + 1) * samples, dtype=np.uint32)
        query = self._next_query()
        keys = np.asarray(self._jit_keys(np.uint32(self._config.seed), np.uint32(self._writer_number), rows))
        sampling = self._sampling()
        request = Request(name=query.name, prompt=query.prompt, keys=keys, sampling=sampling)
        self._asked.append(_Asked(query, self._engine.submit(request), keys, sampling))
        self._queries_on_snapshot += 1

    def search(self, *, ahead: Callable[[], bool] = lambda: False) -> SearchReport:
        """One batch: queries, responses, rewards, reference log-probs, append.

        Args:
          ahead: whether the decoder may go on with queries of the next batches where it has room.

        Raises:
          OSError: the replay log refused the rows (disk full, say).
          FloatingPointError: the policy or the reference gave log-probs that are not finite; names the query.
        """
        begin = time.monotonic()
        samples, size = self._config.searchers.samples_per_query, self._config.searchers.queries_per_batch
        value_tokens = 0

        def feed() -> bool:
            # A lane that is slow does not let the others run ahead without end.
            if len(self._asked) >= size + self._engine.prompts or not (self._may_ask() and ahead()):
                return False
            self._ask()
            return True

        with self._account.measure("decode"):
            while len(self._asked) < size:
                self._ask()
            batch = [self._asked[i] for i in range(size)]
            generation = concatenate(self._engine.collect([asked.answer for asked in batch], feed=feed))
            for _ in batch:
                self._asked.popleft()
        queries = [asked.query for asked in batch]
        prompts, prompt_length = trajectory.left_pad(
            [query.prompt for query in queries], self._contract.prompt_length, self._contract.pad_id
        )
        with self._account.measure("reference"):
            per_row = (
                np.repeat(prompts, samples, axis=0),
                np.repeat(prompt_length, samples),
                generation.tokens,
                generation.length,
            )
            ref_logprobs, _ = self._jit_score(self._reference, *mesh_lib.put_rows(self._mesh, per_row))
            ref_logprobs = np.asarray(ref_logprobs)
        self._check_finite(ref_logprobs, queries)
        of_rows = [query for query in queries for _ in range(samples)]
        with self._account.measure("reward"):
            texts, scores = reward_generation(
                generation,
                of_rows,
                task=self._task,
                tokenizer=self._tokenizer,
                missing_eos_reward=self._contract.missing_eos_reward,
            )
        count, keys = self.rows_per_batch, np.concatenate([asked.keys for asked in batch])
        sampling = jax.tree.map(lambda *rows: np.concatenate(rows), *[asked.sampling for asked in batch])
        rows = {
            "row": np.arange(self._log.next_row, self._log.next_row + count),
            "query_id": np.repeat(np.array([trajectory.query_id(query.prompt) for query in queries], np.uint64), samples),
            "prompt_tokens": per_row[0],
            "prompt_length": per_row[1],
            "response_tokens": generation.tokens,
            "response_length": generation.length,
            "finished": generation.finished,
            "reward": scores.reward,
            "reward_parts": scores.parts,
            "reward_version": np.full(count, self._contract.reward_version, np.int32),
            "ref_logprobs": ref_logprobs,
            "reference_id": np.full(count, int(self.reference_id, 16), np.uint64),
            "policy_logprobs": generation.policy_logprobs,
            "behavior_logprobs": generation.behavior_logprobs,
            "policy_step": generation.policy_step,
            "key": keys,
            **{field.name: getattr(sampling, field.name) for field in dataclasses.fields(sampling)},
        }
        if self._embedder is not None:
            with self._account.measure("embedding"):
                rows["embedding"] = self._embedder(texts)
        if self._value_states is not None:
            with self._account.measure("values"):
                rows["state_values"], value_tokens = self._value_states(generation, scores.reward, keys, of_rows, feed=feed)
        with self._account.measure("append"):
            self._log.append(rows)
        return SearchReport(
            rows=count,
            tokens=int(generation.length.sum()),
            reward=float(scores.reward.mean()),
            finished=float(generation.finished.mean()),
            policy_step=self._engine.policy_step,
            slot_idle=self._engine.usage.idle,
            seconds=time.monotonic() - begin,
            value_tokens=value_tokens,
        )

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

    def _check_finite(self, ref_logprobs: np.ndarray, queries: Sequence[EncodedQuery]) -> None:
        broken = ~np.isfinite(ref_logprobs).all(1)
        if broken.any():
            first = queries[int(broken.argmax()) // self._config.searchers.samples_per_query]
            raise FloatingPointError(
                f"{broken.sum()} responses have reference log-probs that are not finite; the first to query {first.name}"
            )


class _Refresher:
    """Loads snapshots in a thread while the searcher decodes: it asks storage every `poll_seconds`."""

    def __init__(self, searcher: Searcher, *, poll_seconds: float):
        self._searcher, self._poll_seconds = searcher, poll_seconds
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        # A daemon: the end of the process does not wait for a load.
        threading.Thread(target=self._run, name="refresher", daemon=True).start()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._searcher.refresh()
                self._stopping.wait(self._poll_seconds)
        except BaseException as failure:  # raised again where the searcher looks
            self._failure = failure

    def check(self) -> None:
        """Raises what loading raised."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._stopping.set()


def run_searcher(
    searcher: Searcher, config: Any, run: run_dir.RunDir, *, name: str, account: TimeAccount, stop: Callable[[], bool]
) -> None:
    """Searches until the run has finished or `stop` says so. The batch in flight is completed first."""
    writer = MetricWriter(run.metrics(name))
    poll_seconds = storage.poll_seconds([run.shared], config.searchers.poll_seconds)
    begin, batches = time.monotonic(), 0
    rows = tokens = value_tokens = 0
    with account.measure("load_policy"):
        searcher.refresh()
    refresher = _Refresher(searcher, poll_seconds=poll_seconds)
    try:
        while not stop() and not run_dir.is_finished(run, config.learner.steps):
            refresher.check()
            if not searcher.may_search:
                with account.measure("wait_policy"):
                    time.sleep(poll_seconds)
                continue
            report = searcher.search(ahead=lambda: not stop())
            batches += 1
            if batches == 1:
                # The first batch holds the compilation.
                account.restart()
                begin = time.monotonic()
                log.info("%s writes replay/%s", name, searcher.writer)
                continue
            rows, tokens, value_tokens = rows + report.rows, tokens + report.tokens, value_tokens + report.value_tokens
            elapsed = time.monotonic() - begin
            scalars = {
                "rows_per_second": rows / elapsed,
                "tokens_per_second": tokens / elapsed,
                "reward": report.reward,
                "finished": report.finished,
                "policy_step": report.policy_step,
                "slot_idle": report.slot_idle,
                "rows": report.rows,
                "tokens": report.tokens,
            }
            if value_tokens:
                scalars["value_tokens_per_second"] = value_tokens / elapsed
            writer.write(batches, scalars | account.shares())
    finally:
        refresher.close()
        writer.close()


def wait_for_run(run: run_dir.RunDir, *, poll_seconds: float, stop: Callable[[], bool]) -> bool:
    """Waits until the run has its initial reference. Returns False if `stop` came first."""
    told = False
    while not storage.exists(run.initial_reference):
        if stop():
            return False
        if not told:
            log.info("waiting for the trainer to write %s", run.initial_reference)
            told = True
        time.sleep(storage.poll_seconds([run.shared], poll_seconds))
    return True
