"""An OpenAI-compatible endpoint in front of a searcher's decoder: what agents say to it becomes rows of several turns.

    GET  /v1/models             one model, "policy", and how many completions of a prompt and conversations at once the run wants
    POST /v1/chat/completions   messages, tools -> the policy's message
    POST /v1/completions        a prompt, a text or token ids -> the policy's response
    POST /v1/rewards            {"id": of a completion, "reward": number} -> the conversation has ended, and is a row; null: it
                                failed, and its row has no reward. {"user": …, "reward": …}: of the user's last conversation;
                                its others have failed

A request whose messages begin with those of a conversation, as the endpoint gave them, goes on with it: its tokens stay as they
were drawn, and only what is new is encoded. Any other request begins a conversation. Requests may name a "user": a request of a
user goes on only with that user's conversations. The run decides how tokens are sampled; temperatures and lengths of requests are
not read. A conversation that nobody goes on with or rewards in time holds NaN.
"""

import dataclasses
import hmac
import http.server
import itertools
import json
import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from tba_jax.storage.contract import Contract
from tba_jax.tasks.environments import Answer, Message
from tba_jax.tasks.interface import EncodedQuery, Query
from tba_jax.tasks.tools import ToolFormat
from tba_jax.text.tokenizers import Tokenizer
from tba_jax.text.turns import Between

log = logging.getLogger(__name__)

_MOST_BYTES = 16 << 20  # of a request
_LOCAL = ("127.0.0.1", "localhost")
_FAILED = Answer(failure="its client gave it no reward")


class _Bad(ValueError):
    """What a client has done wrong, with an HTTP status."""

    def __init__(self, told: str, status: int = 400):
        super().__init__(told)
        self.status = status


@dataclasses.dataclass(frozen=True)
class Asked(Query):
    """The query of a conversation that a client has begun."""

    talk: Any = None


class Talk:
    """A conversation with a client, as tasks.environments.Session. A client waits, or the policy does, or it has ended.

    reply: what the client waits for; answer: what the policy waits for. is_cut: the policy goes on no more, and the client's
    reward is waited for. has_failed: its client has said so while the policy was writing.
    """

    def __init__(
        self,
        endpoint: "Endpoint",
        number: int,
        messages: list[dict[str, Any]],
        *,
        of: Sequence[Any] | None,
        tool_format: ToolFormat | None,
    ):
        """Args: of: the tools and the user that requests name, None where the client cannot go on."""
        self._endpoint, self.number, self.messages, self._format = endpoint, number, messages, tool_format
        self.of = of
        self.turns, self.is_cut, self.has_failed, self.since = 0, False, False, time.monotonic()
        self.key = ""  # under which it waits for its client
        self.reply: Future[dict[str, Any]] | None = Future()
        self.answer: Future[Answer] | None = None

    def step(self, message: str) -> Future[Answer]:
        """The policy has ended its turn."""
        return self._said(message, "stop")

    def cut(self, message: str) -> Future[Answer]:
        """The policy's turn, or all that it may say, is cut."""
        self.is_cut = True
        return self._said(message, "length")

    def close(self) -> None:
        """The row is whole: nothing more is expected."""
        with self._endpoint.lock:
            self._endpoint.forget(self)
            if self.reply is not None:
                self.reply.set_exception(_Bad("the conversation has ended", 409))
                self.reply = None

    def _said(self, text: str, reason: str) -> Future[Answer]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self._format is not None and reason == "stop":
            message, reason = _with_calls(message, self._format, reason)
        with self._endpoint.lock:
            self.answer, self.since = Future(), time.monotonic()
            if self.has_failed:
                self.answer.set_result(_FAILED)
                return self.answer
            reply, self.reply = self.reply, None
            if self.turns and self.is_cut and not text:  # the policy has no turn for what the client has said last
                while self.messages[-1]["role"] != "assistant":
                    self.messages.pop()
                if reply is not None:
                    reply.set_exception(self._endpoint.cut())
            else:
                self.messages.append(message)
                self.turns += 1
                if reply is not None:
                    reply.set_result({"message": message, "finish_reason": reason, "id": f"{self.number}-{self.turns}"})
            self._endpoint.awaits_client(self)
            return self.answer


def _with_calls(message: dict[str, Any], tool_format: ToolFormat, reason: str) -> tuple[dict[str, Any], str]:
    """The message with its calls of tools as the protocol has them. One that cannot be read stays text."""
    try:
        calls = tool_format.calls(message["content"])
    except ValueError:
        return message, reason
    if not calls:
        return message, reason
    before = message["content"].partition(tool_format.before)[0] if tool_format.before else ""
    told = [
        {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for name, arguments in calls
    ]
    return {"role": "assistant", "content": before, "tool_calls": told}, "tool_calls"


class Endpoint:
    """Serves clients in threads, and the searcher, which looks in one of its own. As tasks.environments.Environments.

    Attributes: lock: over all conversations. url, token: what clients need.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        contract: Contract,
        *,
        address: str,
        token: str,
        idle_seconds: float,
        wanted: Mapping[str, int],
    ):
        """Args: address: PORT of this machine, or HOST:PORT; token: "": a random one; idle_seconds: that a client may take;
        wanted: by the run, "completions" of a prompt and "conversations" at once.

        Raises ValueError: the address cannot be served.
        """
        self._tokenizer, self._contract, self._idle_seconds, self._wanted = tokenizer, contract, idle_seconds, wanted
        self._chat = bool(contract.chat_template)
        self._between = Between(tokenizer, chat_template=self._chat)
        self.lock, self.token = threading.Lock(), token or secrets.token_urlsafe(24)
        self._numbers = itertools.count()
        self._begun: list[Asked] = []
        self._talks: dict[int, Talk] = {}
        # What a client must say so that it goes on -> the conversations that wait for it; equal ones stand for each other.
        self._waiting: dict[str, list[Talk]] = {}
        self._ended = False
        host, _, port = address.rpartition(":")
        try:
            self._server = _Server((host or _LOCAL[0], int(port)), _Handler)
        except (OSError, ValueError, OverflowError) as error:
            told = getattr(error, "strerror", None) or error
            raise ValueError(f"--serve={address} cannot be served: {told}; it must be PORT or HOST:PORT") from error
        self._server.endpoint = self
        self.url = f"http://{host or _LOCAL[0]}:{self._server.server_port}/v1"
        self.is_local = (host or _LOCAL[0]) in _LOCAL
        threading.Thread(target=self._server.serve_forever, name="endpoint", daemon=True).start()

    # The searcher calls these, in one thread.

    def start(self, query: Query) -> tuple[Talk, Future[Answer]]:
        """See Environments.start: what the client said is the prompt."""
        assert isinstance(query, Asked)
        begun: Future[Answer] = Future()
        begun.set_result(Answer())
        return query.talk, begun

    def begun(self) -> list[EncodedQuery]:
        """The conversations that clients have begun since the last call; those that clients have left are given up."""
        with self.lock:
            begun, self._begun = self._begun, []
            late = [talk for talk in self._talks.values() if talk.answer is not None and self._is_late(talk)]
            for talk in late:
                self.forget(talk)
                assert talk.answer is not None
                talk.answer.set_result(Answer(failure=f"its client said nothing for {self._idle_seconds:g} s"))
        return [EncodedQuery(query=query, prompt=tuple(json.loads(query.answer))) for query in begun]

    def _is_late(self, talk: Talk) -> bool:
        return time.monotonic() - talk.since > self._idle_seconds

    def close(self) -> None:
        with self.lock:
            self._ended = True
            for talk in self._talks.values():
                if talk.reply is not None:
                    talk.reply.set_exception(_Bad("the searcher has ended", 503))
                    talk.reply = None
        self._server.shutdown()
        self._server.server_close()

    def forget(self, talk: Talk) -> None:
        """Under the lock."""
        self._talks.pop(talk.number, None)
        if talk in (waiting := self._waiting.get(talk.key, [])):
            waiting.remove(talk)
            if not waiting:
                del self._waiting[talk.key]

    def awaits_client(self, talk: Talk) -> None:
        """Under the lock."""
        if talk.of is not None:
            talk.key = _told(talk.messages, talk.of)
            self._waiting.setdefault(talk.key, []).append(talk)

    # Clients call these, in threads.

    def models(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if self._ended:
            raise _Bad("the searcher has ended", 503)
        return {"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "tba_jax", **self._wanted}]}

    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        messages = _messages(body)
        tools = body.get("tools") or []
        of = [tools, body.get("user")]
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        reply = self._go_on(messages[: last + 1], messages[last + 1 :], of) if last >= 0 else None
        if reply is None:
            how: dict[str, Any] = dict(of=of, tool_format=self._tool_format(tools))
            reply = self._begin(messages, self._prompt(messages, tools), **how)
        told = self._await(reply)
        choice = {"index": 0, "message": told["message"], "finish_reason": told["finish_reason"], "logprobs": None}
        return self._completion("chat.completion", "chatcmpl", told, choice)

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        _check(body)
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            ids = self._encoded(prompt, begin=True)
        elif isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
            ids = prompt
        else:
            raise _Bad("prompt must be a text, or a list of token ids")
        told = self._await(self._begin([], ids, of=None, tool_format=None))
        choice = {"index": 0, "text": told["message"]["content"], "finish_reason": told["finish_reason"], "logprobs": None}
        return self._completion("text_completion", "cmpl", told, choice)

    def reward(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if "reward" not in body:
            raise _Bad("reward is missing: it must be a finite number, or null for a conversation that failed")
        reward, (kind, name) = body["reward"], ("id", body["id"]) if "id" in body else ("user", body.get("user"))
        if reward is not None and (type(reward) not in (int, float) or not abs(reward) <= 3e38):
            raise _Bad(f"reward={str(reward)[:60]} must be a finite number, or null for a conversation that failed")
        with self.lock:
            if self._ended:
                raise _Bad("the searcher has ended", 503)
            talks = self._named(kind, name)
            if not talks:
                told = "names no conversation that goes on: it is not one of this endpoint, or has ended"
                raise _Bad(f"{kind}={name!r} {told}", 404)
            if reward is not None and talks[-1].answer is None:
                raise _Bad(f"{kind}={name!r}: the policy is writing; its reward comes after its answer", 409)
            for talk in talks:
                self.forget(talk)
                talk.has_failed = reward is None or talk is not talks[-1]
                if talk.answer is not None:
                    talk.answer.set_result(_FAILED if talk.has_failed else Answer(done=True, reward=float(reward or 0)))
        return {kind: name, "object": "reward"}

    def _named(self, kind: str, name: Any) -> list[Talk]:
        """The conversations of an id, one, or of a user, in their order."""
        if not isinstance(name, str):
            return []
        if kind == "user":
            return [talk for talk in self._talks.values() if talk.of is not None and talk.of[1] == name]
        number = name.rpartition("-")[0].rpartition("-")[2]
        return [self._talks[int(number)]] if number.isdecimal() and int(number) in self._talks else []

    def cut(self) -> _Bad:
        longest = f"context length, task.response_length={self._contract.response_length}"
        return _Bad(f"the conversation was cut: it has no more turns, or reached its {longest}")

    def _go_on(self, before: Sequence[Any], said: list[dict[str, Any]], of: Sequence[Any]) -> "Future[dict[str, Any]] | None":
        """The reply of the conversation that these messages go on with; None where there is none."""
        if not said:
            raise _Bad("the last message is the assistant's: there is nothing to answer")
        try:  # while the conversation still waits
            if not self._between.encode(said, after=-1):
                raise _Bad("the messages since the assistant's last say nothing")
        except ValueError as error:
            raise _Bad(str(error)) from error
        with self.lock:
            if self._ended:
                raise _Bad("the searcher has ended", 503)
            waiting = self._waiting.get(_told(before, of), [])
            if not waiting:
                return None
            talk = next((each for each in waiting if not each.is_cut), None)
            if talk is None:
                raise self.cut()
            waiting.remove(talk)
            if not waiting:
                del self._waiting[talk.key]
            assert talk.answer is not None
            talk.messages += said
            reply = talk.reply = Future()
            plain: list[Message] = [{**message, "content": message["content"]} for message in said]
            talk.answer.set_result(Answer(messages=plain))
            talk.answer = None
        return reply

    def _begin(
        self,
        messages: list[dict[str, Any]],
        prompt: list[int],
        *,
        of: Sequence[Any] | None,
        tool_format: ToolFormat | None,
    ) -> "Future[dict[str, Any]]":
        if not 1 <= len(prompt) <= self._contract.prompt_length:
            told = f"the prompt has {len(prompt)} tokens: task.prompt_length={self._contract.prompt_length} is the most"
            if any(message["role"] == "assistant" for message in messages):
                told += "; no conversation goes on with these messages (it has ended, or had others), so that they are a prompt"
            raise _Bad(told)
        vocab = self._contract.model["vocab"]
        if wrong := [token for token in prompt if not 0 <= token < vocab]:
            raise _Bad(f"prompt: token {wrong[0]} is not of the policy's {vocab}")
        with self.lock:
            if self._ended:
                raise _Bad("the searcher has ended", 503)
            talk = Talk(self, next(self._numbers), list(messages), of=of, tool_format=tool_format)
            self._talks[talk.number] = talk
            said = "\n\n".join(message["content"] for message in messages) or self._tokenizer.decode(prompt)
            self._begun.append(Asked(prompt=said, answer=json.dumps(prompt), talk=talk))
            assert talk.reply is not None
            return talk.reply

    def _await(self, reply: "Future[dict[str, Any]]") -> dict[str, Any]:
        try:
            return reply.result(self._idle_seconds)
        except TimeoutError as error:
            raise _Bad(f"the policy has not answered within {self._idle_seconds:g} s", 503) from error

    def _prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[int]:
        contents = self._tokenizer.escaped([message["content"] for message in messages])
        if not self._chat:
            return self._encoded("\n\n".join(contents), begin=True)
        asked = [{**message, "content": content} for message, content in zip(messages, contents, strict=True)]
        try:
            (text,) = self._tokenizer.conversations([asked], setting="task.chat_template=True", tools=tools)
        except ValueError as error:
            raise _Bad(str(error)) from error
        return self._encoded(text, begin=False)

    def _encoded(self, text: str, *, begin: bool) -> list[int]:
        try:
            return self._tokenizer.encode_all([text], begin=begin)[0]
        except ValueError as error:
            raise _Bad(str(error)) from error

    def _tool_format(self, tools: Sequence[Any]) -> ToolFormat | None:
        try:
            return self._between.tool_format(tools) if tools else None
        except (ValueError, KeyError, TypeError) as error:
            raise _Bad(f"tools: {error}") from error

    def _completion(self, kind: str, prefix: str, told: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
        made = {"id": f"{prefix}-{told['id']}", "object": kind, "created": int(time.time()), "model": "policy"}
        return {**made, "choices": [choice]}


def _told(messages: Sequence[Mapping[str, Any]], of: Sequence[Any]) -> str:
    """What tells conversations apart: tools and user, and roles, contents and calls of messages."""
    calls = [
        [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
        for message in messages
    ]
    return json.dumps([of, *([m["role"], m["content"], each] for m, each in zip(messages, calls, strict=True))])


def _check(body: Mapping[str, Any]) -> None:
    if body.get("stream"):
        raise _Bad("stream=true is not served")
    if not isinstance(body.get("tools") or [], list):
        raise _Bad("tools must be a list of the protocol's tools")
    if body.get("n", 1) not in (1, None):
        raise _Bad(f"n={body['n']} must be 1: ask again for further samples")


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a request, their contents as texts. Raises _Bad."""
    _check(body)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise _Bad("messages must be a list of at least one message")
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
            if len(parts := [each for each in texts if isinstance(each, str)]) < len(content):
                raise _Bad("a content has parts that are not texts, which the policy does not read")
            content = "".join(parts)
        if not isinstance(message.get("role"), str) or not isinstance(content, str | None):
            raise _Bad("each message must have a role and a content, texts")
        found.append({**{key: value for key, value in message.items() if value is not None}, "content": content or ""})
    return found


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 1024
    endpoint: Endpoint


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version, protocol_version = "tba_jax", "", "HTTP/1.1"
    timeout = 600.0

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve({"/v1/models": self.server.endpoint.models}, {})

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not self._has_key:
            self.close_connection = True
            self._answer(401, "the key is missing or wrong: it is in the searcher's log")
            return
        if not length.isdecimal() or int(length) > _MOST_BYTES:
            self.close_connection = True
            self._answer(413, f"a request must say its length, at most {_MOST_BYTES} bytes")
            return
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            body = None
        its = self.server.endpoint
        routes = {"/v1/chat/completions": its.chat, "/v1/completions": its.complete, "/v1/rewards": its.reward}
        self._serve(routes, body)

    def _serve(self, routes: Mapping[str, Any], body: Any) -> None:
        if not self._has_key:
            self._answer(401, "the key is missing or wrong: it is in the searcher's log")
        elif self.path not in routes:
            self._answer(404, f"there is no {self.path[:100]}; there are {', '.join(routes)}")
        elif not isinstance(body, dict):
            self._answer(400, "the request is not a JSON object")
        else:
            try:
                found = routes[self.path](body)
            except _Bad as error:
                self._answer(error.status, str(error))
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
                self._answer(400, f"the request is not as the protocol has it: {type(error).__name__}: {error}"[:300])
            else:
                self._write(200, found)

    @property
    def _has_key(self) -> bool:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode(errors="replace"), self.server.endpoint.token.encode())

    def _answer(self, status: int, told: str) -> None:
        self._write(status, {"error": {"message": told, "type": "invalid_request_error", "code": status}})

    def _write(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
