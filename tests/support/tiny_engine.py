"""A decoder of eleven tokens, engines of it, requests of every kind, and what the rows that answer them are compared with."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from tba_jax import sharding
from tba_jax.decoding import requests as requests_lib
from tba_jax.decoding import sampling as sampling_lib
from tba_jax.decoding import slots as slots_lib
from tba_jax.decoding.engine import Engine
from tba_jax.decoding.requests import Generation, Request
from tba_jax.models import scoring
from tba_jax.models.config import DecoderConfig
from tba_jax.models.parameters import Params
from tests.support import applied

MODEL = DecoderConfig(layers=2, width=16, heads=4, kv_heads=2, head_size=4, ffn=24, vocab=11, max_positions=16)
PAD, EOS, BANNED = 0, 2, (0, 1, 9)
TEMPERATURE = 0.7  # the scoring temperature
SPACE = scoring.ResponseSpace(temperature=TEMPERATURE, banned_tokens=BANNED, eos_id=EOS)
P, R = 64, 12  # prompts are prefilled at 32 or 64
LENGTHS = (1, 64, 33, 5, 32, 17, 50, 2, 64, 12, 31, 40, 3, 60, 8, 29)
COUNTS = (4, 3, 9, 1)
SIZES = 8, 4  # slots, and samples of a query


def random_params(seed: int = 0) -> Params:
    """Large enough that attention is far from uniform, and the end not too likely."""
    return applied.random(applied.specs(MODEL), scale=0.4, seed=10 + seed)


PARAMS = random_params()


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> jax.sharding.Mesh:
    return sharding.make_mesh((data, fsdp, tensor), setting="searchers.mesh", devices=jax.devices()[: data * fsdp * tensor])


def make_engine(slots: int, samples: int, **changes) -> Engine:
    settings = dict(model=MODEL, space=SPACE, mesh=make_mesh(), prompt_length=P, response_length=R, pad_id=PAD, chunk=4) | changes
    return Engine(slots=slots, samples=samples, **settings)


def mixed_sampling(rows: int) -> sampling_lib.Sampling:
    """Every setting, alone and together, in turn; the first row is greedy."""
    twelve = sampling_lib.Sampling(
        temperature=np.array([0, 1, 0.7, 1.5, 1, 1, 1, 2, 2, 1.1, 3, 0.5], np.float32),
        top_k=np.array([0, 0, 0, 0, 3, 0, 0, 4, 100, 1, 5, 2], np.int32),
        top_p=np.array([1, 1, 1, 1, 1, 0.7, 1, 0.8, 1, 1, 0.6, 1], np.float32),
        min_p=np.array([0, 0, 0, 0, 0, 0, 0.2, 0.05, 0.1, 0, 0.1, 0.9], np.float32),
    )
    return jax.tree.map(lambda x: np.resize(x, rows), twelve)


def plain_sampling(rows: int) -> sampling_lib.Sampling:
    return sampling_lib.constant(rows, temperature=1.0)


def row_keys(rows: int, seed: int = 0) -> np.ndarray:
    return np.asarray(slots_lib.row_keys(seed, 7, np.arange(rows, dtype=np.uint32)))


def make_request(prompt: Sequence[int], samples: int, seed: int = 0, **settings) -> Request:
    defaults = dict(name="q", prompt=prompt, keys=row_keys(samples, seed), sampling=plain_sampling(samples))
    return Request(**defaults | settings)


def make_stream(lengths: Sequence[int], counts: Sequence[int] = COUNTS, *, limits: bool = True, seed: int = 0) -> list[Request]:
    """Requests with prompts of these lengths, sample counts in turn, mixed settings, limits of 1 to R on every third."""
    rng = np.random.default_rng(seed)
    of_request = [counts[i % len(counts)] for i in range(len(lengths))]
    ends = np.cumsum(of_request)
    keys, sampling = row_keys(int(ends[-1]), seed), mixed_sampling(int(ends[-1]))
    stream = []
    for i, (length, end, count) in enumerate(zip(lengths, ends, of_request, strict=True)):
        rows = slice(end - count, end)
        prompt, limit = rng.integers(2, MODEL.vocab, length).tolist(), None
        if limits and i % 3 == 0:
            limit = rng.integers(1, R + 1, count)
        its = jax.tree.map(lambda x, rows=rows: x[rows], sampling)
        stream.append(Request(name=f"q{i}", prompt=prompt, keys=keys[rows], sampling=its, limit=limit))
    return stream


def row_of(request: Request, i: int, **changes) -> Request:
    """Sample i of a request, as a request of its own."""
    limit = None if request.limit is None else request.limit[i : i + 1]
    sampling = jax.tree.map(lambda x: x[i : i + 1], request.sampling)
    return dataclasses.replace(request, keys=request.keys[i : i + 1], sampling=sampling, limit=limit, **changes)


TEXTS = {3: "a", 4: "b", 5: "ab", 6: "c", 7: "ba", 8: "xcdy", 10: "d"}


def decoded_alone(single: Engine, stream: Sequence[Request], params: Params = PARAMS) -> Generation:
    single.set_policy(params, 5)
    rows = [row_of(request, i) for request in stream for i in range(request.samples)]
    return requests_lib.concatenate([single.generate([row])[0] for row in rows])


def decoded_together(engine: Engine, stream: Sequence[Request], params: Params = PARAMS) -> Generation:
    engine.set_policy(params, 5)
    return requests_lib.concatenate(engine.generate(stream))


def assert_same_rows(found: Generation, expected: Generation) -> None:
    for field in ("tokens", "length", "finished", "policy_step"):
        np.testing.assert_array_equal(getattr(found, field), getattr(expected, field), err_msg=field)
    for field in ("policy_logprobs", "behavior_logprobs"):
        np.testing.assert_allclose(getattr(found, field), getattr(expected, field), rtol=0, atol=1e-5, err_msg=field)


def numpy_distribution(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """float64[V]: temperature, top-k, top-p of exactly k tokens' mass, min-p; whatever ties with the last that stays, stays."""
    logits = logits.astype(np.float64)
    if temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    probs = np.exp((logits - logits.max()) / float(np.float32(temperature)))
    order = np.argsort(-logits, kind="stable")[: top_k or len(logits)]
    total, mass, least = probs[order].sum(), 0.0, logits.max()
    for i in order:
        if mass < float(np.float32(top_p)) * total and probs[i] >= float(np.float32(min_p)) * probs[order[0]]:
            least = logits[i]
        mass += probs[i]
    probs = np.where(logits >= least, probs, 0.0)
    return probs / probs.sum()
