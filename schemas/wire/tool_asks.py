"""What a running call asks of the agent that made it: `tool.ask` and `tool.answer`.

A tool host sends `tool.ask` in the name of a call that is open there. The broker passes it on to the agent that holds
the call, and to nobody else. The agent answers each with one `tool.answer`.

Source: docs/design/wire.md section 4; docs/design/tools.md section 12.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import Raw, Struct

from goondan.schemas.wire.frames import ErrorPayload

if TYPE_CHECKING:
    OptionalRaw = Raw | None
else:
    # msgspec takes Raw out of a union and would then accept nothing but nil; the default stays None.
    OptionalRaw = Raw

#: Call one of the agent's tools (InnerCall). Answered with InnerResult.
TOOL: Final = "tool"
#: Look for tools in the catalog (ToolsQuery). Answered with FoundTools.
TOOLS: Final = "tools"
#: A server asks a person (MCP elicitation).
ELICIT: Final = "elicit"
#: A server asks the agent's model (MCP sampling).
SAMPLE: Final = "sample"
#: A server asks for the folders that it may work in (MCP roots).
ROOTS: Final = "roots"
#: How the kinds begin by which a server's token is asked for (MCP authorization).
OAUTH_PREFIX: Final = "oauth."
#: The kinds that code mode has, and those of MCP servers, without the ones that begin with OAUTH_PREFIX.
CODE_KINDS: Final = frozenset({TOOL, TOOLS})
SERVER_KINDS: Final = frozenset({ELICIT, SAMPLE, ROOTS})

#: The bundled extension of code mode, and the full name of the tool that it brings.
CODE_MODE: Final = "code-mode"
CODE_TOOL: Final = "code__run"

#: Questions of one call that may be open at once.
MAX_OPEN: Final = 16
#: Calls of tools that one call may make in all.
MAX_INNER_CALLS: Final = 5_000
#: Bytes of one question, as msgpack.
MAX_ASK_BYTES: Final = 256 << 10
#: Bytes of one answer: several must fit into what may wait for a jail.
MAX_ANSWER_BYTES: Final = 4 << 20


class ToolAsk(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Payload of `tool.ask`. The header's `callId` names the call that asks."""

    #: The number of the question in its call.
    ask_id: int
    #: What is asked: `tool`, `tools`, `elicit`, `sample`, `roots`, or `oauth.` with a name.
    kind: str
    #: What exactly. Its shape depends on `kind`.
    value: OptionalRaw = None


class ToolAnswer(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Payload of `tool.answer`: a value, or an error."""

    #: The number of the question in its call.
    ask_id: int
    #: The value. Its shape depends on the question's `kind`.
    value: OptionalRaw = None
    #: Why there is no value.
    error: ErrorPayload | None = None


class InnerCall(Struct, frozen=True):
    """The value of a question of kind `tool`: one call of a tool."""

    #: The tool's full name, as in the agent's catalog.
    name: str
    #: The arguments: a JSON object.
    args: Any = None


class InnerResult(Struct, frozen=True, omit_defaults=True):
    """The value of the answer to a question of kind `tool`. A call that failed is answered with an error."""

    #: `pending`: the work goes on after this result.
    status: Literal["ok", "pending"]
    #: With `ok`: the tool's output.
    output: OptionalRaw = None
    #: With `pending`: the name of the work that goes on.
    handle: str | None = None


class ToolsQuery(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The value of a question of kind `tools`."""

    #: Words to look for in names and descriptions. None: `names` are described.
    query: str | None = None
    #: Full names of tools to describe.
    names: list[str] = []
    #: How many tools are found at most.
    limit: int = 10


class FoundTool(Struct, frozen=True, omit_defaults=True):
    """One tool of the agent's catalog."""

    #: Its full name.
    name: str
    #: What it does.
    description: str | None = None
    #: The JSON Schema of its arguments. None: it declares none.
    parameters: dict[str, Any] | None = None


class FoundTools(Struct, frozen=True):
    """The value of the answer to a question of kind `tools`."""

    #: The best first.
    tools: list[FoundTool]
    #: How many tools there are in all.
    total: int
