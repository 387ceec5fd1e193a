"""Ask the agents of a running Goondan swarm.

    async with connect() as gdn:
        answer = await gdn.ask("coder", "Fix the test.")

and the same without asyncio: `with connect() as gdn: answer = gdn.ask("coder", "Fix the test.")`.
"""

from goondan_client.client import BlockingClient, Client, connect
from goondan_client.errors import GoondanError
from goondan_client.frames import Answer, LiveEvent, ToolResult, Usage

__all__ = ["Answer", "BlockingClient", "Client", "GoondanError", "LiveEvent", "ToolResult", "Usage", "connect"]
