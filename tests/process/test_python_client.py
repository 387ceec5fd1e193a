"""The client for Python with a real kernel: what it does, what it survives."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from goondan_client import Answer, GoondanError, LiveEvent, connect
from goondan_client.client import BlockingClient
from tests.kernel_fixture import Sandbox, sandbox, wait_until

PICTURE = b"\x89PNG\r\n\x1a\n" + b"\0" * 64


@pytest.fixture(scope="module")
def swarm() -> Iterator[Sandbox]:
    with sandbox() as made:
        made.detach()
        yield made


@pytest.fixture
def run_dir(swarm: Sandbox) -> Path:
    return swarm.run_dirs[0]


def exec_(command: str) -> str:
    """What makes the console of an agent call its tool."""
    return f'/bash__exec {{"command": "{command}"}}'


@pytest.mark.feature("approvals")
async def test_what_it_does(run_dir: Path, tmp_path: Path) -> None:
    async with connect(run_dir=run_dir) as gdn:
        answer = await gdn.ask("main", exec_("echo $((6*7))"), instance="does")
        assert (answer.text, answer.status, answer.model) == ("42", "completed", "embedded")
        assert answer.turn_id and answer.trace_id and answer.event_id

        items = [item async for item in gdn.stream("main", exec_("echo live"), instance="does")]
        assert isinstance(items[-1], Answer) and items[-1].text == "live"
        assert [item.kind for item in items[:2]] == ["turn.started", "step.started"]
        assert {item.tool_name for item in items if isinstance(item, LiveEvent) and item.kind == "tool.called"} == {
            "bash__exec"
        }

        event_id = await gdn.send("main", exec_("echo sent"), instance="does", event_id="mine-1")
        assert event_id == "mine-1"
        # The same question with the same id, later and with an answer: it is not asked again.
        assert (await gdn.ask("main", exec_("echo sent"), instance="does", event_id="mine-1")).text == "sent"
        with pytest.raises(GoondanError) as caught:
            await gdn.ask("main", "something else", instance="does", event_id="mine-1")
        assert caught.value.code == "E_FRAME_INVALID"

        result = await gdn.call("bash__exec", {"command": "echo hi"})
        assert (result.status, result.output["stdout"]) == ("ok", "hi\n")
        asked = await gdn.ask("main", exec_("pwd"), instance="there", workdir=str(tmp_path), trace_id="ab" * 16)
        assert (asked.text, asked.trace_id) == (str(tmp_path), "ab" * 16)
        for tool, args, code in (
            ("bash__exec", {"command": 7}, "E_TOOL_INVALID_ARGS"),
            ("none__at_all", {}, "E_TOOL_NOT_IN_CATALOG"),
        ):
            with pytest.raises(GoondanError) as caught:
                await gdn.call(tool, args)
            assert caught.value.code == code and caught.value.suggestion
        with pytest.raises(GoondanError) as caught:
            await gdn.ask("nobody", "hi")
        assert caught.value.code == "E_AGENT_NOT_FOUND"

        assert ("main", "does") in {(one["agent"], one["instanceKey"]) for one in await gdn.instances()}
        assert await gdn.approvals() == []
        with pytest.raises(GoondanError) as caught:
            await gdn.decide("none", "yes")
        assert caught.value.code == "E_APPROVAL_NOT_FOUND"
        assert gdn.usage().model_calls == 0


async def test_large_questions_and_answers_and_files(swarm: Sandbox, run_dir: Path, tmp_path: Path) -> None:
    blobs = next(swarm.state_dirs[0].glob("blobs"))
    async with connect(run_dir=run_dir) as gdn:
        result = await gdn.call("bash__exec", {"command": "printf %0900000d 7"})
        assert len(result.output["stdout"]) == 900_000
        long = "x" * 3_000_000
        assert (await gdn.ask("main", long, instance="large")).status == "completed"
        with pytest.raises(GoondanError) as caught:
            await gdn.ask("main", "x" * (17 << 20), instance="large")
        assert (caught.value.code, "workdir" in str(caught.value.suggestion)) == ("E_FRAME_TOO_LARGE", True)
        with pytest.raises(GoondanError, match="cannot be sent") as caught:
            await gdn.call("bash__exec", {"command": object()})
        assert (caught.value.code, "JSON" in str(caught.value.suggestion)) == ("E_FRAME_INVALID", True)
        (tmp_path / "a.png").write_bytes(PICTURE)
        assert (await gdn.ask("main", "see", instance="large", files=[tmp_path / "a.png", PICTURE])).text
        nothing = tmp_path / "none.png"
        for files, why, what in (
            ([b"no picture"], "no PNG", "picture or a PDF"),
            ([nothing], "No such file", "path"),
            ([PICTURE] * 17, "16 files", "fewer"),
        ):
            with pytest.raises(GoondanError, match=why) as caught:
                await gdn.ask("main", "see", instance="large", files=files)
            assert (caught.value.code, what in str(caught.value.suggestion)) == ("E_FILE_INVALID", True)
        # Refused: nobody else deletes the file of its payload.
        before = set(os.listdir(blobs))
        with pytest.raises(GoondanError):
            await gdn.ask("nobody", long)
        assert set(os.listdir(blobs)) <= before


async def test_who_gives_up_cancels_the_turn(run_dir: Path) -> None:
    async with connect(run_dir=run_dir) as gdn:
        asking = asyncio.ensure_future(gdn.ask("main", exec_("sleep 50"), instance="gives-up"))
        async for item in gdn.stream("main", exec_("sleep 50"), instance="stream"):
            if item.kind == "tool.called":
                break
        failing = gdn.stream("nobody", "hi")
        reading = asyncio.ensure_future(anext(failing))
        with pytest.raises(GoondanError):
            await reading
        while ("main", "gives-up") not in {(one["agent"], one["instanceKey"]) for one in await gdn.instances()}:
            await asyncio.sleep(0.02)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        # Events of an instance are worked on one at a time: these wait for the ends of the cancelled ones.
        for instance in ("gives-up", "stream"):
            assert (await gdn.ask("main", exec_("echo next"), instance=instance, deadline=30)).text == "next"

        await gdn.send("main", exec_("sleep 50"), instance="ended", event_id="long-1")
        with pytest.raises(GoondanError) as caught:
            await gdn.ask("main", exec_("echo never"), instance="ended", deadline=0.3)
        assert caught.value.code == "E_AGENT_TIMEOUT"
        assert await gdn.cancel("main", instance="ended") == "cancelled"
        with pytest.raises(GoondanError) as caught:
            await gdn.ask("main", exec_("sleep 50"), instance="ended", event_id="long-1")
        assert caught.value.code == "E_CANCELLED"
        with pytest.raises(GoondanError) as caught:
            await gdn.cancel("main", instance="ended")
        assert caught.value.code == "E_EVENT_NOT_FOUND"


def test_the_same_without_asyncio_and_in_threads(run_dir: Path) -> None:
    with connect(run_dir=run_dir) as gdn:
        assert gdn.ask("main", exec_("echo 42"), instance="blocking").text == "42"
        items = list(gdn.stream("main", exec_("echo live"), instance="blocking"))
        assert isinstance(items[-1], Answer) and items[-1].text == "live"
        assert gdn.call("bash__exec", {"command": "echo hi"}).output["stdout"] == "hi\n"
        left = gdn.stream("main", exec_("sleep 50"), instance="left")
        assert next(left).kind == "turn.started"
        answers: dict[int, str | None] = {}

        def ask(number: int) -> None:
            answers[number] = gdn.ask("main", exec_(f"echo {number}"), instance=f"t{number % 2}").text

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == {number: str(number) for number in range(6)}
        with pytest.raises(GoondanError) as caught:
            gdn.ask("nobody", "hi")
        assert caught.value.code == "E_AGENT_NOT_FOUND"
    with pytest.raises(GoondanError) as caught:
        gdn.ask("main", "hi")
    assert caught.value.code == "E_LINK_CLOSED"
    assert not [one for one in threading.enumerate() if one.name == "goondan"]
    left.close()  # after the end there is nothing left to cancel


def test_it_finds_the_kernel_of_a_bundle(swarm: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOONDAN_STATE_ROOT", swarm.env["GOONDAN_STATE_ROOT"])
    monkeypatch.delenv("GOONDAN_RUN_DIR", raising=False)
    (tmp_path / "link").symlink_to(swarm.home)
    for bundle in (swarm.home, swarm.bundle, tmp_path / "link"):
        with connect(bundle) as gdn:
            assert isinstance(gdn, BlockingClient)
    monkeypatch.chdir(swarm.home)
    with connect() as gdn:
        gdn.instances()
    with pytest.raises(GoondanError) as caught, connect(tmp_path):
        pass
    assert caught.value.code == "E_KERNEL_NOT_RUNNING" and caught.value.suggestion
    monkeypatch.setenv("GOONDAN_RUN_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    with pytest.raises(GoondanError) as caught, connect(timeout=0.2):
        pass
    assert caught.value.code == "E_KERNEL_NOT_RUNNING"
    tmp_path.chmod(0o755)
    (tmp_path / "clients.sock").touch()
    with pytest.raises(GoondanError) as caught:
        connect(run_dir=tmp_path)._link._place.token(str(tmp_path))
    assert caught.value.code == "E_BROKER_UNTRUSTED"


async def test_a_link_without_work_costs_nothing_and_still_works(run_dir: Path) -> None:
    async with connect(run_dir=run_dir) as gdn:
        await gdn.instances()
        assert gdn._link.machine.rests
        before = os.times()
        await asyncio.sleep(2.5)
        after = os.times()
        assert after.user + after.system - before.user - before.system < 0.25
        assert (await gdn.ask("main", exec_("echo awake"), instance="idle")).text == "awake"


async def test_a_broker_that_is_killed_loses_nothing(swarm: Sandbox, run_dir: Path) -> None:
    async with connect(run_dir=run_dir) as gdn:
        asked = [
            asyncio.ensure_future(
                gdn.ask("main", exec_(f"sleep 0.2; echo {number}"), instance=f"k{number % 3}", deadline=50)
            )
            for number in range(12)
        ]
        for _ in range(2):
            ready = swarm.times_ready("broker")
            os.kill(swarm.pid("broker"), signal.SIGKILL)
            await asyncio.to_thread(wait_until, lambda before=ready: swarm.times_ready("broker") > before)
        assert [answer.text for answer in await asyncio.gather(*asked)] == [str(number) for number in range(12)]


async def test_a_kernel_that_was_started_anew_has_another_token(swarm: Sandbox, run_dir: Path) -> None:
    async with connect(run_dir=run_dir) as gdn:
        assert (await gdn.ask("main", exec_("echo 1"), instance="anew")).text == "1"
        token = (run_dir / "client.token").read_text()
        assert (await asyncio.to_thread(swarm.gdn, "stop")).status == 0
        asking = asyncio.ensure_future(gdn.ask("main", exec_("echo 2"), instance="anew", deadline=50))
        await asyncio.to_thread(swarm.detach)
        assert (await asking).text == "2"
        assert (run_dir / "client.token").read_text() != token


def test_an_interrupt_cancels_the_turn(swarm: Sandbox, run_dir: Path) -> None:
    ask = f"from goondan_client import connect\nwith connect(run_dir={str(run_dir)!r}) as gdn:\n"
    ask += f"    gdn.ask('main', {exec_('sleep 50')!r}, instance='interrupted')\n"
    asking = subprocess.Popen([sys.executable, "-I", "-c", ask], stderr=subprocess.PIPE, text=True)
    with connect(run_dir=run_dir) as gdn:
        wait_until(lambda: "interrupted" in {one["instanceKey"] for one in gdn.instances()})
        asking.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in asking.communicate(timeout=30)[1]
        # The next one waits for the end of the one before.
        assert gdn.ask("main", exec_("echo next"), instance="interrupted", deadline=30).text == "next"


def test_it_imports_nothing_of_the_kernel() -> None:
    code = "import sys, goondan_client; bad = {'goondan'} & set(sys.modules); print(sorted(bad))"
    said = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"
