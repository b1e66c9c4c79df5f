"""The models of a task: rewards and programs of loaded models, the programs made from configs alone, and what they hold."""

import functools
import shutil

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from configs import base
from tba_jax import sharding
from tba_jax.programs import Measure
from tba_jax.rewards import task_models
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
    made["reward"] = random_checkpoints.write(
        root / "reward", "pythia-410m", random_checkpoints.byte_tokenizer(root / "tokens"), labels=1
    )
    made["classifier"] = spelled_checkpoints.write(root / "classifier", "roberta_classifier")
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
    paths = dict(train_path="rows", heldout_path="rows", reward_path="reward", gold_path="reward")
    settings = {name: folders[path] for name, path in paths.items()} | dict(compute_dtype="float32", batch_rows=4)
    return TLDR(**settings | changes)


def mesh(devices: int = 1):
    return sharding.task_mesh(0, jax.devices()[:devices])


def bytes_of(tree) -> int:
    shards = [shard for x in jax.tree.leaves(tree) for shard in x.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == jax.devices()[0])


def test_the_programs_are_those_that_loaded_models_run(folders):
    task, on = tldr(folders), mesh(2)
    found = task_models.of_task(task, on, role="evaluator", length=LENGTH)
    query, ended = task.queries("heldout")[0], np.ones(2, bool)
    longest = LONG[: LENGTH - 1 - len(query.prompt)]  # the reward model has a token for each character
    loaded = {}

    def load(use):
        loaded[use.name] = task_models.load(use, mesh=on)
        return loaded[use.name]

    with lowered.calls() as called:
        task.start(load)
        task.rewards([query] * 2, [longest, longest[1:]], ended)
        task.measures([query] * 2, [longest, longest[1:]], ended, np.zeros(2))
    assert {lowered.text(program.lower()) for program in found.alone().values()} <= called
    held = {name: Measure().size(tree) for name, tree in found.held.items()}
    assert held == {name: bytes_of(scorer.model.params) for name, scorer in loaded.items()}


def test_a_config_is_enough(folders, tmp_path):
    bare = {}
    for name in ("llama_untied", "gpt2", "reward"):
        bare[name] = str(tmp_path / name)
        (tmp_path / name).mkdir()
        shutil.copy(f"{folders[name]}/config.json", bare[name])
    of_tasks = {red_team: {"victim_path": "llama_untied", "classifier_path": "gpt2"}, tldr: {"reward_path": "reward"}}
    for make, paths in of_tasks.items():
        bare_task = make(folders, **{setting: bare[name] for setting, name in paths.items()})
        whole, found = (task_models.of_task(task, mesh(), role="searcher", length=LENGTH) for task in (make(folders), bare_task))
        sizes = [{name: Measure().size(tree) for name, tree in each.held.items()} for each in (whole, found)]
        assert sizes[0] == sizes[1] and set(found.scoring) == set(whole.scoring)


def test_models_that_cannot_be_used_are_named(folders):
    with pytest.raises(ValueError, match=r"task\.red_team\.victim_path='.*': slots=3 cannot be divided by the 2 ways"):
        task_models.of_task(red_team(folders, victim_concurrency=3), mesh(2), role="searcher", length=LENGTH)
    for name in ("reward", "gold"):
        with pytest.raises(ValueError, match=rf"{name}_path='.*' must have one label, as a reward model has; it has 3, negative"):
            task_models.check(tldr(folders, **{f"{name}_path": folders["classifier"]}), role="evaluator")
    task_models.check(tldr(folders, gold_path=folders["classifier"]), role="searcher")  # which does not load it
    with pytest.raises(ValueError, match=r"'x' of task\.x\.path='.*' is of kind 'generator': its ModelUse needs `generator`"):
        task_models.ModelUse(name="x", setting="task.x.path", path=folders["gpt2"], rows=1, kind="generator")


def test_a_linear_classifier_has_no_program_and_a_digest(folders, tmp_path):
    path, one = tmp_path / "linear.npz", np.ones(1)
    np.savez(path, terms=np.array(["zz"]), idf=one, coef=one[None], intercept=one, platt_a=-one, platt_b=0 * one)
    assert set(task_models.digests(tldr(folders))) == {"task.tldr.reward_path"}, "the gold model defines no reward"
    task = red_team(folders, classifier="linear", classifier_path=str(path))
    found = task_models.of_task(task, mesh(), role="searcher", length=LENGTH)
    assert list(found.held) == ["victim"]
    digests = functools.partial(task_models.digests, task)
    before = digests()
    path.write_bytes(path.read_bytes() + b" ")
    assert {name for name, digest in digests().items() if digest != before[name]} == {"task.red_team.classifier_path"}
