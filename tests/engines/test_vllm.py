"""A real vLLM draws: `make engines` installs it on the CPU, in an environment of its own."""

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
from tba_jax.decoding.servers import Vllm
from tba_jax.experiment import jobs
from tba_jax.models.config import DecoderConfig, ResponseSpace
from tba_jax.models.hugging_face import export
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


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    write_tokenizer, token_ids = export.tokenizer_files(TOKENIZER, None)

    def write(to: Path, weights) -> None:
        model, plain = export.untied(MODEL, weights)
        export.save(to, model, plain, dtype="float32", token_ids=token_ids, more=[write_tokenizer])

    settings = dict(dtype="float32", length=P + R, log_file=folder / "server.log", start_seconds=600.0)
    made = ServedEngine(
        MODEL,
        SPACE,
        tiny.make_mesh(),
        server=ServerProcess(Vllm, python=PYTHON, arguments=ARGUMENTS, **settings),
        folder=folder / "weights",
        write=write,
        slots=16,
        prompt_length=P,
        response_length=R,
        pad_id=0,
        stop_texts=("cd",),
        stop_strings=stop_automaton(TOKENIZER.token_bytes(), ("cd",), vocab=48),
    )
    made.set_policy(params(1), 5)
    yield made
    made.close()


def scored(seed: int, made) -> np.ndarray:
    columns = trajectory.token_columns([PROMPT] * len(made.tokens), made.responses, prompt_length=P, response_length=R, pad_id=0)
    how = dict(R=R, config=MODEL, space=SPACE, logit_bytes=2**20, remat="none")
    return np.asarray(jax.jit(functools.partial(applied.response_logprobs, **how))(params(seed), *columns.values())[0])


def drawn(engine, samples: int, temperature: float = 0.7, seed: int = 0):
    sampling = sampling_lib.constant(samples, temperature=temperature)
    return engine.generate([tiny.make_request(PROMPT, samples, seed, sampling=sampling)])[0]


def test_rows_are_of_the_policy_and_of_the_contract(engine):
    made = drawn(engine, 64)
    assert engine.gap < 1e-4
    np.testing.assert_allclose(made.policy_logprobs, scored(1, made), atol=1e-3)
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
        np.testing.assert_allclose(made.policy_logprobs, scored(seed, made), atol=1e-3)
        assert (made.policy_step[:, 0] == step).all() and engine.gap < 1e-4
        print(f"\nnew weights: {engine.update_seconds:.2f} s without tokens, gap {engine.gap:.2g} nats per token")


def test_it_is_started_anew_where_it_is_killed(engine):
    before, ticket = engine.restarts, engine.submit(tiny.make_request(PROMPT, 64, 4))
    leash = engine._process._process.pid
    for number, _ in enumerate(engine.decode([ticket])):
        if number == 1:
            os.kill(
                int(subprocess.run(["pgrep", "-P", str(leash)], capture_output=True, text=True, check=True).stdout),
                signal.SIGKILL,
            )
    assert engine.restarts == before + 1 and not ticket.left and (ticket.generation.length > 0).all()


def test_a_run_searches_by_it_and_its_ledger_balances(tmp_path):
    small = {"model__heads": 2, "model__kv_heads": 2, "model__head_size": 64, "learner__steps": 4}
    served = {"searchers__engine": "vllm", "searchers__engine_python": PYTHON, "searchers__engine_arguments": ARGUMENTS}
    c = tiny_run.config(schedule__mode="interleaved", replay__recent_probability=1.0, **small, **served)
    s = tiny_run.settings(tmp_path / "run", c)
    assert jobs.everything(s)() == 0
    (rows,) = frozen_runs.rows(s).values()
    assert sorted(set(rows["policy_step"][:, 0].tolist())) == [0, 1, 2, 3] and rows["ref_logprobs"].any()
