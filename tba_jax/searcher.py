"""The searcher: generates responses with the newest policy it can get, scores them, and appends them to the replay log."""

import dataclasses
import functools
import hashlib
import logging
import os
import platform
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tba_jax import mesh as mesh_lib
from tba_jax import policy_store, run_config, run_dir, storage, trajectory
from tba_jax.decoding import generate as generate_lib
from tba_jax.decoding import sampling as sampling_lib
from tba_jax.decoding.embeddings import ResponseEmbedder
from tba_jax.decoding.rewards import reward_generation
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
    """One batch: rows written, response tokens in them, mean reward, share that ended by itself, seconds it took."""

    rows: int
    tokens: int
    reward: float
    finished: float
    policy_step: int
    seconds: float


class Searcher:
    """One searcher: a mesh, a policy snapshot, the reference policy, a stream of queries and a log of its own."""

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
        self.rows_per_batch = config.searchers.queries_per_batch * config.searchers.samples_per_query
        self._log = LogWriter(
            run.replay,
            self.writer,
            contract.row_shape(),
            rows_per_append=self.rows_per_batch,
            segment_appends=config.replay.segment_appends,
            info={"host": platform.node(), "pid": os.getpid(), "started": time.time(), "devices": str(self._mesh.devices.size)},
        )
        generate = functools.partial(
            generate_lib.generate,
            config=policy.model,
            samples_per_query=config.searchers.samples_per_query,
            response_length=contract.response_length,
            eos_id=contract.eos_id,
            pad_id=contract.pad_id,
            banned_tokens=tuple(contract.banned_tokens),
            scoring_temperature=contract.scoring_temperature,
        )
        # One program for all searchers: what tells them apart is an argument, so a compilation cache serves them all.
        self._jit_generate = mesh_lib.on_mesh(
            self._mesh, jax.jit(generate, static_argnames="truncating", out_shardings=mesh_lib.rows_sharding(self._mesh))
        )
        self._jit_keys = jax.jit(generate_lib.row_keys)
        score = functools.partial(
            scoring.response_logprobs,
            config=policy.model,
            temperature=contract.scoring_temperature,
            banned_tokens=tuple(contract.banned_tokens),
            logit_bytes=(config.searchers.logit_megabytes << 20) * self._mesh.size,
            remat="none",
        )
        self._jit_score = mesh_lib.on_mesh(self._mesh, jax.jit(score))
        self._for_sampling = mesh_lib.on_mesh(
            self._mesh, jax.jit(functools.partial(policy.for_sampling, weights=config.searchers.weights))
        )
        self._snapshot: dict[str, Any] = dict(
            specs=policy.trained_specs, shardings=policy.trained_shardings(self._mesh), dtype=policy.snapshot_dtype
        )
        self._taken = 0
        self._order = np.zeros(0, np.int64)
        self.policy_step = -1
        self._weights: Params = {}
        self.reference_id = run_dir.read_json(run.initial_reference)["id"]
        self._reference = policy_store.load(
            run.reference(self.reference_id),
            policy.model_specs,
            policy.model_shardings(self._mesh),
            dtype=policy.model.compute_dtype,
        )

    def refresh(self) -> bool:
        """Takes up the newest snapshot if it is newer than the one in use. Returns whether there was one."""
        newest = policy_store.load_latest(self._run.policies, **self._snapshot, newer_than=self.policy_step)
        if newest is not None:
            self._take(*newest)
        return newest is not None

    def load_step(self, step: int) -> None:
        """Takes up the snapshot of exactly this trainer step."""
        if step != self.policy_step:
            self._take(step, policy_store.load_step(self._run.policies, step, **self._snapshot))

    def _take(self, step: int, snapshot: Params) -> None:
        self.policy_step, self._weights = step, self._for_sampling(snapshot, self._reference)

    def _next_queries(self) -> list[EncodedQuery]:
        """The next queries of this searcher's stream: every query once before any comes again."""
        chosen: list[EncodedQuery] = []
        while len(chosen) < self._config.searchers.queries_per_batch:
            epoch, position = divmod(self._taken, len(self._queries))
            if position == 0:
                self._order = query_order(len(self._queries), seed=self._config.seed, writer=self._writer_number, epoch=epoch)
            chosen.append(self._queries[self._order[position]])
            self._taken += 1
        return chosen

    def search(self) -> SearchReport:
        """One batch: queries, responses, rewards, reference log-probs, append.

        Raises:
          OSError: the replay log refused the rows (disk full, say).
          FloatingPointError: the policy produced non-finite log-probs; names the first query.
        """
        begin = time.monotonic()
        samples = self._config.searchers.samples_per_query
        queries = self._next_queries()
        prompts, prompt_length = trajectory.left_pad(
            [query.prompt for query in queries], self._contract.prompt_length, self._contract.pad_id
        )
        row_numbers = np.arange(self._log.next_row, self._log.next_row + self.rows_per_batch)
        sampling = self._sampling()
        with self._account.measure("decode"):
            keys = np.asarray(self._jit_keys(self._config.seed, np.uint32(self._writer_number), row_numbers.astype(np.uint32)))
            on_device = mesh_lib.put_rows(self._mesh, (prompts, prompt_length, keys, sampling))
            generation = self._jit_generate(self._weights, *on_device, truncating=sampling_lib.is_truncating(sampling))
            generation = jax.device_get(generation)
        with self._account.measure("reference"):
            per_row = (
                np.repeat(prompts, samples, axis=0),
                np.repeat(prompt_length, samples),
                generation.tokens,
                generation.length,
            )
            ref_logprobs, _ = self._jit_score(self._reference, *mesh_lib.put_rows(self._mesh, per_row))
            ref_logprobs = np.asarray(ref_logprobs)
        self._check_finite(generation.policy_logprobs, ref_logprobs, queries)
        with self._account.measure("reward"):
            texts, scores = reward_generation(
                generation,
                [query for query in queries for _ in range(samples)],
                task=self._task,
                tokenizer=self._tokenizer,
                missing_eos_reward=self._contract.missing_eos_reward,
            )
        mask = trajectory.response_mask(generation.length, self._contract.response_length)
        count = self.rows_per_batch
        rows = {
            "row": row_numbers,
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
            "policy_step": np.where(mask, self.policy_step, -1).astype(np.int32),
            "key": keys,
            **{field.name: getattr(sampling, field.name) for field in dataclasses.fields(sampling)},
        }
        if self._embedder is not None:
            with self._account.measure("embedding"):
                rows["embedding"] = self._embedder(texts)
        with self._account.measure("append"):
            self._log.append(rows)
        return SearchReport(
            rows=count,
            tokens=int(generation.length.sum()),
            reward=float(scores.reward.mean()),
            finished=float(generation.finished.mean()),
            policy_step=self.policy_step,
            seconds=time.monotonic() - begin,
        )

    def _sampling(self) -> sampling_lib.Sampling:
        s = self._config.sampling
        plain = sampling_lib.constant(self.rows_per_batch, temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p)
        return sampling_lib.explore(
            plain,
            self._rng,
            temperature_probability=s.explore_temperature_probability,
            temperature_factor=s.explore_temperature_factor,
            top_p_probability=s.explore_top_p_probability,
            top_p_low=s.explore_top_p_low,
        )

    def _check_finite(self, policy_logprobs: np.ndarray, ref_logprobs: np.ndarray, queries: Sequence[EncodedQuery]) -> None:
        broken = ~(np.isfinite(policy_logprobs).all(1) & np.isfinite(ref_logprobs).all(1))
        if broken.any():
            first = queries[int(broken.argmax()) // self._config.searchers.samples_per_query]
            raise FloatingPointError(
                f"{broken.sum()} responses of policy step {self.policy_step} have log-probs that are not finite; "
                f"the first to query {trajectory.query_id(first.prompt):016x} ({first.query.prompt[:60]!r})"
            )


def run_searcher(
    searcher: Searcher, config: Any, run: run_dir.RunDir, *, name: str, account: TimeAccount, stop: Callable[[], bool]
) -> None:
    """Searches until the run has finished or `stop` says so. The batch in flight is completed first."""
    writer = MetricWriter(run.metrics(name))
    begin, batches, rows_on_snapshot = time.monotonic(), 0, 0
    rows = tokens = 0
    while not stop() and not run_dir.is_finished(run, config.learner.steps):
        with account.measure("load_policy"):
            rows_on_snapshot = 0 if searcher.refresh() else rows_on_snapshot
        limit = config.searchers.max_rows_per_snapshot
        if searcher.policy_step < 0 or (limit and rows_on_snapshot >= limit):
            with account.measure("wait_policy"):
                time.sleep(storage.poll_seconds([run.shared], config.searchers.poll_seconds))
            continue
        report = searcher.search()
        batches += 1
        rows_on_snapshot += report.rows
        if batches == 1:
            # The first batch holds the compilation.
            account.restart()
            begin = time.monotonic()
            log.info("%s writes replay/%s", name, searcher.writer)
            continue
        rows, tokens = rows + report.rows, tokens + report.tokens
        elapsed = time.monotonic() - begin
        scalars = {
            "rows_per_second": rows / elapsed,
            "tokens_per_second": tokens / elapsed,
            "reward": report.reward,
            "finished": report.finished,
            "policy_step": report.policy_step,
            "rows": report.rows,
            "tokens": report.tokens,
        }
        writer.write(batches, scalars | account.shares())
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
