"""Clients of an OpenAI-compatible endpoint: their conversations are rows whose tokens are those that were drawn."""

import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tba_jax import trajectory
from tba_jax.experiment import jobs
from tba_jax.roles.searcher.endpoint import Endpoint
from tba_jax.telemetry.status import TimeAccount
from tests.roles.test_conversations import GAME
from tests.support import frozen_runs, tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")


MISSING = "reward is missing: it must be a finite number, or null for a conversation that failed"


class Client:
    """Speaks to an endpoint as a client of OpenAI's protocol does."""

    def __init__(self, endpoint: Endpoint, token: str | None = None):
        self.url, self.token = endpoint.url, endpoint.token if token is None else token

    def ask(self, path: str, body: object = None) -> dict:
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}{path}", data, headers), timeout=60) as answer:
            return json.load(answer)

    def chat(self, messages: list, **settings) -> dict:
        return self.ask("/chat/completions", {"model": "policy", "messages": messages, **settings})

    def asked(self, path: str, body: object) -> tuple[int, Any]:
        """The status, and the answer or why there is none."""
        try:
            return 200, self.ask(path, body)
        except urllib.error.HTTPError as refused:
            return refused.code, json.load(refused)["error"]["message"]

    def refusal(self, path: str, body: object) -> tuple[int, str]:
        code, told = self.asked(path, body)
        assert code != 200
        return code, told

    def play(self, opening: str, answers: list[str], reward: float) -> list[dict]:
        """A conversation: its messages."""
        messages: list = [{"role": "user", "content": opening}]
        for said in [*answers, None]:
            code, told = self.asked("/chat/completions", {"messages": messages})
            if code != 200:  # cut
                assert code == 400 and "context length" in told
                messages.pop()
                break
            made, (choice,) = told, told["choices"]
            messages.append(choice["message"])
            if said is None or choice["finish_reason"] == "length":
                break
            messages.append({"role": "user", "content": said})
        self.ask("/rewards", {"id": made["id"], "reward": reward})
        return messages


@pytest.fixture(scope="module")
def s(tmp_path_factory, one_device_throughout):
    return frozen_runs.make(tmp_path_factory.mktemp("served") / "run", 0, **GAME, task__missing_eos_reward=None)


@contextlib.contextmanager
def serving(s, name: str):
    """The endpoint of a searcher that searches in a thread; and a function that ends it and returns its rows."""
    wanted = {"completions": s.config.learner.completions, "conversations": 12}
    of = s.experiment.tokenizer, s.experiment.contract
    endpoint = Endpoint(*of, address="0", token="", idle_seconds=30.0, wanted=wanted)
    searcher = jobs.make_searcher(s, name=name, account=TimeAccount(), endpoint=endpoint)
    searcher.refresh()
    ended, failures = threading.Event(), []

    def search() -> None:
        try:
            while not ended.is_set():
                searcher.advance(waits=lambda: not ended.is_set())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=search)
    thread.start()

    def end() -> trajectory.Rows:
        ended.set()
        thread.join(60)
        searcher.appended(wait_seconds=10.0)
        searcher.close()
        assert not failures, failures
        return frozen_runs.rows(s)[searcher.writer]

    try:
        yield endpoint, end
    finally:
        ended.set()
        thread.join(60)


@pytest.fixture
def served(s, request):
    with serving(s, f"served{len(request.node.name)}") as (endpoint, end):
        yield Client(endpoint), end, endpoint


def check_said(s, rows: trajectory.Rows, row: int, said: list[str]) -> None:
    """A row has what was said, the prompt, turns and answers in turn, byte for byte and under its mask."""
    tokenizer, trained, tokens = s.experiment.tokenizer, trajectory.trained(rows), trajectory.response(rows, row)
    assert tokenizer.decode(rows["tokens"][row, : rows["prompt_length"][row]].tolist()) == said[0]
    edges = np.flatnonzero(np.diff(trained[row, : len(tokens)])) + 1
    parts = [tokenizer.decode(each.tolist()) for each in np.split(tokens, edges)]
    parts, said = [text for text in parts if text], [text for text in said[1:] if text]
    assert parts == said[: len(parts)], "turns and answers, byte for byte, under the mask"
    assert len(said) - len(parts) <= (not rows["finished"][row]), "an answer that does not fit is not in the row"
    assert trained[row, 0] and (rows["policy_step"][row][trained[row]] == 0).all()


def test_conversations_are_rows_of_the_tokens_that_were_drawn(served, s):
    client, end, _ = served
    (model,) = client.ask("/models")["data"]
    assert (model["id"], model["completions"], model["conversations"]) == ("policy", 4, 12)
    with ThreadPoolExecutor(6) as threads:
        plays = [threads.submit(client.play, f"{'abc'[i % 3]}?\n", ["low\n", "high\n"], float(i)) for i in range(12)]
        talks = [play.result() for play in plays]
    rows = end()
    # Conversations whose openings and answers are the same stand for each other, but each reward is given once.
    assert sorted(rows["reward"].tolist()) == list(range(12)) and rows["finished"].sum() > 0
    trained = trajectory.trained(rows)
    for row, reward in enumerate(rows["reward"].astype(int).tolist()):
        check_said(s, rows, row, [message["content"] for message in talks[reward]])
        assert talks[reward][0]["content"] == f"{'abc'[reward % 3]}?\n"
    assert rows["ref_logprobs"][trained].all() and not rows["ref_logprobs"][~trained].any()


def test_a_client_that_rewrites_history_begins_anew_and_one_that_leaves_is_unscored(served, s):
    client, end, endpoint = served
    first = client.chat([{"role": "user", "content": "a"}])
    assert first["choices"][0]["message"]["content"]
    other = {"role": "assistant", "content": ""}
    second = client.chat([{"role": "user", "content": "a"}, other, {"role": "user", "content": "c"}])
    assert second["id"].split("-")[1] != first["id"].split("-")[1]
    client.ask("/rewards", {"id": second["id"], "reward": 2.0})
    failed = client.chat([{"role": "user", "content": "c"}])
    client.ask("/rewards", {"id": failed["id"], "reward": None})
    assert client.refusal("/rewards", {"id": failed["id"], "reward": 1.0})[0] == 404, "it has ended at once"
    endpoint._idle_seconds = 0.0
    rows = end_when(client, end, endpoint)
    assert sorted(np.nan_to_num(rows["reward"], nan=-5.0).tolist()) == [-5.0, -5.0, 2.0]


def test_users_go_on_with_their_own_conversations_until_these_are_cut(served, s):
    client, end, _ = served
    said: dict[int, list[str]] = {}
    opening, answer = {"role": "user", "content": "b\n"}, {"role": "user", "content": "low\n"}
    begun = {user: client.chat([opening], user=user) for user in "xyz"}
    for user, made in reversed(begun.items()):
        messages, number = [opening, made["choices"][0]["message"]], made["id"].split("-")[1]
        code = 0
        while code != 400:
            code, told = client.asked("/chat/completions", {"messages": [*messages, answer], "user": user})
            if code == 200:
                messages += [answer, told["choices"][0]["message"]]
                assert told["id"].split("-")[1] == number
        for _ in range(2):  # it is said again
            code, told = client.refusal("/chat/completions", {"messages": [*messages, answer], "user": user})
            assert code == 400 and "context length, task.response_length=16" in told
        client.ask("/rewards", {"user": user, "reward": float(number)})
        said[int(number)] = [message["content"] for message in messages]
    rows = end()
    assert sorted(rows["reward"].tolist()) == [0.0, 1.0, 2.0] and not rows["finished"].any()
    for row, number in enumerate(rows["reward"].astype(int).tolist()):
        check_said(s, rows, row, said[number])


def test_a_reward_of_a_user_is_of_the_last_conversation_and_one_that_fails_while_the_policy_writes_ends(served, s):
    client, end, endpoint = served
    for content in "abc":
        client.chat([{"role": "user", "content": content}], user="x")
    with ThreadPoolExecutor(1) as thread:
        body = {"messages": [{"role": "user", "content": "b"}], "user": "y"}
        writing = thread.submit(client.asked, "/chat/completions", body)
        while not any(talk.of[1] == "y" for talk in list(endpoint._talks.values())):
            time.sleep(0.001)
        client.ask("/rewards", {"user": "x", "reward": 3.0})
        client.ask("/rewards", {"user": "y", "reward": None})
        assert writing.result()[0] in (200, 409)
    assert client.refusal("/rewards", {"user": "x", "reward": 3.0})[0] == 404
    rows = end_when(client, end, endpoint)
    assert sorted(np.nan_to_num(rows["reward"], nan=-5.0).tolist()) == [-5.0, -5.0, -5.0, 3.0]


def end_when(client, end, endpoint):
    for _ in range(100):
        with endpoint.lock:
            if not endpoint._talks:
                break
        time.sleep(0.1)
    time.sleep(1.0)
    return end()


def test_what_is_wrong_is_one_sentence_and_no_row(served, s):
    client, end, endpoint = served
    hello = [{"role": "user", "content": "a\n"}]
    for body, status, sentence in [
        ({"messages": []}, 400, "messages must be a list of at least one message"),
        ({"messages": [{"role": "user"}, 3]}, 400, "messages must be a list"),
        ({"messages": hello, "stream": True}, 400, "stream=true is not served"),
        ({"messages": hello, "n": 3}, 400, "n=3 must be 1"),
        ({"messages": [{"role": "user", "content": "É"}]}, 400, "not in the tokenizer's alphabet"),
        ({"messages": [{"role": "user", "content": "a" * 30}]}, 400, "task.prompt_length=7 is the most"),
        ({"messages": [*hello, {"role": "assistant", "content": "b"}]}, 400, "the last message is the assistant's"),
        ([], 400, "the request is not a JSON object"),
        ({"messages": [*hello, {"role": "assistant", "content": "b", "tool_calls": [1]}, hello[0]]}, 400, "not as the protocol"),
    ]:
        code, told = client.refusal("/chat/completions", body)
        assert code == status and sentence in told, told
    begun = client.chat(hello, user="stays")
    messages = [*hello, begun["choices"][0]["message"]]
    for content, sentence in (
        ("É", "not in the tokenizer's alphabet"),
        ("", "say nothing"),
        ([{"type": "image_url"}], "not texts"),
    ):
        body = {"messages": [*messages, {"role": "user", "content": content}], "user": "stays"}
        assert sentence in client.refusal("/chat/completions", body)[1]
    assert client.asked("/chat/completions", {"messages": [*messages, hello[0]], "user": "stays"})[0] in (200, 400), "it goes on"
    assert client.refusal("/rewards", {"user": "stays"}) == (400, MISSING)
    client.ask("/rewards", {"user": "stays", "reward": 0.25})
    ended = [*messages, {"role": "user", "content": "a" * 30}]
    assert "no conversation goes on with these messages" in client.refusal("/chat/completions", {"messages": ended})[1]
    assert client.refusal("/completions", {"prompt": [1, -1]})[1] == "prompt: token -1 is not of the policy's 45"
    assert client.refusal("/completions", {"prompt": [1, 999]}) == (400, "prompt: token 999 is not of the policy's 45")
    assert client.refusal("/rewards", {"id": "chatcmpl-77-1", "reward": 1.0})[0] == 404
    assert client.refusal("/rewards", {"id": "chatcmpl-0-1", "reward": "much"})[0] == 400
    assert client.refusal("/nothing", {})[0] == 404
    assert Client(endpoint, "wrong").refusal("/chat/completions", {"messages": hello})[0] == 401
    made = client.ask("/completions", {"prompt": [1, 13, 39]})
    client.ask("/rewards", {"id": made["id"], "reward": 0.5})
    code, told = client.refusal("/rewards", {"id": made["id"], "reward": 0.5})
    assert code == 404 and "has ended" in told
    rows = end_when(client, end, endpoint)
    assert sorted(rows["reward"].tolist()) == [0.25, 0.5]
    assert rows["tokens"][rows["reward"] == 0.5][0, :3].tolist() == [1, 13, 39]


def test_an_address_that_cannot_be_served_and_a_task_of_one_turn_are_refused(s, tmp_path):
    of = s.experiment.tokenizer, s.experiment.contract
    with pytest.raises(ValueError, match=r"--serve=x:y cannot be served: .*; it must be PORT or HOST:PORT"):
        Endpoint(*of, address="x:y", token="", idle_seconds=1.0, wanted={})
    one = tiny_run.settings(tmp_path / "one", tiny_run.config())
    with pytest.raises(ValueError, match=r"rows of task.name=arithmetic have one turn; clients need an environment's"):
        jobs._endpoint(jobs.dataclasses.replace(one, serve="0"))
