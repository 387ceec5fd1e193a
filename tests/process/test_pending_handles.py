"""Handles of pending work belong to one tool of one agent instance: nobody else takes, reads or imitates them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from goondan.schemas.bundle.launch import SandboxSpec, ToolSpec
from tests.toolhost_fixture import Bench, bench, make_tool

SOURCE = """
import os, time
from goondan_tool import Pending

def start(ctx, input):
    def work():
        while not os.path.exists(input["until"]): time.sleep(0.01)
        return input["value"]
    return Pending(input["name"], work)

def elsewhere(ctx, input): return Pending(input["name"])

handlers = {"start": start, "elsewhere": elsewhere}
"""


def tools(folder: Path) -> list[ToolSpec]:
    polling = make_tool(folder, "handlers = {}\n", "get", name="tool-result", sandbox=SandboxSpec(isolation="shared"))
    return [
        *(make_tool(folder, SOURCE, "start", "elsewhere", name=name) for name in ("a", "b")),
        ToolSpec(name="tool-result", entry=polling.entry, root=polling.root, exports=polling.exports, bundled=True),
    ]


@pytest.fixture
def place(short_tmp: Path) -> Path:
    (short_tmp / "work").mkdir()
    (short_tmp / "work" / "now").touch()
    return short_tmp


async def begin(made: Bench, place: Path, tool: str, name: str, value: str, *, now: bool = True, **who: Any) -> Any:
    """Start work that ends now, or never."""
    work = place / "work"
    args = {"name": name, "value": value, "until": str(work / ("now" if now else "never"))}
    return await made.call(f"{tool}__start", args, workdir=work, **who)


async def get(made: Bench, handle: str, **who: Any) -> Any:
    return await made.call("tool-result__get", {"handle": handle, "waitMs": 5000}, **who)


async def test_a_tool_cannot_replace_what_another_has_promised(place: Path) -> None:
    async with bench(*tools(place)) as made:
        mine = await begin(made, place, "a", "job-3", "of a")
        assert mine == {"status": "pending", "handle": "a/job-3"}
        assert (await get(made, "a/job-3"))["output"] == "of a"
        theirs = await begin(made, place, "b", "job-3", "of b")
        assert theirs == {"status": "pending", "handle": "b/job-3"}
        assert (await get(made, "b/job-3"))["output"] == "of b"
        assert (await get(made, "a/job-3"))["output"] == "of a", "it is still there"


async def test_a_tool_cannot_hold_the_handles_of_another(place: Path) -> None:
    async with bench(*tools(place)) as made:
        await begin(made, place, "b", "job-3", "", now=False)
        assert (await begin(made, place, "a", "job-3", "of a"))["status"] == "pending", "it is not in use"
        assert (await get(made, "a/job-3"))["output"] == "of a"


@pytest.mark.parametrize("name", ["a/job-3", "../a/job-3", "b/../a/job-3"])
async def test_a_tool_cannot_give_out_the_handle_of_another(place: Path, name: str) -> None:
    async with bench(*tools(place)) as made:
        await begin(made, place, "a", "job-3", "of a")
        for told in (
            await begin(made, place, "b", name, "of b"),
            await made.call("b__elsewhere", {"name": name}, workdir=place / "work"),
        ):
            assert told == {"status": "pending", "handle": f"b/{name}"}
        assert (await get(made, "a/job-3"))["output"] == "of a"
        assert (await get(made, f"b/{name}"))["output"] == "of b"


async def test_one_piece_too_many_is_refused_and_all_others_end(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goondan.toolhost.calls.results.MAX_RUNNING", 3)
    async with bench(*tools(place)) as made:
        until = {"value": "done", "until": str(place / "work" / "go")}
        for number in range(3):
            begun = await made.call("a__start", {"name": f"p{number}", **until}, workdir=place / "work")
            assert begun["status"] == "pending"
        refused = await made.call("a__start", {"name": "p3", **until}, workdir=place / "work")
        assert refused["error"]["code"] == "E_OVERLOADED"
        (place / "work" / "go").touch()
        assert [(await get(made, f"a/p{number}"))["output"] for number in range(3)] == ["done"] * 3
        assert (await begin(made, place, "a", "again", ""))["status"] == "pending", "there is room again"


@pytest.mark.parametrize(
    "who",
    [{"agent": "reviewer"}, {"instance_key": "k2"}, {"agent": "k1", "instance_key": "coder"}, {"instance_key": ""}],
)
async def test_nobody_reads_what_was_promised_to_another(place: Path, who: dict[str, str]) -> None:
    async with bench(*tools(place)) as made:
        await begin(made, place, "a", "job-3", "of a")
        assert (await get(made, "a/job-3", **who))["error"]["code"] == "E_TOOL_OUTCOME_UNKNOWN"
        assert (await get(made, "a/job-3"))["output"] == "of a"


@pytest.mark.parametrize("name", ["", "x" * 1025, "a\nb", "\x1b[2J", "a\u2028b", "a\u202eb", "\x7f"])
async def test_a_name_that_is_none_is_an_error_of_the_tool(place: Path, name: str) -> None:
    async with bench(*tools(place)) as made:
        for export in ("start", "elsewhere"):
            args = {"name": name, "value": "", "until": "/"}
            error = (await made.call(f"a__{export}", args, workdir=place / "work"))["error"]
            assert (error["code"], error["name"]) == ("E_TOOL", "ValueError")
        assert (await begin(made, place, "a", "n\u00e9 1", "fine"))["handle"] == "a/n\u00e9 1"
