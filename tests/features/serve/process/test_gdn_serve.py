"""`gdn serve` and `gdn run --serve`: where it listens, who may come in, how it begins and ends."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.kernel_fixture import Sandbox, sandbox, wait_until


@pytest.fixture(scope="module")
def kernel() -> Iterator[Sandbox]:
    with sandbox() as made:
        yield made


def told_by(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What a door says of itself when it is ready."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.stderr and process.stderr.read()
    told: dict[str, Any] = json.loads(line)
    return told | {"port": int(told["url"].rpartition(":")[2])}


@contextmanager
def door(kernel: Sandbox, *more: str) -> Iterator[dict[str, Any]]:
    process = kernel.popen("serve", "--port", "0", "--json", *more)
    try:
        yield told_by(process) | {"process": process}
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(30)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def asks(
    told: dict[str, Any],
    path: str = "/api/v1/nothing",
    token: str | None = None,
    address: str = "127.0.0.1",
    **headers: str,
) -> tuple[int, dict[str, Any]]:
    given = token or Path(told["tokenFile"]).read_text().split()[0]
    connection = http.client.HTTPConnection(address, told["port"], timeout=30)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {given}", **headers})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_alone_it_starts_the_swarm_and_serves_it_until_a_signal(kernel: Sandbox) -> None:
    with door(kernel) as told:
        token_file = Path(told["tokenFile"])
        assert told["url"].startswith("http://127.0.0.1:")
        assert token_file.stat().st_mode & 0o777 == 0o600
        assert asks(told)[0] == 404
        status, refused = asks(told, token="no-token-that-anybody-has")
        assert (status, refused["code"], refused["status"]) == (401, "E_DOOR_REFUSED", 401)
        assert kernel.ps(), "a swarm runs"
        token = token_file.read_text().strip()
        assert token not in Path(f"/proc/{told['pid']}/cmdline").read_text()
        _at_the_same_port(kernel, told)
        assert token_file.read_text().strip() == token
        told["process"].send_signal(signal.SIGINT)
        assert told["process"].wait(30) == 130
        assert not token_file.exists(), "the token goes with the door"
        assert token.encode() not in told["process"].stderr.read()
    wait_until(lambda: not kernel.ps(), what="the swarm ends with the last that used it")


def _at_the_same_port(kernel: Sandbox, told: dict[str, Any]) -> None:
    """A second door of the swarm, at the other address of loopback: neither takes the other one's token along."""
    with suppress(OSError), socket.socket(socket.AF_INET6) as free:  # else there is no IPv6, or the port is not free
        free.bind(("::1", told["port"]))
        free.close()
        with door(kernel, "--port", str(told["port"]), "--address", "::1") as other:
            assert other["tokenFile"] != told["tokenFile"]
            assert asks(told)[0] == 404


def test_beside_a_kernel_it_lives_and_ends_with_it(kernel: Sandbox) -> None:
    started = kernel.gdn("run", "--detach", "--serve=0", "--json")
    assert started.status == 0, started.err
    told = started.json["beside"]["serve"]
    told["port"] = int(told["url"].rpartition(":")[2])
    assert asks(told)[0] == 404
    row = next(row for row in kernel.gdn("ps", "--json").json if row["role"] == "beside")
    assert (row["name"], row["pid"]) == ("serve", told["pid"]) and told["url"] in row["status"]
    assert told["url"] in kernel.gdn("ps").out
    assert kernel.gdn("logs", "--role", "serve").status == 0
    joined = kernel.gdn("run", "--serve", input="hello\n")
    assert joined.status == 2 and "gdn serve" in joined.err
    fd = os.pidfd_open(told["pid"])
    try:
        kernel.gdn("restart")
        assert asks(told)[0] == 404, "a restart in place is not its end"
        kernel.gdn("stop")
        wait_until(lambda: not Path(told["tokenFile"]).exists())
    finally:
        os.close(fd)
    assert kernel.gdn("run", "--serve=x").status == 2
    talked = kernel.gdn("run", "--serve=0", input="hello\n")
    assert talked.status == 0 and "serve: http://127.0.0.1:" in talked.err, talked


def test_a_door_that_cannot_open_beside_a_kernel_is_an_error_and_the_kernel_stops(kernel: Sandbox) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for more in ((), ("--detach",)):
            done = kernel.gdn("run", f"--serve={taken.getsockname()[1]}", *more, input="hello\n")
            assert done.status == 2 and "E_USAGE" in done.err and "Traceback" not in done.err, done
    assert not kernel.ps()


def test_what_cannot_be_served_is_one_error(kernel: Sandbox, tmp_path: Path) -> None:
    for words in (
        ("--address", "0.0.0.0"),
        ("--address", "no.such.address.invalid", "--token-file", str(tmp_path / "none")),
        ("--token-file", "/nowhere/at/all"),
    ):
        done = kernel.gdn("serve", *words)
        assert done.status == 2, (words, done)
        assert "E_USAGE" in done.err and "Traceback" not in done.err, words


def own_address() -> str:
    """An address of this machine that others can reach, else one of loopback that a door takes for such a one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found, suppress(OSError):
        found.connect(("198.51.100.1", 9))  # for documentation (RFC 5737); it only asks for the route, nothing is sent
        return str(found.getsockname()[0])
    return "127.0.0.2"


def test_at_an_address_for_others_it_wants_a_token_file_and_answers_there_alone(
    kernel: Sandbox, tmp_path: Path
) -> None:
    own, token = own_address(), "looker-0123456789"
    tokens = tmp_path / "tokens"
    tokens.write_text(f"other look {token} *\n")
    tokens.chmod(0o600)
    for address in (own, "0.0.0.0"):
        with socket.create_server((address, 0)) as free:
            port = free.getsockname()[1]
        refused = kernel.gdn("serve", "--address", address, "--port", str(port))
        assert refused.status == 2 and "can be reached from other machines" in refused.err, refused
        assert "Give --token-file as well, or leave out --address." in refused.err
        with pytest.raises(ConnectionRefusedError):
            asks({"port": port}, token=token, address=own)
        with door(kernel, "--address", address, "--token-file", str(tokens), "--host", "swarm.example") as told:
            assert told["url"] == f"http://{address}:{told['port']}"
            for host in (f"{own}:{told['port']}", "swarm.example", f"swarm.example:{told['port']}"):
                assert asks(told, token=token, address=own, Host=host)[0] == 404, host
                assert asks(told, token="not-the-right-one-0", address=own, Host=host)[0] == 401, host
            for host in (own, "other.example", f"other.example:{told['port']}"):
                status, error = asks(told, token=token, address=own, Host=host)
                assert (status, error["code"]) == (421, "E_DOOR_REFUSED"), host
            if address == own:
                with pytest.raises(ConnectionRefusedError):
                    asks(told, token=token)
            else:
                assert asks(told, token=token)[0] == 404
