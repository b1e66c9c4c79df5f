"""Files of users: what they define, and the line that is blamed. Recipes and tasks have tests of their own mistakes."""

import sys

import pytest

from tba_jax.run import user_code


def test_a_file_is_loaded_by_the_name_its_dataclasses_need(tmp_path):
    (tmp_path / "mine.py").write_text("import dataclasses\n\n@dataclasses.dataclass\nclass Point:\n    x: 'int' = 3\n")
    module = user_code.load(tmp_path / "mine.py", "tba_jax_test_mine", called="task.name=mine")
    assert module.Point().x == 3 and sys.modules.pop("tba_jax_test_mine") is module


def test_a_file_that_fails_leaves_no_module(tmp_path):
    (tmp_path / "mine.py").write_text("import json\n\njson.loads('{')\n")
    with pytest.raises(ValueError, match=rf"^task.name=mine: .*JSONDecodeError.*\(line 3 of {tmp_path}/mine.py\)$"):
        user_code.load(tmp_path / "mine.py", "tba_jax_test_mine", called="task.name=mine")
    assert "tba_jax_test_mine" not in sys.modules


def test_a_folder_or_text_is_no_python_file(tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ValueError, match=r"mine\.txt is not a Python file"):
        user_code.load(tmp_path / "mine.txt", "tba_jax_test_mine", called="task.name=mine")
