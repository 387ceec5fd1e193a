"""What a script asks of the agent that runs it (`tool.ask`), and the answers; the codes of errors of scripts.

Source: docs/code-mode.md; docs/design/tools.md section 12; docs/errors.md.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from msgspec import Struct

from goondan.schemas.wire import errors, frames

#: The bundled extension, and the full name of the tool that it brings.
EXTENSION: Final = "code-mode"
CODE_TOOL: Final = "code__run"

#: Call one of the agent's tools (InnerCall). Answered with InnerResult.
TOOL: Final = "tool"
#: Look for tools in the catalog (ToolsQuery). Answered with FoundTools.
TOOLS: Final = "tools"


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
    output: frames.OptionalRaw = None
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


ERRORS: Final = errors.add_codes(
    {
        "E_SCRIPT_FAILED": errors.ErrorCode("Mend the script; mind what it has done.", of_tools=True),
        "E_SCRIPT_LANGUAGE": errors.ErrorCode("Write the script in Python.", of_tools=True),
    }
)

#: Structs that the exported schemas show.
EXPORTED: Final = (InnerCall, InnerResult, ToolsQuery, FoundTools)
