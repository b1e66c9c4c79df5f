"""What the study of preference tuning learns from, all of it made of a file of stories and a language model of stories.

A query is the first sentence of a story, or its first two, with the space after it; its reference is the rest of the first
paragraph. The model itself continues openings, VADER's sentiment score (Hutto & Gilbert 2014) prefers the happier of two
continuations, and two reward models learn these preferences from stories of their own: the proxy one, which trains policies, and
the gold one, which measures them.
"""

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from benchmarks import side_by_side
from tba_jax import sharding
from tba_jax.decoding import sampling, slots
from tba_jax.decoding.engine import Engine
from tba_jax.decoding.requests import Request
from tba_jax.models import decoder, scoring
from tba_jax.models.hugging_face import load
from tba_jax.rewards import scorers
from tba_jax.rewards.scorers import SequenceClassifier
from tba_jax.storage import layout
from tba_jax.tasks.interface import ModelUse
from tba_jax.telemetry import metrics
from tba_jax.text.tokenizers import HuggingFaceTokenizer, stop_automaton

PROMPT_LENGTH, RESPONSE_LENGTH = 24, 64  # tokens; stories beyond them are left out
STOP_STRINGS = ("\n",)  # a response ends where its paragraph does
HELDOUT_QUERIES = 512
_SENTENCES = (1, 2)  # of an opening
REWARD_MODELS = ("proxy", "gold")
# Openings that the proxy model's pairs begin with; all others for training are the gold one's.
_PROXY_OPENINGS = 280
_CONTINUATIONS, _PAIRS_EACH = 16, 2  # of an opening; pairs that a continuation is the first of
_MARGIN = 0.3  # of VADER's score, which is within [-1, 1]: pairs that are nearer are nobody's preference
_HELDOUT_PAIRS = 0.1  # share of a model's openings
# A response that is cut at its limit is no paragraph, whatever it says: it gets a reward that all but this share of texts exceed.
_WORST_SHARE = 0.01

_SENTENCE = r".+?[.!?][\"”']?\s\s*"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """queries: split -> file of rows {"query", "summary"}; models: name -> folder of the reward model; pairs: name -> how many
    trained it; pair_accuracy: name -> share of held-out pairs that it orders as VADER does; missing_eos_reward: below nearly all
    of the proxy model's scores."""

    queries: dict[str, Path]
    models: dict[str, Path]
    pairs: dict[str, int]
    pair_accuracy: dict[str, float]
    missing_eos_reward: float


def make(folder: Path, *, model: Path, stories: Path, seed: int) -> Made:
    """Makes what is not there yet in folder. model: a Hugging Face folder; stories: a JSON list of texts; seed: of their order,
    which says who learns from which."""
    folder.mkdir(parents=True, exist_ok=True)
    queries = {split: folder / f"queries_{split}.jsonl" for split in ("train", "heldout")}
    if not all(path.exists() for path in queries.values()):
        texts = json.loads(stories.read_bytes())
        order = np.random.default_rng(seed).permutation(len(texts))
        rows = openings([texts[i] for i in order], model)
        _write(queries["heldout"], rows[-HELDOUT_QUERIES:])
        # Not the other opening of a story whose one is held out.
        first = rows[-HELDOUT_QUERIES]["query"]
        _write(queries["train"], [row for row in rows[:-HELDOUT_QUERIES] if not first.startswith(row["query"])])
    if not all(_pairs(folder, name, split).exists() for name in REWARD_MODELS for split in queries):
        prompts = [row["query"] for row in _read(queries["train"])]
        continued = list(zip(prompts, continuations(prompts, model), strict=True))
        for name, mine in zip(REWARD_MODELS, (continued[:_PROXY_OPENINGS], continued[_PROXY_OPENINGS:]), strict=True):
            heldout = int(_HELDOUT_PAIRS * len(mine))
            _write(_pairs(folder, name, "train"), preferences(mine[:-heldout], seed=0))
            _write(_pairs(folder, name, "heldout"), preferences(mine[-heldout:], seed=1))
    # The larger one first, since it takes longer.
    side_by_side.share_cores(lambda name, cores: _train(folder, name, model, cores), REWARD_MODELS[::-1])
    return Made(
        queries=queries,
        models={name: folder / name for name in REWARD_MODELS},
        pairs={name: len(_read(_pairs(folder, name, "train"))) for name in REWARD_MODELS},
        pair_accuracy={name: _accuracy(folder, name) for name in REWARD_MODELS},
        missing_eos_reward=_worst(folder),
    )


def openings(stories: Sequence[str], model: Path) -> list[dict[str, str]]:
    """Rows {"query", "summary"} in the stories' order, of each opening one; openings of a story follow each other.

    The space belongs to the query: to this model's tokenizer it is part of the token before it, and a text that ends without one
    is at its end.
    """
    tokenizer = HuggingFaceTokenizer(model)
    rows: dict[str, dict[str, str]] = {}
    for story, sentences in itertools.product(stories, _SENTENCES):
        found = re.fullmatch(f"((?:{_SENTENCE}){{{sentences}}})(.+)", story.strip().split("\n")[0].rstrip())
        if found is None:
            continue
        query, summary = found.groups()
        # A paragraph has no more tokens, opening included, than a response may have: room is left for what ends one.
        if len(tokenizer.encode(query)) <= PROMPT_LENGTH and len(tokenizer.encode(query + summary)) <= RESPONSE_LENGTH:
            rows.setdefault(query, {"query": query, "summary": summary})
    return list(rows.values())


def continuations(prompts: Sequence[str], model: Path) -> list[list[str]]:
    """Of each prompt the paragraphs that the model goes on with at temperature 1, without those that are cut at their limit."""
    folder, config, tokenizer = scorers.language_model(model, setting="--data=", compute_dtype="float32")
    mesh = sharding.make_mesh((len(jax.devices()), 1, 1), setting="devices")
    banned = {*tokenizer.special_ids, *range(tokenizer.vocab_size, config.vocab)} - {tokenizer.eos_id}
    engine = Engine(
        config,
        scoring.ResponseSpace(temperature=1.0, banned_tokens=tuple(sorted(banned)), eos_id=tokenizer.eos_id),
        mesh,
        slots=8 * _CONTINUATIONS,
        samples=_CONTINUATIONS,
        prompt_length=PROMPT_LENGTH,
        response_length=RESPONSE_LENGTH,
        pad_id=tokenizer.pad_id,
        stop_strings=stop_automaton(tokenizer.token_bytes(), STOP_STRINGS, vocab=config.vocab),
    )
    engine.set_policy(load.load_params(folder, config, decoder.define(config).shardings(mesh), dtype="float32"), 0)
    rows = np.arange(len(prompts) * _CONTINUATIONS, dtype=np.uint32)
    keys = np.asarray(slots.row_keys(np.uint32(0), 0, rows)).reshape(len(prompts), _CONTINUATIONS, 2)
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    requests = [
        Request(name=repr(prompt), prompt=ids, keys=of_prompt, sampling=sampling.constant(_CONTINUATIONS, temperature=1.0))
        for prompt, ids, of_prompt in zip(prompts, encoded, keys, strict=True)
    ]
    return [
        [
            tokenizer.decode_continuation(ids, tokens[:length].tolist())
            for tokens, length, finished in zip(made.tokens, made.length, made.finished, strict=True)
            if finished
        ]
        for ids, made in zip(encoded, engine.generate(requests), strict=True)
    ]


def preferences(continued: Iterable[tuple[str, Sequence[str]]], *, seed: int) -> list[dict[str, str]]:
    """Rows {"prompt", "chosen", "rejected"} of each query's continuations.

    The texts are whole, query and continuation, after an empty prompt: so the reward model learns from the very tokens that it
    will be given, which are of both as one text. Half of the texts lose what ends their paragraph, for references have no such
    end, and it must not tell them from responses.
    """
    score, rng = SentimentIntensityAnalyzer().polarity_scores, np.random.default_rng(seed)

    def text(prompt: str, response: str) -> str:
        return prompt + (response.split("\n")[0].rstrip() if rng.random() < 0.5 else response)

    rows = []
    for prompt, responses in continued:
        scored = [(score(response)["compound"], response) for response in responses]
        for i, first in enumerate(scored):
            for second in scored[i + 1 : i + 1 + _PAIRS_EACH]:
                if abs(first[0] - second[0]) >= _MARGIN:
                    worse, better = sorted((first, second))
                    rows.append({"prompt": "", "chosen": text(prompt, better[1]), "rejected": text(prompt, worse[1])})
    return rows


def _pairs(folder: Path, name: str, split: str) -> Path:
    return folder / f"pairs_{name}_{split}.jsonl"


def _train(folder: Path, name: str, model: Path, cores: Sequence[int]) -> None:
    """Trains a reward model, unless it is there."""
    if (folder / name).exists():
        return
    settings: dict[str, Any] = {
        "kind": "reward",
        "model.path": model,
        "data.train": _pairs(folder, name, "train"),
        "data.heldout": _pairs(folder, name, "heldout"),
        "data.prompt_length": 1,
        "data.response_length": PROMPT_LENGTH + RESPONSE_LENGTH + 1,
        "data.unfit": "skip",  # a text of the most tokens has rarely one more when it is encoded anew
        "training.learning_rate": 1e-3,
        "training.remat": "none",
    }
    words = ["tba_jax", "supervised", "--config=configs/supervised.py", f"--workdir={folder / f'{name}_training'}"]
    side_by_side.call([*words, f"--output={folder / name}"], settings, folder / f"{name}.out", cores=cores)


def _accuracy(folder: Path, name: str) -> float:
    """Of held-out pairs, at the end of training."""
    lines = metrics.read_lines(layout.RunDir(folder / f"{name}_training").metrics("supervised"))
    return [line["heldout_pair_accuracy"] for line in lines if "heldout_pair_accuracy" in line][-1]


def _worst(folder: Path) -> float:
    """The proxy model's reward that all but _WORST_SHARE of the texts of its held-out pairs exceed."""
    path = folder / "missing_eos_reward.json"
    if not path.exists():
        proxy = ModelUse(name="proxy", setting="--workdir=", path=str(folder / "proxy"), rows=64)
        scorer = SequenceClassifier(proxy, sharding.make_mesh((1, 1, 1), setting="devices"))
        texts = sorted({row[field] for row in _read(_pairs(folder, "proxy", "heldout")) for field in ("chosen", "rejected")})
        scores = scorer.scores(texts, ended=[True] * len(texts))[:, 0]
        layout.write_json(path, {"reward": round(float(np.quantile(scores, _WORST_SHARE)), 2)})
    return layout.read_json(path)["reward"]


def _write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """JSON lines, whole or absent."""
    draft = path.with_suffix(".draft")
    draft.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(draft, path)


def _read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
