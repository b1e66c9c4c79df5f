"""Programs of frozen models, made from configs alone: the same that loaded models run, and what rests on their devices."""

import shutil

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from configs import base
from tba_jax import sharding
from tba_jax.experiment.fitting import Measure
from tba_jax.rewards import LOADERS, embeddings, programs
from tba_jax.tasks.red_team import RedTeam
from tba_jax.tasks.tldr import TLDR
from tests.support import lowered, random_checkpoints, spelled_checkpoints
from tests.support.summaries import ROWS, write_rows

LONG = "a b c d e f " * 40  # longer than every limit
LENGTH = 100  # of the run's prompt and response


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    made = {name: spelled_checkpoints.write(root / name, name) for name in ("llama_untied", "gpt2", "bert_embedding")}
    words = Tokenizer(models.WordLevel({"[UNK]": 0} | {letter: i for i, letter in enumerate("abcdef", 1)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(made["bert_embedding"] / "tokenizer.json"))
    tokens = random_checkpoints.byte_tokenizer(root / "tokens")
    for seed, name in enumerate(("reward", "gold")):
        made[name] = random_checkpoints.write(root / name, "pythia-410m", tokens, labels=1, seed=seed)
    made["rows"] = write_rows(root / "rows.jsonl", ROWS)
    return {name: str(path) for name, path in made.items()}


def red_team(folders, **changes) -> RedTeam:
    settings = base.get_config().task.red_team.to_dict() | dict(
        attack_prompt="attack:",
        replies=2,
        victim_path=folders["llama_untied"],
        victim_template="do {attack}:",
        victim_prompt_length=40,
        victim_reply_length=6,
        victim_concurrency=4,
        classifier="unsafe_token",
        classifier_path=folders["gpt2"],
        classifier_label="unsafe",
        classifier_template="q {attack} a {reply}:",
        classifier_length=40,
        embedder_path=folders["bert_embedding"],
    )
    return RedTeam(**settings | changes)


def tldr(folders, **changes) -> TLDR:
    paths = dict(train_path="rows", heldout_path="rows", reward_path="reward", gold_path="gold")
    settings = {name: folders[path] for name, path in paths.items()} | dict(compute_dtype="float32", batch_rows=4)
    return TLDR(**settings | changes)


TASKS = {"red_team": red_team, "tldr": tldr}
PROGRAMS = {
    "red_team": ["a parameter of the victim", "prefill of the victim", "decode of the victim", "pass of the embedder"],
    "tldr": ["pass of the reward model", "pass of the gold model"],
}


def bytes_of(tree) -> int:
    """On the first device."""
    shards = [shard for x in jax.tree.leaves(tree) for shard in x.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == jax.devices()[0])


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("devices", [1, 2])
def test_the_programs_are_those_that_loaded_models_run(folders, name, devices):
    task, mesh = TASKS[name](folders), sharding.task_mesh(0, jax.devices()[:devices])
    made = programs.of_task(task, mesh, role="evaluator", length=LENGTH).alone()
    query, ended = task.queries("heldout")[0], np.ones(2, bool)
    # Red-teaming cuts what is too long. This reward model has a token for each character.
    longest = LONG[: LENGTH - 1 - len(query.prompt)] if name == "tldr" else LONG
    with lowered.calls() as called:
        task.start(mesh, LOADERS)
        task.rewards([query] * 2, [longest, longest[1:]], ended)
        task.measures([query] * 2, [longest, longest[1:]], ended, np.zeros(2))
    missing = [each for each in PROGRAMS[name] if lowered.text(made[each].lower()) not in called]
    assert not missing and set(PROGRAMS[name]) <= set(made)


def test_what_is_held_is_what_loaded_models_hold(folders):
    task, mesh = red_team(folders), sharding.task_mesh(0, jax.devices()[:1])
    found = programs.of_task(task, mesh, role="searcher", length=LENGTH)
    task.start(mesh, LOADERS)
    query = task.queries("train")[0]
    task.rewards([query], ["do it"], np.ones(1, bool))
    lane, classifier = task._reply._engine._lanes[0], task._toxicity
    assert Measure().size(found.held["victim"]) == bytes_of((lane._weights, lane._prompts, lane._slots))
    assert Measure().size(found.held["classifier"]) == bytes_of(classifier._params)
    assert list(found.held) == ["victim", "classifier"]
    # The verdict is another token there, which makes no difference to memory.
    real = classifier._forward.program(rows=16, length=40).lower().compile().memory_analysis()
    fit = Measure().fit("", found.scoring["pass of the classifier"])
    assert (fit.arguments, fit.temporaries) == (real.argument_size_in_bytes, real.temp_size_in_bytes)


def test_beside_each_program_lie_the_other_models(folders):
    mesh = sharding.task_mesh(0, jax.devices()[:1])
    found = programs.of_task(red_team(folders), mesh, role="evaluator", length=LENGTH)
    beside = {name: set(program.beside) for name, program in found.alone().items()}
    assert beside == {
        "a parameter of the victim": {"victim"},  # which is loaded first
        "prefill of the victim": {"classifier", "embedder"},
        "decode of the victim": {"classifier", "embedder"},
        "pass of the classifier": {"victim", "embedder"},
        "pass of the embedder": {"victim", "classifier"},
    }
    loading = Measure().fit("", found.loading["a parameter of the victim"])
    weights = Measure().size(found.held["victim"][0])
    assert loading.arguments + loading.beside["victim"] == weights


def test_a_config_is_enough(folders, tmp_path):
    bare = {}
    for name in ("llama_untied", "gpt2", "reward"):
        bare[name] = str(tmp_path / name)
        (tmp_path / name).mkdir()
        shutil.copy(f"{folders[name]}/config.json", bare[name])
    mesh = sharding.task_mesh(0, jax.devices()[:1])
    of_tasks = {red_team: {"victim_path": "llama_untied", "classifier_path": "gpt2"}, tldr: {"reward_path": "reward"}}
    for make, paths in of_tasks.items():
        whole = programs.of_task(make(folders), mesh, role="searcher", length=LENGTH)
        task = make(folders, **{setting: bare[name] for setting, name in paths.items()})
        found = programs.of_task(task, mesh, role="searcher", length=LENGTH)
        assert {name: Measure().size(tree) for name, tree in found.held.items()} == {
            name: Measure().size(tree) for name, tree in whole.held.items()
        }
        assert set(found.scoring) == set(whole.scoring)


def test_the_sentence_encoder_is_divided_as_the_loaded_one_is(folders):
    mesh = sharding.make_mesh((1, 2, 1), setting="test", devices=jax.devices()[:2])
    found = programs.sentence_encoder(folders["bert_embedding"], mesh, length=LENGTH)
    embedder = embeddings.ResponseEmbedder(folders["bert_embedding"], mesh)
    with lowered.calls() as called:
        embedder([LONG])
    assert lowered.text(found.scoring["pass of the sentence encoder"].lower()) in called
    assert Measure().size(found.held) == bytes_of(embedder._params)


def test_a_model_that_cannot_be_used_is_named(folders):
    mesh = sharding.task_mesh(0, jax.devices()[:2])
    with pytest.raises(ValueError, match=r"task\.red_team\.victim_path='.*': slots=3 cannot be divided by the 2 ways"):
        programs.of_task(red_team(folders, victim_concurrency=3), mesh, role="searcher", length=LENGTH)


def test_a_linear_classifier_has_no_program(folders):
    task = red_team(folders, classifier="linear", classifier_path="anything.npz")
    found = programs.of_task(task, sharding.task_mesh(0, jax.devices()[:1]), role="searcher", length=LENGTH)
    assert list(found.held) == ["victim"]
