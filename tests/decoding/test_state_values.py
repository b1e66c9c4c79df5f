"""Values of states: where steps end, continuations that are decoded alone, and their way from a searcher to an update."""

import dataclasses
import itertools
import shutil
from concurrent.futures import Future

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tba_jax import sharding
from tba_jax.commands import audit, rescore
from tba_jax.decoding import requests as requests_lib
from tba_jax.decoding import sampling as sampling_lib
from tba_jax.decoding import state_values
from tba_jax.decoding.requests import Request
from tba_jax.decoding.state_values import StateValues
from tba_jax.experiment import jobs
from tba_jax.replay.window import REJECTIONS, validate_rows
from tba_jax.rewards.scorers import ResponseEmbedder
from tba_jax.rewards.task_models import response_texts, reward_texts
from tba_jax.storage import layout
from tba_jax.tasks.arithmetic import Arithmetic
from tba_jax.tasks.interface import EncodedQuery, Query, Scores
from tba_jax.telemetry import metrics
from tba_jax.text.tokenizers import stop_automaton
from tba_jax.trajectory import RowShape, response, response_mask
from tests.support import tiny_run
from tests.support.tiny_checkpoints import path_of
from tests.support.tiny_engine import EOS, MODEL, PARAMS, TEXTS, R, make_engine, make_request, row_keys

pytestmark = pytest.mark.usefixtures("one_device_throughout")
S, SAMPLES, MISSING = 4, 3, -3.0
PROMPTS = ((3, 4, 5), (6,), (7, 3, 8, 5, 10))
STEP_ENDS = ("a", "cd")


class Letters:
    """The reward counts letters b, and what the query's prompt begins with."""

    reward_parts = ("letters",)

    @staticmethod
    def decode_continuation(prompt, tokens):
        return "".join(TEXTS.get(token, "|" if token != EOS else "") for token in tokens)

    @staticmethod
    def rewards(queries, responses, finished):
        reward = np.array([text.count("b") + 10 * int(query.prompt) for query, text in zip(queries, responses, strict=True)])
        return Scores(reward=reward.astype(np.float32), parts=reward[:, None])


def ask(engine):
    keys = row_keys(len(PROMPTS) * S)
    settings = sampling_lib.constant(S, temperature=1.7)
    requests = [
        Request(name="q", prompt=prompt, keys=keys[q * S : (q + 1) * S], sampling=settings) for q, prompt in enumerate(PROMPTS)
    ]
    return requests_lib.concatenate(engine.generate(requests)), keys


def value_states(engine, **settings):
    step_ends = stop_automaton([TEXTS.get(i, "|").encode() for i in range(MODEL.vocab)], STEP_ENDS, vocab=MODEL.vocab)
    sampling = sampling_lib.constant(SAMPLES, temperature=1.3)
    defaults = dict(most_states=0, samples_per_query=S, states_at_a_time=2)
    return StateValues(engine, step_ends=step_ends, sampling=sampling, reward=reward, **defaults | settings)


def reward(generation, queries):
    scored: Future = Future()
    texts = response_texts(generation.responses, queries, Letters)
    scored.set_result(reward_texts(texts, generation.finished, queries, task=Letters, missing_eos_reward=MISSING))
    return texts, scored


QUERIES = [EncodedQuery(query=Query(prompt=str(q)), prompt=prompt) for q, prompt in enumerate(PROMPTS) for _ in range(S)]


def reward_by_hand(query, tokens, length, finished):
    text = Letters.decode_continuation((), tokens[:length].tolist())
    return text.count("b") + 10 * int(query.query.prompt) if finished else MISSING


def test_values_are_mean_rewards_of_continuations_decoded_alone(single):
    engine = make_engine(8, S, prompt_length=5 + R - 1, given_length=R - 1, lockstep=True)
    engine.set_policy(PARAMS, 0)
    generation, keys = ask(engine)
    made = zip(QUERIES, generation.tokens, generation.length, generation.finished, strict=True)
    own = np.array([reward_by_hand(*each) for each in made])
    assert len(set(own)) > 3 and MISSING in own
    beside = [make_request([3, 3], 5, 9)]
    submitted = []
    valuing = value_states(engine)
    valued = valuing.begin(generation)
    for room in valuing.decode(valued, generation, keys, QUERIES):
        if room and beside:
            submitted.append(engine.submit(beside.pop()))
    found, tokens = valued.finish(own.astype(np.float32)), valued.tokens
    assert found.shape == (len(QUERIES), R) and found.dtype == np.float32
    single.set_policy(PARAMS, 0)
    expected, states, alone = np.full(found.shape, np.nan), [], []
    for row, query in enumerate(QUERIES):
        others = [other for other in range(len(QUERIES)) if other // S == row // S and other != row]
        expected[row, 0] = sum(own[other] for other in others) / (S - 1)
        for t in range(1, generation.length[row]):
            text = "".join(TEXTS.get(int(token), "|") for token in generation.tokens[row, :t])
            last = TEXTS.get(int(generation.tokens[row, t - 1]), "|")
            # No text of a step end begins with how it ends, so where the last one ended does not matter.
            if not any(text.rfind(end) >= 0 and text.rfind(end) + len(end) > len(text) - len(last) for end in STEP_ENDS):
                continue
            states.append((row, t))
            for sample in range(SAMPLES):
                key = jax.random.wrap_key_data(keys[row])
                for number in (2**32 - 1, t, sample):
                    key = jax.random.fold_in(key, number)
                its = dict(keys=np.asarray(jax.random.key_data(key))[None], sampling=sampling_lib.constant(1, temperature=1.3))
                alone.append(make_request(query.prompt, 1, beginning=generation.tokens[row, :t].tolist(), **its))
    answers, expected_tokens = single.generate(alone), 0
    for number, (row, t) in enumerate(states):
        its = answers[SAMPLES * number : SAMPLES * (number + 1)]
        rewards = [reward_by_hand(QUERIES[row], made.tokens[0], made.length[0], made.finished[0]) for made in its]
        expected[row, t] = sum(rewards) / SAMPLES
        expected_tokens += sum(int(made.length[0]) - t for made in its)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert tokens == expected_tokens and np.isfinite(found[:, 1:]).sum() > 20
    assert np.isfinite(found[:, 1:]).any(axis=1).sum() < len(QUERIES), "no row without a step"
    # What was asked beside goes on, and is what it is alone.
    list(engine.decode(submitted))
    answer = submitted[0].generation
    (lonely,) = single.generate([dataclasses.replace(submitted[0].request)])
    np.testing.assert_array_equal(answer.tokens, lonely.tokens)
    valuing = value_states(engine, most_states=1, states_at_a_time=100)
    valued = valuing.begin(generation)
    list(valuing.decode(valued, generation, keys, QUERIES))
    fewer = valued.finish(own.astype(np.float32))
    assert (np.isfinite(fewer[:, 1:]).sum(axis=1) == np.isfinite(found[:, 1:]).any(axis=1)).all()
    np.testing.assert_array_equal(fewer[np.isfinite(fewer)], found[np.isfinite(fewer)])


def test_a_run_learns_from_them_and_merges_by_embeddings(tmp_path, monkeypatch):
    """The encoder's tokenizer knows no word of the responses: those of equally many words have one embedding."""
    encoder, words = shutil.copytree(path_of("bert_embedding"), tmp_path / "encoder"), WordLevel({"[UNK]": 0}, unk_token="[UNK]")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(encoder / "tokenizer.json"))
    changes = dict(schedule__mode="interleaved", evaluation__enabled=False, learner__steps=2, learner__objective="vine_ppo")
    changes |= dict(task__embedding_path=str(encoder), replay__merge_cosine_distance=0.01, task__missing_eos_reward=-1.0)
    changes |= dict(task__step_ends=("1", "2+", "=", "3", "44"), searchers__value_samples=5, learner__micro_batch_tokens=26)
    s = tiny_run.settings(tmp_path / "run", tiny_run.config(**changes))
    assert jobs.everything(s)() == 0
    lines = metrics.read_lines(s.run.metrics("trainer"))
    assert [line["finite"] for line in lines] == [1] * 2
    assert all(np.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in lines)
    assert all(line["value_tokens_per_second"] > 0 for line in metrics.read_lines(s.run.metrics("searcher-0")))
    run = audit.open_run(tmp_path / "run")
    assert audit.rebuild_batch(run, 2)[1] and all(account.balances for account in audit.accounts(run).values())
    ((writer, head),) = run.reader.heads().items()
    rows = run.reader.read(writer, 0, head)
    of_query = rows["reward"].reshape(-1, 4)
    np.testing.assert_allclose(rows["state_values"][:, 0].reshape(-1, 4), (of_query.sum(1, keepdims=True) - of_query) / 3)
    later = np.isfinite(rows["state_values"][:, 1:])
    assert later.sum() > 10 and not (later & ~response_mask(rows["response_length"], 6)[:, 1:]).any()
    texts = [s.experiment.tokenizer.decode(response(rows, i)) for i in range(head)]
    embed = ResponseEmbedder(encoder, sharding.task_mesh(0, jax.devices()[:1]))
    np.testing.assert_allclose(rows["embedding"], embed(texts), atol=1e-6)
    distinct = set(zip(rows["query_id"].tolist(), texts, strict=True))
    entry = layout.read_json(s.run.finished)["ledger"][writer]
    assert entry["evicted"]["duplicate"] > 0 and entry["resident"] < len(distinct)
    # Drawn again from its key alone, a row is the same: values change nothing else of it.
    assert audit.regenerate(run, f"{writer}:7")[1]
    # A new reward would need continuations that were not kept.
    monkeypatch.setattr(Arithmetic, "reward_version", 2)
    with pytest.raises(ValueError, match=r"hold values of states \(task.step_ends=\('1', .*: they cannot be scored again"):
        rescore.rescore(s.run.root)
    assert not s.run.rescored(2).exists()


def test_rows_with_values_that_cannot_be_are_not_valid():
    shape = RowShape(prompt_length=2, response_length=6, reward_parts=("a",), state_values=True)
    rows = {name: np.zeros((5, *row), dtype) for name, (dtype, row) in shape.columns().items()}
    rows["prompt_length"][:], rows["response_length"][:] = 1, 6
    rows["state_values"][1, 0], rows["state_values"][2, 3], rows["state_values"][3, 1:] = np.nan, np.inf, np.nan
    reasons = [REJECTIONS[reason] for reason in validate_rows(rows, vocab_size=4)]
    assert reasons == ["valid", "state_values", "state_values", "valid", "valid"]


# Texts of token ids, some of them a part of a character; two more ids have no text.
PIECES = [text.encode() for text in ("", "a", "b", "ab", "ba", "c", "xcdy", "é")] + [b"\xc3", b"\xa9", b"cdcd"]
LENGTH = 9


@pytest.mark.parametrize("ends", [("ab", "cd"), ("aba", "dcd"), ("é", "bab", "cdy")])
def test_states_between_steps_are_those_after_a_whole_step_end(ends):
    """Ids without text keep what stands at their sides apart; what follows a step's end in a token is no part of the next."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, len(PIECES) + 2, (400, LENGTH)).astype(np.int32)
    length = rng.integers(1, LENGTH + 1, 400).astype(np.int32)
    automaton = stop_automaton([*PIECES, None], ends, vocab=len(PIECES) + 2)
    found = state_values.between_steps(tokens, length, automaton)
    assert found.shape == (400, LENGTH) and found.dtype == bool
    expected = np.zeros((400, LENGTH), bool)
    seen = dict.fromkeys(("within a token", "across tokens", "last token"), 0)
    for row, (of_row, n) in enumerate(zip(tokens.tolist(), length.tolist(), strict=True)):
        text = b""
        for t, token in enumerate(of_row[:n]):
            text = text + PIECES[token] if token < len(PIECES) else b""
            if not any(end.encode() in text for end in ends):
                continue
            alone = any(end.encode() in PIECES[token] for end in ends)
            seen["last token" if t + 1 == n else "within a token" if alone else "across tokens"] += 1
            text = b""
            if t + 1 < n:
                expected[row, t + 1] = True
    np.testing.assert_array_equal(found, expected)
    assert min(seen.values()) > 0 and not found[:, 0].any()


def test_states_that_are_left_out_leave_steps_of_equal_number():
    assert state_values.evenly(np.arange(5), 0).tolist() == state_values.evenly(np.arange(5), 5).tolist() == [0, 1, 2, 3, 4]
    for n, most in itertools.combinations(range(12, 0, -1), 2):
        chosen = state_values.evenly(np.arange(n), most).tolist()
        # n states separate n + 1 steps: how many of them are between two that are valued.
        between = np.diff([-1, *chosen, n])
        assert len(chosen) == most and between.min() > 0 and between.max() - between.min() <= 1
