"""The evaluator: decodes held-out queries with chosen snapshots, and writes one JSON report for each."""

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
from tba_jax.rewards.task_models import response_texts, reward_texts
from tba_jax.roles import results, sampler
from tba_jax.roles.conversations import Conversation, Conversations
from tba_jax.roles.results import STDERR, majority, mean, pass_at, perplexity, with_stderr
from tba_jax.roles.sampler import ReferencePolicy, Sampler, Scoring, policy_mesh, text_columns
from tba_jax.roles.work import policy_peaks
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout, places
from tba_jax.storage.published import Published
from tba_jax.storage.snapshots import Damaged
from tba_jax.tasks.environments import HasEnvironment
from tba_jax.tasks.interface import EncodedQuery, HasFinalAnswer, HasMeasures, Task
from tba_jax.telemetry import metrics
from tba_jax.telemetry.alarms import Watch
from tba_jax.telemetry.metrics import MetricWriter
from tba_jax.telemetry.status import Record, TimeAccount
from tba_jax.text.tokenizers import Tokenizer

log = logging.getLogger(__name__)


# The means of every report, which stand beside their standard errors.
_MEANS = (
    "greedy_reward", "sampled_reward", "finished", "kl_to_initial", "greedy_ref_perplexity_paper", "sampled_ref_perplexity_paper",
)  # fmt: skip
# What every report and the metrics hold besides the task's own figures.
REPORTED = (
    *("step", "time", "queries", "score_name", "unscored", "seconds", "samples", results.BEST_STEP, results.BEST_SCORE),
    *(*_MEANS, *(name + STDERR for name in _MEANS), "ref_nll_per_token"),
    *("greedy_ref_perplexity_per_response_token", "sampled_ref_perplexity_per_response_token"),
)


class Evaluator:
    """Evaluates snapshots on held-out queries: rewards of responses, and their KL and perplexity under the policy of step 0."""

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
        self._told = set[str]()  # why responses had no score
        mesh = policy_mesh(config, "evaluation")
        self._peaks = policy_peaks(mesh, config)
        # tokens_per_second, computed_tokens_per_second and shares of the devices' peaks, of the last evaluation.
        self.rates: dict[str, float] = {}
        self._initial = ReferencePolicy(_scoring(config, contract, policy, mesh), run)
        settings = _sampling_settings(config, contract, queries)
        self._sampler = Sampler(contract, run, policy=policy, tokenizer=tokenizer, reference=self._initial, **settings)
        self._conversations: Conversations | None = None
        if isinstance(task, HasEnvironment):
            of = self._sampler.engine, task.environments, tokenizer, contract
            most = config.searchers.conversations or len(self._queries)
            self._conversations = Conversations(*of, most=min(most, len(self._queries)))
        self.snapshots = self._sampler.snapshots

    def evaluate(self, step: int) -> dict[str, Any]:
        """Evaluates the snapshot of `step`, writes `evaluations/<step>.json` and returns its content. Raises as `report`."""
        report = self.report(step)
        places.make_folder(self._run.evaluations)
        layout.write_json(self._run.evaluations / f"{layout.step_name(step)}.json", plain(report))
        return report

    def report(self, step: int) -> dict[str, Any]:
        """Evaluates the snapshot of `step` and writes nothing.

        Raises: FileNotFoundError: the snapshot was pruned. snapshots.Damaged: it is damaged. ValueError: a measure of the task
        has the name of another figure.
        """
        begin, before = time.time(), self._sampler.work
        try:
            self._status.phase(f"evaluating step {step}, loading its policy", done=0, total=3)
            self._sampler.load_step(step)
            self._status.phase(f"evaluating step {step}, greedy responses", done=1, total=3)
            greedy = self._respond(temperature=self._config.evaluation.greedy_temperature, samples=1)
            self._status.phase(f"evaluating step {step}, samples", done=2, total=3)
            sampled = self._respond(temperature=self._contract.scoring_temperature, samples=self._samples_per_query)
        finally:
            self._status.phase("")
        done, seconds = self._sampler.work - before, time.time() - begin
        rates = {"tokens_per_second": done.tokens / seconds, "computed_tokens_per_second": done.computed / seconds}
        self.rates = rates | done.shares(seconds, self._peaks)
        shown = self._config.evaluation.samples
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
            **self._of_kind("greedy", greedy),
            **self._of_kind("sampled", sampled),
            # −log π_ref of all tokens of the samples.
            "ref_nll_per_token": -_total(sampled, "ref_logprob_sum") / _total(sampled, "tokens"),
            **mean("kl_to_initial", self._values(sampled, "policy_logprob_sum") - self._values(sampled, "ref_logprob_sum")),
            "seconds": time.time() - begin,
            "samples": plain({"greedy": greedy[:shown], "sampled": sampled[:shown]}),
        }

    def _of_kind(self, kind: str, responses: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Perplexities of all responses of a kind, greedy or sampled, under the policy of step 0: per token at the scoring
        temperature, and the TBA paper's; and the task's own figures."""
        per_token = perplexity(_total(responses, "ref_logprob_sum"), _total(responses, "tokens"))
        found = {f"{kind}_ref_perplexity_per_response_token": per_token}
        found |= mean(f"{kind}_ref_perplexity_paper", self._values(responses, "ref_perplexity_paper"))
        if not isinstance(self._task, HasMeasures):
            return found
        called = f"measures() of task {type(self._task).__name__} gave"
        queries = [query.query for query in self._queries] * (len(responses) // len(self._queries))
        texts, finished, rewards = ([response[name] for response in responses] for name in ("response", "finished", "reward"))
        for name, value in self._task.measures(queries, texts, np.array(finished), np.array(rewards, np.float32)).items():
            figure, values = f"{kind}_{name}", np.asarray(value, np.float64)
            if values.ndim and values.shape != (len(responses),):
                told = f"{called} {name!r} values of shape {values.shape} for {len(responses)} responses"
                raise ValueError(f"{told}; it must be one number, or one for each response")
            if figure in (*REPORTED, self._task.score_name):
                raise ValueError(f"{called} {name!r}, and {figure} is another figure of evaluation reports; call it otherwise")
            found |= mean(figure, values.reshape(-1, len(self._queries))) if values.ndim else {figure: float(values)}
        return found

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

    def _respond(self, *, temperature: float, samples: int) -> list[dict[str, Any]]:
        """Scored responses: the first sample of all queries, then the second sample of all queries, and so on."""
        # Keys do not depend on the step: two evaluations differ by the weights alone.
        queries = self._queries * samples
        keys = np.asarray(row_keys(np.uint32(self._config.seed), 0, np.arange(len(queries), dtype=np.uint32)))
        sampling = sampling_lib.constant(1, temperature=temperature)
        answers: Sequence[Generation | Conversation]
        if self._conversations is None:
            requests = [
                Request(name=repr(query.query.prompt[:60]), prompt=query.prompt, keys=key[None], sampling=sampling)
                for query, key in zip(queries, keys, strict=True)
            ]
            answers = self._sampler.engine.generate(requests)
        else:
            answers = self._conversations.have(queries, keys, sampling)
        size = self._config.evaluation.batch_size
        begins = range(0, len(queries), size)
        batches = [self._scored(queries[begin : begin + size], answers[begin : begin + size]) for begin in begins]
        return [response for batch in batches for response in batch]

    def _scored(self, batch: Sequence[EncodedQuery], answers: Sequence[Generation | Conversation]) -> list[dict[str, Any]]:
        """Rewards, reference log-probs and texts of at most batch_size responses. Args: answers: one a query."""
        conversations = [each for each in answers if isinstance(each, Conversation)]
        made = [each.generation if isinstance(each, Conversation) else each for each in answers]
        # The last batch is filled up: all batches have as many rows.
        missing = self._config.evaluation.batch_size - len(batch)
        prompts = [query.prompt for query in (*batch, *[batch[0]] * missing)]
        filled, generation = concatenate([*made, *[made[0]] * missing]), concatenate(made)
        rows = text_columns(prompts, filled.responses, self._contract)
        if conversations:
            told = [each.environment for each in (*conversations, *[conversations[0]] * missing)]
            rows |= {"policy_step": filled.policy_step, "environment": np.array(told, np.float32)}
        ref_logprobs = at_temperature_1 = self._initial.logprobs(rows)
        if self._contract.scoring_temperature != 1:
            at_temperature_1 = self._initial.logprobs(rows, temperature=1.0)
        texts = response_texts(generation.responses, batch, self._tokenizer)
        if self._conversations is None:
            missing_eos = self._contract.missing_eos_reward
            scores = reward_texts(texts, generation.finished, batch, task=self._task, missing_eos_reward=missing_eos)
        else:
            scores = self._conversations.scores(conversations)
        if scores.failure and scores.failure not in self._told:
            self._told.add(scores.failure)
            log.warning("a held-out response has no score: %s", scores.failure)
        drawn = (generation.policy_step >= 0).sum(axis=1)
        return [
            {
                "query": query.query.prompt,
                "answer": query.query.answer,
                "response": texts[i],
                "reward": float(scores.reward[i]),
                "finished": bool(generation.finished[i]),
                "tokens": int(drawn[i]),
                "policy_logprob_sum": float(generation.policy_logprobs[i].sum()),
                "ref_logprob_sum": float(ref_logprobs[i].sum()),
                # Prompt and response are one sequence here, in which the prompt costs nothing.
                "ref_perplexity_paper": perplexity(
                    float(at_temperature_1[i].sum()), len(query.prompt) + int(generation.length[i])
                ),
            }
            for i, query in enumerate(batch)
        ]


def _sampling_settings(config: Any, contract: contract_lib.Contract, queries: Sequence[EncodedQuery]) -> dict[str, Any]:
    # Evaluations value no states.
    given = contract.given_length if contract.turns else 0
    lengths = dict(prompt_length=max(len(query.prompt) for query in queries) + given, given_length=given)
    e = config.evaluation
    return dict(weights="full", slots=e.batch_size, samples=1, swap_memory=e.swap_memory, **lengths)


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
    how = _scoring(config, contract, policy, policy_mesh(config, "evaluation", devices=devices))
    return sampler.programs(
        how,
        models=sampler.models_beside(config, task, role="evaluator", section="evaluation", devices=devices),
        tokenizer=tokenizer,
        rows=config.evaluation.batch_size,
        scorer=how,
        section="evaluation",
        slots_setting="evaluation.batch_size",
        **_sampling_settings(config, contract, queries),
    )


def _scoring(config: Any, contract: contract_lib.Contract, policy: Policy, mesh: jax.sharding.Mesh) -> Scoring:
    e = config.evaluation
    return Scoring(contract=contract, policy=policy, mesh=mesh, logit_megabytes=e.logit_megabytes, score_tokens=e.score_tokens)


def plain(value: Any) -> Any:
    """A report, or a part of it, for JSON, which has no NaN: None stands for it."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _total(responses: Sequence[dict[str, Any]], name: str) -> float:
    return float(sum(response[name] for response in responses))


def tell(report: Mapping[str, Any], config: Any, *, writer: MetricWriter, watch: Watch, more: Mapping[str, float]) -> None:
    """Records a report: its figures and `more` of them as a point of metrics, its samples for trackers, and its alarms."""
    step = report["step"]
    figures = {name: value for name, value in report.items() if isinstance(value, float) and name != "time"}
    writer.write(step, {**figures, **more})
    watch.look(step, {"unscored": report["unscored"], "rows": report["queries"] * (1 + config.evaluation.samples_per_query)})
    rows = [{"kind": kind} | response for kind, responses in report["samples"].items() for response in responses]
    writer.table("samples", step, rows)


class PendingSteps:
    """Finds published snapshots that are due for evaluation and have none: the first, multiples of every_steps, the last."""

    def __init__(self, run: layout.RunDir, *, every_steps: int, final_step: int, snapshots: Published | None = None):
        """Args: snapshots: those of the run that a reader has not found damaged; None: all of them."""
        self._run, self._every_steps, self._final_step = run, every_steps, final_step
        self._snapshots = snapshots or Published(run.policies)

    def __call__(self) -> list[int]:
        """The steps, ascending."""
        due = {step for step in self._snapshots.whole() if step % self._every_steps == 0 or step == self._final_step}
        return sorted(due.difference(layout.steps_in(self._run.evaluations)) if due else due)


def run_evaluator(
    evaluator: Evaluator, config: Any, run: layout.RunDir, *, account: TimeAccount, stop: Callable[[], bool]
) -> None:
    """Evaluates snapshots as they appear, until the last one of the finished run is done or `stop` says so. A damaged one is left
    out until it is published again."""
    record = account.record
    writer = metrics.open_writer(config, run, "evaluator", role="evaluator", status=record.status)
    record.status.phase("")
    scores = results.Scores(run.evaluations)
    watch = Watch(run.metrics("evaluator"), config, role="evaluator")

    def pending_steps() -> list[int]:  # a trainer that resumes may have changed the last step
        final = contract_lib.steps_of(run)
        return PendingSteps(run, every_steps=config.evaluation.every_steps, final_step=final, snapshots=evaluator.snapshots)()

    while not stop():
        finished = contract_lib.is_finished(run)  # read before the snapshots: the last one is published before it
        pending = pending_steps()
        if not pending and finished:
            break
        if not pending:
            with account.measure("wait_policy"):
                time.sleep(places.poll_seconds([run.shared], config.searchers.poll_seconds))
            continue
        try:
            if run.id:
                contract_lib.check_is_there(run)
            step = pending[-1] if finished else pending[0]
            record.profiler.batch(step, most=1)
            with account.measure("evaluate"):
                report = evaluator.evaluate(step)
        except (FileNotFoundError, Damaged):  # it was removed meanwhile, or is not evaluated
            continue
        record.status.step, best = step, scores.best()
        more = results.best_figures(best) | evaluator.rates | account.shares()
        tell(report, config, writer=writer, watch=watch, more=more)
        figures = f"greedy reward {with_stderr(report, 'greedy_reward')}, sampled {with_stderr(report, 'sampled_reward')}"
        log.info("; ".join(filter(None, (f"step {step}: {figures}", results.best_in_words(best, apart_from=step)))))
    writer.close()
