"""What a handler with a network grant cannot do with it, tried from inside a real jail."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from goondan.schemas.bundle.launch import SandboxSpec
from tests.containment.tried import TOOLS
from tests.process.test_egress import pages, unused_port
from tests.toolhost_fixture import bench, make_tool

SOURCE = """
import errno, os, socket, struct

def attempt(function):
    try:
        return ["done", function()]
    except OSError as error:
        return ["refused", errno.errorcode.get(error.errno, type(error).__name__)]

def tcp(host, port, family=socket.AF_INET):
    with socket.socket(family) as s:
        s.settimeout(3)
        s.connect((host, port))
        return s.recv(10).decode()

def udp(host, port):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(0.3)
        s.sendto(b"out", (host, port))
        return s.recv(10).decode()

def abstract(name):
    with socket.socket(socket.AF_UNIX) as s:
        s.connect("\\0" + name)
        return "connected"

def path(name):
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(name)
        return "connected"

def pair(name):
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    left.sendto(b"out", name)

def route():
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as s:
        body = struct.pack("BBBBBBBBI", 2, 0, 0, 0, 254, 3, 0, 1, 0) + struct.pack("HHI", 8, 4, 1)
        s.send(struct.pack("IHHII", 16 + len(body), 24, 0x605, 1, 0) + body)
        code = struct.unpack_from("i", s.recv(4096), 16)[0]
        if code:
            raise OSError(-code, "netlink")

def bind_device():
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, 1)

def proxy(target):
    with socket.create_connection(("127.42.0.1", 3128), 3) as s:
        s.sendall(f"CONNECT {target} HTTP/1.1\\r\\n\\r\\n".encode())
        return s.recv(200).decode().split(" ")[1]

def look(ctx, input):
    port, other, ours = input["port"], input["other"], input["udp"]
    return {
        "interfaces": [name for _, name in socket.if_nameindex()],
        "other port": attempt(lambda: tcp("127.0.0.1", other)),
        "any address": attempt(lambda: tcp("0.0.0.0", other)),
        "mapped": attempt(lambda: tcp("::ffff:127.0.0.1", other, socket.AF_INET6)),
        "six": attempt(lambda: tcp("::1", other, socket.AF_INET6)),
        "host name": attempt(lambda: tcp(input["name"], other)),
        "udp": attempt(lambda: udp("127.0.0.1", ours)),
        "udp outside": attempt(lambda: udp("8.8.8.8", 53)),
        "abstract": attempt(lambda: abstract(input["abstract"])),
        "path": attempt(lambda: path("stream.sock")),
        "pair": attempt(lambda: pair("stream.sock")),
        "raw": attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP).close()),
        "packet": attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3).close()),
        "vsock": attempt(lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close()),
        "route": attempt(route),
        "mark": attempt(bind_device),
        "take over": attempt(lambda: socket.socket().bind(("127.0.0.1", port))),
        "proxies": {target: proxy(target) for target in input["targets"]},
    }

def granted(ctx, input):
    with socket.create_connection(("127.0.0.1", input["port"]), 5) as s:
        s.sendall(b"GET /granted HTTP/1.0\\r\\nHost: 127.0.0.1:%d\\r\\n\\r\\n" % input["port"])
        return s.recv(1000).decode().splitlines()[0]

handlers = {"look": look, "granted": granted}
"""


@contextmanager
def listeners(abstract: str) -> Iterator[tuple[int, int, list[bytes]]]:
    """A TCP server that was not granted, a UDP server, and an abstract socket; what they received."""
    tcp, udp, unix = socket.socket(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.socket(socket.AF_UNIX)
    received: list[bytes] = []
    tcp.bind(("127.0.0.1", 0))
    tcp.listen()
    udp.bind(("127.0.0.1", 0))
    udp.settimeout(0.05)
    unix.bind("\0" + abstract)
    unix.listen()
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            try:
                received.append(udp.recv(100))
            except TimeoutError:
                continue

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield tcp.getsockname()[1], udp.getsockname()[1], received
    finally:
        ended.set()
        thread.join()
        for made in (tcp, udp, unix):
            made.close()


async def test_a_grant_is_a_door_and_no_window(tmp_path: Path) -> None:
    abstract = f"gdn-test-{unused_port()}"
    with (
        pages() as (port, seen),
        listeners(abstract) as (other, udp, received),
        socket.socket(socket.AF_UNIX) as stream,
    ):
        network: Any = {"allow": [f"127.0.0.1:{port}"], "public": True}
        targets = [
            *(f"{name}:{other}" for name in ("127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0")),
            *(f"{name}:{other}" for name in ("0x7f.1", "2130706433", socket.gethostname())),
            "169.254.169.254:80",
            "10.0.0.1:443",
            "[64:ff9b::7f00:1]:443",
        ]
        tools = [
            make_tool(
                tmp_path, SOURCE, "look", "granted", name=name, sandbox=SandboxSpec(network=network, isolation=how)
            )
            for how, name in TOOLS.items()
        ]
        work = tmp_path / "work"
        work.mkdir()
        stream.bind(str(work / "stream.sock"))  # a program of the operator's, in the operator's folder
        stream.listen()
        async with bench(*tools) as host:
            arguments = {
                "port": port, "other": other, "udp": udp, "abstract": abstract, "name": socket.gethostname(),
                "targets": targets,
            }  # fmt: skip
            results = await asyncio.gather(
                *(host.call(f"{tool.name}__look", arguments, workdir=work) for tool in tools)
            )
            for result in results:
                assert result["status"] == "ok", result
                found = result["output"]
                assert found.pop("interfaces") == ["lo"]
                verdicts = found.pop("proxies")
                assert {name: said for name, said in verdicts.items() if said not in ("400", "403", "502")} == {}
                assert {what: seen_ for what, (seen_, _) in found.items() if seen_ != "refused"} == {}
            assert received == []
            assert seen == []
            # What was granted is reached, by several forked calls at once, and their receipts say so.
            calls = [host.start("c__granted", {"port": port}) for _ in range(3)]
            assert [(await waiter)["output"] for _, waiter in calls] == ["HTTP/1.1 200 OK"] * 3
            assert all(host.receipts[call_id]["jail"]["reached"] == [f"127.0.0.1:{port}"] for call_id, _ in calls)
