"""What the host does with calls: checks them, keeps their results, and gives each a jail, within its limits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Raw

import goondan.toolhost.jails.launch
import goondan.toolhost.serving.starting
from goondan.schemas.bundle.launch import ExportSpec, SandboxSpec, ToolHostSpec, ToolSpec
from goondan.schemas.wire.codec import encode_value
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.frames import Frame, ToolCallPayload
from goondan.toolhost.calls.call_registry import CallRegistry
from goondan.toolhost.calls.machine import MAX_MADE
from goondan.toolhost.calls.session import MAX_CALLS_PER_JAIL, MAX_PENDING_PER_JAIL
from tests.toolhost_fixture import Bench, bench, code_of, make_tool, until

SOURCE = """
import os, time
count = 0
def bump(ctx, input):
    global count
    count += 1
    return [count, input]
def nap(ctx, input): time.sleep(input["s"]); return os.getpid()
def mark(ctx, input):
    open(input["file"], "a").write("x"); time.sleep(input.get("s", 0)); return "marked"
def where(ctx, input): return [os.getcwd(), ctx.workdir, sorted(os.listdir(".")), os.environ.get("X")]
def keep(ctx, input):
    path = os.environ["HOME"] + "/kept"
    seen = os.path.exists(path); open(path, "w").close(); return seen
handlers = {"bump": bump, "nap": nap, "mark": mark, "where": where, "keep": keep}
"""
NAMES = ("bump", "nap", "mark", "where", "keep")
CLOSED = {
    "type": "object",
    "properties": {"channelId": {"type": "string"}, "n": {"type": "number"}},
    "required": ["channelId"],
    "additionalProperties": False,
}


def tool(folder: Path, **options: Any) -> ToolSpec:
    return make_tool(folder, SOURCE, *NAMES, **options)


# --- arguments


@pytest.mark.requirement("HANDLER-06")
async def test_arguments_are_checked_and_aliases_renamed(short_tmp: Path, workdir: Path) -> None:
    export = ExportSpec(name="bump", parameters=CLOSED, aliases={"channel": "channelId"})
    async with bench(make_tool(short_tmp, SOURCE, export)) as made:
        result = await made.call("t__bump", {"channel": "C1", "n": 2}, workdir=workdir)
        assert result["output"] == [1, {"channelId": "C1", "n": 2}]
        for bad in ({}, {"channelId": 1}, {"channelId": "C1", "x": 1}):
            result = await made.call("t__bump", bad, workdir=workdir)
            assert code_of(result) == "E_TOOL_INVALID_ARGS"
            assert result["error"]["name"] == "ToolInputValidationError"
            assert result["error"]["message"].startswith("Invalid arguments for tool 't__bump': args.")
        # none of them reached the handler
        assert (await made.call("t__bump", {"channelId": "C1"}, workdir=workdir))["output"][0] == 2


async def test_arguments_that_are_no_json_object(short_tmp: Path, workdir: Path) -> None:
    bad = (b"\xc4\x01x", b"\x81\x01\x02", b"\xa2\xff\xff", b"\x91" * 70 + b"\xc0", b"\xc0", b"\x90")
    async with bench(tool(short_tmp)) as made:
        for number, args in enumerate(bad):
            made.host.on_frame(call_frame("t__bump", f"turn-1/raw{number}", workdir, Raw(args)))
        assert [call_id for call_id, _ in made.results] == [f"turn-1/raw{number}" for number in range(len(bad))]
        assert {code_of(result) for _, result in made.results} <= {"E_TOOL_INVALID_ARGS", "E_FRAME_INVALID"}
        assert (await made.call("t__bump", workdir=workdir))["status"] == "ok"


def call_frame(name: str, call_id: str, workdir: Path, args: Raw, agent: str = "coder") -> Frame:
    payload = ToolCallPayload(args=args, turn_id="t", tool_call_id="c")
    return Frame(
        "tool.call",
        call_id=call_id,
        from_=agent,
        instance_key="k1",
        tool=name,
        workdir=str(workdir),
        payload=Raw(encode_value(payload)),
    )


async def test_calls_that_cannot_be_taken_on(short_tmp: Path, workdir: Path) -> None:
    async with bench(tool(short_tmp)) as made:
        assert code_of(await made.call("t__absent", workdir=workdir)) == "E_TOOL_NOT_FOUND"
        assert code_of(await made.call("nobody", workdir=workdir)) == "E_TOOL_NOT_FOUND"
        assert code_of(await made.call("t__bump", workdir="/nonexistent/x")) == "E_SANDBOX_DENIED"
        assert code_of(await made.call("t__bump", workdir="/usr/lib")) == "E_SANDBOX_DENIED"
        assert code_of(await made.call("t__bump", workdir=Path(made.facts.inside))) == "E_SANDBOX_DENIED"
        broken = call_frame("t__bump", "turn-1/b", workdir, Raw(b"\x80"))
        broken.payload = Raw(b"\xa1x")
        made.host.on_frame(broken)
        assert code_of(made.results[-1][1]) == "E_FRAME_INVALID"
        started_before = call_frame("t__mark", "turn-1/approved", workdir, Raw(encode_value({"file": "never", "s": 0})))
        started_before.attach = True
        made.host.on_frame(started_before)
        assert code_of(made.results[-1][1]) == "E_TOOL_OUTCOME_UNKNOWN"
        assert not (workdir / "never").exists()
        for frame in (Frame("tool.call"), Frame("tool.cancel"), Frame("ack", stage="result"), Frame("pong")):
            made.host.on_frame(frame)
        assert (await made.call("t__bump", workdir=workdir))["output"][0] == 1


# --- callIds


async def test_a_repeated_call_attaches_or_gets_the_same_result(short_tmp: Path, workdir: Path) -> None:
    async with bench(tool(short_tmp)) as made:
        args = {"file": "ran", "s": 0.3}
        first_id, first = made.start("t__mark", args, workdir=workdir, call_id="turn-1/same")
        made.host.on_frame(call_frame("t__mark", first_id, workdir, Raw(encode_value(args))))
        assert (await first)["output"] == "marked"
        assert len(made.results) == 1
        made.host.on_frame(call_frame("t__mark", first_id, workdir, Raw(encode_value(args))))
        assert made.results[1] == made.results[0]
        assert (workdir / "ran").read_text() == "x"
        assert made.host.answers.calls.known_ids() == [first_id]
        made.host.answers.resend()
        assert made.results[2] == made.results[0]
        # another agent has no part in it
        made.host.on_frame(call_frame("t__mark", first_id, workdir, Raw(encode_value(args)), agent="other"))
        assert code_of(made.results[3][1]) == "E_FORBIDDEN"
        made.acknowledge(first_id)
        assert made.host.answers.calls.known_ids() == []
        assert (await made.call("t__mark", {"file": "ran"}, workdir=workdir, call_id=first_id))["status"] == "ok"
        assert (workdir / "ran").read_text() == "xx"


async def test_a_result_that_was_not_kept_is_an_unknown_outcome(
    short_tmp: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("goondan.toolhost.serving.answers.CallRegistry", lambda: CallRegistry(kept_bytes=100))
    async with bench(tool(short_tmp)) as made:
        await made.call("t__mark", {"file": "ran"}, workdir=workdir, call_id="turn-1/lost")
        made.host.on_frame(call_frame("t__mark", "turn-1/lost", workdir, Raw(encode_value({"file": "ran"}))))
        assert code_of(made.results[-1][1]) == "E_TOOL_OUTCOME_UNKNOWN"
        assert (workdir / "ran").read_text() == "x"


# --- jails


async def test_jails_are_per_tool_instance_and_workdir(short_tmp: Path, workdir: Path) -> None:
    other = short_tmp / "other"
    other.mkdir()
    async with bench(tool(short_tmp), tool(short_tmp, name="u")) as made:
        assert (await made.call("t__bump", workdir=workdir))["output"][0] == 1
        assert (await made.call("t__bump", workdir=workdir))["output"][0] == 2
        for options in (
            {"workdir": workdir, "instance_key": "k2"},
            {"workdir": workdir, "agent": "writer"},
            {"workdir": other},
            {"workdir": None},
        ):
            assert (await made.call("t__bump", **options))["output"][0] == 1
        assert (await made.call("u__bump", workdir=workdir))["output"][0] == 1
        assert made.host.sessions.jail_count == 6


async def test_a_shared_tool_has_one_jail_and_neither_workdir_nor_variables(short_tmp: Path, workdir: Path) -> None:
    shared = tool(short_tmp, sandbox=SandboxSpec(isolation="shared", env=["X"]))
    async with bench(shared, environment={"X": "secret"}) as made:
        for number, key in enumerate(("k1", "k2", "k3")):
            assert (await made.call("t__bump", workdir=workdir, instance_key=key))["output"][0] == number + 1
        assert (await made.call("t__where", workdir=workdir))["output"] == [
            "/run/goondan/home", "/run/goondan/home", [], None,
        ]  # fmt: skip


@pytest.mark.parametrize(("nests", "kept"), [(True, "forked"), (False, "alone")])
async def test_every_call_is_fresh(short_tmp: Path, workdir: Path, nests: bool, kept: str) -> None:
    """In a jail that they share, or, where the kernel allows no walls inside of one, each in its own."""
    once = tool(short_tmp, sandbox=SandboxSpec(isolation="call"))
    async with bench(once, facts=lambda facts: msgspec.structs.replace(facts, nests=nests)) as made:
        results = await asyncio.gather(*(made.call("t__bump", workdir=workdir) for _ in range(3)))
        assert [result["output"][0] for result in results] == [1, 1, 1]
        assert (await made.call("t__keep", workdir=workdir))["output"] is False
        assert (await made.call("t__keep", workdir=workdir))["output"] is False
        assert {receipt["jail"]["calls"] for receipt in made.receipts.values()} == {kept}
        await until(lambda: made.host.sessions.jail_count == nests)  # one that stays for the next call, or none


async def test_what_a_worker_made_ahead_has_done_is_not_in_the_way_of_a_tool(short_tmp: Path, workdir: Path) -> None:
    source = (
        "import sys\n"
        "def seen(ctx, input): return [__name__, sys.modules[__name__].seen is seen, __file__]\n"
        "handlers = {'seen': seen}\n"
    )
    sandbox = msgspec.convert({"isolation": "call"}, SandboxSpec)
    made_tool = make_tool(short_tmp, source, "seen", sandbox=sandbox)
    entry = Path(made_tool.entry).rename(Path(made_tool.root) / "look.py")  # as the module that it has loaded
    async with bench(msgspec.structs.replace(made_tool, entry=str(entry))) as made:
        for _ in range(3):
            output = (await made.call("t__seen", workdir=workdir))["output"]
            assert output == ["look", True, str(entry)]


async def test_the_home_lives_as_long_as_the_jail(short_tmp: Path, workdir: Path) -> None:
    async with bench(tool(short_tmp), jail_idle_s=0.2) as made:
        assert (await made.call("t__keep", workdir=workdir))["output"] is False
        assert (await made.call("t__keep", workdir=workdir))["output"] is True
        await until(lambda: made.host.sessions.jail_count == 0)  # idle for longer than jail_idle_s
        assert (await made.call("t__keep", workdir=workdir))["output"] is False


async def test_more_instances_than_jails(short_tmp: Path, workdir: Path) -> None:
    async with bench(tool(short_tmp), max_jails=2) as made:
        busy = [made.start("t__nap", {"s": 0.5}, workdir=workdir, instance_key=f"b{n}")[1] for n in range(2)]
        waiting = [made.start("t__bump", workdir=workdir, instance_key=f"w{n}") for n in range(4)]
        made.cancel(waiting[3][0])
        assert code_of(await waiting[3][1]) == "E_CANCELLED"
        results = await asyncio.wait_for(asyncio.gather(*(waiter for _, waiter in waiting[:3])), 20)
        assert [result["output"][0] for result in results] == [1, 1, 1]
        assert all(waiter.done() for waiter in busy)
        assert made.host.sessions.jail_count <= 2


async def test_a_call_can_run_out_of_time_before_it_has_a_jail(short_tmp: Path, workdir: Path) -> None:
    async with bench(tool(short_tmp), max_jails=1) as made:
        _, busy = made.start("t__nap", {"s": 1}, workdir=workdir, instance_key="b")
        result = await made.call("t__mark", {"file": "ran"}, workdir=workdir, deadline_ms=200)
        assert code_of(result) == "E_TOOL_TIMEOUT"
        assert "before it could start" in result["error"]["message"]
        assert (await busy)["status"] == "ok"
        assert not (workdir / "ran").exists()


# --- life


async def test_calls_wait_until_it_is_known_whether_jails_can_be_made(short_tmp: Path, workdir: Path) -> None:
    spec = ToolHostSpec(tools=[tool(short_tmp)], state_dir="/nonexistent", revision="1")
    made = Bench(spec)
    _, early = made.start("t__bump", workdir=workdir)
    assert not made.results
    made.host.sessions.open(made.facts)
    assert (await asyncio.wait_for(early, 20))["output"][0] == 1
    await made.host.close()
    made.start("t__bump", workdir=workdir)
    assert len(made.results) == 1  # closed: the next incarnation answers


async def test_without_a_sandbox_every_call_is_answered_with_the_reason(short_tmp: Path, workdir: Path) -> None:
    spec = ToolHostSpec(tools=[tool(short_tmp)], state_dir="/nonexistent", revision="1")
    made = Bench(spec)
    _, early = made.start("t__bump", workdir=workdir)
    made.host.sessions.open(None, fail("E_SANDBOX_UNAVAILABLE", "no usable bubblewrap: none was found"))
    for result in (await early, await made.call("t__bump", workdir=workdir)):
        assert code_of(result) == "E_SANDBOX_UNAVAILABLE"
        assert "none was found" in result["error"]["message"]
    await made.host.close()


async def test_a_bubblewrap_that_fails_is_named_with_its_words(short_tmp: Path, workdir: Path) -> None:
    broken = short_tmp / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    spec = ToolHostSpec(tools=[tool(short_tmp)], state_dir="/nonexistent", revision="1")
    made = Bench(spec)
    made.host.sessions.open(msgspec.structs.replace(made.facts, bwrap=str(broken), bwrap_root=str(short_tmp)))
    result = await made.call("t__bump", workdir=workdir)
    assert code_of(result) == "E_SANDBOX_UNAVAILABLE"
    assert "No permissions to create a new namespace" in result["error"]["message"]
    made.host.sessions.open(msgspec.structs.replace(made.facts, bwrap="/nonexistent/bwrap"))
    assert code_of(await made.call("t__bump", workdir=workdir)) == "E_SANDBOX_UNAVAILABLE"
    await made.host.close()


async def test_a_new_bundle_ends_the_jails_of_tools_that_changed(short_tmp: Path, workdir: Path) -> None:
    first, second = tool(short_tmp), tool(short_tmp, name="u")
    async with bench(first, second) as made:
        await made.call("t__bump", workdir=workdir)
        await made.call("u__bump", workdir=workdir)
        _, running = made.start("t__nap", {"s": 0.3}, workdir=workdir)
        changed = msgspec.structs.replace(first, error_message_limit=50)
        made.host.configure(ToolHostSpec(tools=[changed, second], state_dir="/nonexistent", revision="2"))
        assert (await running)["status"] == "ok"
        assert (await made.call("t__bump", workdir=workdir))["output"][0] == 1
        assert (await made.call("u__bump", workdir=workdir))["output"][0] == 2
        made.host.configure(ToolHostSpec(tools=[second], state_dir="/nonexistent", revision="3"))
        assert code_of(await made.call("t__bump", workdir=workdir)) == "E_TOOL_NOT_FOUND"


WAITING = """
import asyncio, os
async def wait(ctx, input):
    while not os.path.exists("go"): await asyncio.sleep(0.02)
handlers = {"wait": wait}
"""


async def test_calls_that_waited_while_a_guard_was_replaced_get_another_jail(workdir: Path, short_tmp: Path) -> None:
    document = workdir / "goondan.yaml"
    document.write_text("a")
    async with bench(make_tool(short_tmp, WAITING, "wait"), protected=[str(document)]) as made:
        first, *calls = (made.start("t__wait", workdir=workdir)[1] for _ in range(MAX_CALLS_PER_JAIL + 2))
        (slot,) = made.host.sessions.pool.sessions()
        await until(lambda: len(slot.calls) == MAX_CALLS_PER_JAIL and made.live_of(slot).jail.live)
        (workdir / "edited").write_text("b")
        (workdir / "edited").rename(document)  # as editors save: the jail's mount is gone with the old file
        (workdir / "go").touch()
        assert {result["status"] for result in await asyncio.gather(first, *calls)} == {"ok"}
        assert [news.op for news in made.workers if news.op == "start"] == ["start"] * 2
        assert slot.closed


async def test_a_guard_that_is_replaced_while_a_jail_is_made_costs_another_jail_and_no_call(
    workdir: Path, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = workdir / "goondan.yaml"
    document.write_text("a")
    identity, saves = goondan.toolhost.jails.launch._identity, [MAX_MADE - 1]

    def looked_at(path: str) -> tuple[int, int]:
        found = identity(path)
        if path == str(document) and saves[0] > 0:
            saves[0] -= 1
            (workdir / "edited").write_text("b")
            (workdir / "edited").rename(document)  # as editors save
        return found

    monkeypatch.setattr(goondan.toolhost.jails.launch, "_identity", looked_at)
    async with bench(tool(short_tmp), protected=[str(document)]) as made:
        results = await asyncio.gather(*(made.call("t__bump", workdir=workdir) for _ in range(3)))
        assert [result["status"] for result in results] == ["ok"] * 3
        assert sorted(result["output"][0] for result in results) == [1, 2, 3], "all in one jail, which began once"
        assert saves == [0]


PENDING = """
import os, time
from goondan_tool import Pending
def start(ctx, input):
    def work():
        while not os.path.exists("go"): time.sleep(0.01)
    return Pending(input["handle"], work)
def echo(ctx, input): return input
def deep(ctx, input):
    def down(levels): return max(map(down, [levels + 1]))
    time.sleep(0.01)  # so that it runs on a thread
    try: return down(0)
    except RecursionError: return "too deep"
handlers = {"start": start, "echo": echo, "deep": deep}
"""


@pytest.mark.requirement("RESULT-04")
async def test_pending_work_takes_no_places_of_calls_and_has_a_bound_of_its_own(short_tmp: Path) -> None:
    """More of it than a jail has places or threads, with the default limits; and a thread's stack is deep enough."""
    workdir = short_tmp / "work"
    workdir.mkdir()
    most = MAX_PENDING_PER_JAIL
    async with bench(make_tool(short_tmp, PENDING, "start", "echo", "deep")) as made:
        starts = [made.start("t__start", {"handle": f"h{n}"}, workdir=workdir)[1] for n in range(most + 1)]
        results = await asyncio.wait_for(asyncio.gather(*starts), 20)
        assert [result["status"] for result in results] == ["pending"] * most + ["error"]
        assert results[-1]["error"]["code"] == "E_OVERLOADED"
        assert (await made.call("t__echo", {"a": 1}, workdir=workdir))["output"] == {"a": 1}
        for _ in range(3):
            assert (await made.call("t__deep", workdir=workdir))["output"] == "too deep"
        (slot,) = made.host.sessions.pool.sessions()
        assert len(slot.pending) == most
        (workdir / "go").touch()
        await until(lambda: not slot.calls)


async def test_a_jail_is_refused_while_the_one_before_it_in_its_workdir_does_not_end(
    tmp_path: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tool(tmp_path, name="first"), tool(tmp_path, name="second")
    async with bench(first, second) as host:
        call = {"file": "marks"}
        monkeypatch.setattr(goondan.toolhost.serving.starting, "CLOSE_S", 0.3)
        assert (await host.call("first__mark", call, workdir=workdir))["status"] == "ok"
        [slot] = host.host.sessions.pool.sessions()
        # As after a SIGKILL that the kernel cannot carry out: its processes are still there.
        host.live_of(slot).jail.dying = True
        refused = await host.call("second__mark", call, workdir=workdir)
        assert code_of(refused) == "E_SANDBOX_UNAVAILABLE"
        assert f"the jail before this one does not end in {workdir}" in refused["error"]["message"]
        assert (workdir / "marks").read_text() == "x", "nothing ran beside it"
        other = workdir.parent / "other"
        other.mkdir()
        assert (await host.call("second__mark", call, workdir=other))["status"] == "ok"
        monkeypatch.undo()  # a busy machine needs its time to end one
        host.live_of(slot).jail.dying = False
        host.live_of(slot).jail.kill("it ends after all")
        assert (await host.call("second__mark", call, workdir=workdir))["status"] == "ok"
