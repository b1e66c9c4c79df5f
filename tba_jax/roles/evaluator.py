"""The evaluator: decodes held-out queries with chosen snapshots, and writes one JSON report for each."""

import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tba_jax.decoding import sampling as sampling_lib
from tba_jax.decoding.requests import Generation, Request, concatenate
from tba_jax.decoding.slots import row_keys
from tba_jax.models.policy import Policy
from tba_jax.programs import Program
from tba_jax.rewards.responses import response_texts, reward_texts
from tba_jax.roles import sampler
from tba_jax.roles.evaluation_figures import STDERR, majority, mean, pass_at, perplexity, with_stderr
from tba_jax.roles.reference import ReferencePolicy, policy_mesh, text_columns
from tba_jax.roles.sampler import Sampler
from tba_jax.roles.work import Work, policy_peaks
from tba_jax.storage import best_step, layout, places, snapshots
from tba_jax.storage import contract as contract_lib
from tba_jax.storage.damaged_snapshots import DamagedSnapshots
from tba_jax.tasks.interface import EncodedQuery, HasFinalAnswer, HasMeasures, Task
from tba_jax.telemetry import metrics
from tba_jax.telemetry.alarms import Watch
from tba_jax.telemetry.record import Record, TimeAccount
from tba_jax.text.tokenizers import Tokenizer

log = logging.getLogger(__name__)


# The means of every report, which stand beside their standard errors.
_MEANS = (
    *("greedy_reward", "sampled_reward", "finished", "kl_to_initial"),
    *("greedy_ref_perplexity_paper", "sampled_ref_perplexity_paper"),
)
# What every report and the metrics hold besides the task's own figures.
REPORTED = (
    *("step", "time", "queries", "score_name", "unscored", "seconds", "samples", best_step.BEST_STEP, best_step.BEST_SCORE),
    *(*_MEANS, *(name + STDERR for name in _MEANS), "ref_nll_per_token"),
    *("greedy_ref_perplexity_per_response_token", "sampled_ref_perplexity_per_response_token"),
)
# What an evaluator does about a damaged snapshot, see DamagedSnapshots.
NOT_EVALUATED = "It is not evaluated"


class Evaluator:
    """Evaluates snapshots on held-out queries: rewards of responses, and their KL and perplexity under the policy of step 0,
    which is π_ref here whatever reference the run trains with."""

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
        record: Record | None = None,
    ):
        """Args: record: of this process; None: nothing is recorded."""
        self._status = (record or Record()).status
        self._config, self._contract, self._run = config, contract, run
        self._tokenizer, self._task, self._queries = tokenizer, task, list(queries)
        self._samples_per_query = config.evaluation.samples_per_query
        mesh = policy_mesh(config, "evaluation")
        self._peaks = policy_peaks(mesh, config)
        # Of the last evaluation: tokens_per_second, computed_tokens_per_second, and shares of the devices' peaks.
        self.rates: dict[str, float] = {}
        self._initial = ReferencePolicy(contract, run, policy=policy, mesh=mesh, **_scoring_settings(config))
        self._sampler = Sampler(
            contract,
            run,
            policy=policy,
            tokenizer=tokenizer,
            reference=self._initial,
            **_sampling_settings(config, queries),
        )

    def evaluate(self, step: int) -> dict[str, Any]:
        """Evaluates the snapshot of `step`, writes `evaluations/<step>.json` and returns its content.

        Raises: as `report`.
        """
        report = self.report(step)
        places.make_folder(self._run.evaluations)
        layout.write_json(self._run.evaluations / f"{layout.step_name(step)}.json", plain(report))
        return report

    def report(self, step: int) -> dict[str, Any]:
        """Evaluates the snapshot of `step` and writes nothing.

        Raises:
          FileNotFoundError: the snapshot was pruned. snapshots.Damaged: it is damaged.
          ValueError: a measure of the task has the name of another figure.
        """
        begin, before = time.time(), self._sampler.work
        try:
            self._tell_part(step, 0, "loading its policy")
            self._sampler.load_step(step)
            self._tell_part(step, 1, "greedy responses")
            greedy = self._respond(temperature=self._config.evaluation.greedy_temperature, samples=1)
            self._tell_part(step, 2, "samples")
            sampled = self._respond(temperature=self._contract.scoring_temperature, samples=self._samples_per_query)
        finally:
            self._status.phase("")
        self._note_rates(self._sampler.work - before, time.time() - begin)
        return {
            "step": step,
            "time": begin,
            "queries": len(self._queries),
            "score_name": self._task.score_name,
            **mean(self._task.score_name, self._values(greedy, "reward")),
            **mean("greedy_reward", self._values(greedy, "reward")),
            **mean("sampled_reward", self._values(sampled, "reward")),
            **mean("finished", self._values(greedy, "finished")),
            # Responses whose reward could not be found. The means leave them out.
            "unscored": sum(math.isnan(response["reward"]) for response in (*greedy, *sampled)),
            **self._of_samples(sampled),
            **self._measures("greedy", greedy),
            **self._measures("sampled", sampled),
            # −log π_ref of all tokens of the samples.
            "ref_nll_per_token": -_total(sampled, "ref_logprob_sum") / _total(sampled, "tokens"),
            **self._ref_perplexities("greedy", greedy),
            **self._ref_perplexities("sampled", sampled),
            **mean("kl_to_initial", self._values(sampled, "policy_logprob_sum") - self._values(sampled, "ref_logprob_sum")),
            "seconds": time.time() - begin,
            "samples": {
                "greedy": [_plain(response) for response in greedy[: self._config.evaluation.samples]],
                "sampled": [_plain(response) for response in sampled[: self._config.evaluation.samples]],
            },
        }

    def _note_rates(self, done: Work, seconds: float) -> None:
        """Args: done: by the sampler in these seconds, which rewards and the loading of the policy are part of."""
        rates = {"tokens_per_second": done.tokens / seconds, "computed_tokens_per_second": done.computed / seconds}
        self.rates = rates | done.shares(seconds, self._peaks)

    def _tell_part(self, step: int, done: int, part: str) -> None:
        """Tells which of the three parts of an evaluation begins. Args: done: parts before it."""
        self._status.phase(f"evaluating step {step}, {part}", done=done, total=3)

    def _measures(self, kind: str, responses: Sequence[dict[str, Any]]) -> dict[str, float]:
        """The task's own figures of all greedy or all sampled responses, by name. Args: kind: "greedy" or "sampled"."""
        if not isinstance(self._task, HasMeasures):
            return {}
        queries = [query.query for query in self._queries] * (len(responses) // len(self._queries))
        texts, finished, rewards = ([response[name] for response in responses] for name in ("response", "finished", "reward"))
        found = self._task.measures(queries, texts, np.array(finished), np.array(rewards, np.float32))
        named: dict[str, float] = {}
        for name, value in found.items():
            if np.ndim(value) and np.shape(value) != (len(responses),):
                raise ValueError(
                    f"measures() of task {type(self._task).__name__} gave {name!r} values of shape {np.shape(value)} for "
                    f"{len(responses)} responses; it must be one number, or one for each response"
                )
            values = np.asarray(value, np.float64)
            figure = f"{kind}_{name}"
            named |= mean(figure, values.reshape(-1, len(self._queries))) if values.ndim else {figure: float(values)}
        if taken := sorted(named.keys() & {*REPORTED, self._task.score_name}):
            raise ValueError(
                f"measures() of task {type(self._task).__name__} gave {taken[0].removeprefix(kind + '_')!r}, and {taken[0]} is "
                "another figure of evaluation reports; call it otherwise"
            )
        return named

    def _of_samples(self, sampled: Sequence[dict[str, Any]]) -> dict[str, float]:
        """pass@k and majority@k of the queries whose samples were all scored; {} where a reward is neither 0 nor 1."""
        samples = self._samples_per_query
        rewards = self._values(sampled, "reward").T
        scored = ~np.isnan(rewards).any(axis=1)
        right = rewards[scored] == 1
        if samples == 1 or not scored.any() or not np.isin(rewards[scored], (0, 1)).all():
            return {}
        powers = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
        found: dict[str, float] = {}
        for k in sorted({*powers, samples}):
            found |= mean(f"pass@{k}", pass_at(right.sum(axis=1), samples, k)[None])
        if isinstance(self._task, HasFinalAnswer):
            answers = [self._task.final_answer(response["response"]) for response in sampled]
            of_queries = np.array(answers, dtype=object).reshape(samples, -1).T[scored]
            shares = [majority(given, correct) for given, correct in zip(of_queries.tolist(), right, strict=True)]
            found |= mean(f"majority@{samples}", np.array(shares)[None])
        return found

    def _values(self, responses: Sequence[dict[str, Any]], name: str) -> np.ndarray:
        """float64[K, Q]: a figure of K responses to each of the queries."""
        return np.array([response[name] for response in responses], np.float64).reshape(-1, len(self._queries))

    def _ref_perplexities(self, kind: str, responses: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Perplexities of the policy of step 0 on all greedy or all sampled responses: per token of the responses, at the
        scoring temperature; and the TBA paper's. Args: kind: see `_measures`."""
        per_token = perplexity(_total(responses, "ref_logprob_sum"), _total(responses, "tokens"))
        return {
            f"{kind}_ref_perplexity_per_response_token": per_token,
            **mean(f"{kind}_ref_perplexity_paper", self._values(responses, "ref_perplexity_paper")),
        }

    def _respond(self, *, temperature: float, samples: int) -> list[dict[str, Any]]:
        """Scored responses: the first sample of all queries, then the second sample of all queries, and so on."""
        # Keys do not depend on the step: two evaluations differ by the weights alone.
        queries = self._queries * samples
        keys = np.asarray(row_keys(np.uint32(self._config.seed), 0, np.arange(len(queries), dtype=np.uint32)))
        sampling = sampling_lib.constant(1, temperature=temperature)
        generations = self._sampler.engine.generate(
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
        """Rewards, reference log-probs and texts of at most batch_size responses. Args: made: one response a query."""
        # The last batch is filled up: all batches have as many rows.
        missing = self._config.evaluation.batch_size - len(batch)
        prompts = [query.prompt for query in (*batch, *[batch[0]] * missing)]
        filled, generation = concatenate([*made, *[made[0]] * missing]), concatenate(made)
        rows = text_columns(prompts, filled.responses, self._contract)
        ref_logprobs = at_temperature_1 = self._initial.logprobs(rows)
        if self._contract.scoring_temperature != 1:
            at_temperature_1 = self._initial.logprobs(rows, temperature=1.0)
        texts = response_texts(generation.responses, batch, self._tokenizer)
        missing_eos = self._contract.missing_eos_reward
        scores = reward_texts(texts, generation.finished, batch, task=self._task, missing_eos_reward=missing_eos)
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
                # Of prompt and response as one sequence, in which the prompt costs nothing.
                "ref_perplexity_paper": perplexity(
                    float(at_temperature_1[i].sum()), len(query.prompt) + int(generation.length[i])
                ),
            }
            for i, query in enumerate(batch)
        ]


def _sampling_settings(config: Any, queries: Sequence[EncodedQuery]) -> dict[str, Any]:
    """Arguments of Sampler."""
    longest = max(len(query.prompt) for query in queries)
    e = config.evaluation
    return dict(weights="full", slots=e.batch_size, samples=1, prompt_length=longest, swap_memory=e.swap_memory)


def programs(
    config: Any,
    contract: contract_lib.Contract,
    *,
    policy: Policy,
    tokenizer: Tokenizer,
    task: Task,
    queries: Sequence[EncodedQuery],
    devices: Sequence[jax.Device] | None = None,
) -> dict[str, Program]:
    """Name -> what an evaluator compiles on the devices of its policy. Args: devices: of the role; None: of this process."""
    return sampler.programs(
        contract,
        policy_mesh(config, "evaluation", devices=devices),
        models=sampler.models_beside(config, task, role="evaluator", section="evaluation", devices=devices),
        policy=policy,
        tokenizer=tokenizer,
        rows=config.evaluation.batch_size,
        limits=_scoring_settings(config),
        scores=True,
        section="evaluation",
        slots_setting="evaluation.batch_size",
        **_sampling_settings(config, queries),
    )


def _scoring_settings(config: Any) -> dict[str, int]:
    e = config.evaluation
    return dict(samples=1, logit_megabytes=e.logit_megabytes, score_tokens=e.score_tokens)


def plain(report: dict[str, Any]) -> dict[str, Any]:
    """A report for JSON, which has no NaN: None stands for it."""
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in report.items()}


def report_scalars(report: dict[str, Any]) -> dict[str, float]:
    """The figures of a report, as metrics take them."""
    return {name: value for name, value in report.items() if isinstance(value, float) and name != "time"}


def counts(report: Mapping[str, Any], config: Any) -> dict[str, float]:
    """How many responses a report is of, and how many of them have no score, as alarms look at them."""
    return {"unscored": report["unscored"], "rows": report["queries"] * (1 + config.evaluation.samples_per_query)}


def sample_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The samples of a report, as tables of trackers take them."""
    return [{"kind": kind} | response for kind, responses in report["samples"].items() for response in responses]


def _total(responses: Sequence[dict[str, Any]], name: str) -> float:
    return float(sum(response[name] for response in responses))


def _plain(response: dict[str, Any]) -> dict[str, Any]:
    """A response for JSON, see `plain`."""
    return response | ({"reward": None} if math.isnan(response["reward"]) else {})


class PendingSteps:
    """Finds published snapshots that are due for evaluation and have none yet: the first, multiples of every_steps, the last.

    A second call looks only at snapshots that are newer than the known ones: an object store lists every file of every snapshot.
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
                else:  # it is being written, or a killed trainer left it and the next one writes it again
                    complete = False
            self._looked_to = step if complete else self._looked_to
        return sorted(self._published.difference(layout.steps_in(self._run.evaluations)))


def run_evaluator(
    evaluator: Evaluator, config: Any, run: layout.RunDir, *, account: TimeAccount, stop: Callable[[], bool]
) -> None:
    """Evaluates snapshots as they appear, until the last one of the finished run is done or `stop` says so.

    A damaged one is told, and left out until it is published again: neither this role nor the end of the run waits for it.
    """
    record = account.record
    writer = metrics.open_writer(config, run, "evaluator", role="evaluator", status=record.status)
    record.status.phase("")
    damaged, scores = DamagedSnapshots(run.policies, follows=NOT_EVALUATED), best_step.Scores(run.evaluations)
    watch = Watch(run.metrics("evaluator"), config, role="evaluator")

    def afresh() -> PendingSteps:  # a trainer that resumes may have changed the last step
        return PendingSteps(run, every_steps=config.evaluation.every_steps, final_step=contract_lib.steps_of(run))

    pending_steps = afresh()
    while not stop():
        finished = contract_lib.is_finished(run)  # read before the snapshots: the last one is published before it
        # At the end all snapshots are looked at once more: a trainer that resumed may have published steps that were not there.
        pending = damaged.without(afresh()() if finished else pending_steps())
        if not pending:
            if finished:
                break
            with account.measure("wait_policy"):
                time.sleep(places.poll_seconds([run.shared], config.searchers.poll_seconds))
            continue
        try:
            if run.id:
                contract_lib.check_is_there(run)
            step = pending[-1] if finished else pending[0]
            record.profiler.batch(step, most=1)
            with account.measure("evaluate"):
                report = damaged.attempt(step, functools.partial(evaluator.evaluate, step))
        except FileNotFoundError:
            # The snapshot was pruned meanwhile.
            pending_steps = afresh()
            continue
        if report is None:
            continue
        record.status.step, best = report["step"], scores.best()
        writer.write(report["step"], report_scalars(report) | best_step.figures(best) | evaluator.rates | account.shares())
        watch.look(report["step"], counts(report, config))
        writer.table("samples", report["step"], sample_rows(report))
        figures = f"greedy reward {with_stderr(report, 'greedy_reward')}, sampled {with_stderr(report, 'sampled_reward')}"
        log.info("; ".join(filter(None, (f"step {step}: {figures}", best_step.told(best, apart_from=step)))))
    writer.close()
