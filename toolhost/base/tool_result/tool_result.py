"""`tool-result__get`: the result of pending work.

The tool host itself answers these calls (toolhost/serving/answers.py), because only it knows the work of every jail.
If this module is ever called, it only says so.
"""

from __future__ import annotations

from goondan_tool import ToolContext, ToolError

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from typing import Any, NoReturn


def get(ctx: ToolContext, input: dict[str, Any]) -> NoReturn:
    """Never called by a tool host of this version."""
    raise ToolError("results of pending work are known to the tool host alone", code="E_TOOL_OUTCOME_UNKNOWN")


handlers = {"get": get}
