"""Recorded parity of the bundled tool http-fetch, through a real jail and the egress proxy, and what goes beyond it.

The server is `tests/servers/mock_api.py` on loopback, granted as an operator would grant it: without that grant the
tool reaches public addresses only.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace

from goondan.kernel.bundle.documents import base_tools
from goondan.kernel.bundle.rules.plan import tool_spec
from goondan.schemas.bundle.launch import ToolSpec
from tests.contract.recorded import cases, check, check_deviations, differences, fill
from tests.service_fixture import MockApi, mock_api
from tests.toolhost_fixture import Bench, bench

CASES = cases("http-fetch")


@pytest.fixture(scope="module")
def api() -> Iterator[MockApi]:
    with mock_api() as made:
        yield made


def spec(*hosts: str, open_catalog: bool = False) -> ToolSpec:
    """The bundled tool, with these hosts granted as well; without parameters where cases were recorded so."""
    tool = tool_spec(base_tools()["http-fetch"])
    assert tool.sandbox.network == "public"
    if open_catalog:
        tool = replace(tool, exports=[replace(export, parameters=None) for export in tool.exports])
    network = {"allow": list(hosts), "public": True} if hosts else "public"
    return replace(tool, sandbox=replace(tool.sandbox, network=network))


def places(api: MockApi) -> list[str]:
    """The services by both names that the cases use."""
    return [api.host, f"localhost:{api.host.rpartition(':')[2]}"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(api: MockApi) -> AsyncIterator[Bench]:
    async with bench(spec(*places(api))) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_host(api: MockApi) -> AsyncIterator[Bench]:
    async with bench(spec(*places(api), open_catalog=True)) as made:
        yield made


@pytest.mark.requirement("HTTP-01", "HTTP-02", "HTTP-03", "HTTP-04", "HTTP-05", "HTTP-06", "HTTP-07", "HTTP-08")
@pytest.mark.requirement("HTTP-09", "HTTP-10")
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
async def test_recorded(case: dict[str, Any], api: MockApi, host: Bench, open_host: Bench, tmp_path: Path) -> None:
    port = api.host.rpartition(":")[2]
    case = fill(case, {"SERVER": api.url, "SERVER_HOST": api.host, "SERVER_PORT": port})
    api.reset()
    began = time.monotonic()
    made = open_host if case.get("catalog") == "open" else host
    result = await made.call(case["tool"], case["args"])
    found = differences(case, result, tmp_path, (time.monotonic() - began) * 1000)
    # A redirect loop and a timeout are recorded without requests: how many come in time is nobody's promise.
    if case.get("requests") and (asked := api.requests()) != case["requests"]:
        found.append(f"asked {asked} instead of {case['requests']}")
    check(case, found)


def test_few_cases_deviate() -> None:
    check_deviations("http-fetch")


@pytest.mark.requirement("HTTP-01", "BASE-01", "BASE-04")
@pytest.mark.asyncio(loop_scope="module")
async def test_a_redirect_leads_nowhere_that_a_request_may_not_go(api: MockApi, host: Bench) -> None:
    async def follow(target: str) -> dict[str, Any]:
        result = await host.call("http-fetch__get", {"url": f"{api.url}/redirect-to?code=302&to={target}"})
        assert result["status"] == "error", result
        return result["error"]  # type: ignore[no-any-return]

    for target in ("http://169.254.169.254/latest", "http://127.0.0.1:1/", "http://[::ffff:10.0.0.1]/", "//10.0.0.1/"):
        error = await follow(target)
        assert error["code"] == "E_SANDBOX_DENIED", (target, error)
    assert "Unsupported protocol 'file:'" in (await follow("file:///etc/passwd"))["message"]


@pytest.mark.requirement("HTTP-01")
async def test_without_a_grant_nothing_of_this_machine_is_reached(api: MockApi) -> None:
    api.reset()
    async with bench(spec()) as made:
        for url in (f"{api.url}/json", f"http://localhost:{api.host.rpartition(':')[2]}/json", "http://0x7f000001/"):
            result = await made.call("http-fetch__get", {"url": url})
            assert result["error"]["code"] == "E_SANDBOX_DENIED", result
    assert api.requests() == []


@pytest.mark.requirement("HTTP-08")
@pytest.mark.asyncio(loop_scope="module")
async def test_no_more_is_read_than_was_asked_for(api: MockApi, host: Bench) -> None:
    began = time.monotonic()
    result = await host.call("http-fetch__get", {"url": f"{api.url}/bytes/200000000", "maxBytes": 1000})
    assert result["status"] == "ok", result
    assert (len(result["output"]["body"]), result["output"]["truncated"]) == (1000, True)
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("url", ["http://a b/", "http://a:99999/", "http://256.1.1.1/", "http://[::1%lo]/", "http:///"])
@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_no_address(host: Bench, url: str) -> None:
    result = await host.call("http-fetch__get", {"url": url})
    assert result["error"]["message"] == f"Invalid URL: {url}"
