"""`gdn acp` with a real kernel: an editor that behaves, and editors that do not."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import acp
import pytest
from acp import schema

from tests.features.acp.process.editor import Editor, editor, first
from tests.kernel_fixture import PATIENCE_S, Sandbox, has_feature, sandbox, wait_until
from tests.process.model_servers import KEY, server

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(64))
#: The code for a session that is not there.
NONE = -32002
CAREFUL = '\n  extensions: [{ref: Extension/approval, config: {rules: [{tools: ["bash__exec"], action: ask}]}}]'


def bundle(base: str) -> str:
    careful = CAREFUL if has_feature("approvals") else ""
    return f"""\
apiVersion: goondan.ai/v1
kind: Model
metadata: {{name: fake}}
spec: {{provider: openai, model: m, endpoint: "{base}/v1", apiKey: {{valueFrom: {{env: MY_KEY}}}}}}
---
apiVersion: goondan.ai/v1
kind: Model
metadata: {{name: console}}
spec: {{provider: embedded}}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {{name: main}}
spec:
  modelConfig: {{modelRef: Model/fake}}
  tools: [Tool/bash, Tool/file-system]
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {{name: other}}
spec:
  modelConfig: {{modelRef: Model/console}}
  tools: [Tool/bash]
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {{name: careful}}
spec:
  modelConfig: {{modelRef: Model/console}}
  tools: [Tool/bash]{careful}
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {{name: swarm}}
spec: {{entryAgent: Agent/main, agents: [{{ref: Agent/main}}, {{ref: Agent/other}}, {{ref: Agent/careful}}]}}
"""


@pytest.fixture(scope="module")
def place() -> Iterator[Sandbox]:
    with server("fake_llm") as base, sandbox(bundle(base), {"MY_KEY": KEY}) as made:
        (made.home / "work").mkdir()
        yield made


@pytest.fixture
def kernel(place: Sandbox) -> Sandbox:
    """Its kernel, and a folder in which tools may work."""
    if not place.ps():
        place.detach()
    return place


@pytest.fixture(scope="module")
def shared(place: Sandbox) -> Iterator[Editor]:
    if not place.ps():
        place.detach()
    with editor(place) as one:
        yield one


@pytest.fixture
def one(shared: Editor, kernel: Sandbox) -> Editor:
    """The editor of most tests, which has been told nothing."""
    shared.choose = first
    shared.updates.clear()
    shared.permissions.clear()
    return shared


@pytest.fixture
def work(kernel: Sandbox) -> str:
    return str(kernel.home / "work")


def exec_call(command: str) -> str:
    return f"call bash__exec {json.dumps({'command': command})}"


def console_call(command: str) -> str:
    return f"/bash__exec {json.dumps({'command': command})}"


def is_call(asked: dict[str, Any]) -> bool:
    return str(asked["toolCall"]["toolCallId"]).startswith("ask-")


def only_folders(asked: dict[str, Any]) -> str | None:
    """Somebody who agrees to folders, and says nothing to calls."""
    return None if is_call(asked) else first(asked)


def test_a_turn_with_text_reasoning_tools_and_files(one: Editor, work: str) -> None:
    Path(work, "a.png").write_bytes(PNG)
    told = one.call("initialize", protocolVersion=7)
    assert told["protocolVersion"] == 1
    assert told["authMethods"] == []
    session = one.new(work)
    assert session.startswith("main/acp-")
    assert one.prompt(session, "think Hello")["stopReason"] == "end_turn"
    assert one.said == "echo: Hello | thoughts: 0"
    assert one.text_of("agent_thought_chunk") == "They say: Hello"
    assert [asked["toolCall"]["title"] for asked in one.permissions] == [f"Let tools work in {work}?"]
    done = one.prompt(session, f"call file-system__write {json.dumps({'path': 'b.txt', 'content': 'two'})}")
    assert done["usage"].keys() >= {"totalTokens", "inputTokens", "outputTokens"}
    calls = [update for update in one.updates if "toolCallId" in update]
    assert [call["sessionUpdate"] for call in calls][:1] == ["tool_call"]
    assert calls[0]["content"] == [{"type": "diff", "path": f"{work}/b.txt", "oldText": None, "newText": "two"}]
    assert calls[-1]["status"] == "completed"
    assert len({call["toolCallId"] for call in calls}) == 1
    assert Path(work, "b.txt").read_text() == "two"
    link = {"type": "resource_link", "uri": Path(work, "a.png").as_uri(), "name": "a.png"}
    picture = {"type": "image", "data": base64.b64encode(PNG).decode(), "mimeType": "image/png"}
    one.prompt(session, "Compare", link, picture)
    assert one.said.count(f"image/png {len(PNG)}") == 2
    assert len(one.permissions) == 1


def test_what_the_page_tells_an_editor_starts_the_agents_of_the_bundle_from_anywhere(kernel: Sandbox) -> None:
    page = (Path(__file__).resolve().parents[4] / "docs" / "serve.md").read_text(encoding="utf-8")
    (server,) = json.loads(page.partition("```json\n")[2].partition("```")[0])["agent_servers"].values()
    assert server.keys() <= {"type", "command", "args", "env"}, "Zed knows these"
    assert (server["type"], server["command"], server["args"][0]) == ("custom", "gdn", "acp")
    words = [word.replace("/home/me/swarm", str(kernel.home)) for word in server["args"][1:]]
    assert words != server["args"][1:]
    kernel.here = Path("/")
    try:
        with editor(kernel, *words) as one:
            assert one.call("initialize", protocolVersion=1)["agentInfo"]["name"] == "goondan"
            assert one.new("/").startswith("main/acp-")
    finally:
        kernel.here = None


def test_a_session_is_loaded_listed_resumed_and_closed(one: Editor, kernel: Sandbox, work: str) -> None:
    with editor(kernel, "--agent", "main") as other:
        session = other.new(work)
        other.prompt(session, exec_call("echo hi"))
        other.call("session/close", sessionId=session)
        assert "no session" in other.refusal("session/prompt", sessionId=session, prompt=[])["message"]
    listed = one.call("session/list", cwd=work)["sessions"]
    assert session in [row["sessionId"] for row in listed]
    assert one.call("session/list", cwd="/nowhere")["sessions"] == []
    modes = one.call("session/load", sessionId=session, cwd=work, mcpServers=[])["modes"]
    assert modes["currentModeId"] == "main"
    kinds = [update["sessionUpdate"] for update in one.updates]
    assert kinds == ["user_message_chunk", "tool_call", "tool_call_update", "agent_message_chunk"]
    one.updates.clear()
    one.call("session/resume", sessionId=session, cwd=work, mcpServers=[])
    assert one.updates == []
    assert one.prompt(session, "again")["stopReason"] == "end_turn"
    assert one.refusal("session/load", sessionId="main/none", cwd=work, mcpServers=[])["code"] == NONE
    assert one.refusal("session/load", sessionId="_operator/x", cwd=work, mcpServers=[])["code"] == NONE


def test_a_mode_is_the_agent_that_answers(one: Editor, work: str) -> None:
    told = one.call("session/new", cwd=work, mcpServers=[])
    session = told["sessionId"]
    assert [mode["id"] for mode in told["modes"]["availableModes"]] == ["main", "careful", "other"]
    one.call("session/set_mode", sessionId=session, modeId="other")
    one.prompt(session, "hello")
    assert "embedded console" in one.said
    refused = one.refusal("session/set_mode", sessionId=session, modeId="nobody")
    assert refused["message"] == "the modes are main, careful, other"
    one.updates.clear()
    loaded = one.call("session/load", sessionId=session, cwd=work, mcpServers=[])
    assert loaded["modes"]["currentModeId"] == "other"
    assert "embedded console" in one.said


def test_tools_work_in_the_editors_folder_only_after_a_yes(one: Editor, kernel: Sandbox) -> None:
    folder = kernel.home / "refused"
    folder.mkdir()
    one.choose = lambda asked: "reject_always"
    session = one.new(str(folder))
    one.prompt(session, exec_call("touch here; pwd"))
    assert "Tools do not work in" in one.said
    one.prompt(session, "again")
    assert one.said == "echo: again"
    one.prompt(one.new(str(folder)), exec_call("pwd"))
    assert len(one.permissions) == 1
    assert list(folder.iterdir()) == []
    assert kernel.gdn("acp", "--ask-again").status == 0
    one.choose = lambda asked: "allow_once"
    session = one.new(str(folder))
    one.prompt(session, exec_call("touch here"))
    one.prompt(session, "again")
    assert len(one.permissions) == 2
    assert [path.name for path in folder.iterdir()] == ["here"]
    none = one.refusal("session/new", cwd=str(kernel.home / "none"), mcpServers=[])
    assert "is no directory" in none["message"]


def test_a_yes_is_for_the_folder_that_was_shown(one: Editor, kernel: Sandbox) -> None:
    """The editor's folder may be a link, and a tool that works above it can lead it elsewhere."""
    shown, elsewhere, link = (kernel.home / name for name in ("shown", "elsewhere", "link"))
    shown.mkdir()
    elsewhere.mkdir()
    link.symlink_to(shown)
    session = one.new(str(link))
    one.prompt(session, "hello")
    link.unlink()
    link.symlink_to(elsewhere)
    one.choose = lambda asked: "reject_once"
    one.prompt(session, exec_call("touch here"))
    titles = [asked["toolCall"]["title"] for asked in one.permissions]
    assert titles == [f"Let tools work in {shown}?", f"Let tools work in {elsewhere}?"]
    assert not any(elsewhere.iterdir())
    link.unlink()
    link.symlink_to(kernel.env["GOONDAN_STATE_ROOT"])
    refused = one.refusal("session/prompt", sessionId=session, prompt=[{"type": "text", "text": "hello"}])
    assert (refused["code"], refused["data"]) == (-32602, {"code": "E_SANDBOX_DENIED"})


def test_only_an_option_that_was_chosen_is_a_yes(one: Editor, kernel: Sandbox) -> None:
    yes = "allow_always"
    results: list[Any] = [1, None, [], {}, {"outcome": None}, {"outcome": "selected"}, {"outcome": []}]
    results += [{"outcome": {"outcome": "cancelled", "optionId": yes}}, {"outcome": {"optionId": yes}}]
    results += [{"outcome": {"outcome": "selected", "optionId": option}} for option in ([yes], "allow", None)]
    answers: list[dict[str, Any]] = [{"result": result} for result in results]
    one.choose = lambda asked: None
    for number, answer in enumerate([*answers, {"error": {"code": "x", "message": [], "data": 1}}]):
        folder = kernel.home / f"unsaid{number}"
        folder.mkdir()
        asked = one.begin_prompt(one.new(str(folder)), "hello")
        while (message := one.next() or {}).get("method") != "session/request_permission":
            pass
        one.say(id=message["id"], **answer)
        one.say(id=message["id"], result={"outcome": {"outcome": "selected", "optionId": yes}})
        assert one.end_of(asked)["result"]["stopReason"] == "end_turn", answer
        assert f"Tools do not work in {folder}" in one.said, answer


def test_a_folder_that_is_none_is_refused(one: Editor, kernel: Sandbox) -> None:
    odd = os.fsencode(kernel.home) + b"/\xff"
    os.mkdir(odd)
    os.symlink(odd, kernel.home / "odd")
    relative = ("", ".", "..", "~", "work")
    for cwd in (*relative, "/etc/passwd", "/none", "/" + "x" * 5000, "/\0", kernel.env["GOONDAN_STATE_ROOT"]):
        refused = one.refusal("session/new", cwd=cwd, mcpServers=[])
        assert refused["code"] == -32602, cwd
        assert ("no absolute path" in refused["message"]) == (cwd in relative), cwd
    session = one.new(str(kernel.home / "odd"))
    refused = one.refusal("session/prompt", sessionId=session, prompt=[{"type": "text", "text": "hello"}])
    assert "cannot be sent" in refused["message"]


def test_more_files_than_a_message_takes_are_not_copied(one: Editor, kernel: Sandbox, work: str) -> None:
    links = []
    for number in range(40):
        path = Path(work, f"{number}.png")
        path.write_bytes(PNG + bytes([number]))
        links.append({"type": "resource_link", "uri": path.as_uri(), "name": path.name})
    session = one.new(work)
    one.prompt(session, "hello")
    state = Path(kernel.env["GOONDAN_STATE_ROOT"])
    before = sorted(state.glob("workspaces/*/blobs/**/*"))
    refused = one.refusal("session/prompt", sessionId=session, prompt=links)
    assert "more than 16 files" in refused["message"]
    assert sorted(state.glob("workspaces/*/blobs/**/*")) == before


def test_servers_of_the_editor_are_refused_in_words(one: Editor, work: str) -> None:
    servers = [{"name": "files", "command": "/bin/files", "args": [], "env": []}]
    session = one.call("session/new", cwd=work, mcpServers=servers)["sessionId"]
    one.prompt(session, "hello")
    assert "not used: files" in one.said
    assert "gdn mcp add" in one.said


def test_a_turn_is_cancelled(one: Editor, work: str) -> None:
    session = one.new(work)
    asked = one.begin_prompt(session, exec_call("sleep 60"))
    one.until(lambda: any(update.get("status") == "in_progress" for update in one.updates))
    second = one.end_of(one.begin_prompt(session, "hello"))
    assert "works on a prompt: wait" in second["error"]["message"]
    one.say(method="session/cancel", params={"sessionId": session})
    assert one.end_of(asked)["result"]["stopReason"] == "cancelled"
    assert one.prompt(session, "hello")["stopReason"] == "end_turn"


def test_a_prompt_is_cancelled_while_its_folder_is_asked_about(one: Editor, kernel: Sandbox) -> None:
    folder = kernel.home / "asked"
    folder.mkdir()
    one.choose = lambda asked: None
    session = one.new(str(folder))
    asked = one.begin_prompt(session, "hello")
    one.until(lambda: bool(one.permissions))
    one.say(method="session/cancel", params={"sessionId": session})
    assert one.end_of(asked)["result"]["stopReason"] == "cancelled"


@pytest.mark.feature("approvals")
def test_a_call_that_waits_for_a_person_is_asked_in_the_editor(one: Editor, work: str) -> None:
    session = one.new(work)
    one.call("session/set_mode", sessionId=session, modeId="careful")
    one.prompt(session, console_call("echo yes"))
    assert "yes" in one.said
    asked = one.permissions[-1]
    assert [option["kind"] for option in asked["options"]] == ["allow_once", "reject_once"]
    assert "echo yes" in asked["toolCall"]["content"][0]["content"]["text"]
    one.choose = lambda asked: "reject_once"
    one.prompt(session, console_call("echo no"))
    assert "E_APPROVAL_DENIED" in one.said + json.dumps(one.updates)


@pytest.mark.feature("approvals")
def test_a_call_is_kept_when_the_editor_vanishes(kernel: Sandbox, work: str) -> None:
    with editor(kernel, "--agent", "careful", choose=only_folders) as one:
        session = one.new(work)
        one.begin_prompt(session, console_call("echo kept"))
        one.until(lambda: any(is_call(asked) for asked in one.permissions))
    items = kernel.gdn("approve", "list", "--json").json["items"]
    assert [item["instanceKey"] for item in items] == [session.partition("/")[2]]
    assert kernel.gdn("approve", "yes", items[0]["code"]).status == 0
    wait_until(lambda: "kept" in kernel.gdn("instance", "export", *session.split("/")).out)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"what?", -32700),
        (b"[" * 70_000, -32700),
        (b"[]", -32600),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "fs/read"}', -32601),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "session/cancel"}', -32601),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "session/new"}', -32602),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "session/new", "params": [1]}', -32602),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "session/new", "params": {"cwd": 3, "mcpServers": []}}', -32602),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "session/new", "params": {"cwd": "a", "mcpServers": []}}', -32602),
        (
            b'{"jsonrpc": "2.0", "id": 1, "method": "session/prompt", "params": {"sessionId": "x", "prompt": []}}',
            -32002,
        ),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "authenticate", "params": {"methodId": "x"}}', -32601),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "session/list", "params": {"cwd": 7}}', -32602),
        (b'{"jsonrpc": "2.0", "id": 9, "method": "initialize", "params": {"protocolVersion": -1}}', -32602),
    ],
)
def test_rubbish_gets_one_error_in_words(one: Editor, line: bytes, code: int) -> None:
    one.send(line)
    answer = one.next()
    assert answer is not None
    assert answer["error"]["code"] == code
    assert 0 < len(answer["error"]["message"]) < 400
    assert "Traceback" not in answer["error"]["message"]


def test_metadata_of_a_client_is_no_parameter(one: Editor, work: str) -> None:
    told = one.call("session/new", cwd=work, mcpServers=[], _meta={"self": 1, "session_id": "x", "cwd": "/"})
    assert told["sessionId"].startswith("main/acp-")
    one.prompt(told["sessionId"], "hello")
    assert one.call("session/list", _meta={"cwd": "/nowhere"})["sessions"]


def test_responses_and_notifications_that_nobody_wants_are_left(one: Editor) -> None:
    for more in ({"id": 5, "result": 1}, {"id": "x", "error": "words"}, {"method": "session/cancel", "params": 1}):
        one.say(**more)
    one.say(method="session/cancel", params={"sessionId": "nobody"})
    one.say(method="no/such")
    assert one.call("initialize", protocolVersion=1)["protocolVersion"] == 1


def test_a_line_of_a_hundred_megabytes_takes_no_memory(one: Editor) -> None:
    before = _peak(one.process.pid)
    assert one.process.stdin is not None
    for _ in range(100):
        one.process.stdin.write(b"x" * (1 << 20))
    one.send(b"")
    answer = one.next()
    assert answer is not None
    assert "104857600 bytes" in answer["error"]["message"]
    assert _peak(one.process.pid) - before < 80 << 10


def _peak(pid: int) -> int:
    """The most memory that a process has had (KiB)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def test_nothing_is_sent_when_the_editor_vanishes_before_its_folder_is_allowed(kernel: Sandbox) -> None:
    """It found its kernel, although the bundle has become bad."""
    folder, text = kernel.home / "vanished", kernel.bundle.read_text()
    folder.mkdir()
    with editor(kernel, choose=lambda asked: None) as one:
        kernel.bundle.write_text("{{{")
        try:
            session = one.new(str(folder))
        finally:
            kernel.bundle.write_text(text)
        one.begin_prompt(session, "hello")
        one.until(lambda: bool(one.permissions))
    assert session.partition("/")[2] not in kernel.gdn("instance", "list").out


def test_a_client_that_does_not_read_keeps_nobody(kernel: Sandbox) -> None:
    """Its lines are no longer read when many answers are unread, and a signal ends all of it."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = kernel.popen("acp", **pipes)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b'{"jsonrpc": "2.0", "id": 1, "method": "no/such"}\n')
    process.stdin.flush()
    assert process.stdout.readline()
    os.set_blocking(process.stdin.fileno(), False)
    line = b'{"jsonrpc": "2.0", "id": "' + b"x" * 2000 + b'", "method": "no/such"}\n'
    sent = 0
    with suppress(BlockingIOError):
        while sent < 64 << 20:
            ready = select.select([], [process.stdin], [], 0.5)[1]
            if not ready:
                break
            sent += os.write(process.stdin.fileno(), line)
    assert sent < 32 << 20
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 128 + signal.SIGINT


def test_a_signal_ends_it_in_order(kernel: Sandbox, work: str) -> None:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    one = Editor(kernel.popen("acp", **pipes))
    session = one.new(work)
    asked = one.begin_prompt(session, exec_call("sleep 60"))
    one.until(lambda: any(update.get("status") == "in_progress" for update in one.updates))
    one.process.send_signal(signal.SIGTERM)
    assert one.end_of(asked)["result"]["stopReason"] == "cancelled"
    assert one.process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert kernel.ps()


def test_it_finds_the_next_kernel(kernel: Sandbox, work: str) -> None:
    with editor(kernel) as one:
        session = one.new(work)
        one.prompt(session, "first")
        asked = one.begin_prompt(session, exec_call("sleep 60"))
        one.until(lambda: any(update.get("status") == "in_progress" for update in one.updates))
        assert kernel.gdn("stop").status == 0
        error = one.end_of(asked)["error"]
        assert "E_KERNEL_STOPPED" in error["message"]
        kernel.detach()
        assert kernel.gdn("cancel", error["message"].split()[6]).status == 0
        assert one.prompt(session, "second")["stopReason"] == "end_turn"
        assert one.said == "echo: second"
        pidfd = os.pidfd_open(kernel.pid("supervisor"))
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert select.select([pidfd], [], [], PATIENCE_S)[0]
        os.close(pidfd)
        assert one.prompt(session, "third")["stopReason"] == "end_turn"  # at a kernel of its own
        assert one.said == "echo: third"
    wait_until(lambda: not kernel.ps())


async def test_a_client_on_the_sdk(kernel: Sandbox, work: str) -> None:
    """The package's own client, which checks each message against its schema."""
    heard: list[Any] = []

    class Client:
        async def request_permission(self, session_id: str, tool_call: Any, options: Any, **more: Any) -> Any:
            outcome = schema.AllowedOutcome(outcome="selected", option_id=options[0].option_id)
            return schema.RequestPermissionResponse(outcome=outcome)

        async def session_update(self, session_id: str, update: Any, **more: Any) -> None:
            heard.append(update)

    client: Any = Client()
    words = ["-I", "-m", "goondan.kernel.cli", "acp", "--agent", "careful"]
    async with acp.spawn_agent_process(client, sys.executable, *words, env=kernel.env, cwd=kernel.home) as (one, _):
        assert (await one.initialize(protocol_version=acp.PROTOCOL_VERSION)).protocol_version == 1
        session = await one.new_session(cwd=work, mcp_servers=[])
        async with asyncio.timeout(PATIENCE_S):
            prompt: list[Any] = [acp.text_block(console_call("echo from-the-sdk"))]
            done = await one.prompt(session_id=session.session_id, prompt=prompt)
        assert done.stop_reason == "end_turn"
    said = [update.content.text for update in heard if isinstance(update, schema.AgentMessageChunk)]
    assert "from-the-sdk" in "".join(said)
    assert any(isinstance(update, schema.ToolCallStart) for update in heard)
