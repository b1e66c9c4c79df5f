"""The contract that roles share, what a config is built into, and changes of a resumed run's schedule."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from configs import base, story_sentiment
from tba_jax.experiment import composition, meshes
from tba_jax.run import contract as contract_lib
from tba_jax.run import layout
from tba_jax.run.layout import RunDir
from tba_jax.text import vocabulary
from tba_jax.text.tokenizers import HuggingFaceTokenizer
from tests.support import tiny_checkpoints, tiny_run

FIXTURES = Path(__file__).parent.parent / "fixtures"


@pytest.fixture
def model_folder(tmp_path) -> Path:
    """A tiny Llama of 48 ids and 64 positions, with a tokenizer of 40 ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = shutil.copytree(FIXTURES / "tiny_llama_tied", tmp_path / "model")
    words = ["<end>", "<unk>", *(f"w{i}" for i in range(38))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<end>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"})
    )
    stories = tmp_path / "stories.json"
    stories.write_text(json.dumps([f"w{i} w{i + 1} w{i + 2}" for i in range(20)]))
    return folder


def story_config(folder: Path, **overrides):
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    settings = {
        "model.path": str(folder),
        "task.story_sentiment.data_path": str(folder.parent / "stories.json"),
        "task.story_sentiment.heldout_queries": 5,
        "learner.queries": 4,
        "task.prompt_length": 16,
        "task.response_length": 48,
    }
    return tiny_run.config_with(settings | named, story_sentiment)


def test_a_pretrained_model_and_its_limits(model_folder):
    built = composition.build(story_config(model_folder))
    assert (built.policy.model.vocab, built.tokenizer.vocab_size, built.contract.eos_id) == (48, 40, 0)
    assert built.contract.banned_tokens == tuple(range(40, 48))  # rows of the embedding without a token
    assert {split: len(queries) for split, queries in built.queries.items()} == {"train": 15, "heldout": 5}
    assert built.queries["train"][0].prompt == (2, 3, 4)
    assert "data_path" not in built.contract.task
    with pytest.raises(
        ValueError, match=r"task.prompt_length=17 \+ task.response_length=48 = 65 exceed the model's 64 positions"
    ):
        composition.build(story_config(model_folder, task__prompt_length=17))
    definition = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps(definition | {"vocab_size": 39}))
    with pytest.raises(ValueError, match=rf"model.path='{model_folder}': the tokenizer has 40 ids, the embedding only 39"):
        composition.build(story_config(model_folder))
    (model_folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=f"{model_folder} holds no tokenizer"):
        composition.build(story_config(model_folder))
    with pytest.raises(ValueError, match="nowhere"):
        composition.build(story_config(model_folder, model__path=str(model_folder / "nowhere")))


def test_the_extra_of_a_task_is_named_before_a_model_is_looked_for(model_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "vaderSentiment", None)
    with pytest.raises(
        ValueError, match=r"task.name='story_sentiment' needs .*vaderSentiment.*`stories`: `make stories`.*\.\[stories\]'"
    ):
        composition.build(story_config(model_folder, model__path=str(model_folder / "nowhere")))


def test_long_prompts_may_be_left_out(model_folder):
    stories = model_folder.parent / "stories.json"
    stories.write_text(json.dumps([f"w{i} " * (2 + i % 3) for i in range(20)]))
    config = story_config(model_folder, task__prompt_length=3, task__long_prompts="skip")
    built = composition.build(config)
    assert (built.skipped["train"], built.skipped["heldout"]) == (5, 1)
    assert {len(query.prompt) for query in built.queries["train"]} == {2, 3}


@pytest.mark.parametrize(
    "role, overrides, devices, sentence",
    [
        ("trainer", {"learner.mesh.data": 2}, 8, "learner.mesh data=2 × fsdp=1 × tensor=1 does not make up the 8 devices"),
        ("trainer", {"learner.mesh.data": -1, "learner.mesh.tensor": 4}, 6, "tensor=4 does not make up the 6 devices"),
        (
            "trainer",
            {},
            8,
            "learner.micro_batch_rows or learner.queries × learner.completions = 140 rows are not divisible by the 8",
        ),
        (
            "searcher",
            {"searchers.queries_per_batch": 3, "searchers.samples_per_query": 25, "searchers.slots": 100},
            4,
            "searchers.queries_per_batch × searchers.samples_per_query = 75 rows are not divisible by the 4 ways",
        ),
        ("searcher", {"searchers.slots": 30}, 4, "searchers.slots=30 cannot be divided by the 4 ways of the mesh's data axis"),
        (
            "searcher",
            {"searchers.slots": 212},
            4,
            "searchers.slots=212 over 4 ways of the mesh are 53 each, which divide into groups of 1 only; a multiple of 12 lets",
        ),
        (
            "trainer",
            {"warm_start.steps": 9, "warm_start.batch_size": 30},
            4,
            "warm_start.batch_size = 30 rows are not divisible by",
        ),
        (
            "evaluator",
            {"evaluation.mesh.tensor": 3},
            3,
            "evaluation.mesh: layers.attention.key.weight: axis 'kv_heads' of size 4 is not divisible by 3 (mesh axes",
        ),
        ("searcher", {"searchers.mesh.data": 3}, 4, "searchers.mesh data=3"),
        ("evaluator", {"evaluation.batch_size": 9}, 2, "evaluation.batch_size = 9 rows are not divisible by the 2 ways"),
    ],
)
def test_meshes_that_do_not_fit_the_devices_are_refused(role, overrides, devices, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        meshes.check(composition.build(tiny_run.config_with(overrides)), role=role, devices=devices)
    meshes.check(composition.build(base.get_config()), role=role, devices=4)


def test_a_misspelt_key_fails_with_a_suggestion():
    with pytest.raises((AttributeError, KeyError), match="learning_rate"):
        base.get_config().learner.learning_rat = 1.0


def join(tmp_path, overrides: dict[str, object] | None = None):
    config = tiny_run.config_with(overrides or {})
    contract_lib.join(RunDir(tmp_path / "run"), config, composition.build(config).contract)
    return config


def test_the_first_role_writes_the_config_and_others_join(tmp_path):
    config = join(tmp_path)
    stored = (tmp_path / "run" / "config.json").read_bytes()
    assert json.loads(stored)["config"] == json.loads(json.dumps(config.to_dict()))
    assert json.loads(stored)["changes"] == []
    join(tmp_path)
    # Per-role and schedule settings are no part of the contract, nor is the number format of computing.
    join(
        tmp_path,
        {"learner.learning_rate": 1.0, "searchers.count": 7, "model.compute_dtype": "bfloat16", "sampling.temperature": 2.0},
    )
    assert (tmp_path / "run" / "config.json").read_bytes() == stored
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]


def test_a_run_of_another_version_is_refused(tmp_path):
    join(tmp_path)
    run = RunDir(tmp_path / "run")
    stored = contract_lib.read(run)
    for there in (None, contract_lib.FORMAT + 1):
        layout.write_json(run.config, stored | {"format": there})
        for attempt in (
            join,
            lambda _: contract_lib.read_run(run),
            lambda _: contract_lib.changed_schedule(run, tiny_run.config_with({})),
        ):
            with pytest.raises(ValueError, match=rf"config\.json has format {there}, .* {contract_lib.FORMAT}: .* new --workdir"):
                attempt(tmp_path)
    del stored["config"]["searchers"]["swap"]
    layout.write_json(run.config, stored)
    with pytest.raises(ValueError, match=r"config\.json has no setting searchers\.swap: .* new --workdir"):
        join(tmp_path)


def test_supervised_training_is_no_run_to_join(tmp_path):
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    layout.write_json(run.config, {"format": contract_lib.FORMAT, "config": {}, "contract": {"supervised": "sft"}})
    with pytest.raises(ValueError, match="run' holds supervised training"):
        join(tmp_path)


def test_what_ends_and_bounds_responses_is_in_the_contract():
    changes = {"task.min_response_length": 32, "task.banned_tokens": (7, 4, 7), "task.stop_strings": ("=", "1+", "=")}
    changes |= {"task.step_ends": (",", "#", ",")}
    contract = composition.build(tiny_run.config_with(changes)).contract
    assert (contract.min_response_length, contract.stop_strings) == (32, ("1+", "="))
    assert contract.step_ends == ("#", ",") and contract.row_shape().state_values
    assert contract.banned_tokens == (0, 1, 4, 7)


def test_a_special_token_whose_text_is_a_stop_string_is_allowed(model_folder, tmp_path):
    """The tokenizer is a byte-level one with a special token beside the end."""
    folder = tiny_checkpoints.write_byte_bpe(tmp_path / "tokenizer")
    definition = json.loads((folder / "tokenizer.json").read_text())
    special = [{**definition["added_tokens"][0], "id": 258 + i, "content": f"<|{name}|>"} for i, name in enumerate(("turn", "x"))]
    (folder / "tokenizer.json").write_text(json.dumps(definition | {"added_tokens": [*definition["added_tokens"], *special]}))
    tokenizer = HuggingFaceTokenizer(folder)
    assert tokenizer.special_ids == (256, 258, 259)

    def banned(*stop_strings: str) -> tuple[int, ...]:
        task = tiny_run.config_with({"task.stop_strings": stop_strings}).task
        vocabulary.check_stop_strings(task.stop_strings, tokenizer, 262)
        return vocabulary.banned_tokens(task, tokenizer, 262)

    for text in ("<|turn|>", "<|end|>"):
        with pytest.raises(ValueError, match=re.escape(f"task.step_ends holds {text!r}, which no response can")):
            vocabulary.check_stop_strings([text], tokenizer, 262, setting="task.step_ends", special=False)
    vocabulary.check_stop_strings(["turn"], tokenizer, 262, setting="task.step_ends", special=False)
    assert banned() == banned("turn") == (258, 259, 260, 261)
    assert banned("<|turn|>") == (259, 260, 261)


def test_stop_strings_need_a_tokenizer_whose_tokens_have_bytes(model_folder):
    with pytest.raises(
        ValueError, match=r"the tokenizer's decoder is none, .* task\.stop_strings and task\.step_ends need a byte-level"
    ):
        composition.build(story_config(model_folder, task__stop_strings=("w3",)))


def test_a_stop_string_is_one_that_the_tokenizer_can_spell(data_dir):
    """stories260K strips white space from the ends of a text, TinyStories-656K has no token for 漢."""
    for name, text, spelled in (
        ("stories260K-hf", "\n", True),
        ("stories260K-hf", "漢", True),
        ("stories260K-hf", "  ", False),  # it makes one space of many
        ("TinyStories-656K", "\n\n", True),
        ("TinyStories-656K", "a 漢", False),
    ):
        tokenizer = HuggingFaceTokenizer(data_dir / "models" / name)
        if spelled:
            vocabulary.check_stop_strings([text], tokenizer, tokenizer.vocab_size)
            continue
        with pytest.raises(ValueError, match=re.escape(f"task.stop_strings holds {text!r}, which no response can")):
            vocabulary.check_stop_strings([text], tokenizer, tokenizer.vocab_size)


def test_another_contract_is_refused_by_field(tmp_path):
    join(tmp_path)
    changed = {
        "task.response_length": 33,
        "sampling.scoring_temperature": 0.7,
        "model.width": 64,
        "task.arithmetic.seed": 1,
        "task.missing_eos_reward": -1.0,
        "warm_start.steps": 600,
    }
    with pytest.raises(ValueError, match="belongs to a run of another contract") as refused:
        join(tmp_path, changed)
    different, _, advice = str(refused.value).partition(". A run keeps its contract: ")
    assert advice == "take its settings, or begin another run in a new --workdir"
    assert different.split("; ")[1:] == [
        "missing_eos_reward: None there, -1.0 here",
        "model.max_positions: 48 there, 49 here",
        "model.width: 128 there, 64 here",
        "response_length: 32 there, 33 here",
        "scoring_temperature: 1.0 there, 0.7 here",
        "task.arithmetic.seed: 0 there, 1 here",
        "warm_start.steps: 0 there, 600 here",
    ]


def test_a_changed_schedule_needs_leave_and_is_recorded(tmp_path):
    run = RunDir(tmp_path / "run")
    join(tmp_path)
    assert contract_lib.change_schedule(run, tiny_run.config_with({}), allowed=[], step=3) == {}
    free = {
        "learner.micro_batch_rows": 20,
        "learner.mesh.data": 1,
        "publish.keep": 9,
        "searchers.count": 5,
        "evaluation.queries": 8,
    }
    assert contract_lib.change_schedule(run, tiny_run.config_with(free), allowed=[], step=3) == {}
    before = run.config.read_bytes()
    changed = tiny_run.config_with({"learner.steps": 400, "replay.recent_probability": 0.5, "seed": 4})
    with pytest.raises(ValueError, match="the run has another schedule") as refused:
        contract_lib.change_schedule(run, changed, allowed=["learner.steps"], step=3)
    for part in (
        "replay.recent_probability: 0.95 there, 0.5 here",
        "seed: 0 there, 4 here",
        "--allow_change=replay.recent_probability,seed",
    ):
        assert part in str(refused.value)
    assert "learner.steps" not in str(refused.value)
    assert run.config.read_bytes() == before
    allowed = ["learner.steps", "replay.recent_probability", "seed"]
    assert contract_lib.change_schedule(run, changed, allowed=allowed, step=120)["learner.steps"] == (500, 400)
    stored = contract_lib.read(run)
    assert stored["config"]["learner"]["steps"] == 400 and len(stored["changes"]) == 1
    assert stored["changes"][0]["step"] == 120
    assert stored["changes"][0]["settings"] == {
        "learner.steps": [500, 400],
        "replay.recent_probability": [0.95, 0.5],
        "seed": [0, 4],
    }
    # From here on the changed schedule is the run's; the old one would be a change.
    assert contract_lib.change_schedule(run, changed, allowed=[], step=130) == {}
    with pytest.raises(ValueError, match=r"learner.steps: 400 there, 500 here"):
        contract_lib.change_schedule(run, tiny_run.config_with({}), allowed=[], step=130)


def test_before_the_first_step_the_trainer_sets_the_schedule(tmp_path):
    """Whoever came first: a searcher's own flags about the trainer bind nobody."""
    join(tmp_path)
    run = RunDir(tmp_path / "run")
    trainers = tiny_run.config_with({"learner.steps": 40, "replay.capacity": 60_000, "replay.mount": ("/a",), "seed": 4})
    join(tmp_path, {"learner.steps": 40})
    changes = contract_lib.change_schedule(run, trainers, allowed=[], step=0)
    assert changes["learner.steps"] == (500, 40) and changes["replay.capacity"] == (50_000, 60_000)
    assert contract_lib.changed_schedule(run, trainers) == {} and contract_lib.read(run)["changes"][0]["step"] == 0
    # Not what the index of a checkpoint was built with, which a stop before the first step leaves.
    (run.checkpoints / "00000000").mkdir(parents=True)
    smaller = tiny_run.config_with({"learner.steps": 40, "seed": 4, "replay.mount": ("/a",)})
    with pytest.raises(ValueError, match=r"replay.capacity of a run cannot change: 60000 there, 50000 here"):
        contract_lib.change_schedule(run, smaller, allowed=[], step=0)
    # From the first step on it is the run's.
    later = tiny_run.config_with({"seed": 4, "replay.mount": ("/a",), "replay.capacity": 60_000})
    with pytest.raises(ValueError, match=r"learner.steps: 40 there, 500 here"):
        contract_lib.change_schedule(run, later, allowed=[], step=1)


def test_a_role_that_joins_writes_nothing(tmp_path, monkeypatch):
    """So that one which is started again while storage refuses is not told that its user made a mistake."""
    join(tmp_path)

    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(layout, "create_json", refuse)
    join(tmp_path)
    with pytest.raises(ValueError, match="cannot be written: No space left on device"):
        join(tmp_path / "elsewhere")


def test_past_schedules_of_steps_after_a_checkpoint(tmp_path):
    """Three changes, at steps 10, 30 and 50."""
    join(tmp_path)
    run = RunDir(tmp_path / "run")
    rate, steps = "learner.learning_rate", "learner.steps"
    for step, values in ((10, {rate: 2e-5}), (30, {rate: 3e-5, steps: 600}), (50, {rate: 3e-5, steps: 700})):
        assert contract_lib.change_schedule(run, tiny_run.config_with(values), allowed=[rate, steps], step=step)
    first, second = {rate: 1e-5, steps: 500}, {rate: 2e-5, steps: 500}
    assert contract_lib.past_schedules(run, after=0) == [(10, first), (30, second), (50, {steps: 600})]
    assert contract_lib.past_schedules(run, after=30) == [(50, {steps: 600})]
    assert contract_lib.past_schedules(run, after=50) == []
    with pytest.raises(ValueError, match=r"--allow_change=learner\.step: there is no setting learner\.step"):
        contract_lib.change_schedule(run, tiny_run.config_with({}), allowed=["learner.step"], step=60)


@pytest.mark.parametrize(
    "name, there, here, refused",
    [
        ("learner.reference.kind", "initial", "ema", True),
        ("learner.reference.kind", "reset", "surrogate", True),
        ("learner.reference.kind", "reset", "ema", False),
        ("learner.objective", "trajectory_balance", "learned_log_z", True),
        ("learner.objective", "learned_log_z", "tba_prime", True),
        ("learner.objective", "trajectory_balance", "tba_prime", False),
        ("learner.objective", "grpo", "ppo", True),
        ("learner.objective", "learned_log_z", "ppo", True),
        ("learner.objective", "rloo", "grpo", False),
    ],
)
def test_what_checkpoints_hold_cannot_change(tmp_path, name, there, here, refused):
    join(tmp_path, {name: there})
    run, changed = RunDir(tmp_path / "run"), tiny_run.config_with({name: here})
    if refused:
        with pytest.raises(ValueError, match=f"{name} of a run cannot change from '{there}' to '{here}': its checkpoints hold"):
            contract_lib.change_schedule(run, changed, allowed=[name], step=3)
    else:
        assert contract_lib.change_schedule(run, changed, allowed=[name], step=3) == {name: (there, here)}


def test_what_the_index_was_built_with_cannot_change(tmp_path):
    join(tmp_path)
    changed = tiny_run.config_with({"replay.capacity": 60_000})
    with pytest.raises(ValueError, match=r"replay.capacity of a run cannot change: 50000 there, 60000 here"):
        contract_lib.change_schedule(RunDir(tmp_path / "run"), changed, allowed=["replay.capacity"], step=3)


def test_mounts_can_only_grow(tmp_path):
    join(tmp_path, {"replay.mount": ("/a", "/b")})
    run = RunDir(tmp_path / "run")
    with pytest.raises(ValueError, match=r"replay.mount: \['/a', '/b'\] there, \['/a', '/b', '/c'\] here; .*allow_change"):
        contract_lib.change_schedule(run, tiny_run.config_with({"replay.mount": ("/a", "/b", "/c")}), allowed=[], step=3)
    allowed = ["replay.mount"]
    with pytest.raises(ValueError, match=r"replay.mount of a run can only grow: its journal names rows of '/a'"):
        contract_lib.change_schedule(run, tiny_run.config_with({"replay.mount": ("/c", "/b")}), allowed=allowed, step=3)
    contract_lib.change_schedule(run, tiny_run.config_with({"replay.mount": ("/a", "/b", "/c")}), allowed=allowed, step=3)
    assert contract_lib.read(run)["config"]["replay"]["mount"] == ["/a", "/b", "/c"]


def test_where_a_run_began_cannot_change(tmp_path):
    contract = composition.build(tiny_run.config_with({})).contract
    run = RunDir(tmp_path / "run")
    contract_lib.join(run, tiny_run.config_with({}), contract, init_from="/other@5")
    for same in ("/other@5", ""):
        contract_lib.join(run, tiny_run.config_with({}), contract, init_from=same)
    with pytest.raises(ValueError, match=r"--init_from=/other@6: .* exists and began from the policy /other@5"):
        contract_lib.join(run, tiny_run.config_with({}), contract, init_from="/other@6")
    join(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"--init_from=/other@6: .* exists and began from what its config says"):
        contract_lib.join(RunDir(tmp_path / "plain" / "run"), tiny_run.config_with({}), contract, init_from="/other@6")


@pytest.mark.parametrize("inside", ["", "below"])
def test_a_workdir_that_cannot_be_written_is_refused(tmp_path, inside):
    (tmp_path / "file").write_text("not a folder")
    root = tmp_path / "file" / inside
    config = base.get_config()
    with pytest.raises(ValueError, match=rf"workdir '{root}' cannot be written: (File exists|Not a directory)"):
        contract_lib.join(RunDir(root), config, composition.build(config).contract)


def test_a_damaged_config_is_named(tmp_path):
    join(tmp_path)
    (tmp_path / "run" / "config.json").write_text('{"config": ')
    with pytest.raises(ValueError, match=r"run/config.json is not valid JSON"):
        join(tmp_path)
