"""The bundled tool `code`: runs a script that calls the tools of its agent (code mode).

The script has what every handler has, and `tools`. The agent makes its calls, under the rules of the agent.

Source: docs/code-mode.md; docs/design/tools.md section 12.
"""

from __future__ import annotations

from code_scripts.calls import Calls, Printed
from goondan_base.arguments import InvalidInput, non_empty
from goondan_tool import ToolContext, ToolError

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from typing import Any


def run(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`code__run`: run the script to its end; what it printed, and how many calls it made."""
    source, language = non_empty(input, "code"), input.get("language")
    asking = ctx.tools
    if asking is None:
        raise ToolError("this jail may not call tools", code="E_FORBIDDEN")
    calls, printed = Calls(asking), Printed()
    if language == "python":
        from code_scripts import python_script

        python_script.run(source, calls, printed)
    elif language == "javascript":
        from code_scripts import node_script

        node_script.run(source, calls, printed, ctx)
    else:
        raise InvalidInput("'language' must be python or javascript")
    return {"printed": printed.text(), "calls": calls.count}


handlers = {"run": run}
