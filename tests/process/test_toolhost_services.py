"""The bundled tools `telegram` and `slack` in real jails: what no recorded case asks, and services that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from goondan.kernel.bundle.documents import base_tools
from goondan.kernel.bundle.rules.plan import tool_spec
from goondan.schemas.bundle.launch import ToolSpec
from tests.kernel_fixture import sandbox
from tests.service_fixture import MockApi, mock_api
from tests.toolhost_fixture import Bench, bench

TOKEN = "xoxb-or-123456:not-a-real-token"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
#: What is sent of an endless body when nobody stops reading (bytes).
ENDLESS = 50 << 20
Reply = Callable[[socket.socket, str], None]


def tools(*hosts: str) -> list[ToolSpec]:
    """Both tools; besides their own hosts they may reach these."""
    made = [tool_spec(base_tools()[name]) for name in ("telegram", "slack")]
    return [
        replace(tool, sandbox=replace(tool.sandbox, network={"allow": [*tool.sandbox.network["allow"], *hosts]}))
        for tool in made
    ]


class Service:
    """A service that answers each request as the first name of its path says (see `replies`)."""

    def __init__(self, port: int) -> None:
        self.host = f"127.0.0.1:{port}"
        self.url = f"http://{self.host}"
        self.asked: list[str] = []
        self.sent = 0
        self.replies: dict[str, Reply] = {}
        self.ended = threading.Event()

    def answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            data = b""
            while b"\r\n\r\n" not in data:
                data += connection.recv(65536)
            path = data.split(b" ")[1].decode()
            self.asked.append(path)
            self.replies[path.split("/")[1]](connection, path)


@contextmanager
def service() -> Iterator[Service]:
    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    made = Service(listening.getsockname()[1])
    threads: list[threading.Thread] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                thread = threading.Thread(target=made.answer, args=(listening.accept()[0],))
                thread.start()
                threads.append(thread)

    acceptor = threading.Thread(target=serve)
    acceptor.start()
    try:
        yield made
    finally:
        made.ended.set()
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        acceptor.join()
        for thread in threads:
            thread.join()


def says(body: bytes | str, head: bytes = HEAD) -> Reply:
    """A whole answer."""
    data = body.encode() if isinstance(body, str) else body
    return lambda connection, path: connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)


def moved(to: str) -> Reply:
    """A redirect."""
    return lambda connection, path: connection.sendall(
        f"HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()
    )


def endless(made: Service, begin: bytes) -> Reply:
    """50 MB, counted as they are taken."""

    def reply(connection: socket.socket, path: str) -> None:
        connection.sendall(begin)
        while made.sent < ENDLESS:
            made.sent += connection.send(b" " * 65536)

    return reply


def silent(made: Service, begin: bytes = b"", pause_s: float = 0.0) -> Reply:
    """Nothing; or these bytes, so far apart."""

    def reply(connection: socket.socket, path: str) -> None:
        for byte in begin:
            connection.sendall(bytes([byte]))
            if made.ended.wait(pause_s):
                return
        made.ended.wait(30)

    return reply


async def refused(host: Bench, tool: str, workdir: Path, **args: Any) -> dict[str, Any]:
    """A call that ends in one structured error without the token; the error."""
    result = await host.call(tool, {"token": TOKEN, **args}, workdir=workdir)
    assert result["status"] == "error", result
    assert TOKEN not in json.dumps(result, ensure_ascii=False)
    error: dict[str, Any] = result["error"]
    assert error["suggestion"] and error["helpUrl"]
    return error


SENDS: dict[str, dict[str, Any]] = {
    "telegram__send": {"chatId": "1", "text": "x"},
    "slack__send": {"channelId": "C", "text": "x"},
}


@pytest.mark.requirement("TELEGRAM-04", "SLACK-04")
async def test_services_that_misbehave(tmp_path: Path) -> None:
    """An API that answers `ok: false`, HTML, never, too much, or sends elsewhere: one error each, soon."""
    with service() as made, service() as other:
        made.replies = {
            "never": silent(made),
            "drip": silent(made, HEAD * 1000, 0.02),
            "html": says("<html>hello</html>", b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"),
            "empty": says(b""),
            "nan": says('{"ok": true, "result": {"message_id": NaN}}'),
            "deep": says('{"ok": true, "result": ' + "[" * 200_000),
            "number": says('{"ok": true, "ts": ' + "9" * 100_000 + "}"),
            "endless": endless(made, HEAD + b'\r\n{"ok": true, "x": "'),
            "telling": says(json.dumps({"ok": False, "description": f"no {TOKEN}", "error": f"no {TOKEN}"})),
            "moved": moved(f"{other.url}/never/x"),
            "close": lambda connection, path: None,
            "binary": lambda connection, path: connection.sendall(os.urandom(1000)),
        }
        expected = {
            "never": "API request timed out after 300ms",
            "drip": "API request timed out after 300ms",
            "html": "failed: HTTP 200 OK",
            "empty": "failed: HTTP 200 OK",
            "nan": "failed: HTTP 200 OK",
            "deep": "failed: HTTP 200 OK",
            "number": "failed: HTTP 200 OK",
            "endless": "failed: the answer has more than 4194304 bytes",
            "telling": "failed: no ***",
            "moved": "failed: HTTP 302 Found",
            "close": "request failed: ",
            "binary": "request failed: ",
        }
        async with bench(*tools(made.host, other.host)) as host:
            for tool, args in SENDS.items():
                for name, said in expected.items():
                    made.sent = 0
                    began = time.monotonic()
                    error = await refused(
                        host,
                        tool,
                        tmp_path,
                        apiBaseUrl=f"{made.url}/{name}",
                        timeoutMs=300 if "0ms" in said else 9000,
                        **args,
                    )
                    assert error["message"].startswith(f"[{tool.partition('__')[0]}] "), error
                    assert said in error["message"], (name, error)
                    assert error["code"] == "E_TOOL"
                    assert time.monotonic() - began < 9, name
                    assert made.sent < ENDLESS / 2, "it went on reading"
            assert other.asked == []
            assert not [line for line in host.logs if TOKEN in line.message]


async def test_what_a_service_says_is_shown_without_the_token(tmp_path: Path) -> None:
    told = {"ts": f"1.{TOKEN}", "text": f"\ud800 {TOKEN}", "big": 1 << 70, TOKEN: [TOKEN]}
    with service() as made:
        made.replies = {
            "x": says(json.dumps({"ok": True, "messages": [told], "ts": TOKEN, "message": {"text": TOKEN}})),
            "nested": says(json.dumps({"ok": True, "messages": [{"x": json.loads("[" * 80 + "]" * 80)}]})),
        }
        async with bench(*tools(made.host)) as host:
            base = {"token": TOKEN, "apiBaseUrl": f"{made.url}/x", "channelId": "C"}
            for tool, args in (("slack__read", {}), ("slack__send", {"text": "x"})):
                result = await host.call(tool, {**base, **args}, workdir=tmp_path)
                assert result["status"] == "ok", result
                assert TOKEN not in json.dumps(result)
            result = await host.call("slack__read", {**base, "apiBaseUrl": f"{made.url}/nested"}, workdir=tmp_path)
            assert result["error"]["code"] == "E_TOOL_BAD_OUTPUT"


@pytest.mark.parametrize("token", ["xoxb\r\nX-Evil: 1", "xoxb\nGET / HTTP/1.1"])
async def test_a_token_makes_no_second_header(token: str, tmp_path: Path) -> None:
    with service() as made:
        async with bench(*tools(made.host)) as host:
            for tool, args in SENDS.items():
                error = await refused(host, tool, tmp_path, **{**args, "token": token, "apiBaseUrl": f"{made.url}/x"})
                assert "bot token holds a line break" in error["message"]
                assert "xoxb" not in json.dumps(error)
        assert made.asked == []


@pytest.mark.requirement("SLACK-22", "SLACK-23", "TELEGRAM-20", "TELEGRAM-21")
async def test_downloads_that_misbehave(tmp_path: Path) -> None:
    """Too large, sent elsewhere, sent in circles, broken off: one error, nothing saved, the token given to nobody."""
    with service() as made, service() as other:
        plain = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
        made.replies = {
            "endless": endless(made, plain + b"\r\n"),
            "large": says(b"", plain + b"X: 1\r\nContent-Length: 52428800\r\n"),
            "moved": moved(f"{other.url}/x/secret?{TOKEN}"),
            "circle": moved("/circle/x"),
            "nowhere": moved("http://[::1"),
            "short": lambda connection, path: connection.sendall(plain + b"Content-Length: 50\r\n\r\nonly ten b"),
            "forbidden": says("no", b"HTTP/1.1 403 Forbidden\r\n"),
            "ok": says("hello", plain),
        }
        expected = {
            "endless": "Slack file exceeds maxBytes limit (more than 4048576 > 3000000)",
            "large": "Slack file exceeds maxBytes limit (52428800 > 3000000)",
            "moved": f"the host of apiBaseUrl only, not to {other.host}",
            "circle": "more than 5 redirects",
            "nowhere": "redirected to what is no URL",
            "short": "the answer broke off",
            "forbidden": "[slack] file download failed: HTTP 403 Forbidden",
        }
        async with bench(*tools(made.host, other.host)) as host:
            base = {"apiBaseUrl": f"{made.url}/api", "savePath": "file", "includeBase64": False}
            for name, said in expected.items():
                error = await refused(host, "slack__downloadFile", tmp_path, url=f"{made.url}/{name}/f", **base)
                assert said in error["message"], (name, error)
                assert list(tmp_path.iterdir()) == []
            assert made.sent < ENDLESS / 2
            error = await refused(host, "slack__downloadFile", tmp_path, url=f"{other.url}/x/f", **base)
            assert other.host in error["message"]
            # Telegram: the token is in the address, so no redirect is followed at all.
            path = {"ok": True, "result": {"file_id": "F", "file_path": '../it\'s "x"?.bin'}}
            made.replies["api"] = lambda connection, asked: (
                moved(f"{made.url}/ok/f")(connection, asked)
                if "/file/" in asked
                else says(json.dumps(path))(connection, asked)
            )
            error = await refused(
                host, "telegram__downloadFile", tmp_path, fileId="F", apiBaseUrl=f"{made.url}/api", savePath="file"
            )
            assert "[telegram] file download request failed: it was redirected" in error["message"]
            assert made.asked[-1].endswith("/../it's%20%22x%22%3F.bin")
            assert other.asked == []
            assert list(tmp_path.iterdir()) == []


@pytest.mark.requirement("TELEGRAM-18", "SLACK-20")
async def test_downloads_stay_in_the_workdir(tmp_path: Path) -> None:
    workdir = tmp_path / "work"
    (workdir / ".git").mkdir(parents=True)
    (workdir / "out").symlink_to(tmp_path)
    (workdir / "file").symlink_to(tmp_path / "target")
    os.mkfifo(workdir / "fifo")
    with service() as made:
        made.replies = {"ok": says("hello", b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n")}
        async with bench(*tools(made.host)) as host:
            base = {"url": f"{made.url}/ok/f", "apiBaseUrl": made.url}
            for path in ("../up", "out/up", "file", "/tmp/up", "/etc/passwd", str(tmp_path / "up")):
                error = await refused(host, "slack__downloadFile", workdir, savePath=path, **base)
                assert (error["code"], made.asked) == ("E_SANDBOX_DENIED", []), path
            error = await refused(host, "slack__downloadFile", workdir, savePath=".git/config", **base)
            assert error["code"] == "EROFS"
            error = await refused(host, "slack__downloadFile", workdir, savePath="out/..", **base)
            assert error["code"] in ("EISDIR", "E_SANDBOX_DENIED")
            for path in ('it\'s "quoted" 한글.txt', "new/folders/file", "fifo", str(workdir / "absolute")):
                result = await host.call(
                    "slack__downloadFile", {"token": TOKEN, "savePath": path, **base}, workdir=workdir
                )
                assert result["status"] == "ok", result
                assert result["output"]["savedPath"] == str(workdir / path)
                assert (workdir / path).read_bytes() == b"hello"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["work"]
        assert list((workdir / ".git").iterdir()) == []
        assert not list(workdir.rglob("*.part"))


async def test_a_cancelled_call_ends_and_the_jail_goes_on(tmp_path: Path) -> None:
    with service() as made:
        made.replies = {"never": silent(made), "ok": says('{"ok": true}')}
        async with bench(*tools(made.host)) as host:
            args = {"token": TOKEN, "apiBaseUrl": f"{made.url}/never", "channelId": "C", "text": "x"}
            call_id, waiter = host.start("slack__send", args, workdir=tmp_path)
            while not made.asked:
                await asyncio.sleep(0.01)
            host.cancel(call_id)
            assert (await asyncio.wait_for(waiter, 20))["error"]["code"] == "E_CANCELLED"
            result = await host.call("slack__send", {**args, "apiBaseUrl": f"{made.url}/ok"}, workdir=tmp_path)
            assert result["status"] == "ok"


async def test_a_host_that_was_not_granted_is_named(tmp_path: Path) -> None:
    with service() as made:
        async with bench(*tools()) as host:
            for tool, args in SENDS.items():
                error = await refused(host, tool, tmp_path, apiBaseUrl=f"{made.url}/x", **args)
                assert error["code"] == "E_SANDBOX_DENIED"
                assert made.host in error["message"]
        assert made.asked == []


# --- what no recorded case asks, against the recorded service


@contextmanager
def granted() -> Iterator[tuple[MockApi, list[ToolSpec]]]:
    with mock_api() as api:
        yield api, tools(api.host)


async def body_of(host: Bench, api: MockApi, tool: str, workdir: Path, **args: Any) -> tuple[Any, Any]:
    """The output of a call, and the body of its one request."""
    api.reset()
    base = {"token": "xoxb-1", "apiBaseUrl": api.url if tool.startswith("telegram") else f"{api.url}/api"}
    result = await host.call(tool, {**base, **args}, workdir=workdir)
    assert result["status"] == "ok", result
    (request,) = api.requests()
    return result["output"], request["body"]


@pytest.mark.requirement("TELEGRAM-05", "TELEGRAM-06", "TELEGRAM-08", "TELEGRAM-12", "TELEGRAM-14", "TELEGRAM-15")
@pytest.mark.requirement("TELEGRAM-16", "TELEGRAM-17")
async def test_telegram_sends_every_parameter(tmp_path: Path) -> None:
    with granted() as (api, specs):
        async with bench(*specs) as host:

            async def asked(export: str, **args: Any) -> tuple[Any, Any]:
                return await body_of(host, api, f"telegram__{export}", tmp_path, chatId="7", **args)

            _, body = await asked(
                "send", text="x", parseMode="hTML", disableNotification=True, disableWebPagePreview=False,
                replyToMessageId="5", allowSendingWithoutReply=True,
            )  # fmt: skip
            assert body == {
                "chat_id": "7",
                "text": "x",
                "parse_mode": "HTML",
                "disable_notification": True,
                "disable_web_page_preview": False,
                "reply_to_message_id": 5,
                "allow_sending_without_reply": True,
            }
            _, body = await asked("edit", messageId=3, text="y", parseMode="MARKDOWNV2", disableWebPagePreview=True)
            assert body == {
                "chat_id": "7",
                "message_id": 3,
                "text": "y",
                "parse_mode": "MarkdownV2",
                "disable_web_page_preview": True,
            }
            output, body = await asked("react", messageId=3, emoji="👍", emojis=[" ❤ ", "👍", ""], isBig=False)
            assert (output["emojis"], output["reactionCount"], output["cleared"]) == (["👍", "❤"], 2, False)
            assert [reaction["emoji"] for reaction in body["reaction"]] == ["👍", "❤"]
            assert body["is_big"] is False
            output, body = await asked("react", messageId=3, emoji="👍", clear=True)
            assert (output["emojis"], output["reactionCount"], output["cleared"]) == ([], 0, True)
            assert body == {"chat_id": "7", "message_id": 3, "reaction": []}
            spec = next(export for export in specs[0].exports if export.name == "setChatAction")
            actions = (spec.parameters or {})["properties"]["action"]["enum"]
            assert len(actions) == 11
            for name in ("action", "status"):  # the documented alias
                for action in actions:
                    output, body = await asked("setChatAction", **{name: action})
                    spelled = action.replace("-", "_")
                    assert (body["action"], output["action"], output["status"]) == (spelled, spelled, spelled)
            for args, code in (({"action": "typing", "status": "upload-video"}, "E_TOOL_INVALID_ARGS"),
                               ({"status": "dancing"}, "E_TOOL_INVALID_ARGS")):  # fmt: skip
                result = await host.call("telegram__setChatAction", {"chatId": "7", **args}, workdir=tmp_path)
                assert result["error"]["code"] == code


@pytest.mark.requirement("SLACK-05", "SLACK-06", "SLACK-09", "SLACK-17")
async def test_slack_knows_the_documented_aliases(tmp_path: Path) -> None:
    with granted() as (api, specs):
        async with bench(*specs) as host:
            others: dict[str, dict[str, Any]] = {
                "send": {"text": "x"},
                "read": {},
                "edit": {"text": "x"},
                "delete": {},
                "react": {"emoji": "x"},
            }
            for export, args in others.items():
                tool = f"slack__{export}"
                output, body = await body_of(
                    host, api, tool, tmp_path, channel="C_OK", **args, **({} if export == "send" else {"ts": "1.1"})
                )
                assert (output["channelId"], body["channel"]) == ("C_OK", "C_OK")
                if export == "send":
                    continue
                assert output["messageTs"] == "1.1"
                output, _ = await body_of(host, api, tool, tmp_path, channel="C_OK", timestamp="2.2", **args)
                assert output["messageTs"] == "2.2"
                result = await host.call(tool, {"channelId": "C", "channel": "D", "ts": "1", **args}, workdir=tmp_path)
                assert result["error"]["code"] == "E_TOOL_INVALID_ARGS"
            busy = {"token": "xoxb-1", "apiBaseUrl": f"{api.url}/api", "channel": "C_RATE", "text": "x"}
            result = await host.call("slack__send", busy, workdir=tmp_path)
            assert result["error"]["suggestion"] == "The service is busy: wait 30 seconds."
            _, body = await body_of(
                host, api, "slack__read", tmp_path, channelId="C_OK", latest="9", oldest="1", cursor="c", limit=1000
            )
            assert body == {"channel": "C_OK", "latest": "9", "oldest": "1", "cursor": "c", "limit": 1000}


@pytest.mark.requirement("TELEGRAM-18", "SLACK-20", "SLACK-21", "TELEGRAM-19")
async def test_downloads_know_the_documented_aliases(tmp_path: Path) -> None:
    with granted() as (api, specs):
        async with bench(*specs) as host:
            base = {"token": "xoxb-1", "apiBaseUrl": api.url}
            calls: list[tuple[str, dict[str, Any]]] = [
                ("telegram__downloadFile", {"file_id": "photo"}),
                ("slack__downloadFile", {"fileUrl": f"{api.url}/slack-files/image.png"}),
                ("slack__downloadFile", {"downloadUrl": f"{api.url}/slack-files/image.png"}),
            ]
            for tool, args in calls:
                result = await host.call(tool, {**base, **args, "outputPath": "saved/it"}, workdir=tmp_path)
                assert result["status"] == "ok", result
                assert result["output"]["savedPath"] == str(tmp_path / "saved/it")
                assert (tmp_path / "saved/it").stat().st_size == result["output"]["sizeBytes"]
                assert "xoxb-1" not in json.dumps(result)
                api.reset()
                result = await host.call(tool, base, workdir=tmp_path)
                assert result["error"]["code"] == "E_TOOL_INVALID_ARGS"
                assert api.requests() == []


@pytest.mark.requirement("TELEGRAM-01", "TELEGRAM-02", "SLACK-01")
def test_through_a_whole_kernel_with_the_token_in_its_environment() -> None:
    """Command, agent, broker, jail and egress proxy; the token reaches the service, and no file of the kernel."""
    calls: list[tuple[str, dict[str, Any], str | None]] = [
        ("telegram__send", {"chatId": "1", "text": "x"}, None),
        ("telegram__downloadFile", {"fileId": "photo", "savePath": "photo.jpg"}, None),
        ("telegram__send", {"chatId": "err400", "text": "x"}, "E_TOOL"),
        ("slack__send", {"channel": "C", "text": "x"}, "E_TOKEN_MISSING"),
    ]
    with mock_api() as api, sandbox(extra_env={"TELEGRAM_BOT_TOKEN": TOKEN}) as kernel:
        lines = [
            json.dumps({"id": str(index), "tool": tool, "args": {**args, "apiBaseUrl": api.url}})
            for index, (tool, args, _) in enumerate(calls)
        ]
        done = kernel.gdn("call", "--batch", "-", "--allow-net", api.host, input="\n".join(lines))
        results = {line["id"]: line["result"] for line in done.lines}
        for index, (_, _, code) in enumerate(calls):
            result = results[str(index)]
            assert (result["status"], result.get("error", {}).get("code")) == ("error" if code else "ok", code), result
        assert {request["path"].split("/")[-2] for request in api.requests()} >= {f"bot{TOKEN}", "photos"}
        assert TOKEN not in done.out + done.err
        written = [path for path in (kernel.home / "state").rglob("*") if path.is_file()]
        assert any(path.suffix == ".log" for path in written)
        assert not [path for path in written if TOKEN.encode() in path.read_bytes()]
