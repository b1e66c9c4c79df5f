"""The searcher: generates responses with the newest policy it can get, scores them, and appends them to the replay log."""

import contextlib
import dataclasses
import math
import os
import platform
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tba_jax import trajectory
from tba_jax.decoding import sampling as sampling_lib
from tba_jax.decoding.engine import Ticket
from tba_jax.decoding.requests import Generation, Request, concatenate
from tba_jax.decoding.served import GAP_LIMITS, ServedEngine, served_rank, weights_folder
from tba_jax.decoding.server_process import ServerProcess
from tba_jax.decoding.servers import SERVERS, Server
from tba_jax.decoding.slots import row_keys
from tba_jax.decoding.state_values import StateValues
from tba_jax.models.config import DecoderConfig
from tba_jax.models.hugging_face import export, load
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.programs import Program
from tba_jax.replay.log import LogWriter
from tba_jax.rewards import task_models as rewards
from tba_jax.rewards.scorers import ResponseEmbedder
from tba_jax.roles import sampler
from tba_jax.roles.backpressure import Room
from tba_jax.roles.conversations import Conversation, Conversations, Unending
from tba_jax.roles.sampler import Sampler, Scoring, automaton, check_finite, make_reference, policy_mesh, text_columns
from tba_jax.roles.searcher import stream
from tba_jax.roles.searcher.appender import Appender, DecodedBatch, SearchReport, done
from tba_jax.roles.searcher.endpoint import Endpoint
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout
from tba_jax.tasks.environments import HasEnvironment
from tba_jax.tasks.interface import EncodedQuery, Task
from tba_jax.telemetry.status import TimeAccount
from tba_jax.text.tokenizers import StopStrings, Tokenizer

_FLUSH_SECONDS = 5.0  # that ended conversations with clients wait for others
_LOOK_SECONDS = 1.0  # between two looks at whether environments are still waited for


@dataclasses.dataclass(frozen=True, eq=False)
class _Asked:
    """A query that is being answered: by the decoder, or in a conversation for each of its rows; and the keys and settings by
    which its rows are drawn."""

    query: EncodedQuery
    answers: Sequence[Ticket | Conversation]
    keys: np.ndarray
    sampling: sampling_lib.Sampling

    @property
    def is_open(self) -> bool:
        return any(each.left for each in self.answers)


class Searcher:
    """One searcher: a sampler, a stream of queries, and a replay log of its own.

    Rows are appended in the order in which their queries were asked: rows that end early do not overtake long ones, which would
    bias what the trainer sees. Attributes: sampler; appender; writer: the id of its log; mesh: of the policy.
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
        writer: str,
        account: TimeAccount,
        endpoint: Endpoint | None = None,
        teacher: Policy | None = None,
    ):
        """Args: writer: the id of its log, see stream.writer_id. endpoint: whose clients ask, in place of the task's queries.
        teacher: see Experiment."""
        self._config, self._contract = config, contract
        self._account = account
        self.mesh = policy_mesh(config, "searchers")
        scoring = _scoring(config, contract, policy, self.mesh)
        reference = make_reference(config, scoring, run, teacher=teacher)
        self.sampler = Sampler(
            contract,
            run,
            policy=policy,
            tokenizer=tokenizer,
            reference=reference,
            served=_served(config, contract, run, policy, tokenizer, queries, reference, writer, serves=endpoint is not None),
            **_sampling_settings(config, contract, queries, self.mesh, serves=endpoint is not None),
        )
        self._engine, self._reference = self.sampler.engine, self.sampler.reference
        self._conversations: Conversations | None = None
        if isinstance(task, HasEnvironment):
            its = endpoint or task.environments
            self._conversations = Conversations(self._engine, its, tokenizer, contract, most=most_conversations(config))
        self._endpoint, self._goes_on = endpoint, Unending()
        self._steps = self._conversations.decode([self._goes_on]) if endpoint and self._conversations else None
        self._embedder = ResponseEmbedder(config.task.embedding_path, self.mesh) if contract.embedding else None
        self.writer, self._writer_number = writer, stream.writer_number(writer)
        self._stream = stream.make(config, queries, run.policies, writer=self._writer_number)
        self._rng = np.random.default_rng([config.seed, self._writer_number])
        log = LogWriter(
            run.replay,
            writer,
            contract.row_shape(),
            info=dict(
                host=platform.node(),
                pid=os.getpid(),
                started=time.time(),
                devices=str(self.mesh.devices.size),
                engine=config.searchers.engine,
            ),
        )
        self.appender = Appender(
            log,
            task=task,
            tokenizer=tokenizer,
            missing_eos_reward=contract.missing_eos_reward,
            most_waiting=1 if config.schedule.mode == "interleaved" else config.searchers.reward_batches,
            success_rates=config.searchers.prompt_selection == "posterior",
        )
        self._value_states = self._make_state_values(automaton(contract.step_ends, tokenizer, vocab=policy.model.vocab))
        self._jit_keys = jax.jit(row_keys)
        # Queries that the engine was asked and whose rows are not decoded yet, in the order of the stream.
        self._asked: deque[_Asked] = deque()
        self._rows_begun = 0  # of an endpoint
        self._room = Room(run.demand, writer) if config.searchers.max_updates_ahead else None

    def _make_state_values(self, step_ends: StopStrings | None) -> StateValues | None:
        s = self._config.searchers
        if step_ends is None:
            return None
        return StateValues(
            self._engine,
            step_ends=step_ends,
            sampling=self._plain_sampling(s.value_samples),
            most_states=s.value_states,
            samples_per_query=s.samples_per_query,
            states_at_a_time=2 * _slots(self._config) // s.value_samples,
            reward=self.appender.reward,
        )

    def refresh(self) -> bool:
        """Takes up the newest snapshot of those that searchers.lag allows, if it is newer than the last, and what the trainer
        tells of its demand. Returns whether there was one. May be called from a thread beside the one that searches."""
        if self._room is not None:
            self._room.look()
        if found := self.sampler.load_newest(lag=self._config.searchers.lag):
            self._note_load()
        return found

    def idle(self) -> None:
        """Called now and then while the searcher waits: takes up weights that have come, so that the next can be loaded, and what
        the trainer tells of its demand, which `refresh` does not look at while it loads a snapshot."""
        if self.sampler.step >= 0:
            for _ in self._engine.decode([]):
                pass
        if self._room is not None:
            self._room.look()

    def _note_load(self) -> None:
        self._stream.look(self.sampler.step)
        status = self._account.record.status
        status.step = max(status.step, self.sampler.step)

    def load_step(self, step: int) -> None:
        """Takes up the snapshot of exactly this trainer step."""
        if step != self.sampler.step:
            self.sampler.load_step(step)
            self._note_load()

    @property
    def may_search(self) -> bool:
        """Whether there are weights, and a query that is being answered or may be asked."""
        return self.sampler.step >= 0 and (self._endpoint is not None or len(self._asked) > 0 or self._may_ask)

    @property
    def _may_ask(self) -> bool:
        """Whether another query may be asked: one that completes a batch, or begins one that the trainer has room for."""
        asked, s = self._stream.taken, self._config.searchers
        return self._room is None or asked % s.queries_per_batch > 0 or self._room.allows(asked * s.samples_per_query)

    def _ask(self) -> None:
        samples = self._config.searchers.samples_per_query
        rows = np.arange(self._stream.taken * samples, (self._stream.taken + 1) * samples, dtype=np.uint32)
        query = next(self._stream)
        keys = np.asarray(self._jit_keys(np.uint32(self._config.seed), np.uint32(self._writer_number), rows))
        sampling = self._sampling()
        answers: list[Ticket | Conversation] = []
        if self._conversations is None:
            answers += [self._engine.submit(Request(name=query.name, prompt=query.prompt, keys=keys, sampling=sampling))]
        else:
            alone = [(keys[i : i + 1], jax.tree.map(lambda x, i=i: x[i : i + 1], sampling)) for i in range(samples)]
            answers += [self._conversations.begin(query, *each) for each in alone]
        self._asked.append(_Asked(query, answers, keys, sampling))

    def _ask_ahead(self, room: int, ahead: Callable[[], bool]) -> None:
        """Asks queries of the next batches. Args: room: prompts that the decoder has room for; ahead: see `advance`."""
        # The other lanes do not run ahead of a slow one without end, nor other conversations of one whose environment is slow.
        ahead_of, samples = self._engine.prompts, self._config.searchers.samples_per_query
        if self._conversations is not None:
            room, ahead_of = room // samples, self._conversations.most // samples
        most = self._config.searchers.queries_per_batch + ahead_of
        for _ in range(room):
            if len(self._asked) >= most or not (self._may_ask and ahead()):
                break
            self._ask()

    def search(self, *, ahead: Callable[[], bool] = lambda: False) -> SearchReport:
        """Searches one batch, which is in the log when this returns. See `advance`."""
        self.advance(ahead=ahead)
        return self.appended(wait_seconds=None)[-1]

    def advance(self, *, ahead: Callable[[], bool] = lambda: False, waits: Callable[[], bool] = lambda: True) -> None:
        """Decodes one batch, has the reference score it, and hands it on to be rewarded and appended. Waits while
        searchers.reward_batches batches wait for their rewards.

        Args: ahead: whether the decoder may go on with queries of the next batches where it has room. waits: asked now and then
        during that wait, and while responses of several turns are made; False gives the batch up. Raises FloatingPointError:
        log-probs of the policy or the reference are not finite; names the query. Others: see `appended`.
        """
        decoded = self._decode(ahead, waits) if self._endpoint is None else self._converse(self._endpoint, waits)
        if decoded is None:
            return
        batch, generation = decoded
        queries = [asked.query for asked in batch for _ in asked.keys]
        rows = self._rows(batch, queries, generation)
        with self._account.measure("reference"):
            rows["ref_logprobs"] = self._ref_logprobs(rows)
            check_finite(rows["ref_logprobs"], [query.name for query in queries])
        if self._conversations is None:
            texts, scores = self.appender.reward(generation, queries)
        else:
            ended = [each for asked in batch for each in asked.answers if isinstance(each, Conversation)]
            texts, scores = self.appender.texts(generation, queries), done(self._conversations.scores(ended))
        if self._embedder is not None:
            with self._account.measure("embedding"):
                rows["embedding"] = self._embedder(texts)
        values = None
        if self._value_states is not None:
            with self._account.measure("values"):
                values = self._value_states.begin(generation)
                for room in self._value_states.decode(values, generation, rows["key"], queries):
                    self._ask_ahead(room, ahead)
        made = DecodedBatch(
            rows=rows,
            texts=texts,
            queries=queries,
            scores=scores,
            values=values,
            figures=dict(
                policy_step=self._engine.policy_step,
                slot_idle=self._engine.usage.idle,
                useful_token_share=self.sampler.useful_token_share,
                engine=self._engine.figures if isinstance(self._engine, ServedEngine) else {},
                work=self.sampler.work,
            ),
        )
        with self._account.measure("wait_rewards"):
            self.appender.put(made, waits=waits)

    def appended(self, *, wait_seconds: float | None = 0.0) -> list[SearchReport]:
        """Reports of the batches that were appended since the last call. Args, Raises: see Appender.appended."""
        with self._account.measure("wait_rewards"):
            return self.appender.appended(wait_seconds=wait_seconds)

    @property
    def serves(self) -> bool:
        """Whether clients ask, in place of the task's queries."""
        return self._endpoint is not None

    def close(self) -> None:
        self.appender.close()
        if self._endpoint is not None:
            self._endpoint.close()
        if isinstance(self._engine, ServedEngine):
            self._engine.close()

    def _decode(self, ahead: Callable[[], bool], waits: Callable[[], bool]) -> tuple[list[_Asked], Generation] | None:
        """The next queries_per_batch queries, and the responses to them; None where they are given up."""
        size = self._config.searchers.queries_per_batch
        status = self._account.record.status
        is_first = self._stream.taken == 0
        telling = status.during("compiling the decoder, for the first batch") if is_first else contextlib.nullcontext()
        with self._account.measure("decode"), telling:
            while len(self._asked) < size:
                self._ask()
            batch = [self._asked[i] for i in range(size)]
            decoder: Any = self._conversations or self._engine
            looked = time.monotonic()
            for room in decoder.decode([each for asked in batch for each in asked.answers]):
                self._ask_ahead(room, ahead)
                if self._conversations is not None and (now := time.monotonic()) > looked + _LOOK_SECONDS:
                    if not waits():
                        return None
                    looked = now
            for _ in batch:
                self._asked.popleft()
        generation = concatenate([each.generation for asked in batch for each in asked.answers])
        return batch, generation

    def _converse(self, endpoint: Endpoint, waits: Callable[[], bool]) -> tuple[list[_Asked], Generation] | None:
        """The conversations with clients that have ended, once they are as many as the rows of a batch, or the first of them has
        waited, or the searcher stops; None where there are none."""
        assert self._conversations is not None and self._steps is not None
        most, looked, since, stops = _rows_per_batch(self._config), time.monotonic(), math.inf, False
        with self._account.measure("decode"):
            while True:
                for query in endpoint.begun():
                    row = np.array([self._rows_begun], np.uint32)
                    keys = np.asarray(self._jit_keys(np.uint32(self._config.seed), np.uint32(self._writer_number), row))
                    sampling = jax.tree.map(lambda x: x[:1], self._sampling())
                    self._asked.append(_Asked(query, [self._conversations.begin(query, keys, sampling)], keys, sampling))
                    self._rows_begun += 1
                next(self._steps)
                now = time.monotonic()
                ended = [asked for asked in self._asked if not asked.is_open]
                since = min(since, now) if ended else math.inf
                if len(ended) >= most or now > since + _FLUSH_SECONDS:
                    break
                if now > looked + _LOOK_SECONDS:
                    if stops := not waits():
                        break
                    looked = now
        # At the end of the searcher, all that have ended.
        if not (batch := ended if stops else ended[:most]):
            return None
        self._asked = deque(asked for asked in self._asked if asked not in batch)
        return batch, concatenate([each.generation for asked in batch for each in asked.answers])

    def _ref_logprobs(self, rows: Mapping[str, np.ndarray]) -> np.ndarray:
        """float32[B, R]. A batch of an endpoint that is not full is filled up, so that no program is compiled for it."""
        count = len(rows["tokens"])
        missing = max(0, _rows_per_batch(self._config) - count)
        filled = {name: np.concatenate([column, np.repeat(column[:1], missing, axis=0)]) for name, column in rows.items()}
        return self._reference.logprobs(filled if missing else rows)[:count]

    def _rows(self, batch: Sequence[_Asked], queries: Sequence[EncodedQuery], generation: Generation) -> dict[str, np.ndarray]:
        """The columns that decoding gives. Args: queries: one a row."""
        sampling = jax.tree.map(lambda *rows: np.concatenate(rows), *[asked.sampling for asked in batch])
        told = [each.environment for asked in batch for each in asked.answers if isinstance(each, Conversation)]
        return {
            **({"environment": np.array(told, np.float32)} if told else {}),
            "query_id": np.array([trajectory.query_id(query.prompt) for query in queries], np.uint64),
            **text_columns([query.prompt for query in queries], generation.responses, self._contract),
            "finished": generation.finished,
            "reward_version": np.full(len(queries), self._contract.reward_version, np.int32),
            "reference_id": np.full(len(queries), int(self._reference.id, 16), np.uint64),
            "policy_logprobs": generation.policy_logprobs,
            "behavior_logprobs": generation.behavior_logprobs,
            "policy_step": generation.policy_step,
            "key": np.concatenate([asked.keys for asked in batch]),
            **{field.name: getattr(sampling, field.name) for field in dataclasses.fields(sampling)},
        }

    def _plain_sampling(self, rows: int) -> sampling_lib.Sampling:
        s = self._config.sampling
        return sampling_lib.constant(rows, temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p)

    def _sampling(self) -> sampling_lib.Sampling:
        """Settings for the samples of one query, with exploration."""
        s = self._config.sampling
        names = ("temperature_probability", "temperature_low_factor", "temperature_factor", "top_p_probability", "top_p_low")
        explored = {name: s[f"explore_{name}"] for name in names}
        return sampling_lib.explore(self._plain_sampling(self._config.searchers.samples_per_query), self._rng, **explored)


def _rows_per_batch(config: Any) -> int:
    return config.searchers.queries_per_batch * config.searchers.samples_per_query


def most_conversations(config: Any) -> int:
    """How many responses of several turns are under way."""
    most: int = config.searchers.conversations or 4 * _slots(config)
    return most


def _slots(config: Any) -> int:
    return config.searchers.slots or _rows_per_batch(config)


def _sampling_settings(
    config: Any,
    contract: contract_lib.Contract,
    queries: Sequence[EncodedQuery],
    mesh: jax.sharding.Mesh,
    *,
    serves: bool = False,
) -> dict[str, Any]:
    """Args: serves: whether prompts are those of clients, of which nothing is known."""
    s = config.searchers
    longest = contract.prompt_length if serves else max(len(query.prompt) for query in queries)
    given_length = contract.given_length
    return dict(
        weights=s.weights,
        slots=_slots(config),
        samples=1 if contract.turns else s.samples_per_query,
        prompt_length=longest + given_length,
        given_length=given_length,
        swap=s.swap,
        swap_memory=s.swap_memory,
        chunk=s.decode_chunk,
        lockstep=config.schedule.mode == "interleaved" and not contract.turns,
    )


def _served(
    config: Any,
    contract: contract_lib.Contract,
    run: layout.RunDir,
    policy: Policy,
    tokenizer: Tokenizer,
    queries: Sequence[EncodedQuery],
    reference: sampler.Reference,
    writer: str,
    *,
    serves: bool,
) -> ServedEngine | None:
    """The server that draws, None where the searcher draws itself. Args: writer: see Searcher."""
    s = config.searchers
    if s.engine == "own":
        return None
    settings = _sampling_settings(config, contract, queries, reference.mesh, serves=serves)
    kind, rank, length = SERVERS[s.engine], served_rank(policy), settings["prompt_length"] + contract.response_length
    source = load.resolve_folder(config.model.path) if config.model.path else None
    write_tokenizer, token_ids = export.tokenizer_files(tokenizer, source)

    def write(folder: Path, model: DecoderConfig, params: Params) -> None:
        export.save(folder, model, params, dtype=policy.model.compute_dtype, token_ids=token_ids, more=[write_tokenizer])

    server: Server | ServerProcess = (
        kind(s.engine_url)
        if s.engine_url
        else ServerProcess(
            kind,
            python=s.engine_python or sys.executable,
            arguments=[*(kind.adapter_arguments(rank) if rank else ()), *s.engine_arguments],
            dtype=policy.model.compute_dtype,
            length=length,
            log_file=run.logs / f"{writer}-{s.engine}.log",
            start_seconds=s.engine_start_seconds,
        )
    )
    return ServedEngine(
        policy,
        {} if policy.lora is None else reference.params,
        contract.response_space(),
        reference.mesh,
        server=server,
        folder=weights_folder(Path(s.engine_folder or tempfile.gettempdir())),
        write=write,
        slots=settings["slots"],
        prompt_length=settings["prompt_length"],
        response_length=contract.response_length,
        given_length=settings["given_length"],
        pad_id=contract.pad_id,
        stop_texts=contract.stop_strings,
        stop_strings=automaton(contract.stop_strings, tokenizer, vocab=policy.model.vocab),
        request_seconds=s.engine_request_seconds,
        give_up_seconds=s.give_up_seconds,
        gap_limit=config.learner.logprob_gap_limit or GAP_LIMITS[policy.model.compute_dtype],
    )


def programs(
    config: Any,
    contract: contract_lib.Contract,
    *,
    policy: Policy,
    tokenizer: Tokenizer,
    task: Task,
    queries: Sequence[EncodedQuery],
    teacher: Policy | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> dict[str, Program]:
    """Name -> what a searcher compiles on the devices of its policy. Args: teacher: see Experiment; devices: of the role; None:
    of this process."""
    mesh = policy_mesh(config, "searchers", devices=devices)
    models = sampler.models_beside(config, task, role="searcher", section="searchers", devices=devices)
    if contract.embedding:
        models |= rewards.sentence_encoder(config.task.embedding_path, mesh, length=contract.response_length)
    scores, how = contract.has_reference and config.searchers.scores_reference, _scoring(config, contract, policy, mesh)
    scorer = dataclasses.replace(how, policy=teacher or policy) if scores else None
    if config.searchers.engine != "own":
        made = {} if scorer is None else scorer.programs(scorer.shapes, _rows_per_batch(config))
        return {**models.loading, **made, **models.scoring}
    return sampler.programs(
        how,
        models=models,
        tokenizer=tokenizer,
        rows=_rows_per_batch(config),
        scorer=scorer,
        section="searchers",
        slots_setting="searchers.slots",
        **_sampling_settings(config, contract, queries, mesh),
    )


def _scoring(config: Any, contract: contract_lib.Contract, policy: Policy, mesh: jax.sharding.Mesh) -> Scoring:
    s = config.searchers
    limits = dict(samples=s.samples_per_query, logit_megabytes=s.logit_megabytes, score_tokens=s.score_tokens)
    return Scoring(contract=contract, policy=policy, mesh=mesh, **limits)
