"""Network grants in real jails: ordinary clients reach what was granted, and are told what was not."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from goondan.schemas.bundle.launch import PythonSpec, SandboxSpec
from tests.toolhost_fixture import Bench, bench, make_tool
from tests.unit.toolhost.traffic.test_hello import client_hello

SOURCE = """
import os, socket, subprocess, urllib.request

def raw(ctx, input):
    with socket.create_connection((input["host"], input["port"]), 5) as connection:
        connection.sendall(input.get("send", "GET /raw HTTP/1.0\\r\\n\\r\\n").encode("latin-1"))
        data = b""
        while piece := connection.recv(65536):
            data += piece
    return data.decode("latin-1")

def fetch(ctx, input):
    import httpx
    return httpx.get(input["url"], timeout=5).text

def opened(ctx, input):
    return urllib.request.urlopen(input["url"], timeout=5).read().decode()

def sh(ctx, input):
    done = subprocess.run(input["command"], shell=True, capture_output=True, text=True)
    return {"code": done.returncode, "out": done.stdout, "err": done.stderr}

def swallow(ctx, input):
    try:
        raw(ctx, input)
    except OSError:
        return "nothing"

handlers = {"raw": raw, "fetch": fetch, "opened": opened, "sh": sh, "swallow": swallow}
"""
EXPORTS = ("raw", "fetch", "opened", "sh", "swallow")


class _Pages(BaseHTTPRequestHandler):
    """Answers with the path, and what came as body."""

    protocol_version = "HTTP/1.1"
    seen: list[str]

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append(f"{self.command} {self.path} {self.headers['Host']}")  # type: ignore[attr-defined]
        answer = f"page {self.path} {body.decode()}".encode()
        self.send_response(302 if self.path.startswith("/to/") else 200)
        if self.path.startswith("/to/"):
            self.send_header("Location", f"http://{self.path.removeprefix('/to/')}")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def pages() -> Iterator[tuple[int, list[str]]]:
    """A server on loopback: its port, and the requests that it has seen."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Pages)
    server.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_port, server.seen  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def sandbox(network: Any) -> SandboxSpec:
    return SandboxSpec(network=network, python=PythonSpec(venv=sys.prefix))


def unused_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def denied(host: Bench, export: str, args: Any, named: str) -> str:
    """A call that must fail with E_SANDBOX_DENIED naming a host; its message."""
    result = await host.call(f"t__{export}", args)
    assert result["status"] == "error", result
    assert result["error"]["code"] == "E_SANDBOX_DENIED", result
    assert named in result["error"]["message"]
    return str(result["error"]["message"])


async def test_ordinary_clients_reach_what_was_granted(tmp_path: Path) -> None:
    with pages() as (port, seen):
        other = unused_port()
        allow = [f"127.0.0.1:{port}", f"localhost:{port}"]
        async with bench(make_tool(tmp_path, SOURCE, *EXPORTS, sandbox=sandbox({"allow": allow}))) as host:
            base = f"http://localhost:{port}"
            raw = await host.call("t__raw", {"host": "127.0.0.1", "port": port})
            assert raw["output"].endswith("page /raw "), raw
            assert (await host.call("t__fetch", {"url": f"{base}/httpx"}))["output"] == "page /httpx "
            assert (await host.call("t__opened", {"url": f"{base}/urllib"}))["output"] == "page /urllib "
            command = f"curl -sS {base}/curl"
            if shutil.which("node", path="/usr/local/bin:/usr/bin:/bin"):
                command += f"; node -e 'fetch(\"{base}/node\").then(r => r.text()).then(console.log)'"
                seen_by_node = ["GET /node"]
            else:
                seen_by_node = []
            ran = (await host.call("t__sh", {"command": command}))["output"]
            assert ran["out"].startswith("page /curl "), ran
            for path in ("GET /httpx", "GET /urllib", "GET /curl", *seen_by_node):
                assert any(line.startswith(path) for line in seen), (path, ran)
            # What was not granted, by name and by address, on any port.
            await denied(host, "raw", {"host": "evil.example.com", "port": 80}, "evil.example.com")
            await denied(host, "fetch", {"url": "https://evil.example.com/"}, "evil.example.com")
            await denied(host, "opened", {"url": f"{base}/to/evil.example.com/"}, "evil.example.com")
            await denied(host, "opened", {"url": f"{base}/to/127.0.0.1:{other}/"}, f"127.0.0.1:{other}")
            await denied(host, "raw", {"host": "127.0.0.1", "port": other}, f"127.0.0.1:{other}")
            message = await denied(host, "raw", {"host": "93.184.216.34", "port": 443}, "93.184.216.34:443")
            assert f"granted: 127.0.0.1:{port}, localhost:{port}" in message
            if socket.has_ipv6:
                await denied(host, "raw", {"host": "2606:4700::1111", "port": 443}, "[2606:4700::1111]:443")
            # A refusal that a handler got over is not the reason for a later error.
            host.receipts.clear()
            assert (await host.call("t__swallow", {"host": "evil.example.com", "port": 80}))["output"] == "nothing"
            await host.call("t__raw", {"host": "127.0.0.1", "port": port})
            swallowed, after = [receipt["call"].get("denied") for receipt in host.receipts.values()]
            assert (swallowed, after) == (["evil.example.com"], None), "of each call, not of the jail"
            assert (await host.call("t__raw", {}))["error"]["code"] != "E_SANDBOX_DENIED"


async def test_public_leads_nowhere_inside(tmp_path: Path) -> None:
    with pages() as (port, seen):
        async with bench(make_tool(tmp_path, SOURCE, *EXPORTS, sandbox=sandbox("public"))) as host:
            for name in ("127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]"):
                await denied(
                    host, "opened", {"url": f"http://{name}:{port}/"}, f"{name}:{port}".replace("127.0.0.1]", "7f00:1]")
                )
            for name in ("10.0.0.1", "169.254.169.254", "0.0.0.0"):
                await denied(host, "opened", {"url": f"http://{name}/"}, name)
            for name in ("0x7f.1", "2130706433", "127.1"):  # a form that libraries read differently is no host at all
                answer = (await host.call("t__sh", {"command": f"curl -sS --globoff http://{name}:{port}/"}))["output"]
                assert "page" not in answer["out"]
            await denied(host, "raw", {"host": "93.184.216.34", "port": 443}, "HTTP proxy")
            ran = (await host.call("t__sh", {"command": f"curl -sS http://localhost:{port}/"}))["output"]
            assert "E_SANDBOX_DENIED" in ran["out"]
            assert seen == []


async def test_the_proxy_passes_one_request_to_one_host(tmp_path: Path) -> None:
    with pages() as (port, seen):
        network = {"allow": [f"localhost:{port}", "*.example.org:443"]}
        async with bench(make_tool(tmp_path, SOURCE, *EXPORTS, sandbox=sandbox(network))) as host:

            async def proxy(text: str) -> str:
                result = await host.call("t__raw", {"host": "127.42.0.1", "port": 3128, "send": text})
                return str(result.get("output", result.get("error")))

            first = f"POST http://localhost:{port}/a HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Length: 2\r\n\r\nhi"
            second = f"GET http://localhost:{port}/b HTTP/1.1\r\nHost: evil\r\n\r\n"
            answer = await proxy(first + second)
            assert answer.endswith("page /a hi")
            assert seen == [f"POST /a localhost:{port}"]
            assert "403" in await proxy("GET http://evil.example.com/ HTTP/1.1\r\n\r\n")
            assert "400" in await proxy(f"GET http://localhost:{port}/ HTTP/1.1\r\nHost: evil\r\n\r\n")
            hello = client_hello("evil.example.com").decode("latin-1")
            answer = await proxy(f"CONNECT localhost:{port} HTTP/1.1\r\n\r\n" + hello)
            assert "200" in answer
            right = client_hello("localhost").decode("latin-1")
            answer = await proxy(f"CONNECT localhost:{port} HTTP/1.1\r\n\r\n" + right)
            assert "Bad request" in answer  # it was passed on; our server speaks no TLS
            assert len(seen) == 1
            await host.call("t__fetch", {"url": f"http://localhost:{port}/c"})
            assert seen[1:] == [f"GET /c localhost:{port}"]
            # Where a granted host sends a client is a request of its own, and judged as one.
            for target in ("evil.example.com/", "169.254.169.254/latest/", f"127.0.0.1:{port}/d"):
                named = target.partition("/")[0]
                await denied(host, "opened", {"url": f"http://localhost:{port}/to/{target}"}, named)
            assert not [line for line in seen if line.startswith("GET /d")]


async def test_without_a_network_the_error_says_so(tmp_path: Path) -> None:
    async with bench(make_tool(tmp_path, SOURCE, *EXPORTS, sandbox=sandbox("none"))) as host:
        calls: list[tuple[str, Any]] = [
            ("raw", {"host": "127.0.0.1", "port": 80}),
            ("raw", {"host": "example.com", "port": 80}),
            ("fetch", {"url": "http://127.0.0.1/"}),
            ("opened", {"url": "http://example.com/"}),
        ]
        for export, args in calls:
            await denied(host, export, args, "no network was granted to this tool")
        assert (await host.call("t__raw", {}))["error"]["name"] == "KeyError"


async def test_privileged_ports_and_names_that_do_not_resolve(tmp_path: Path) -> None:
    network = {"allow": ["no-such-host.test:443"]}
    async with bench(make_tool(tmp_path, SOURCE, *EXPORTS, sandbox=sandbox(network))) as host:
        assert (
            "127.42.0.2 no-such-host.test" in (await host.call("t__sh", {"command": "cat /etc/hosts"}))["output"]["out"]
        )
        result = await host.call("t__raw", {"host": "no-such-host.test", "port": 443})
        assert result["error"]["code"] == "ECONNRESET"
        assert "resolved" in "".join(line.message for line in host.logs), host.logs


def _proxies() -> list[int]:
    """Egress proxies that this process has started."""
    found = []
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit() and b"egress/start.py" in Path(f"/proc/{name}/cmdline").read_bytes():
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == os.getpid() and fields[0] != "Z":
                    found.append(int(name))
    return found


async def test_the_proxy_has_nothing_and_is_replaced(tmp_path: Path) -> None:
    with pages() as (port, _):
        network = {"allow": [f"127.0.0.1:{port}"]}
        async with bench(make_tool(tmp_path, SOURCE, *EXPORTS, sandbox=sandbox(network))) as host:
            args = {"host": "127.0.0.1", "port": port}
            assert (await host.call("t__raw", args))["status"] == "ok"
            (pid,) = _proxies()
            status = dict(
                line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
            )
            assert (status["NoNewPrivs"].strip(), status["Seccomp"].strip()) == ("1", "2")
            limits = Path(f"/proc/{pid}/limits").read_text()
            assert limits.partition("Max core file size")[2].split()[:2] == ["0", "0"]
            if os.geteuid() == 0:
                assert set(status["Uid"].split()) == {"65534"}
                assert int(status["CapEff"], 16) == 0
                assert Path(f"/proc/{pid}/environ").read_bytes() == b""
            os.kill(pid, signal.SIGKILL)
            for _ in range(500):
                if _proxies() != [pid]:
                    break
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            again = await host.call("t__raw", args)
            assert again["status"] == "ok", again
            assert _proxies() not in ([], [pid])
    for _ in range(200):
        if not _proxies():
            return
        await asyncio.sleep(0.01)
    pytest.fail("the proxy outlives its tool host")


async def test_many_calls_at_once_lose_no_refusal(tmp_path: Path) -> None:
    """More news than a socket holds, both ways: every one of these calls must know why it failed."""
    async with bench(
        make_tool(tmp_path, SOURCE, *EXPORTS, sandbox=sandbox({"allow": ["127.0.0.1:9"]})), max_jails=4
    ) as host:
        args = {"host": "127.0.0.1", "port": 10}
        started = [host.start("t__raw", args, instance_key=f"k{number % 4}")[1] for number in range(400)]
        results = await asyncio.wait_for(asyncio.gather(*started), 40)
        assert {result["error"]["code"] for result in results} == {"E_SANDBOX_DENIED"}
