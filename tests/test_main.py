"""The entry: every recipe loads and dry-runs; bad input is one sentence and exit code 2, with nothing compiled or written."""

import json
import re
from pathlib import Path

import pytest

from tba_jax import main
from tests.support import tiny_run
from tests.support.small_recipes import PRETRAINED

# Not recipes: the schema of another command, and a table that recipes share. configs/demo_baselines.py needs a name. Those of
# pretrained models run from end to end in test_recipes.
RECIPES = sorted(
    path.name.replace("demo_baselines.py", "demo_baselines.py:online_dpo")
    for path in (tiny_run.ROOT / "configs").glob("*.py")
    if path.name not in ("__init__.py", "supervised.py", "baselines.py", *PRETRAINED)
)


def stories(data_dir: Path) -> list[str]:
    """The files that story_sentiment.py asks for."""
    return [
        f"--config.model.path={data_dir}/models/TinyStories-656K",
        f"--config.task.story_sentiment.data_path={data_dir}/tinystories/tinystories_1000.json",
    ]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_dry_runs(recipe, tmp_path, request):
    flags = stories(request.getfixturevalue("data_dir")) if recipe == "story_sentiment.py" else []
    done = tiny_run.call(tiny_run.command(tmp_path / "run", *flags, "--dry_run", recipe=f"configs/{recipe}", tiny=False))
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout[done.stdout.index("{") : done.stdout.index("\nparameters:")])
    other = {
        "demo_tba_prime.py": "tba_prime",
        "demo_vine_ppo.py": "vine_ppo",
        "demo_baselines.py:online_dpo": "online_dpo",
    }
    assert printed["learner"]["objective"] == other.get(recipe, "trajectory_balance")
    assert re.search(r"total +[\d,]+", done.stdout)
    for role in ("trainer", "searcher", "evaluator"):
        assert re.search(rf"{role} +\d+\.\d{{3}}  \(", done.stdout), f"no memory estimate of the {role}"
    assert not (tmp_path / "run").exists(), "a dry run must not write"


@pytest.mark.parametrize(
    "recipe, label", [("configs/demo.py", "demo"), ("/a/configs/demo_baselines.py:grpo", "demo_baselines:grpo")]
)
def test_a_run_is_called_by_its_recipe_and_the_name_that_the_recipe_takes(recipe, label):
    assert main.label_of(recipe) == label


REFUSALS = {
    "misspelt key": (["--config.learner.learning_rat=1"], ["learning_rat", "did you mean 'learning_rate'"]),
    "unknown key": (["--config.zzz=1"], ["zzz"]),
    "ill-typed key": (["--config.learner.steps=many"], ["learner.steps", "many"]),
    "missing recipe": (["--config=configs/nope.py"], ["configs/nope.py"]),
    "recipe without its baseline": (
        ["--config=configs/demo_baselines.py"],
        ["no baseline is named", "takes one of reinforce, rloo"],
    ),
    "unknown baseline": (
        ["--config=configs/demo_baselines.py:grppo"],
        ["demo_baselines.py:grppo", "no baseline 'grppo' (did you mean 'grpo'?)", "takes one of reinforce, rloo"],
    ),
    "recipe that takes no name": (
        ["--config=configs/demo.py:grpo"],
        ["configs/demo.py:grpo: this recipe takes no name after a colon"],
    ),
    "micro-batch": (["--config.learner.micro_batch_rows=5"], ["5", "12 rows"]),
    "batch and mesh": (["--config.learner.mesh.data=5"], ["12 rows", "= 5"]),
    "mesh and devices": (["--config.searchers.mesh.data=4"], ["searchers.mesh data=4", "1 devices"]),
    "prompt length": (["--config.task.prompt_length=5"], ["40 of 40 train prompts", "task.prompt_length=5", "longest: 7"]),
    "model path": (["--config.model.path=/nowhere"], ["/nowhere", "does not exist"]),
    "setting that the objective does not read": (["--config.learner.clip_low=0.1"], ["learner.clip_low=0.1", "does not read it"]),
    "role": (["--role=nobody"], ["nobody", "trainer"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_is_one_sentence(case, tmp_path):
    flags, words = REFUSALS[case]
    done = tiny_run.call(tiny_run.command(tmp_path / "run", *flags))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and "Traceback" not in done.stderr, done.stderr
    for word in words:
        assert word in done.stderr
    assert not (tmp_path / "run").exists(), "bad input must not write"


def test_incomplete_checkpoint_is_refused_before_anything_is_written(tmp_path, data_dir):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for path in (data_dir / "models" / "TinyStories-656K").glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    flags = [*stories(data_dir), f"--config.model.path={folder}"]
    done = tiny_run.call(tiny_run.command(tmp_path / "run", *flags, recipe="configs/story_sentiment.py", tiny=False))
    assert done.returncode == 2
    assert f"{folder} holds no weights" in done.stderr and "model.safetensors" in done.stderr
    assert not (tmp_path / "run").exists()


def test_unwritable_workdir(tmp_path):
    (tmp_path / "file").write_text("")
    done = tiny_run.call(tiny_run.command(tmp_path / "file" / "run"))
    assert done.returncode == 2
    assert str(tmp_path / "file" / "run") in done.stderr and "cannot be written" in done.stderr


def test_long_prompts_can_be_skipped(tmp_path):
    flags = ["--config.task.arithmetic.digits=2", "--config.task.prompt_length=5", "--config.task.long_prompts=skip", "--dry_run"]
    done = tiny_run.call(tiny_run.command(tmp_path / "run", *flags))
    assert done.returncode == 2, "no prompt is left, so skipping cannot help"
    assert "40 of 40" in done.stderr
