"""Custom tasks: loading a class of a file, its settings, and every mistake."""

import json
import re

import numpy as np
import pytest

from configs import base
from tba_jax.commands import command_line, recipes, rescore
from tba_jax.experiment import composition, training
from tba_jax.rewards.task_models import reward_texts
from tba_jax.tasks import interface
from tba_jax.tasks.interface import EncodedQuery, Query, Scores
from tests.support import task_files, tiny_run


@pytest.fixture
def file(tmp_path):
    path = task_files.write(tmp_path)
    path.write_text(f'{path.read_text()}\nclass Half:\n    score_name = "half"\n')
    return path


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("nowhere.py:Ones", "task.name='{name}': there is no file {folder}/nowhere.py"),
        ("my_task.py:One", "task.name='{name}': {folder}/my_task.py has no class 'One'; it has Half, Ones"),
        ("my_task.py:Half", "Half lacks reward_parts, reward_version, queries, rewards, worked_examples"),
        ("failing.py:Ones", "ModuleNotFoundError: No module named 'no_such_module' (line 3 of {folder}/failing.py)"),
        ("graded.py:Ones", "task.name='{name}': Ones lacks queries (tba_jax/tasks/interface.py, Task)"),
    ],
)
def test_a_name_that_names_no_task_is_refused(file, name, sentence):
    (file.parent / "failing.py").write_text("x = 1\n\nimport no_such_module\n")
    graded = "from tba_jax.tasks.graders import GradedTask\n\nclass Ones(GradedTask):\n    grade = len\n"
    (file.parent / "graded.py").write_text(graded)
    name = f"{file.parent}/{name}"
    with pytest.raises(ValueError, match=re.escape(sentence.format(name=name, folder=file.parent))):
        interface.custom_class(name)


def test_settings_that_the_class_does_not_take_are_refused(file):
    sentence = "task.custom: the task's constructor takes (count: int = 40): got an unexpected keyword argument 'cout'"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        interface.make_custom(interface.custom_class(f"{file}:Ones"), {"count": 3, "cout": 4})


@pytest.mark.parametrize(
    "code, sentence",
    [
        ("queries(self, split): return 3 / 0", "ZeroDivisionError: division by zero (line {line} of {file})"),
        ("queries(self, split): return []", "queries('train') gave none"),
        ("queries(self, split): return ['a']", "must give Query(prompt, answer), texts, the first not empty; it gave 'a'"),
        (r"queries(self, split): return [Query('b', '\ud800')]", r"queries('train') gave Query(prompt='b', answer='\ud800')"),
        ("__init__(self): raise KeyError('oops')", "its constructor raised KeyError: 'oops' (line {line} of {file})"),
    ],
    ids=lambda text: text[:50],
)
def test_what_a_class_does_wrong_is_one_sentence(file, code, sentence):
    file.write_text(content := f"{file.read_text()}class Wrong(Ones):\n    def {code}\n")
    c = base.get_config()
    c.task.name = f"{file}:Wrong"
    with pytest.raises(ValueError, match=re.escape(sentence.format(file=file, line=content.count("\n")))) as raised:
        composition.build(c)
    assert str(raised.value).startswith(f"task.name='{file}:Wrong': ")


@pytest.mark.parametrize(
    "rewards, error, sentence",
    [
        ([0.5] * 3, TypeError, "must return Scores, not list"),
        (Scores(np.zeros(4), np.zeros((4, 1))), ValueError, "a reward of shape (4,) and parts of shape (4, 1); for 3 responses"),
        (SystemExit(3), RuntimeError, "raised SystemExit: 3"),
    ],
    ids=str,
)
def test_rewards_that_are_none_are_refused_by_the_tasks_name(rewards, error, sentence):
    class Given:
        reward_parts = ("share",)

        def rewards(self, queries, responses, finished):
            if isinstance(rewards, SystemExit):
                raise rewards
            return rewards

    queries = [EncodedQuery(query=Query(prompt="a"), prompt=(1,))] * 3
    with pytest.raises(error, match=rf"rewards\(\) of task Given .*{re.escape(sentence)}"):
        reward_texts(["x"] * 3, np.ones(3, bool), queries, task=Given(), missing_eos_reward=None)


def test_settings_of_ones_own_go_with_a_task_of_ones_own():
    c = base.get_config()
    c.task.custom.count = 3
    with pytest.raises(ValueError, match=r"^task.custom.count is a setting of a custom task, FILE.py:CLASS, but task.name="):
        composition.build(c)


def test_the_run_is_one_wherever_the_file_lies(file, tmp_path, monkeypatch):
    c = tiny_run.config()
    c.task.custom.count = 24
    monkeypatch.chdir(tmp_path)
    c = recipes.override(c, [f"--config.task.name={file.name}:Ones"])
    s = tiny_run.settings(tmp_path / "run", c)
    assert s.experiment.contract.task_name == "my_task.py:Ones" and s.experiment.contract.task == {"count": 24}
    training.join(s, may_change_schedule=True)
    monkeypatch.chdir("/")
    assert json.loads((tmp_path / "run/config.json").read_text())["config"]["task"]["name"] == str(file) + ":Ones"
    assert "reward version 1" in rescore.rescore(tmp_path / "run", command_line.Source(trust_task=True))
    moved = tmp_path / "elsewhere" / "my_task.py"
    moved.parent.mkdir()
    file.rename(moved)
    c.task.name = f"{moved}:Ones"
    assert composition.build(c).contract == s.experiment.contract
    with pytest.raises(ValueError, match="there is no file"):
        rescore.rescore(tmp_path / "run", command_line.Source(trust_task=True))
