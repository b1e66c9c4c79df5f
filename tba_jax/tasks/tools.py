"""Tools: Python functions that the policy may call in the format of its chat template, as often as it likes before it answers.

    def calculate(expression: str) -> str:
        \"\"\"Works out an arithmetic expression.

        Args:
            expression: with + - * / and parentheses
        \"\"\"
        ...

    class Sums(ToolTask):
        tools = (calculate,)

        @staticmethod
        def grade(query, answer): ...      # the last message, which calls no tool -> reward

What a tool returns or raises, and what the policy calls in a way that cannot be read, comes back as a message of the role "tool".
"""

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from tba_jax.tasks import graders
from tba_jax.tasks.environments import EnvironmentTask, Message
from tba_jax.tasks.interface import Query

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """How a chat template writes the call of a tool: before, a JSON object with a name and arguments under these keys, after."""

    before: str
    name: str
    arguments: str

    def calls(self, message: str) -> list[tuple[str, dict[str, Any]]]:
        """(name, arguments) of each call in a message; [] where there is none. Raises ValueError: a call cannot be read."""
        # Without a mark before it the whole message is a call, or none of it.
        whole = [message] if message.lstrip().startswith("{") else []
        return [self._call(part) for part in (message.split(self.before)[1:] if self.before else whole)]

    def _call(self, text: str) -> tuple[str, dict[str, Any]]:
        try:
            found, _ = json.JSONDecoder().raw_decode(text.lstrip())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the call of a tool is not valid JSON: {error}") from error
        name, arguments = (found.get(key) for key in (self.name, self.arguments)) if isinstance(found, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError(
                f'the call of a tool must be an object with "{self.name}", a text, and "{self.arguments}", an object'
            )
        return name, arguments


# A call by which a chat template shows how it writes one.
PROBE = {"name": "tool_of_probe", "arguments": {"key_of_probe": "value_of_probe"}}


def format_of(text: str) -> ToolFormat:
    """The format in which a chat template has written the call PROBE. Args: text: of the assistant's message, from its beginning.

    Raises ValueError: the call is no JSON object.
    """
    decoder = json.JSONDecoder()
    for at in (match.start() for match in re.finditer(r"\{", text)):
        try:
            found, _ = decoder.raw_decode(text, at)
        except ValueError:
            continue
        keys = {json.dumps(value, sort_keys=True): key for key, value in found.items()} if isinstance(found, dict) else {}
        name, arguments = (keys.get(json.dumps(PROBE[each], sort_keys=True)) for each in ("name", "arguments"))
        if name and arguments:
            return ToolFormat(before=text[:at].strip(), name=name, arguments=arguments)
    raise ValueError("the chat template writes no JSON object where a tool is called, so calls of tools cannot be read")


def schemas(tools: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """JSON schemas of functions, from their type hints and docstrings. Raises ValueError: names a function that has no schema."""
    from transformers.utils import get_json_schema

    found = []
    for tool in tools:
        name = getattr(tool, "__name__", repr(tool))
        if not _NAME.fullmatch(name):
            raise ValueError(f"the tool {name!r} must have a name of 1 to 64 letters, digits and underscores: define it by def")
        try:
            found.append(get_json_schema(tool))
        except Exception as error:  # of classes of its own
            told = " ".join(str(error).split())
            raise ValueError(f"the tool {name} needs type hints, and a docstring that tells of each argument: {told}") from error
    names = [each["function"]["name"] for each in found]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two tools have the name {repeated!r}")
    return found


class WithTools:
    """The environment of a ToolTask."""

    def __init__(self, *, tools: Sequence[graders.Reference], grade: graders.Reference, tool_format: ToolFormat):
        self._tools = {function.__name__: function for function in map(graders.find, tools)}
        self._grade, self._format = graders.find(grade), tool_format
        self.tool_calls = self.errors = 0

    def start(self, query: Query) -> None:
        self._query = query

    def step(self, message: str) -> tuple[list[Message] | None, float]:
        try:
            calls = self._format.calls(message)
        except ValueError as error:
            self.errors += 1
            return [{"role": "tool", "content": f"error: {error}"}], 0.0
        if not calls:
            return None, self._grade(self._query, message)
        return [{"role": "tool", "content": self._run(*call)} for call in calls], 0.0

    def _run(self, name: str, arguments: dict[str, Any]) -> str:
        self.tool_calls += 1
        try:
            if name not in self._tools:
                raise ValueError(f"there is no tool {name!r}; there are {', '.join(self._tools)}")
            inspect.signature(self._tools[name]).bind(**arguments)
            result = self._tools[name](**arguments)
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except Exception as error:
            self.errors += 1
            return f"error: {type(error).__name__}: {error}"


class ToolTask(EnvironmentTask):
    """A task whose policy may call `tools`, functions at the top level of the task's file, and whose last message `grade`
    rewards. It needs a tokenizer whose chat template knows tools. See EnvironmentTask."""

    environment = WithTools
    tools: tuple[Callable[..., Any], ...] = ()
    grade: Callable[[Query, str], float]

    def __init__(self, *, time_limit: float = 60.0, concurrency: int = 2):
        """Raises ValueError: a tool has no schema, or workers could not import it. Others: see Environments."""
        if not (isinstance(self.tools, tuple | list) and self.tools and hasattr(type(self), "grade")):
            raise ValueError(f"{type(self).__name__} must set tools = (function, …) and grade = staticmethod(function)")
        self.schemas = schemas(self.tools)
        references = [graders.refer(tool, called="the tool") for tool in self.tools]
        settings = {"tools": references, "grade": graders.refer(type(self).grade)}
        super().__init__(settings=settings, time_limit=time_limit, concurrency=concurrency)

    def use(self, tool_format: ToolFormat) -> None:
        """Calls of tools are read in this format from now on."""
        self.environments.settings["tool_format"] = tool_format
