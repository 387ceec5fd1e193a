"""The embedded provider: a console behind the model's interface. Deterministic, without key and network.

It turns commands into tool calls and tool results into readable text, so that `make run` works on a fresh machine
through the same turn, catalog, validation and sandbox as any model. It never pretends to be a model.

Commands, one a line (JSON may span lines); several calls in one input run in parallel:
    /TOOL {json}      /TOOL key=value …      /tools      /help      @AGENT text

Source: docs/design/turns.md section 7.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, Final

from msgspec import msgpack

from goondan.agentproc.machine.messages import Message, ToolData, ToolResultPart, UserData
from goondan.agentproc.machine.turn import AskedCall
from goondan.agentproc.providers import base
from goondan.schemas.bundle.launch import CatalogItem
from goondan.schemas.wire import errors, frames

#: The longest text of one result (characters). A console is no place for more, and an answer must fit into a frame.
MAX_SHOWN: Final = 16_384
#: The longest description of one tool in the list (characters).
MAX_DESCRIPTION: Final = 100
#: The tool that asks another agent; present when the bundle grants it.
REQUEST_TOOL: Final = "agents__request"

HELP: Final = """\
This is the embedded console. It runs commands; it is not a language model.

  /TOOL {json}        call a tool, for example  /bash__exec {"command":"echo hello"}
  /TOOL key=value …   the same with simple values; several lines run in parallel
  /tools              list the tools of this agent
  @AGENT text         ask another agent

To talk to a model, set it in goondan.yaml: a Model resource with spec.provider, spec.model and spec.apiKey
(for example valueFrom: {env: NAME}), and the Agent's spec.modelConfig.modelRef."""


class EmbeddedProvider:
    """Answers every request at once, from the messages of the turn only."""

    needs_history = False

    async def complete(
        self,
        request: base.ModelRequest,
        on_delta: Callable[[base.TextDelta], None] | None = None,
        on_news: Callable[[base.ModelNews], None] | None = None,
    ) -> base.ModelAnswer:
        """Turn the commands of the last user message into tool calls, or the results behind it into text."""
        return answer(request.messages, request.tools)

    async def window(self, request: base.ModelRequest) -> None:
        """A console has no context."""

    def forget(self) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing to close."""


def answer(messages: Sequence[Message], tools: Sequence[CatalogItem]) -> base.ModelAnswer:
    """The console's next answer (pure)."""
    results: list[ToolResultPart] = []
    told: list[str] = []  # of pending work that has ended since
    for message in reversed(messages):
        if isinstance(message.data, ToolData):
            results[:0] = message.data.content
        elif isinstance(message.data, UserData) and message.source.type == "tool":
            told.insert(0, message.data.content)
        elif results:
            break
        elif isinstance(message.data, UserData):
            parsed = parse(message.data.content, tools)
            if isinstance(parsed, str):
                return base.ModelAnswer(text=parsed, finish_reason="stop")
            return base.ModelAnswer(calls=parsed, finish_reason="tool-calls")
    shown = [show_results(results)] if results else []
    return base.ModelAnswer(text="\n".join([*shown, *told]) or HELP, finish_reason="stop")


# --- commands to calls ----------------------------------------------------------------------------------------------


def parse(text: str, tools: Sequence[CatalogItem]) -> list[AskedCall] | str:
    """The calls that an input asks for, or the text that answers it."""
    items = {item.name: item for item in tools}
    calls: list[AskedCall] = []
    at, end = 0, len(text)
    while True:
        while at < end and text[at].isspace():
            at += 1
        if at == end:
            return calls or HELP
        stop = text.find("\n", at)
        line = text[at : stop if stop >= 0 else end]
        if line[0] == "@":
            parsed: AskedCall | str = _ask_agent(line[1:].strip(), items)
        elif line[0] == "/":
            parsed, used = _command(text, at, line, items, len(calls))
            at += used - len(line)
        else:
            parsed = HELP if not calls else f"Nothing was called: this line is no command: {line}"
        if isinstance(parsed, str):
            return parsed
        calls.append(parsed)
        at += len(line)


def _command(text: str, at: int, line: str, items: dict[str, CatalogItem], index: int) -> tuple[AskedCall | str, int]:
    """One `/` command, and the number of characters of `text` that it took."""
    name = line[1:].split(maxsplit=1)[0] if line[1:].strip() and not line[1].isspace() else ""
    rest = line[1 + len(name) :].lstrip()
    if name == "tools" and not rest:
        return list_tools(list(items.values())), len(line)
    if name in ("", "help"):
        return HELP, len(line)
    if "__" not in name:
        return _unknown(name, items), len(line)
    call_id = f"call_{index + 1}"
    if not rest.startswith("{"):
        pairs = _pairs(name, rest, items.get(name))
        return (pairs if isinstance(pairs, str) else base.asked_call(call_id, name, pairs)), len(line)
    start = at + line.index("{", 1 + len(name))
    try:
        value, stop = base.scan_json(text, start)
    except (ValueError, RecursionError) as error:
        return _broken_json(name, text[start:], error, items.get(name)), len(line)
    newline = text.find("\n", stop)
    behind = text[stop : newline if newline >= 0 else len(text)].strip()
    if behind:
        return f"Nothing was called: there is text behind the arguments of /{name}: {behind[:80]}", len(line)
    return base.asked_call(call_id, name, value), stop - at


def _pairs(name: str, rest: str, item: CatalogItem | None) -> dict[str, Any] | str:
    """`key=value` words as arguments. A value is text when the schema says string; otherwise JSON if it can be read as
    JSON.
    """
    try:
        words = shlex.split(rest)
    except ValueError as error:
        return f"Nothing was called: the arguments of /{name} have {str(error).lower()}.\n{_example(name, item)}"
    declared = (item.parameters or {}).get("properties", {}) if item else {}
    args: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key or not equals:
            problem = f"Nothing was called: {word!r} is no key=value."
            return f"{problem}\n{_example(name, item)}"
        schema = declared.get(key) if isinstance(declared, dict) else None
        args[key] = value if isinstance(schema, dict) and schema.get("type") == "string" else _plain(value)
    return args


def _plain(value: str) -> Any:
    try:
        return base.read_json(value)
    except (ValueError, RecursionError):
        return value


def _ask_agent(line: str, items: dict[str, CatalogItem]) -> AskedCall | str:
    agent, _, text = line.partition(" ")
    if not agent or not text.strip():
        return "Write @AGENT and what to ask it, for example  @coder list the open files"
    if REQUEST_TOOL not in items:
        return (
            f"Agent '{agent}' was not asked: this agent has no tool {REQUEST_TOOL}. [E_TOOL_NOT_IN_CATALOG]\n"
            "Suggestion: requests between agents are not available in this version; send to the agent from outside, "
            f"for example  gdn send {agent} TEXT"
        )
    return base.asked_call("call_1", REQUEST_TOOL, {"target": agent, "input": text.strip()})


def list_tools(tools: Sequence[CatalogItem]) -> str:
    """The catalog as text, one line for each tool."""
    if not tools:
        return "This agent has no tools. Add some to its spec.tools."
    width = max(len(item.name) for item in tools)
    lines = []
    for item in tools:
        description = " ".join((item.description or "").split())
        if len(description) > MAX_DESCRIPTION:
            description = description[: MAX_DESCRIPTION - 1] + "…"
        lines.append(f"  /{item.name:<{width}}  {description}".rstrip())
    return f"{len(tools)} tools:\n" + "\n".join(lines)


def _unknown(name: str, items: dict[str, CatalogItem]) -> str:
    near = get_close_matches(name, items, n=3, cutoff=0.4) or [tool for tool in items if tool.startswith(name + "__")]
    hint = f" Did you mean {', '.join('/' + tool for tool in near)}?" if near else ""
    return f"There is no command /{name}.{hint}\nTools are called by their full name; /tools lists them."


def _broken_json(name: str, text: str, error: Exception, item: CatalogItem | None) -> str:
    if isinstance(error, json.JSONDecodeError):
        shown = text.splitlines()[error.lineno - 1] if text.splitlines() else ""
        start = max(0, error.colno - 60)
        mark = " " * (error.colno - 1 - start) + "^ " + error.msg
        where = f"  {shown[start : start + 100]}\n  {mark}"
    else:
        where = f"  {str(error) or 'nested too deep'}"
    return f"Nothing was called: the arguments of /{name} are no JSON.\n{where}\n{_example(name, item)}"


def _example(name: str, item: CatalogItem | None) -> str:
    """An example of the call, from the tool's schema."""
    schema = (item.parameters if item else None) or {}
    required, properties = schema.get("required", []), schema.get("properties", {})
    example: dict[str, Any] = {}
    for key in required if isinstance(required, list) else []:
        declared = properties.get(key) if isinstance(properties, dict) else None
        kind = declared.get("type") if isinstance(declared, dict) else None
        example[key] = {"number": 1, "integer": 1, "boolean": True, "array": [], "object": {}}.get(str(kind), "…")
    return f"Write it as  /{name} {json.dumps(example, ensure_ascii=False)}"


# --- results to text ------------------------------------------------------------------------------------------------


def show_results(parts: Sequence[ToolResultPart]) -> str:
    """Results as a person reads them. With several results, each has a line with its number and tool."""
    if len(parts) == 1:
        return show_result(parts[0])
    return "\n\n".join(f"[{n}] {part.tool_name}\n{show_result(part)}" for n, part in enumerate(parts, 1))


def show_result(part: ToolResultPart) -> str:
    """One result: output, error with code and suggestion, or handle."""
    result = part.result
    if result.status == "pending":
        return f"pending, handle {result.handle}"
    if result.status == "error":
        return _show_error(part.tool_name, result)
    output = msgpack.decode(result.output) if result.output is not None else None
    if isinstance(output, dict) and isinstance(output.get("stdout"), str) and "exitCode" in output:
        return _show_process(output)
    if part.tool_name == REQUEST_TOOL and isinstance(output, dict) and isinstance(output.get("response"), str):
        return _cut(output["response"])
    if isinstance(output, str):
        return _cut(output)
    return _cut(json.dumps(output, ensure_ascii=False, indent=2, default=str))


def _show_error(name: str, result: frames.ToolResult) -> str:
    error = result.error
    if error is None:
        return f"{name} failed."
    lines = [f"{name} failed: {error.message}" + (f" [{error.code}]" if error.code else "")]
    if error.suggestion:
        lines.append(f"Suggestion: {error.suggestion}")
    if error.help_url:
        ours = error.code and error.help_url == errors.help_url(error.code)
        lines.append(f"Help: {f'gdn explain {error.code}' if ours else error.help_url}")
    return _cut("\n".join(lines))


def _show_process(output: dict[str, Any]) -> str:
    """The output of a command. Its exit is shown only when it failed."""
    pieces = [_cut(output["stdout"].rstrip("\n"))] if output["stdout"] else []
    stderr = output.get("stderr")
    if isinstance(stderr, str) and stderr:
        pieces.append("stderr:\n" + _cut(stderr.rstrip("\n")))
    if output.get("timedOut"):
        pieces.append("(timed out)")
    if output.get("signal"):
        pieces.append(f"(ended by {output['signal']})")
    elif output["exitCode"] != 0:
        pieces.append(f"(exit code {output['exitCode']})")
    return "\n".join(pieces) or "(no output)"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}\n… ({len(text) - MAX_SHOWN} more characters)"
