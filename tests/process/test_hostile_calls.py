"""Strings that no system call takes, or that mean more than they say, in every field of a call.

Each gets one structured answer, nothing is thrown where nobody catches it, no place for a jail is lost, and the next
call is served.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from goondan.schemas.bundle.address import MAX_PATH_BYTES, is_path
from goondan.schemas.bundle.launch import Filesystem, PythonSpec, SandboxSpec
from goondan.schemas.wire.codec import encode_value
from goondan.schemas.wire.frames import Frame, ToolCallPayload
from tests.toolhost_fixture import Bench, bench, make_tool

SOURCE = """
def echo(ctx, input): return [input, ctx.agent_name, ctx.instance_key, ctx.turn_id, ctx.tool_call_id]
handlers = {"echo": echo}
"""
#: A new find joins these.
HOSTILE = [
    "", "\0", "a\0b", "/\0", "/tmp/\0", "/tmp\0/x", "\n", "/tmp/a\nb", "..", "/..", "/../..", "//", "/./", "~", "~root",
    "$HOME", "${HOME}", "%s%n%x", "-", "--help", "\x1b[2J\x07", "\u202e\u2028", "\ufeff", "\x7f", "/dev/null",
    "/dev/stdin", "/proc/self/mem", "/proc/self/fd/0", "/proc/1/root", "/sys/kernel", "relative/path", "C:\\x",
    "x" * 100_000, "/" + "x" * 100_000, "/" + "a/" * 50_000, "/tmp/" + "a/../" * 1_000, "/" + "\U0001f600" * 1_100,
    "/tmp/" + "n" * 300, "\U0001f600" * 50_000,
]  # fmt: skip
#: Fields of the header, and of the payload.
HEADER = ("from_", "instance_key", "tool", "call_id", "workdir", "to", "id", "event_id", "trace_id", "in_reply_to")
PAYLOAD = ("turn_id", "tool_call_id", "message_id")
#: What may be answered: the caller's mistake, or the tool's outcome, and no bug of ours.
CODES = {"E_FRAME_INVALID", "E_SANDBOX_DENIED", "E_TOOL_NOT_FOUND", "E_SANDBOX_UNAVAILABLE"}


def frame(number: int, field: str, value: str, workdir: Path) -> Frame:
    """A good call but for one field."""
    fields = {"turn_id": "turn", "tool_call_id": "call", **({field: value} if field in PAYLOAD else {})}
    payload = ToolCallPayload(args=Raw(encode_value({"n": number})), message=Raw(encode_value({"m": 1})), **fields)
    made = Frame(
        "tool.call", id=f"f{number}", call_id=f"turn/{number}", from_="coder", instance_key="k", tool="t__echo"
    )
    made.workdir, made.deadline_ms, made.payload = str(workdir), 20_000, Raw(encode_value(payload))
    if field in HEADER:
        setattr(made, field, value)
    return made


async def answers(made: Bench, count: int) -> list[tuple[str, dict[str, Any]]]:
    """Wait until there are so many."""
    async with asyncio.timeout(25):
        while len(made.results) < count:
            await asyncio.sleep(0.005)
    return made.results


@pytest.mark.parametrize("field", [*HEADER, *PAYLOAD])
async def test_every_string_of_a_call(short_tmp: Path, field: str) -> None:
    workdir = short_tmp / "work"
    workdir.mkdir()
    thrown: list[dict[str, Any]] = []
    async with bench(make_tool(short_tmp, SOURCE, "echo"), max_jails=4) as made:
        made.loop.set_exception_handler(lambda loop, context: thrown.append(context))
        asked = [frame(number, field, value, workdir) for number, value in enumerate(HOSTILE)]
        for one in asked:
            made.host.on_frame(one)
        found = await answers(made, len(asked))
        assert sorted(call_id for call_id, _ in found) == sorted(one.call_id or "" for one in asked)
        for _, result in found:
            assert result["status"] == "ok" or result["error"]["code"] in CODES, result
            assert len(result.get("error", {"message": ""})["message"]) <= 1000
        assert thrown == []
        assert (await made.call("t__echo", {"still": "here"}, workdir=workdir))["output"][0] == {"still": "here"}


ODD = st.text(st.sampled_from("/.\0\n~a\ud800\u202e \\%$"), max_size=40).map(lambda text: "/" + text)


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=200), ODD, st.integers(4000, 4200).map(lambda n: "/" + "x" * n)))
def test_what_is_a_path_can_be_given_to_the_system(text: str) -> None:
    whole = not any("\ud800" <= c <= "\udfff" for c in text)
    fits = whole and len(text.encode()) <= MAX_PATH_BYTES
    assert is_path(text) == (text.startswith("/") and fits and is_taken(text))


def is_taken(text: str) -> bool:
    """Whether there is a system call that can be given this path."""
    try:
        Path(text).stat()
    except ValueError:  # a zero byte, or what is no UTF-8
        return False
    except OSError:
        return True
    return True


async def test_strange_workdirs_cost_no_place_for_a_jail(short_tmp: Path) -> None:
    """Each was one that no jail got any more: sixteen of them, and the tool host served nobody."""
    (short_tmp / "work").mkdir()
    async with bench(make_tool(short_tmp, SOURCE, "echo"), max_jails=2) as made:
        for number in range(6):
            result = await made.call("t__echo", workdir=f"/a\0{number}", instance_key=f"k{number}")
            assert result["error"]["code"] == "E_FRAME_INVALID"
        assert made.host.sessions.jail_count == 0
        assert (await made.call("t__echo", workdir=short_tmp / "work"))["status"] == "ok"


async def test_strange_grants_cost_no_place_for_a_jail(short_tmp: Path) -> None:
    """The bundle's check refuses them; a tool host that is started by hand has only itself."""
    strange = ["/a\0b", "\0", "x" * 100_000, "/" + "y" * 100_000, "/tmp/\ud800", "~\0/x"]
    sandboxes = [SandboxSpec(filesystem=Filesystem(read=[path])) for path in strange]
    sandboxes += [SandboxSpec(filesystem=Filesystem(write=[path])) for path in strange]
    sandboxes += [SandboxSpec(python=PythonSpec(venv=path)) for path in strange]
    tools = [make_tool(short_tmp, SOURCE, "echo", name=f"t{n}", sandbox=sandbox) for n, sandbox in enumerate(sandboxes)]
    (short_tmp / "work").mkdir()
    plain = make_tool(short_tmp, SOURCE, "echo", name="plain")
    async with bench(*tools, plain, max_jails=2) as made:
        for tool in tools:
            error = (await made.call(f"{tool.name}__echo"))["error"]
            assert (error["code"], len(error["message"]) < 500) == ("E_SANDBOX_DENIED", True)
        assert made.host.sessions.jail_count == 0
        assert (await made.call("plain__echo", workdir=short_tmp / "work"))["status"] == "ok"


async def test_a_bug_costs_one_call_and_no_place(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is thrown while a jail is planned is an answer, and is told to the log."""
    from goondan.toolhost.serving import starting

    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("embedded null byte")

    workdir = short_tmp / "work"
    workdir.mkdir()
    thrown: list[dict[str, Any]] = []
    async with bench(make_tool(short_tmp, SOURCE, "echo"), max_jails=1) as made:
        made.loop.set_exception_handler(lambda loop, context: thrown.append(context))
        with monkeypatch.context() as patched:
            patched.setattr(starting, "look_up", broken)
            for _ in range(3):
                assert (await made.call("t__echo", workdir=workdir))["error"]["code"] == "E_INTERNAL"
        assert [str(context["exception"]) for context in thrown] == ["embedded null byte"] * 3
        assert made.host.sessions.jail_count == 0
        assert (await made.call("t__echo", workdir=workdir))["status"] == "ok"
