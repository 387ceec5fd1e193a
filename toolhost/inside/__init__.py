"""Everything of Goondan that stands inside a jail, and what a tool may import: `from goondan_tool import Pending`.

This folder is mounted read-only in every jail, under the name `goondan_tool`; nothing else of the kernel is. It
imports no third-party package and as little of the standard library as it can: a cold jail pays for each import.
"""

from .api import AgentError, Logger, Message, Pending, Runtime, ToolContext, ToolError

__all__ = ["AgentError", "Logger", "Message", "Pending", "Runtime", "ToolContext", "ToolError"]
