"""The tasks of reasoning-gym, TextArena and OpenEnv, with the real packages."""

import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tba_jax.experiment.schema import SCHEMA
from tba_jax.tasks import TASKS
from tests.support import tiny_run


def make(name: str, **changes):
    settings = SCHEMA.defaults().task[name].to_dict() | {"train_queries": 6, "heldout_queries": 3} | changes
    return TASKS[name](**settings)


@pytest.fixture
def task_of():
    """Makes tasks that are closed at the end."""
    made = []

    def of(name: str, **changes):
        made.append(make(name, **changes))
        return made[-1]

    yield of
    for each in made:
        each.close()


class TestReasoningGym:
    pytestmark = pytest.mark.skipif(not tiny_run.has("reasoning_gym"), reason="reasoning-gym is not installed: make dev")

    def test_right_and_wrong_answers_are_told_apart(self, task_of):
        task = task_of("reasoning_gym", dataset="chain_sum", parameters='{"max_terms": 3, "max_digits": 2}')
        train, heldout = task.queries("train"), task.queries("heldout")
        assert len(heldout) == 3 and not {each.prompt for each in train} & {each.prompt for each in heldout}
        found = task.rewards(train, [each.answer for each in train], np.ones(len(train), bool))
        assert (found.reward == 1).all() and not found.failure
        assert (task.rewards(train, ["no"] * len(train), np.ones(len(train), bool)).reward < 1).all()

    def test_what_a_verifier_cannot_read_is_wrong(self, task_of):
        task = task_of("reasoning_gym", dataset="prime_factorization")
        found = task.rewards(task.queries("train")[:1], ["two times three"], np.ones(1, bool))
        assert found.reward.tolist() == [0] and not found.failure

    def test_an_answer_stands_within_tags(self, task_of):
        task = task_of("reasoning_gym", tagged=True)
        query = task.queries("train")[0]
        responses = [f"so <answer>x</answer> no, <answer> {query.answer} </answer>.", query.answer, f"<answer>{query.answer}"]
        assert task.rewards([query] * 3, responses, np.ones(3, bool)).reward.tolist() == [1, 0, 0]

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"dataset": "chain"}, "task.reasoning_gym.dataset='chain' is not one of reasoning-gym .*chain_sum"),
            ({"parameters": '{"min_terms": 9, "max_terms": 2}'}, "task.reasoning_gym.parameters=.*gives no questions"),
            ({"parameters": "{"}, "task.reasoning_gym.parameters={ gives no questions"),
            ({"prompt": "{question} {question}"}, r"must hold {question} once"),
        ],
        ids=str,
    )
    def test_bad_settings_are_one_sentence(self, changes, sentence):
        with pytest.raises(ValueError, match=sentence):
            make("reasoning_gym", **changes)


class TestTextArena:
    pytestmark = pytest.mark.skipif(not tiny_run.has("textarena"), reason="textarena is not installed: make dev")

    def test_a_game_is_played_by_its_hints(self, task_of):
        task = task_of("text_arena")
        query = task.queries("train")[0]
        assert "between 1 and 20" in query.prompt and query.prompt == task.queries("train")[0].prompt
        session, answer = task.environments.start(query)
        assert not answer.result(60).failure
        low, high = 1, 20
        for _ in range(10):
            guess = (low + high) // 2
            told = session.step(f"[{guess}]").result(60)
            assert not told.failure
            if told.done:
                break
            text = told.messages[0]["content"]
            assert "higher" in text or "lower" in text, "what the game has said since, without what was said before"
            assert len(text) < 200
            low, high = (guess + 1, high) if "higher" in text else (low, guess - 1)
        assert told.done and told.reward == 1.0

    def test_an_unknown_game_is_one_sentence(self):
        with pytest.raises(ValueError, match=r"task.text_arena.game='Chess' is no game of TextArena"):
            make("text_arena", game="Chess")


SERVER = """
import sys, uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Say(Action):
    message: str


class Heard(Observation):
    text: str = ""


class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.heard, self.seed = 0, seed
        return Heard(text=f"seed {seed}", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **kwargs):
        self.heard += 1
        return Heard(text=f"{self.seed}: {action.message}", done=self.heard == 2, reward=0.25)

    @property
    def state(self):
        return State()


uvicorn.run(create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=16), port=int(sys.argv[1]), log_level="warning")
"""


class TestOpenEnv:
    pytestmark = pytest.mark.skipif(not tiny_run.has("openenv"), reason="openenv-core is not installed: make dev")

    @pytest.fixture(scope="class")
    def url(self, tmp_path_factory):
        """The address of a real server, a process of its own."""
        file = tmp_path_factory.mktemp("server") / "server.py"
        file.write_text(SERVER)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        server = subprocess.Popen([sys.executable, str(file), str(port)])
        deadline = time.monotonic() + 120
        while server.poll() is None and time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
        server.kill()
        server.wait()

    def test_a_server_answers(self, task_of, url):
        task = task_of("open_env", url=url)
        queries = task.queries("train")
        assert [each.prompt for each in queries] == [f"seed {3 + i}" for i in range(6)]
        begun = [task.environments.start(query) for query in queries]
        for i, (session, answer) in enumerate(begun):
            assert not answer.result(60).failure, answer.result()
            first = session.step("hello").result(60)
            assert (first.messages[0]["content"], first.reward, first.done) == (f"{3 + i}: hello", 0.25, False)
        last = begun[0][0].step("again").result(60)
        assert last.done and last.reward == 0.25

    def test_what_does_not_fit_is_told(self, task_of, url):
        for changes, sentence in (
            ({"observation": "words"}, r"ValueError: the observation has no text 'words' \(task.open_env.observation\); it has"),
            ({"url": "http://127.0.0.1:9"}, "the environment of OpenEnv does not start"),
        ):
            with pytest.raises(ValueError, match=sentence):
                task_of("open_env", **({"url": url} | changes)).queries("train")
        with pytest.raises(ValueError, match=r"task.open_env.url='' must be the address of a server"):
            make("open_env")
