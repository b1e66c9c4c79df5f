"""Files of users: what they define, and the line that is blamed. Recipes and tasks have tests of their own mistakes."""

import sys

import pytest

from tba_jax.run import user_code


def test_a_file_is_loaded_by_the_name_its_dataclasses_need_and_one_that_fails_leaves_no_module(tmp_path):
    (tmp_path / "mine.py").write_text("import dataclasses\n\n@dataclasses.dataclass\nclass Point:\n    x: 'int' = 3\n")
    module = user_code.load(tmp_path / "mine.py", "tba_jax_test_mine", called="task.name=mine")
    assert module.Point().x == 3 and sys.modules.pop("tba_jax_test_mine") is module
    (tmp_path / "mine.py").write_text("import json\n\njson.loads('{')\n")
    (tmp_path / "mine.txt").write_text("x")
    for name, told in (("mine.py", r"JSONDecodeError.*\(line 3 of .*/mine.py\)$"), ("mine.txt", "mine.txt is not a Python file")):
        with pytest.raises(ValueError, match=rf"^task.name=mine: .*{told}"):
            user_code.load(tmp_path / name, "tba_jax_test_mine", called="task.name=mine")
        assert "tba_jax_test_mine" not in sys.modules
