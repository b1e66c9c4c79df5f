"""Tokens a second of vLLM on the CPU and of the own decoder: the same model, prompts, lengths and cores, strictly in turn.

python -m benchmarks.engines --python=.venv-engines/bin/python [--pairs=5] [--layers=6] [--width=384]

Needs the Python of an environment with vLLM (make engines). Two loads: 64 prompts of 64 tokens with 128 drawn each, and 16
samples of 128 tokens of one prompt of 512. The first turn of each, which compiles, is not timed; vLLM's prefix cache is on.
"""

import dataclasses
import functools
import os
import statistics
import string
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags

from tba_jax import sharding
from tba_jax.decoding import sampling
from tba_jax.decoding.engine import Engine
from tba_jax.decoding.requests import Request
from tba_jax.decoding.served import ServedEngine
from tba_jax.decoding.server_process import ServerProcess
from tba_jax.decoding.servers import Vllm
from tba_jax.decoding.slots import row_keys
from tba_jax.models import decoder
from tba_jax.models.config import DecoderConfig, ResponseSpace
from tba_jax.models.hugging_face import export
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.text.tokenizers import CharacterTokenizer

_PYTHON = flags.DEFINE_string("python", None, "Python of an environment with vLLM.", required=True)
_PAIRS = flags.DEFINE_integer("pairs", 5, "Turns of each.", lower_bound=1)
_LAYERS = flags.DEFINE_integer("layers", 6, "Of the model.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 384, "Of the model; heads have 64.", lower_bound=64)

_TOKENIZER = CharacterTokenizer(string.printable)
_DRAWN = 128


@dataclasses.dataclass(frozen=True)
class _Load:
    prompts: int
    prompt: int
    samples: int


_LOADS = {"64 prompts of 64": _Load(64, 64, 1), "16 samples of a prompt of 512": _Load(1, 512, 16)}


def _requests(load: _Load, seed: int) -> list[Request]:
    rng, vocab = np.random.default_rng(seed), _TOKENIZER.vocab_size
    keys = np.asarray(row_keys(seed, 0, np.arange(load.prompts * load.samples, dtype=np.uint32)))
    asked: dict[str, Any] = dict(sampling=sampling.constant(load.samples, temperature=1.0))
    return [
        Request(
            name=f"{i}",
            prompt=rng.integers(3, vocab, load.prompt).tolist(),
            keys=keys[i * load.samples :][: load.samples],
            **asked,
        )
        for i in range(load.prompts)
    ]


def _measure(load: _Load, model: DecoderConfig, params: Params, folder: Path) -> dict[str, list[float]]:
    """Tokens a second of each turn."""
    rows = load.prompts * load.samples
    space = ResponseSpace(temperature=1.0, banned_tokens=(0, 1, _TOKENIZER.eos_id), eos_id=-1)
    mesh = sharding.make_mesh((1, 1, 1), setting="benchmark", devices=jax.devices()[:1])
    write_tokenizer, token_ids = export.tokenizer_files(_TOKENIZER, None)

    def write(to: Path, its: DecoderConfig, weights: Params) -> None:
        export.save(to, its, weights, dtype="float32", token_ids=token_ids, more=[write_tokenizer])

    process = ServerProcess(
        Vllm,
        python=_PYTHON.value,
        arguments=("--gpu-memory-utilization=0.2", "--enforce-eager"),
        dtype="float32",
        length=load.prompt + _DRAWN,
        log_file=folder / "vllm.log",
        start_seconds=600.0,
    )
    sizes: dict[str, Any] = dict(slots=rows, prompt_length=load.prompt, response_length=_DRAWN, pad_id=0)
    served = ServedEngine(Policy(model=model), {}, space, mesh, server=process, folder=folder / "weights", write=write, **sizes)
    engines: dict[str, ServedEngine | Engine] = {
        "vLLM": served,
        "own": Engine(model, space, mesh, samples=load.samples, lockstep=True, **sizes),
    }
    found: dict[str, list[float]] = {name: [] for name in engines}
    try:
        for engine in engines.values():
            engine.set_policy(params, 0)
        for turn in range(_PAIRS.value + 1):
            for name, engine in engines.items():
                asked, begun = _requests(load, turn), time.perf_counter()
                made = engine.generate(asked)
                seconds = time.perf_counter() - begun
                assert sum(int(each.length.sum()) for each in made) == rows * _DRAWN
                if turn:
                    found[name].append(rows * _DRAWN / seconds)
    finally:
        served.close()
    return found


def main(_: list[str]) -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    heads = _WIDTH.value // 64
    sizes: dict[str, Any] = dict(layers=_LAYERS.value, width=_WIDTH.value, heads=heads, kv_heads=heads, head_size=64)
    model = DecoderConfig(**sizes, ffn=4 * _WIDTH.value, vocab=_TOKENIZER.vocab_size, max_positions=1024)
    params = jax.jit(functools.partial(decoder.define(model).init))(jax.random.key(0))
    print("| load | own, tokens/s | vLLM, tokens/s | own / vLLM, median (lowest to highest) |\n|---|---|---|---|")
    for name, load in _LOADS.items():
        with tempfile.TemporaryDirectory() as folder:
            found = _measure(load, model, params, Path(folder))
        ratios = [own / vllm for own, vllm in zip(found["own"], found["vLLM"], strict=True)]
        own, vllm = (statistics.median(found[kind]) for kind in ("own", "vLLM"))
        print(f"| {name} | {own:.0f} | {vllm:.0f} | {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |")


if __name__ == "__main__":
    app.run(main)
