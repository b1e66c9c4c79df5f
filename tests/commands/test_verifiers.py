"""A real environment of the package verifiers, in a process of its own, plays with a searcher: its rollouts are rows."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from tba_jax import __main__ as commands
from tba_jax.roles.searcher.endpoint import Endpoint
from tests.roles.searcher.test_endpoint import check_said, serving
from tests.roles.test_conversations import GAME
from tests.support import frozen_runs, tiny_run

pytestmark = [
    pytest.mark.skipif(not tiny_run.has("verifiers"), reason="verifiers is not installed: make verifiers installs it"),
    pytest.mark.usefixtures("one_device_throughout"),
]
# Each rollout's begin, and what was said with its reward, are lines of a file.
ENVIRONMENT = """
import itertools, json
import verifiers as vf
from datasets import Dataset

numbers = itertools.count(1)


class Guess(vf.MultiTurnEnv):
    def __init__(self, file, **settings):
        super().__init__(**settings)
        self.file = file

    def tell(self, **line):
        with open(self.file, "a") as file:
            file.write(json.dumps(line) + "\\n")

    async def setup_state(self, state):
        self.tell(begun=state["prompt"][-1]["content"])
        return state

    async def env_response(self, messages, state, **kwargs):
        if state["answer"] == "breaks":
            raise KeyError("broken game")
        guess = messages[-1]["content"].strip()
        if guess == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "yes\\n"}]
            return []
        return [{"role": "user", "content": "low\\n" if guess < state["answer"] else "high\\n"}]


def load_environment(file, compares):
    rows = [("a?\\n", "a"), ("a?\\n", "b"), ("b?\\n", "c"), ("c?\\n", "breaks"), ("ab?\\n", "ungraded"), ("ac?\\n", "nan")]
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": q}], "answer": a} for q, a in rows])

    async def number(state) -> float:
        state["number"] = next(numbers)
        return float("nan") if state["answer"] == "nan" else float(state["number"])

    async def solved(answer, state) -> float:
        if answer == "ungraded":
            raise RuntimeError("no grade")
        won = float(state.get("final_env_response") is not None)
        last = state["trajectory"][-1]
        said = [message["content"] for message in [*last["prompt"], *last["completion"]]]
        environment.tell(number=state["number"], won=won, said=said, answer=answer)
        return won

    async def first(states) -> list[float]:
        environment.tell(first=states[0]["number"], of=len(states))
        return [float(state is states[0]) for state in states]

    rubric = vf.Rubric(funcs=[number, solved], weights=[1.0, 0.5])
    if compares:
        rubric.add_reward_func(first, weight=0.25)
    environment = Guess(file, dataset=data, rubric=rubric, max_turns=3)
    return environment
"""


@pytest.fixture(scope="module")
def s(tmp_path_factory, one_device_throughout):
    return frozen_runs.make(tmp_path_factory.mktemp("served") / "run", 0, **GAME, task__missing_eos_reward=None)


def start(folder, endpoint, **arguments):
    """The command, in a folder that has the environment."""
    (folder / "tiny_guess.py").write_text(ENVIRONMENT)
    given = [f"--url={endpoint.url}", "--environment=tiny-guess", f"--arguments={json.dumps(arguments)}"]
    its = os.environ | {"TBA_JAX_SERVE_TOKEN": endpoint.token, "PYTHONPATH": str(tiny_run.ROOT)}
    how = dict(cwd=folder, env=its, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-m", "tba_jax", "verifiers", *given], **how)


@pytest.mark.parametrize("compares", [False, True])
def test_rollouts_are_rows_with_the_rewards_of_the_rubric(s, tmp_path, compares):
    file = tmp_path / "told.jsonl"

    def told(key):
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in map(json.loads, lines) if key in line]

    with serving(s, f"verifiers{compares:d}") as (endpoint, end):
        player = start(tmp_path, endpoint, file=str(file), compares=compares)
        until = time.monotonic() + 120
        users = {}
        while len(told("said")) < 28 and player.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
            with endpoint.lock:
                users |= {number: talk.of[1] for number, talk in endpoint._talks.items()}
        assert len(users) > 4 and len({*users.values()} - {None}) == len(users), "no two rollouts exchange conversations"
        rows = end()
        out, log = player.communicate(timeout=60)
    assert player.returncode == 0, log
    given = int(re.search(r"the searcher at http\S+ has ended: (\d+) rollouts have a reward", out)[1])
    has_reward = np.isfinite(rows["reward"])
    assert given >= has_reward.sum() >= 16 and not has_reward.all(), "rollouts that failed are unscored rows at once"
    rows = {name: column[has_reward] for name, column in rows.items()}
    firsts = {each["first"]: each["of"] for each in told("first")}
    games = {each["number"] + 0.5 * each["won"] + 0.25 * (each["number"] in firsts): each for each in told("said")}
    assert compares == bool(firsts) and (not firsts or 1 < max(firsts.values()) <= 4), (
        "a rubric that compares has the rollouts of an example"
    )
    for row, reward in enumerate(rows["reward"].tolist()):
        check_said(s, rows, row, games[reward]["said"])
        assert games[reward]["answer"] in "abc", "of the rubric, for the conversation that it has read"
    opened = [
        s.experiment.tokenizer.decode(each[:n].tolist()) for each, n in zip(rows["tokens"], rows["prompt_length"], strict=True)
    ]
    queries = {opening: {rows["query_id"][i] for i, other in enumerate(opened) if other == opening} for opening in opened}
    assert all(len(ids) == 1 for ids in queries.values()) and len(set.union(*queries.values())) == len(queries) == 2
    begun = [each["begun"] for each in told("begun")]
    groups = [begun[at : at + 4] for at in range(0, len(begun) - 3, 4)]
    assert all(len(set(group)) == 1 for group in groups), "learner.completions times each"
    for sentence in ("KeyError: 'broken game'", "RuntimeError: no grade", "ValueError: its reward is nan, which is not finite"):
        assert re.search(rf"a rollout of example \d failed and has no reward: {sentence}", log), log


def test_what_is_wrong_is_one_sentence(s, tmp_path, capsys, monkeypatch):
    def refused(*arguments):
        with pytest.raises(SystemExit) as ended:
            commands.main(["verifiers", *arguments])
        assert ended.value.code == 2
        return capsys.readouterr().err

    assert "--url=http://127.0.0.1:9/v1 must be where a searcher serves" in refused(
        "--environment=x", "--url=http://127.0.0.1:9/v1"
    )
    of = s.experiment.tokenizer, s.experiment.contract
    wanted = {"completions": 4, "conversations": 8}
    endpoint = Endpoint(*of, address="0", token="", idle_seconds=1.0, wanted=wanted)
    with contextlib.closing(endpoint):
        assert "the key is missing or wrong" in refused("--environment=x", f"--url={endpoint.url}")
        monkeypatch.setenv("TBA_JAX_SERVE_TOKEN", endpoint.token)
        url = f"--url={endpoint.url}"
        assert "--environment=nowhere --arguments={} cannot be loaded" in refused("--environment=nowhere", url)
        assert "--arguments=[ cannot be loaded: JSONDecodeError" in refused("--environment=nowhere", url, "--arguments=[")
