"""Without a network, whatever a tool in JavaScript tries is refused by one code, and by the sentence that helps."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.javascript_runtimes import RUNTIMES
from tests.javascript_tools import javascript_tool
from tests.toolhost_fixture import bench

TOOL: Final = """
import dns from 'node:dns/promises';
import http from 'node:http';
import net from 'node:net';

const either = (start) => new Promise((ok, bad) => start(ok).on('error', bad));

export const handlers = {
  fetch: () => fetch('http://example.com/'),
  address: () => fetch('http://192.0.2.1/'),
  connect: () => either((ok) => net.connect(80, '192.0.2.1', ok)),
  get: () => either((ok) => http.get('http://192.0.2.1/', ok)),
  listen: () => either((ok) => net.createServer().listen(0, ok)),
  lookup: () => dns.lookup('example.com'),
  resolve: () => dns.resolve('example.com'),
  wrapped: () => fetch('http://192.0.2.1/').catch((cause) => { throw new Error('no weather today', { cause }) }),
  other() { throw Object.assign(new Error('not allowed'), { code: 'EPERM' }) },
};
"""
OFFLINE: Final = ("fetch", "address", "connect", "get", "listen", "lookup", "resolve", "wrapped")


@pytest.mark.parametrize("name", RUNTIMES)
async def test_what_needs_a_network_says_so(short_tmp: Path, name: str) -> None:
    async with bench(javascript_tool(short_tmp, name, TOOL, *OFFLINE, "other")) as made:
        for export in OFFLINE:
            error = (await made.call(f"t__{export}"))["error"]
            assert error["code"] == "E_SANDBOX_DENIED", (export, error)
            assert error["message"].startswith("no network was granted to this tool"), error
        assert (await made.call("t__other"))["error"]["code"] == "EPERM"
