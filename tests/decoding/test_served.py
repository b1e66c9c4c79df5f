"""Responses that an inference server draws: a run's where the server does as it is asked, and one sentence where it does not."""

import dataclasses
import functools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from tba_jax import trajectory
from tba_jax.decoding import sampling as sampling_lib
from tba_jax.decoding.requests import Generation, Request
from tba_jax.decoding.served import ServedEngine, WrongWeights, served_rank, weights_folder
from tba_jax.decoding.server_process import ServerProcess
from tba_jax.decoding.servers import Draw, Refused, Sglang, Unavailable, Vllm
from tba_jax.models.hugging_face import export
from tba_jax.models.policy import LoraConfig, Policy
from tests.support import applied, tiny_server
from tests.support import tiny_engine as tiny
from tests.support.tiny_engine import EOS, MODEL, PAD, PARAMS, SPACE, TEMPERATURE
from tests.support.tiny_server import TinyServer, TinyVllm

P, R = 20, 12
OTHER = tiny.random_params(1)


POLICY = Policy(model=MODEL)
ADAPTED = Policy(model=MODEL, lora=LoraConfig(rank=3, alpha=6.0, targets=("layers.attention.query",)))
FIRST, SECOND = (applied.random(ADAPTED.trained_specs, scale=0.5, seed=seed) for seed in (2, 3))


def write(folder: Path, model, params) -> None:
    export.save(folder, model, params, dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("weights") / "first"
    write(made, *export.untied(MODEL, PARAMS))
    return made


@pytest.fixture
def server(folder):
    made = TinyServer(folder)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


def make(server, tmp_path, policy=POLICY, base=PARAMS, **changes) -> ServedEngine:
    settings = dict(prompt_length=P + R - 1, response_length=R, given_length=R - 1, pad_id=PAD, slots=4) | changes
    base, weights = base if policy.lora else {}, tmp_path / "weights"
    return ServedEngine(policy, base, SPACE, tiny.make_mesh(), server=server, folder=weights, write=write, **settings)


@pytest.fixture
def engine(server, tmp_path):
    made = make(Vllm(server.url), tmp_path)
    made.set_policy(PARAMS, 5)
    yield made
    made.close()


def request(samples: int = 6, *, temperature: float = TEMPERATURE, **settings) -> Request:
    sampling = sampling_lib.constant(samples, temperature=temperature)
    return tiny.make_request([6, 6, 3, 8], samples, **dict(sampling=sampling) | settings)


def scored(made: Generation, prompt, params=PARAMS) -> np.ndarray:
    columns = trajectory.token_columns(
        [prompt] * len(made.tokens), made.responses, prompt_length=P, response_length=R, pad_id=PAD
    )
    how = dict(R=R, config=MODEL, space=SPACE, logit_bytes=2**20, remat="none")
    return np.asarray(jax.jit(functools.partial(applied.response_logprobs, **how))(params, *columns.values())[0])


def test_rows_are_of_the_policy_and_of_the_contract(engine, server):
    (made,) = engine.generate([request(40)])
    np.testing.assert_allclose(made.policy_logprobs, scored(made, [6, 6, 3, 8]), atol=1e-4)
    np.testing.assert_array_equal(made.behavior_logprobs, made.policy_logprobs)
    mask = trajectory.response_mask(made.length, R)
    assert (made.policy_step == np.where(mask, 5, -1)).all() and not set(SPACE.banned_tokens) & set(made.tokens[mask].tolist())
    last = made.tokens[np.arange(40), made.length - 1]
    np.testing.assert_array_equal(made.finished, last == EOS)
    assert 0 < made.finished.sum() < 40 and (made.length[~made.finished] == R).all()
    assert len({tuple(row) for row in made.tokens.tolist()}) > 30, "samples differ"
    assert engine.gap < 1e-4 and engine.usage.useful == made.length.sum()


def test_the_likeliest_response_is_the_own_decoders(engine):
    (made,) = engine.generate([request(1, temperature=0.0)])
    own = tiny.make_engine(1, 1, prompt_length=P, response_length=R)
    own.set_policy(PARAMS, 5)
    (expected,) = own.generate([request(1, temperature=0.0)])
    np.testing.assert_array_equal(made.tokens, expected.tokens)
    assert not made.behavior_logprobs.any() and not made.policy_logprobs.any(), "the policy's log-probs are not known"


def test_a_turn_goes_on_where_the_last_ended_and_settings_are_all_sent(engine, server):
    given = [4, 5, 6]
    its = request(2, beginning=given, turn=3, limit=np.array([8, 9]))
    (made,) = engine.generate([its])
    assert (made.tokens[:, :3] == given).all() and (made.policy_step[:, :3] == -1).all() and (made.length <= [8, 9]).all()
    asked = server.asked[-1]
    assert asked["prompt"] == [6, 6, 3, 8, *given] and asked["ignore_eos"] and asked["stop_token_ids"] == [EOS]
    assert {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"} <= asked.keys()
    with pytest.raises(ValueError, match="21 tokens of prompt and 0 of the response are not within 1 to 20 and 0 to 10"):
        engine.submit(tiny.make_request([3] * 21, 1))


def test_new_weights_come_after_what_is_under_way_and_are_checked(engine, server):
    first = engine.submit(request(8))
    steps = []
    for number, _ in enumerate(engine.decode([first])):
        if number == 1:
            engine.swap(engine.prepare(OTHER), 7)
        if number == 3:
            steps.append(engine.submit(request(3)))
    for _ in engine.decode(steps):
        pass
    mask = trajectory.response_mask(first.generation.length, R)
    of_rows = [set(row[on].tolist()) for row, on in zip(first.generation.policy_step, mask, strict=True)]
    assert all(each in ({5}, {7}) for each in of_rows), "no response is of two policies"
    assert engine.policy_step == 7 and server.loads == 3 and engine.gap < 1e-4 and engine.figures["update_seconds"] > 0
    assert len(list((engine._folder).iterdir())) == 1, "old weights are removed"


def test_a_server_with_other_weights_is_not_asked(engine, server, tmp_path):
    engine.generate([request(1)])
    server.faults["stale"] = True
    engine.set_policy(OTHER, 7)
    with pytest.raises(WrongWeights, match=r"log-probs that are .* nats per token off the policy's, above 0.001"):
        engine.generate([request(1)])
    near = jax.tree.map(lambda x: x * (1 + 1e-6), PARAMS)  # too near to tell by the limit
    lax = make(Vllm(server.url), tmp_path / "lax", gap_limit=10.0)
    server.faults.clear()
    lax.set_policy(PARAMS, 5)
    lax.generate([request(1)])
    server.faults["stale"] = True
    lax.set_policy(OTHER, 6)
    with pytest.raises(WrongWeights, match="has the weights before, not those that it was given"):
        lax.generate([request(1)])
    server.faults.clear()
    lax.set_policy(near, 6)
    lax.generate([request(1)])


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ({"cut": True}, "it continued 2 tokens that are not the 4 it was given"),
        ({"no_ids": True}, "gave no token ids and log-probs: vLLM 0.11 and later"),
        ({"early": True}, "it ended a response after 2 of 12 tokens, without an end of sequence"),
        ({"drawn": 9}, "token 9 is not of the policy's 11, or one of task.banned_tokens"),
        ({"drawn": 11}, "token 11 is not of the policy's 11"),
        ({"status": (404, 99)}, "answered 404"),
    ],
    ids=str,
)
def test_what_a_run_cannot_have_is_one_sentence(engine, server, fault, sentence):
    engine.generate([request(1)])
    server.faults |= fault
    with pytest.raises(Refused, match=sentence):
        engine.generate([request(16)])


def test_a_server_that_is_full_or_late_is_asked_again_and_one_that_stays_away_given_up(engine, server, tmp_path, monkeypatch):
    monkeypatch.setattr("tba_jax.decoding.served._FIRST_PAUSE", 0.05)
    engine.generate([request(1)])
    server.faults |= {"status": (429, 5)}
    (made,) = engine.generate([request(6)])
    np.testing.assert_allclose(made.policy_logprobs, scored(made, [6, 6, 3, 8]), atol=1e-4)
    away = make(Vllm("http://127.0.0.1:9"), tmp_path / "away", give_up_seconds=0.3)
    away.set_policy(PARAMS, 5)
    with pytest.raises(Unavailable, match=r"is away: .*refused"):
        away.generate([request(1)])
    late = make(Vllm(server.url), tmp_path / "late", give_up_seconds=0.3)
    late.set_policy(PARAMS, 5)
    late.generate([request(1)])
    monkeypatch.setattr(late, "_request_seconds", 1.0)
    server.faults |= {"late": 2.0}
    with pytest.raises(Unavailable, match=r"did not answer within 1 s; no answer has come within searchers.give_up_seconds=0.3"):
        late.generate([request(1)])


@pytest.fixture(params=[POLICY, ADAPTED], ids=["whole", "adapters"])
def started(request, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(tiny_server.__file__).parents[2]))
    settings = dict(python=sys.executable, dtype="float32", length=P + R, start_seconds=120.0)
    arguments = Vllm.adapter_arguments(3) if request.param.lora else ()
    process = ServerProcess(TinyVllm, log_file=tmp_path / "server.log", arguments=arguments, **settings)
    made = make(process, tmp_path, request.param, request_seconds=5.0)
    yield made
    made.close()


def pid_of_server(engine: ServedEngine) -> int:
    leash = engine._process._process.pid
    return int(subprocess.run(["pgrep", "-P", str(leash)], capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_a_server_of_its_own_is_started_anew(started, sign):
    adapted = started._policy.lora is not None
    trained, weights = (SECOND, ADAPTED.merged(SECOND, PARAMS)) if adapted else (PARAMS, PARAMS)
    started.set_policy(trained, 5)
    started.generate([request(8)])
    ticket = started.submit(request(8))
    for number, _ in enumerate(started.decode([ticket])):
        if number == 1:
            killed = pid_of_server(started)
            os.kill(killed, sign)
    expected = scored(ticket.generation, [6, 6, 3, 8], weights)
    np.testing.assert_allclose(ticket.generation.policy_logprobs, expected, atol=1e-4)
    assert started.restarts == 1 and pid_of_server(started) != killed
    last = pid_of_server(started)
    started.close()
    with pytest.raises(ProcessLookupError):
        os.kill(last, 0)


def test_a_server_that_cannot_start_says_why(tmp_path):
    settings = dict(arguments=(), dtype="float32", length=P + R, start_seconds=60.0, log_file=tmp_path / "server.log")
    broken = make(ServerProcess(Vllm, python=sys.executable, **settings), tmp_path)
    broken.set_policy(PARAMS, 5)
    with pytest.raises(
        Unavailable, match=r"vllm ended with code 1 before it was ready; the last lines of .*No module named 'vllm'"
    ):
        broken.generate([request(1)])


def test_sglang_is_asked_by_its_own_protocol(monkeypatch):
    """The exchange as its documentation has it."""
    asked, server = [], Sglang("http://127.0.0.1:1")
    told = {"prompt_tokens": 3, "output_token_logprobs": [[-0.5, 4, None], [-0.25, 2, None]], "finish_reason": {"type": "stop"}}
    told["input_token_logprobs"] = [[None, 6, None], [-1.5, 7, None], [-2.5, 8, None]]

    def answer(method, path, body, seconds):
        asked.append((method, path, body))
        return (
            {"text": "x", "meta_info": told} if path == "/generate" else {"success": path.startswith("/update"), "message": "no"}
        )

    monkeypatch.setattr(server, "_ask", answer)
    draw = Draw(context=[6, 7, 8], limit=5, temperature=0.7, top_k=0, top_p=1.0, min_p=0.0, eos_id=2, banned=(9,), stop=("x",))
    drawn = server.draw(draw, seconds=1.0)
    assert (drawn.tokens, drawn.logprobs, drawn.context) == ([4, 2], [-0.5, -0.25], [6, 7, 8])
    _, path, body = asked[0]
    how = body["sampling_params"]
    assert (path, body["input_ids"], body["return_logprob"]) == ("/generate", [6, 7, 8], True)
    assert (how["max_new_tokens"], how["stop_token_ids"], how["logit_bias"], how["no_stop_trim"]) == (5, [2], {"9": -100.0}, True)
    assert server.logprobs([6, 7, 8], seconds=1.0) == [-1.5, -2.5]
    server.load(Path("/weights"), seconds=1.0)
    assert asked[-1][1:] == ("/update_weights_from_disk", {"model_path": "/weights", "flush_cache": True})
    server.load_adapter(Path("/adapter"), rank=5, seconds=1.0)
    (_, path, body), name = asked[-1], server._adapter
    assert (path, body) == ("/load_lora_adapter", {"lora_name": name, "lora_path": "/adapter"})
    server.logprobs([6, 7, 8], seconds=1.0)
    assert asked[-1][2]["lora_path"] == name
    server.load_adapter(Path("/adapter"), rank=5, seconds=1.0)
    assert asked[-1][1:] == ("/unload_lora_adapter", {"lora_name": name}) and server._adapter != name
    assert Sglang.adapter_arguments(5) == ["--enable-lora", "--max-lora-rank=5", "--lora-target-modules=all"]
    told["prompt_tokens"] = 2
    with pytest.raises(Refused, match="continued 2 of 3 tokens"):
        server.draw(draw, seconds=1.0)


def test_weights_of_processes_that_are_gone_are_removed(server, tmp_path):
    mine = weights_folder(tmp_path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, other = (mine.with_name(f"{mine.name.rpartition('-')[0]}-{number}") for number in (ended.pid, os.getppid()))
    for folder in (left, other, tmp_path / "tba_jax-weights-elsewhere-1"):
        folder.mkdir()
    engine = ServedEngine(
        POLICY,
        {},
        SPACE,
        tiny.make_mesh(),
        server=Vllm(server.url),
        folder=mine,
        write=write,
        slots=1,
        prompt_length=P,
        response_length=R,
        pad_id=PAD,
    )
    engine.set_policy(PARAMS, 0)
    engine.generate([request(1)])
    assert {each.name for each in tmp_path.iterdir()} == {mine.name, other.name, "tba_jax-weights-elsewhere-1"}
    engine.close()
    assert not mine.exists()


def test_a_server_that_comes_back_with_its_first_weights_gets_those_in_use(engine, server, folder, monkeypatch):
    monkeypatch.setattr("tba_jax.decoding.served._FIRST_PAUSE", 0.05)
    engine.set_policy(OTHER, 7)
    engine.generate([request(1)])
    server.load(folder)
    loads, server.faults["status"] = server.loads, (502, 4)
    (made,) = engine.generate([request(4)])
    assert server.loads == loads + 1 and engine.gap < 1e-4 and (made.policy_step[:, 0] == 7).all()
    np.testing.assert_allclose(made.policy_logprobs, scored(made, [6, 6, 3, 8], OTHER), atol=1e-4)


def test_adapters_are_loaded_under_new_names_and_asked_for(server, tmp_path, monkeypatch):
    monkeypatch.setattr("tba_jax.decoding.served._FIRST_PAUSE", 0.05)
    server.most_rank = 8
    engine = make(Vllm(server.url), tmp_path, ADAPTED)
    names = []
    for step, trained in enumerate([FIRST, SECOND]):
        engine.set_policy(trained, step)
        (made,) = engine.generate([request(4)])
        np.testing.assert_allclose(made.policy_logprobs, scored(made, [6, 6, 3, 8], ADAPTED.merged(trained, PARAMS)), atol=1e-4)
        assert engine.gap < 1e-4
        names += server.adapters
        assert {asked["model"] for asked in server.asked[-5:]} == {names[-1]}, "the probe and the rows are of the adapter"
    assert len(names) == 2 and len(set(names)) == 2 and server.loads == 1, "the one before is dropped, the model stays"
    server.adapters.clear()  # as one that began anew
    (made,) = engine.generate([request(4)])
    assert server.adapters and engine.gap < 1e-4 and (made.policy_step[:, 0] == 1).all()
    server.faults["stale"] = True
    engine.set_policy(FIRST, 3)
    with pytest.raises(WrongWeights, match="nats per token off the policy's"):
        engine.generate([request(1)])
    engine.close()


@pytest.mark.parametrize(
    ("most_rank", "told"), [(2, "LoRA rank 3 is greater than max_lora_rank 2"), (None, "load_lora_adapter answered 404")]
)
def test_an_adapter_that_the_server_cannot_have_is_one_sentence(server, tmp_path, most_rank, told):
    server.most_rank = most_rank
    engine = make(Vllm(server.url), tmp_path, ADAPTED)
    engine.set_policy(FIRST, 0)
    with pytest.raises(Refused, match=f"{told}.*lora.rank=3 .* need a server .* --enable-lora --max-lora-rank=8"):
        engine.generate([request(1)])
    assert not server.asked
    engine.close()


def test_adapters_that_servers_cannot_have_are_merged(server, tmp_path):
    """Those of a head, of ranks above vLLM's largest, and of architectures that have none there."""
    lora = ADAPTED.lora
    assert [served_rank(each) for each in (POLICY, ADAPTED)] == [0, 3]
    assert not served_rank(Policy(model=MODEL, lora=dataclasses.replace(lora, rank=513)))
    assert not served_rank(Policy(model=dataclasses.replace(MODEL, architecture="gpt_neox"), lora=lora))
    model, base = export.untied(MODEL, PARAMS)
    policy = Policy(model=model, lora=dataclasses.replace(lora, targets=("layers.*", "lm_head")))
    engine = make(Vllm(server.url), tmp_path, policy, base)
    engine.set_policy(applied.random(policy.trained_specs, scale=0.2), 0)
    engine.generate([request(1)])
    assert engine.gap < 1e-4 and server.loads == 2 and not server.adapters
    engine.close()
