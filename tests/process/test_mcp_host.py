"""MCP servers at the tool host: real jails, real workers, servers that speak the protocol by hand."""

from __future__ import annotations

from pathlib import Path

from tests.mcp_fixture import Asker, make_server, text
from tests.toolhost_fixture import bench


async def test_a_server_is_listed_and_called(short_tmp: Path) -> None:
    async with bench(make_server(short_tmp)) as made:
        asker = Asker(made)
        listing = await asker.ask()
        assert [tool["export"] for tool in listing["tools"]] == ["echo", "count", "nap", "where"]
        result = await made.call("srv__echo", {"a": [1, "x"]})
        assert text(result) == {"a": [1, "x"]}
