"""The evaluator: greedy decoding of held-out queries on chosen snapshots, one JSON report each."""

import collections
import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tba_jax import sharding, trajectory
from tba_jax.decoding import sampling as sampling_lib
from tba_jax.decoding.engine import Engine
from tba_jax.decoding.requests import Generation, Request, concatenate
from tba_jax.decoding.slots import row_keys
from tba_jax.models import scoring
from tba_jax.models.policy import Policy
from tba_jax.rewards.responses import reward_generation
from tba_jax.run import contract as contract_lib
from tba_jax.run import layout, places, snapshots
from tba_jax.run.metrics import MetricWriter, TimeAccount
from tba_jax.tasks.interface import EncodedQuery, HasFinalAnswer, HasMeasures, Task
from tba_jax.text import stop_strings
from tba_jax.text.tokenizers import Tokenizer

log = logging.getLogger(__name__)


# What every report holds besides the task's score.
REPORTED = (
    *("step", "time", "queries", "greedy_reward", "sampled_reward", "finished", "unscored"),
    *("ref_nll_per_token", "ref_perplexity", "greedy_ref_perplexity", "kl_to_ref", "seconds", "samples"),
)


_MOST_NATS = 700.0  # whose exp is still a float


class Evaluator:
    """Evaluates snapshots on held-out queries: greedy score, and mean reward and reference likelihood of samples."""

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
    ):
        self._config, self._contract, self._run = config, contract, run
        self._tokenizer, self._task, self._queries = tokenizer, task, list(queries)
        self._samples_per_query = config.evaluation.samples_per_query
        devices = sharding.policy_devices(config.evaluation.task_devices)
        self._mesh = sharding.make_mesh(tuple(config.evaluation.mesh.values()), setting="evaluation.mesh", devices=devices)
        reference_id = layout.read_json(run.initial_reference)["id"]
        self._reference = snapshots.load(
            run.reference(reference_id), policy.model_specs, policy.model_shardings(self._mesh), dtype=policy.model.compute_dtype
        )
        self._snapshot: dict[str, Any] = dict(
            specs=policy.trained_specs, shardings=policy.trained_shardings(self._mesh), dtype=policy.snapshot_dtype
        )
        space = contract.response_space()
        self._engine = Engine(
            policy.model,
            space,
            self._mesh,
            slots=config.evaluation.batch_size,
            samples=1,
            prompt_length=max(len(query.prompt) for query in queries),
            response_length=contract.response_length,
            pad_id=contract.pad_id,
            stop_strings=stop_strings.build(tokenizer.token_bytes(), contract.stop_strings, vocab=policy.model.vocab)
            if contract.stop_strings
            else None,
        )
        self._score = scoring.scorer(
            self._mesh,
            graphdef=policy.base.graphdef,
            R=contract.response_length,
            space=space,
            logit_megabytes=config.evaluation.logit_megabytes,
        )
        self._for_sampling = sharding.on_mesh(self._mesh, jax.jit(functools.partial(policy.for_sampling, weights="full")))

    def evaluate(self, step: int) -> dict[str, Any]:
        """Evaluates the snapshot of `step`, writes `evaluations/<step>.json` and returns its content.

        Raises: as `report`.
        """
        report = self.report(step)
        layout.write_json(self._run.evaluations / f"{layout.step_name(step)}.json", plain(report))
        return report

    def report(self, step: int) -> dict[str, Any]:
        """Evaluates the snapshot of `step` and writes nothing.

        Raises:
          FileNotFoundError: the snapshot was pruned.
          ValueError: a measure of the task is called like another figure.
        """
        begin = time.time()
        snapshot = snapshots.load_step(self._run.policies, step, **self._snapshot)
        self._engine.set_policy(self._for_sampling(snapshot, self._reference), step)
        del snapshot
        greedy = self._respond(temperature=0.0, samples=1)
        sampled = self._respond(temperature=self._contract.scoring_temperature, samples=self._samples_per_query)
        return {
            "step": step,
            "time": begin,
            "queries": len(self._queries),
            self._task.score_name: _mean(greedy, "reward"),
            "greedy_reward": _mean(greedy, "reward"),
            "sampled_reward": _mean(sampled, "reward"),
            "finished": _mean(greedy, "finished"),
            # Responses whose reward could not be found; the means are of the others.
            "unscored": sum(math.isnan(response["reward"]) for response in (*greedy, *sampled)),
            **self._of_samples(sampled),
            **self._measures("greedy", greedy),
            **self._measures("sampled", sampled),
            # Of samples, in nats: how far the policy has moved from the reference.
            "ref_nll_per_token": _ref_nll(sampled),
            # exp of it: the reference's perplexity on samples, and on greedy responses, at the scoring temperature.
            "ref_perplexity": math.exp(min(_ref_nll(sampled), _MOST_NATS)),
            "greedy_ref_perplexity": math.exp(min(_ref_nll(greedy), _MOST_NATS)),
            "kl_to_ref": sum(r["policy_logprob_sum"] - r["ref_logprob_sum"] for r in sampled) / len(sampled),
            "seconds": time.time() - begin,
            "samples": {
                "greedy": [_plain(response) for response in greedy[: self._config.evaluation.samples]],
                "sampled": [_plain(response) for response in sampled[: self._config.evaluation.samples]],
            },
        }

    def _measures(self, kind: str, responses: Sequence[dict[str, Any]]) -> dict[str, float]:
        """What the task measures besides, of all greedy or all sampled responses."""
        if not isinstance(self._task, HasMeasures):
            return {}
        queries = [query.query for query in self._queries] * (len(responses) // len(self._queries))
        texts, finished, rewards = ([response[name] for response in responses] for name in ("response", "finished", "reward"))
        found = self._task.measures(queries, texts, np.array(finished), np.array(rewards, np.float32))
        named = {f"{kind}_{name}": float(value) for name, value in found.items()}
        if taken := sorted(named.keys() & {*REPORTED, self._task.score_name}):
            raise ValueError(
                f"measures() of task {type(self._task).__name__} gave {taken[0].removeprefix(kind + '_')!r}, and {taken[0]} is "
                "another figure of evaluation reports; call it otherwise"
            )
        return named

    def _of_samples(self, sampled: Sequence[dict[str, Any]]) -> dict[str, float]:
        """pass@k and majority@k of the queries all of whose samples were scored, where the reward says right or wrong."""
        samples = self._samples_per_query
        rewards = np.array([response["reward"] for response in sampled]).reshape(samples, -1).T
        scored = ~np.isnan(rewards).any(axis=1)
        right = rewards[scored] == 1
        if samples == 1 or not scored.any() or not np.isin(rewards[scored], (0, 1)).all():
            return {}
        powers = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
        found = {f"pass@{k}": float(pass_at(right.sum(axis=1), samples, k).mean()) for k in sorted({*powers, samples})}
        if isinstance(self._task, HasFinalAnswer):
            answers = [self._task.final_answer(response["response"]) for response in sampled]
            of_queries = np.array(answers, dtype=object).reshape(samples, -1).T[scored]
            found[f"majority@{samples}"] = float(
                np.mean([majority(given, correct) for given, correct in zip(of_queries.tolist(), right, strict=True)])
            )
        return found

    def _respond(self, *, temperature: float, samples: int) -> list[dict[str, Any]]:
        """Of all queries the first sample, then of all the second."""
        # The same keys at every step: two evaluations differ by the weights alone.
        queries = self._queries * samples
        keys = np.asarray(row_keys(np.uint32(self._config.seed), 0, np.arange(len(queries), dtype=np.uint32)))
        sampling = sampling_lib.constant(1, temperature=temperature)
        generations = self._engine.generate(
            [
                Request(name=repr(query.query.prompt[:60]), prompt=query.prompt, keys=key[None], sampling=sampling)
                for query, key in zip(queries, keys, strict=True)
            ]
        )
        size = self._config.evaluation.batch_size
        responses: list[dict[str, Any]] = []
        for begin in range(0, len(queries), size):
            batch, made = queries[begin : begin + size], generations[begin : begin + size]
            responses += self._scored(batch, made)
        return responses

    def _scored(self, batch: Sequence[EncodedQuery], made: Sequence[Generation]) -> list[dict[str, Any]]:
        # The last batch is filled up: scoring has one shape.
        missing = self._config.evaluation.batch_size - len(batch)
        filled, generation = concatenate([*made, *[made[0]] * missing]), concatenate(made)
        columns = trajectory.token_columns(
            [query.prompt for query in (*batch, *[batch[0]] * missing)],
            [tokens[:length] for tokens, length in zip(filled.tokens, filled.length, strict=True)],
            prompt_length=self._contract.prompt_length,
            response_length=self._contract.response_length,
            pad_id=self._contract.pad_id,
        )
        ref_logprobs = np.asarray(self._score(self._reference, *sharding.put_rows(self._mesh, tuple(columns.values())))[0])
        texts, scores = reward_generation(
            generation,
            batch,
            task=self._task,
            tokenizer=self._tokenizer,
            missing_eos_reward=self._contract.missing_eos_reward,
        )
        return [
            {
                "query": query.query.prompt,
                "answer": query.query.answer,
                "response": texts[i],
                "reward": float(scores.reward[i]),
                "finished": bool(generation.finished[i]),
                "tokens": int(generation.length[i]),
                "policy_logprob_sum": float(generation.policy_logprobs[i].sum()),
                "ref_logprob_sum": float(ref_logprobs[i].sum()),
            }
            for i, query in enumerate(batch)
        ]


def plain(report: dict[str, Any]) -> dict[str, Any]:
    """A report as JSON takes it, which has no NaN."""
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in report.items()}


def _ref_nll(responses: Sequence[dict[str, Any]]) -> float:
    """−log π_ref, nats per token."""
    tokens = max(sum(response["tokens"] for response in responses), 1)
    return -sum(response["ref_logprob_sum"] for response in responses) / tokens


def _mean(responses: Sequence[dict[str, Any]], name: str) -> float:
    """Of the responses that have it; NaN where none has."""
    values = [response[name] for response in responses if not math.isnan(response[name])]
    return float(np.mean(values)) if values else math.nan


def _plain(response: dict[str, Any]) -> dict[str, Any]:
    """As JSON takes it, which has no NaN."""
    return response | ({"reward": None} if math.isnan(response["reward"]) else {})


def pass_at(right: np.ndarray, samples: int, k: int) -> np.ndarray:
    """float64[n]: the chance that k of a query's samples, drawn without replacement, hold a right one (Chen et al. 2021, eq. 1).

    Args: right: int[n], right ones among the `samples` of each query.
    """
    # 1 − C(n − c, k) / C(n, k), as a product that does not overflow.
    factors = 1 - k / np.arange(1, samples + 1)[None]
    return 1 - np.where(np.arange(samples)[None] >= samples - right[:, None], factors, 1.0).prod(axis=1)


def majority(answers: Sequence[str], right: Sequence[bool]) -> float:
    """The share of right ones among the samples that give the most frequent final answer; a mean over answers as frequent.

    Args: answers: final answers in a canonical form; "" is none, and no vote.
    """
    counts = collections.Counter(answer for answer in answers if answer)
    if not counts:
        return 0.0
    most = max(counts.values())
    voted = [
        np.mean([correct for given, correct in zip(answers, right, strict=True) if given == answer])
        for answer, count in counts.items()
        if count == most
    ]
    return float(np.mean(voted))


class PendingSteps:
    """Published snapshots that are to be evaluated and have not been: the first, multiples of every_steps, the last.

    Asked again, it looks only at what is newer than what it knows: an object store lists every file of every snapshot.
    """

    def __init__(self, run: layout.RunDir, *, every_steps: int, final_step: int):
        self._run, self._every_steps, self._final_step = run, every_steps, final_step
        self._published: set[int] = set()
        self._looked_to = -1

    def __call__(self) -> list[int]:
        """The steps, ascending."""
        complete = True
        for step in layout.steps_in(self._run.policies, newer_than=self._looked_to):
            if step % self._every_steps == 0 or step == self._final_step:
                if step in self._published or snapshots.is_committed(self._run.policies, step):
                    self._published.add(step)
                else:  # being written, or what a killed trainer left and the next one writes again
                    complete = False
            self._looked_to = step if complete else self._looked_to
        return sorted(self._published.difference(layout.steps_in(self._run.evaluations)))


def run_evaluator(
    evaluator: Evaluator, config: Any, run: layout.RunDir, *, account: TimeAccount, stop: Callable[[], bool]
) -> None:
    """Evaluates snapshots as they appear, until the last one of the finished run is done or `stop` says so."""
    writer = MetricWriter(run.metrics("evaluator"))
    every_steps, final_step = config.evaluation.every_steps, config.learner.steps
    afresh = functools.partial(PendingSteps, run, every_steps=every_steps, final_step=final_step)
    pending_steps = afresh()
    while not stop():
        finished = layout.is_finished(run, final_step)  # read before the snapshots: the last one is published before it
        # At the end all are looked at once more: a trainer that went back may have published what it had not before.
        pending = afresh()() if finished else pending_steps()
        if not pending:
            if finished:
                break
            with account.measure("wait_policy"):
                time.sleep(places.poll_seconds([run.shared], config.searchers.poll_seconds))
            continue
        try:
            with account.measure("evaluate"):
                report = evaluator.evaluate(pending[-1] if finished else pending[0])
        except FileNotFoundError:
            # Pruned meanwhile: the list is made anew.
            pending_steps = afresh()
            continue
        scalars = {name: value for name, value in report.items() if isinstance(value, float) and name != "time"}
        writer.write(report["step"], scalars | account.shares())
        log.info("step %d: greedy reward %.3f, sampled %.3f", report["step"], report["greedy_reward"], report["sampled_reward"])
    writer.close()
