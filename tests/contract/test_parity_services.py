"""Recorded parity of the bundled tools of chat services: every case through a real jail and the egress proxy.

The service is `tests/servers/mock_api.py` on loopback, granted as an operator would grant it. What it was asked is
compared as well: method, path, headers and body of every request.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from msgspec.structs import replace

from goondan.kernel.bundle.documents import base_tools
from goondan.kernel.bundle.rules.plan import tool_spec
from goondan.schemas.bundle.launch import ToolSpec
from tests.contract.recorded import cases, check, check_deviations, differences, fill, set_up
from tests.contract.test_parity_refusals import SCHEMAS
from tests.service_fixture import MockApi, mock_api
from tests.toolhost_fixture import Bench, bench

TOOLS = ("telegram", "slack")
CASES = cases(*TOOLS)
#: Nobody listens there; cases about servers that cannot be reached ask for it.
NOBODY = "127.0.0.1:1"


@pytest.fixture(scope="module")
def api() -> Iterator[MockApi]:
    with mock_api() as made:
        yield made


def specs(*hosts: str, open_catalog: bool = False) -> list[ToolSpec]:
    """The bundled tools with these hosts granted as well; without parameters where cases were recorded so."""
    tools = [tool_spec(base_tools()[name]) for name in TOOLS]
    if open_catalog:
        tools = [replace(tool, exports=[replace(export, parameters=None) for export in tool.exports]) for tool in tools]
    return [
        replace(tool, sandbox=replace(tool.sandbox, network={"allow": [*tool.sandbox.network["allow"], *hosts]}))
        for tool in tools
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def benches(api: MockApi) -> AsyncIterator[Callable[..., Awaitable[Bench]]]:
    """Hosts made when they are first asked for and kept for all cases, so that their jails stay warm."""
    made: dict[Any, Bench] = {}
    async with AsyncExitStack() as stack:

        async def get(*, open_catalog: bool, environment: dict[str, str]) -> Bench:
            key = (open_catalog, *environment.items())
            if key not in made:
                tools = specs(api.host, NOBODY, open_catalog=open_catalog)
                made[key] = await stack.enter_async_context(bench(*tools, environment=environment))
            return made[key]

        yield get


@pytest.mark.requirement("TELEGRAM-01", "TELEGRAM-02", "TELEGRAM-03", "TELEGRAM-05", "TELEGRAM-07", "TELEGRAM-08")
@pytest.mark.requirement("TELEGRAM-09", "TELEGRAM-10", "TELEGRAM-11", "TELEGRAM-12", "TELEGRAM-14", "TELEGRAM-17")
@pytest.mark.requirement("TELEGRAM-18", "TELEGRAM-20", "TELEGRAM-21")
@pytest.mark.requirement("SLACK-01", "SLACK-02", "SLACK-03", "SLACK-07", "SLACK-08", "SLACK-09", "SLACK-10", "SLACK-11")
@pytest.mark.requirement("SLACK-12", "SLACK-13", "SLACK-14", "SLACK-15", "SLACK-16", "SLACK-18", "SLACK-19", "SLACK-20")
@pytest.mark.requirement("SLACK-22", "SLACK-23", "NAME-12")
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
async def test_recorded(
    case: dict[str, Any], api: MockApi, benches: Callable[..., Awaitable[Bench]], place: Path
) -> None:
    places = {"WORKDIR": str(place), "PARENT": str(place.parent), "SERVER": api.url, "SERVER_HOST": api.host}
    case = fill(case, places)
    setup = case.get("setup", {})
    set_up(setup, place)
    made = await benches(open_catalog=case.get("catalog") == "open", environment=setup.get("env", {}))
    api.reset()
    began = time.monotonic()
    result = await made.call(case["tool"], case["args"], workdir=place)
    found = differences(case, result, place, (time.monotonic() - began) * 1000)
    if "requests" in case and (asked := api.requests()) != case["requests"]:
        found.append(f"asked {asked} instead of {case['requests']}")
    check(case, found)


@pytest.mark.parametrize("tool", TOOLS)
def test_few_cases_deviate(tool: str) -> None:
    check_deviations(tool)


@pytest.mark.requirement("TELEGRAM-01", "SLACK-01", "BASE-01", "BASE-04")
@pytest.mark.parametrize(
    ("tool", "exports", "hosts"),
    [
        ("telegram", ["send", "edit", "delete", "react", "setChatAction", "downloadFile"], ["api.telegram.org:443"]),
        ("slack", ["send", "read", "edit", "delete", "react", "downloadFile"], ["slack.com:443", "*.slack.com:443"]),
    ],
)
def test_the_manifest(tool: str, exports: list[str], hosts: list[str]) -> None:
    spec = tool_spec(base_tools()[tool])
    assert ([export.name for export in spec.exports], spec.error_message_limit) == (exports, 1000)
    assert spec.sandbox.network == {"allow": hosts}
    for export in spec.exports:
        schema = export.parameters or {}
        assert schema["additionalProperties"] is False
        assert {"token", "timeoutMs", "apiBaseUrl"} <= set(schema["properties"])
    document = yaml.safe_load((Path(spec.root) / "tool.yaml").read_text(encoding="utf-8"))
    assert document["metadata"] == {"name": tool, "labels": {"tier": "base"}}


@pytest.mark.parametrize("tool", TOOLS)
def test_the_schemas_are_the_recorded_ones(tool: str) -> None:
    """Names, order, types and what is required, as far as recorded refusals tell (parseMode has no enum here)."""
    manifest = {f"{tool}__{export.name}": export.parameters or {} for export in tool_spec(base_tools()[tool]).exports}
    told = {name: schema for name, schema in SCHEMAS.items() if name in manifest and "properties" in schema}
    assert told
    for name, schema in told.items():
        assert manifest[name]["required"] == schema["required"], name
        assert list(manifest[name]["properties"]) == list(schema["properties"]), name
        for parameter, known in schema["properties"].items():
            ours = manifest[name]["properties"][parameter]
            if "type" in known:
                assert ours["type"] == known["type"], (name, parameter)
            if "enum" in known and parameter != "parseMode":
                assert ours["enum"] == known["enum"], (name, parameter)
