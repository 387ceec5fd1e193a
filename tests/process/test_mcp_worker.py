"""The MCP worker over real sockets, against servers of both eras."""

from __future__ import annotations

from tests.process.mcp_worker_host import Scripted, beside


async def test_a_server_is_listed_and_called_over_its_descriptor() -> None:
    server = Scripted()
    async with beside(server) as host:
        ready = await host.ready()
        assert ready.listing is not None
        assert [(tool.export, tool.name) for tool in ready.listing.tools] == [("echo", "echo")]
        assert ready.listing.era == "handshake"
        assert ready.listing.protocol_version == "2025-11-25"
        assert (ready.listing.server_name, ready.listing.server_version) == ("scripted", "1")
        assert await host.call("echo", a=1, b=None) == '{"a": 1, "b": null}'
        assert await host.exit() == 0
