"""A real vLLM draws: `make engines` installs it on the CPU, in an environment of its own."""

import dataclasses
import functools
import os
import signal
import string
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

from tba_jax import trajectory
from tba_jax.decoding import sampling as sampling_lib
from tba_jax.decoding.served import ServedEngine
from tba_jax.decoding.server_process import ServerProcess
from tba_jax.decoding.servers import Refused, Vllm
from tba_jax.experiment import jobs
from tba_jax.models.config import DecoderConfig, ResponseSpace
from tba_jax.models.hugging_face import export
from tba_jax.models.policy import LoraConfig, Policy
from tba_jax.text.tokenizers import CharacterTokenizer, stop_automaton
from tests.support import applied, frozen_runs, tiny_run
from tests.support import tiny_engine as tiny

PYTHON = os.environ.get("TBA_JAX_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="TBA_JAX_VLLM_PYTHON names no Python with vLLM: make engines installs one"),
    pytest.mark.usefixtures("one_device_throughout"),
    pytest.mark.timeout(900),
]
ARGUMENTS = ("--enforce-eager", "--gpu-memory-utilization=0.2")
TOKENIZER = CharacterTokenizer(string.ascii_letters[:45])
MODEL = DecoderConfig(layers=2, width=128, heads=2, kv_heads=1, head_size=64, ffn=256, vocab=48, max_positions=128)
SPACE = ResponseSpace(temperature=0.7, banned_tokens=(0, 1, 9), eos_id=2, min_length=3)
P, R, PROMPT = 20, 16, [6, 6, 3, 8]


def params(seed: int):
    return applied.random(applied.specs(MODEL), scale=0.15, seed=seed)


def make(folder: Path, policy: Policy, base, arguments=()) -> ServedEngine:
    write_tokenizer, token_ids = export.tokenizer_files(TOKENIZER, None)

    def write(to: Path, model, weights) -> None:
        export.save(to, model, weights, dtype="float32", token_ids=token_ids, more=[write_tokenizer])

    settings = dict(dtype="float32", length=P + R, log_file=folder / "server.log", start_seconds=600.0)
    return ServedEngine(
        policy,
        base,
        SPACE,
        tiny.make_mesh(),
        server=ServerProcess(Vllm, python=PYTHON, arguments=(*ARGUMENTS, *arguments), **settings),
        folder=folder / "weights",
        write=write,
        slots=16,
        prompt_length=P,
        response_length=R,
        pad_id=0,
        stop_texts=("cd",),
        stop_strings=stop_automaton(TOKENIZER.token_bytes(), ("cd",), vocab=48),
    )


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    made = make(tmp_path_factory.mktemp("vllm"), Policy(model=MODEL), {})
    made.set_policy(params(1), 5)
    yield made
    made.close()


def scored(weights, made) -> np.ndarray:
    columns = trajectory.token_columns([PROMPT] * len(made.tokens), made.responses, prompt_length=P, response_length=R, pad_id=0)
    how = dict(R=R, config=MODEL, space=SPACE, logit_bytes=2**20, remat="none")
    return np.asarray(jax.jit(functools.partial(applied.response_logprobs, **how))(weights, *columns.values())[0])


def drawn(engine, samples: int, temperature: float = 0.7, seed: int = 0):
    sampling = sampling_lib.constant(samples, temperature=temperature)
    return engine.generate([tiny.make_request(PROMPT, samples, seed, sampling=sampling)])[0]


def test_rows_are_of_the_policy_and_of_the_contract(engine):
    made = drawn(engine, 64)
    assert engine.gap < 1e-4
    np.testing.assert_allclose(made.policy_logprobs, scored(params(1), made), atol=1e-3)
    mask = trajectory.response_mask(made.length, R)
    assert not {0, 1, 9} & set(made.tokens[mask].tolist()) and (made.length >= 3).all()
    ends = made.tokens[np.arange(64), made.length - 1]
    stopped = np.array([TOKENIZER.decode(row.tolist()).endswith("cd") for row in made.responses])
    np.testing.assert_array_equal(made.finished, (ends == 2) | stopped)
    assert made.finished.any() and not made.finished.all() and len({tuple(row) for row in made.tokens.tolist()}) > 60
    np.testing.assert_array_equal(drawn(engine, 1, 0.0).tokens, own(1).tokens)


def own(seed: int):
    made = tiny.make_engine(1, 1, model=MODEL, space=SPACE, prompt_length=P, response_length=R)
    made.set_policy(params(seed), 5)
    return made.generate([tiny.make_request(PROMPT, 1, 0, sampling=sampling_lib.constant(1, temperature=0.0))])[0]


def test_it_takes_new_weights_whose_head_is_the_embedding(engine):
    assert MODEL.tied_embedding
    for step, seed in ((7, 2), (8, 3)):
        engine.set_policy(params(seed), step)
        made = drawn(engine, 16)
        np.testing.assert_allclose(made.policy_logprobs, scored(params(seed), made), atol=1e-3)
        assert (made.policy_step[:, 0] == step).all() and engine.gap < 1e-4
        print(f"\nnew weights: {engine.update_seconds:.2f} s without tokens, gap {engine.gap:.2g} nats per token")


def kill_amid(engine, samples: int):
    """A generation during which the server is killed."""
    ticket, leash = engine.submit(tiny.make_request(PROMPT, samples, 4)), engine._process._process.pid
    for number, _ in enumerate(engine.decode([ticket])):
        if number == 1:
            pids = subprocess.run(["pgrep", "-P", str(leash)], capture_output=True, text=True, check=True).stdout
            os.kill(int(pids), signal.SIGKILL)
    return ticket.generation


def test_it_is_started_anew_where_it_is_killed(engine):
    before = engine.restarts
    made = kill_amid(engine, 64)
    assert engine.restarts == before + 1 and (made.length > 0).all()


def test_it_draws_by_adapters_that_it_loads(tmp_path):
    lora = LoraConfig(rank=3, alpha=6.0, targets=("layers.*",))
    policy, base, likeliest = Policy(model=MODEL, lora=lora), params(1), []
    engine = make(tmp_path, policy, base, Vllm.adapter_arguments(lora.rank))
    for seed in (0, 1, 2):
        adapters = applied.random(policy.trained_specs, scale=0.15, seed=seed)
        engine.set_policy(adapters, seed)
        made = drawn(engine, 16)
        np.testing.assert_allclose(made.policy_logprobs, scored(policy.merged(adapters, base), made), atol=1e-3)
        assert engine.gap < 1e-4
        print(f"\nnew adapters: {engine.update_seconds:.2f} s without tokens, gap {engine.gap:.2g} nats per token")
        likeliest.append(drawn(engine, 1, 0.0).tokens.tolist())
    assert likeliest[0] != likeliest[1] != likeliest[2], "other adapters draw other tokens"
    kill_amid(engine, 16)
    assert engine.restarts == 1 and engine.gap < 1e-4 and drawn(engine, 1, 0.0).tokens.tolist() == likeliest[2]
    wide = dataclasses.replace(lora, rank=16)
    trained = applied.random(Policy(model=MODEL, lora=wide).trained_specs, scale=0.1)
    export.save_adapters(tmp_path / "wide", MODEL, trained, wide, base="", dtype="float32")
    with pytest.raises(Refused, match=r"rank 16 is greater than max_lora_rank 8.*lora.rank=16 .*--max-lora-rank=16"):
        engine._server.load_adapter(tmp_path / "wide", rank=16, seconds=60.0)
    engine.close()


@pytest.mark.parametrize("changes", [{}, {"lora__rank": 2}], ids=["whole", "adapters"])
def test_a_run_searches_by_it_and_its_ledger_balances(tmp_path, changes):
    small = {"model__heads": 2, "model__kv_heads": 2, "model__head_size": 64, "learner__steps": 4}
    served = {"searchers__engine": "vllm", "searchers__engine_python": PYTHON, "searchers__engine_arguments": ARGUMENTS}
    c = tiny_run.config(schedule__mode="interleaved", replay__recent_probability=1.0, **small, **served, **changes)
    s = tiny_run.settings(tmp_path / "run", c)
    assert jobs.everything(s)() == 0
    (rows,) = frozen_runs.rows(s).values()
    assert sorted(set(rows["policy_step"][:, 0].tolist())) == [0, 1, 2, 3] and rows["ref_logprobs"].any()
