"""Recorded parity of the bundled tools that need nothing but their jail: every case, by the host that serves agents."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
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
from goondan.schemas.wire.codec import replace_surrogates
from tests.contract.recorded import cases, check, check_deviations, differences, fill, set_up
from tests.toolhost_fixture import Bench, bench

TOOLS = ("file-system", "json-query", "text-transform", "wait")
#: Cases about catalogs and registries are replayed where those are: test_parity_refusals.py.
CASES = [case for case in cases(*TOOLS) if not (isinstance(case.get("catalog"), list) or "registry" in case)]


def specs(*, open_catalog: bool = False, message_limit: int | None = None) -> list[ToolSpec]:
    """The bundled tools; without parameters, or with another errorMessageLimit, where cases were recorded so."""
    tools = [tool_spec(base_tools()[name]) for name in TOOLS]
    if open_catalog:
        tools = [replace(tool, exports=[replace(export, parameters=None) for export in tool.exports]) for tool in tools]
    return tools if message_limit is None else [replace(tool, error_message_limit=message_limit) for tool in tools]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def benches() -> AsyncIterator[Callable[..., Awaitable[Bench]]]:
    """Hosts made when they are first asked for and kept for all cases, so that their jails stay warm."""
    made: dict[tuple[bool, int | None], Bench] = {}
    async with AsyncExitStack() as stack:

        async def get(*, open_catalog: bool, message_limit: int | None) -> Bench:
            key = (open_catalog, message_limit)
            if key not in made:
                tools = specs(open_catalog=open_catalog, message_limit=message_limit)
                made[key] = await stack.enter_async_context(bench(*tools))
            return made[key]

        yield get


@pytest.mark.requirement("FS-01", "FS-02", "FS-03", "FS-04", "FS-05", "FS-06", "FS-07", "FS-08", "FS-09", "FS-10")
@pytest.mark.requirement("FS-11", "FS-12", "FS-13", "FS-14", "FS-15")
@pytest.mark.requirement("JSON-01", "JSON-02", "JSON-03", "JSON-04", "JSON-05", "JSON-06", "JSON-07", "JSON-08")
@pytest.mark.requirement("JSON-09", "JSON-10", "JSON-11", "JSON-12")
@pytest.mark.requirement("TEXT-01", "TEXT-02", "TEXT-03", "TEXT-04", "TEXT-05", "TEXT-06", "TEXT-07", "TEXT-08")
@pytest.mark.requirement("TEXT-09", "TEXT-10", "TEXT-11", "TEXT-12", "CONTEXT-05")
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
async def test_recorded(case: dict[str, Any], benches: Callable[..., Awaitable[Bench]], place: Path) -> None:
    case = fill(case, {"WORKDIR": str(place), "PARENT": str(place.parent)})
    set_up(case.get("setup", {}), place)
    args = replace_surrogates(case["args"])  # as wherever JSON enters the kernel
    made = await benches(open_catalog=case.get("catalog") == "open", message_limit=case.get("errorMessageLimit"))
    began = time.monotonic()
    result = await made.call(case["tool"], args, workdir=place)
    found = differences(case, result, place, (time.monotonic() - began) * 1000)
    check(case, found)


@pytest.mark.parametrize("tool", TOOLS)
def test_few_cases_deviate(tool: str) -> None:
    check_deviations(tool)


@pytest.mark.requirement("BASE-01", "BASE-04", "ERROR-09", "FS-15")
@pytest.mark.parametrize(
    ("tool", "exports", "limit"),
    [
        ("file-system", ["read", "write", "list", "mkdir"], 2000),
        ("json-query", ["query", "pick", "count", "flatten"], 1000),
        ("text-transform", ["replace", "slice", "split", "join", "trim", "case"], 1000),
        ("wait", ["seconds"], 600),
    ],
)
def test_the_manifest(tool: str, exports: list[str], limit: int) -> None:
    spec = tool_spec(base_tools()[tool])
    assert ([export.name for export in spec.exports], spec.error_message_limit) == (exports, limit)
    assert all((export.parameters or {})["additionalProperties"] is False for export in spec.exports)
    document = yaml.safe_load((Path(spec.root) / "tool.yaml").read_text(encoding="utf-8"))
    assert document["metadata"] == {"name": tool, "labels": {"tier": "base"}}
