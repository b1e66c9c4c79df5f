"""The supervised command: what it learns, what it writes, how it resumes, and what it refuses."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy

from configs import supervised as recipe
from tba_jax import sharding
from tba_jax.commands import command_line, supervised
from tba_jax.models import parameters, scoring
from tba_jax.models.config import DecoderConfig
from tba_jax.models.hugging_face import export, load
from tba_jax.models.parameters import Params
from tba_jax.run import processes
from tba_jax.storage import contract, layout
from tba_jax.supervised import tuning
from tba_jax.telemetry import metrics
from tba_jax.text.tokenizers import HuggingFaceTokenizer
from tests.support import applied
from tests.support.summaries import write_rows

CHARACTERS = "abcdefghijklmnopqrstuvwxyz:#"
# The embedding has a row that no token uses, so that a mesh can split it.
MODEL = DecoderConfig(layers=2, width=32, heads=4, kv_heads=2, head_size=8, ffn=64, vocab=32, max_positions=64)
SETTINGS: dict[str, Any] = {"data.prompt_length": 8, "data.response_length": 16, "data.heldout_share": 0.3}
SETTINGS |= {"training.batch_size": 8, "training.steps": 4, "training.warmup_steps": 1, "training.learning_rate": 3e-3}
SETTINGS |= {"training.remat": "none", "training.mesh.data": 1, "metrics.every_steps": 1}


def random_params() -> Params:
    """Four times as large as fresh ones: attention that is not uniform to begin with learns in fewer steps."""
    fresh = parameters.flatten(applied.init(jax.random.key(7), MODEL))
    return parameters.unflatten({name: leaf if name.endswith(".scale") else 4 * leaf for name, leaf in fresh.items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    export.save(folder, MODEL, random_params(), dtype="float32", token_ids={"eos_token_id": 2})
    export.write_character_tokenizer(folder, CHARACTERS, pad_id=0, bos_id=1, eos_id=2)
    return folder


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    make_mesh = sharding.make_mesh
    first = lambda sizes, *, setting: make_mesh(sizes, setting=setting, devices=jax.devices()[: int(np.prod(sizes))])  # noqa: E731
    monkeypatch.setattr(sharding, "make_mesh", first)


def sentences(count: int, seed: int, *, reward: bool = False) -> list[dict[str, str]]:
    """The response is the prompt's word again, backwards; for a reward model it is better than the word itself."""
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(list("abcd"), int(rng.integers(2, 7)))) for _ in range(count)]
    if reward:
        return [{"prompt": f"{text}:", "chosen": text[::-1], "rejected": f"{text}d"} for text in words]
    return [{"prompt": f"{text}:", "response": text[::-1]} for text in words]


def config(folder: Path, train: str, **changes: Any) -> Any:
    c = recipe.get_config()
    changed = {name.replace("__", "."): value for name, value in changes.items()}
    c.update_from_flattened_dict({**SETTINGS, "model.path": str(folder), "data.train": train, **changed})
    return c


def after(count: int) -> Callable[[], bool]:
    asked = iter(range(10**6))
    return lambda: next(asked) >= count


def never() -> bool:
    return False


def test_sft_lowers_the_loss_and_its_folder_computes_the_same(folder, tmp_path, capsys):
    train = write_rows(tmp_path / "train.jsonl", sentences(300, seed=1))
    c = config(folder, train, training__steps=20, training__batch_size=16, evaluation__every_steps=10)
    plan = supervised.prepare(c, layout.RunDir(tmp_path / "run"), tmp_path / "sft")
    tuned = tuning.Tuning(plan)
    assert tuned.train(never)
    tuned.export()
    points = [line for line in metrics.read_lines(plan.run.metrics("supervised")) if "heldout_loss" in line]
    assert points[-1]["heldout_loss"] < 0.8 * points[0]["heldout_loss"], points
    for point in points:
        np.testing.assert_allclose(point["heldout_perplexity"], np.exp(point["heldout_loss"]), rtol=1e-6)

    model = load.read_config(tmp_path / "sft", compute_dtype="float32")
    params = load.load_params(tmp_path / "sft", model, applied.shardings(model, plan.mesh))
    jax.tree.map(np.testing.assert_array_equal, params, tuned.state.params["policy"])
    assert model == plan.model and HuggingFaceTokenizer(tmp_path / "sft").fingerprint == plan.tokenizer.fingerprint
    rows = tuning.make_batch(plan.data.heldout, rows=64, prompt_length=8, response_length=16, pad_id=0)
    space = scoring.ResponseSpace(temperature=1.0, banned_tokens=(), eos_id=-1)
    settings: dict[str, Any] = dict(R=16, config=model, space=space, logit_bytes=1 << 20, remat="none")
    score = jax.jit(functools.partial(applied.response_logprobs, **settings))
    found, _ = score(params, rows.tokens, rows.prompt_length, rows.response_length)
    loss = -np.sum(found) / sum(len(response) for _, response in plan.data.heldout)
    np.testing.assert_allclose(loss, points[-1]["heldout_loss"], rtol=1e-5)
    tuned.state.params["policy"]["final_norm"]["scale"] = jax.numpy.full(32, np.nan)
    tuned.step -= 1
    with pytest.raises(FloatingPointError, match="step 20: loss nan"):
        tuned.train(never)
    tuned.close()


def weights(folder: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(folder / "model.safetensors")


def trained(workdir: Path) -> list[dict[str, Any]]:
    lines = metrics.read_lines(layout.RunDir(workdir).metrics("supervised"))
    return [{k: v for k, v in line.items() if k not in ("time", "seconds")} for line in lines if "loss" in line]


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(folder, tmp_path, monkeypatch, capsys):
    """Four steps of 8 examples out of 12: the third and the fourth cross from one epoch to the next."""
    lines = sentences(16, seed=1, reward=True)
    train, heldout = write_rows(tmp_path / "train.jsonl", lines[:12]), write_rows(tmp_path / "heldout.jsonl", lines[12:])
    c = config(folder, train, kind="reward", data__heldout=heldout, training__steps=0, training__epochs=2.5)
    plan = supervised.prepare(c, layout.RunDir(tmp_path / "whole"), tmp_path / "whole-model")
    assert plan.steps == 4  # 30 examples, 8 a step
    seen, make_batch = [], tuning.make_batch
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "make_batch", lambda batch, **sizes: (seen.extend(map(id, batch)), make_batch(batch, **sizes))[1])
        assert supervised.execute(plan, never) == 0
    taken = [row for row in seen if row in {id(row) for row in plan.data.train}]
    assert len(taken) == 32 and sorted(taken[:12]) == sorted(taken[12:24]) and len(set(taken[:12])) == 12
    assert taken[:12] != taken[12:24], "each epoch has an order of its own"
    capsys.readouterr()

    write_rows(tmp_path / "moved.jsonl", lines[:12])
    given = SETTINGS | {"kind": "reward", "model.path": folder, "data.train": tmp_path / "moved.jsonl", "data.heldout": heldout}
    given |= {"training.steps": 0, "training.epochs": 2.5, "evaluation.every_steps": 1, "checkpoint.keep": 3}
    arguments = ["--config=configs/supervised.py", f"--workdir={tmp_path}/parts", f"--output={tmp_path}/parts-model"]
    arguments += [f"--config.{name}={value}" for name, value in given.items()]
    monkeypatch.setattr(processes, "StopSignal", lambda: after(2))
    assert command_line.execute(supervised, arguments) == processes.STOPPED
    assert f"stopped at step 2 of 4; the same command resumes {tmp_path}/parts" in capsys.readouterr().err
    assert not (tmp_path / "parts-model").exists() and layout.steps_in(layout.RunDir(tmp_path / "parts").checkpoints) == [2]
    monkeypatch.setattr(processes, "StopSignal", lambda: never)
    assert command_line.execute(supervised, arguments) == 0
    said = capsys.readouterr()
    assert "resumed at step 2 of 4" in said.err and re.fullmatch(
        r"reward: held-out pair accuracy \S+ -> \S+ \(loss \S+ -> \S+; guesses: 0.5 ± 0.25\) in \d+ s, model in \S+\n", said.out
    )
    jax.tree.map(np.testing.assert_array_equal, weights(tmp_path / "parts-model"), weights(tmp_path / "whole-model"))
    assert trained(tmp_path / "parts") == trained(tmp_path / "whole") and len(trained(tmp_path / "whole")) == 4
    initial = random_params()["embedding"]["weight"]
    assert not np.array_equal(weights(tmp_path / "whole-model")["model.embed_tokens.weight"], initial)
    found = {path.name for path in (tmp_path / "parts-model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= found

    again = supervised.prepare(c, plan.run, tmp_path / "again")
    assert supervised.execute(again, never) == 0, "a finished run only writes its model"
    jax.tree.map(np.testing.assert_array_equal, weights(tmp_path / "again"), weights(tmp_path / "whole-model"))


FULL = {"checkpoint__keep": 10**13, "checkpoint__every_steps": 1, "training__steps": 10**13}
BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"data__prompt_length": 60}, "= 76 exceed the model's 64 positions"),
    ({"training__micro_batch_rows": 3}, "training.micro_batch_rows=3 does not divide training.batch_size=8"),
    ({"training__micro_batch_rows": 1, "training__mesh__data": 2}, "by the 2 ways of training.mesh.data × "),
    ({"data__response_field": "prompt"}, "the fields of an example must differ: data.*_field are prompt, prompt"),
    (FULL, "this run would fill its disk, about "),
]


@pytest.mark.parametrize(("changes", "words"), BAD_SETTINGS)
def test_bad_settings_are_named(folder, tmp_path, changes, words):
    c = config(folder, write_rows(tmp_path / "train.jsonl", sentences(50, seed=1)), **changes)
    with pytest.raises(ValueError) as refused:
        supervised.prepare(c, layout.RunDir(tmp_path / "run"), tmp_path / "model")
    assert words in str(refused.value) and not (tmp_path / "run").exists()


def test_a_resumed_run_keeps_its_settings_and_examples(folder, tmp_path):
    train = write_rows(path := tmp_path / "train.jsonl", sentences(50, seed=1))
    run_folder = layout.RunDir(tmp_path / "run")

    def prepared(**changes: Any) -> Any:
        return supervised.prepare(config(folder, train, **changes), run_folder, tmp_path / "model")

    prepared()
    free = {"training__micro_batch_rows": 4, "training__remat": "full", "training__logit_megabytes": 7, "metrics__every_steps": 9}
    prepared(**free, training__mesh__data=2, evaluation__every_steps=3, evaluation__examples=5)
    with pytest.raises(ValueError, match=r"training\.learning_rate: 0\.003 there, 1\.0 here; training\.steps: 4 there, 5 here"):
        prepared(training__learning_rate=1.0, training__steps=5)
    with pytest.raises(ValueError, match=r"kind: 'sft' there, 'reward' here|field 'chosen' is missing"):
        prepared(kind="reward")
    write_rows(path, sentences(50, seed=2))
    with pytest.raises(ValueError, match=r"the examples of data\.train .* are not those"):
        prepared()
    layout.write_json(run_folder.config, {"format": contract.FORMAT, "config": {}, "contract": {"task_name": "arithmetic"}})
    with pytest.raises(ValueError, match="belongs to an RL run"):
        prepared()
