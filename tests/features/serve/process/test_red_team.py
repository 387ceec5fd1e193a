"""The red team: what an attacker tries at a door that runs, byte by byte over sockets. Nothing of it may succeed.

What depends on time and bounds (slow heads and bodies, streams that nobody reads, thousands of connections) is tried
with small bounds in `test_gate.py`; what a page in a browser can do, in `test_foreign_page.py`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.features.serve.doors import LINES, LOOK, OPERATE, TALK, asks, head, status
from tests.features.serve.process.test_gdn_serve import told_by
from tests.kernel_fixture import BUNDLE, Sandbox, sandbox, wait_until

#: Two agents: the tokens `look` and `talk` lead to main only.
TWO = BUNDLE.replace(
    "kind: Swarm",
    "kind: Agent\nmetadata: {name: secret}\nspec: {modelConfig: {modelRef: Model/console}}\n---\n"
    "apiVersion: goondan.ai/v1\nkind: Swarm",
).replace("agents: [{ref: Agent/main}]", "agents: [{ref: Agent/main}, {ref: Agent/secret}]")
SEND = "/api/v1/messages"
EVIL = "http://evil.example"


class Door(NamedTuple):
    """A door that runs."""

    kernel: Sandbox
    port: int
    pid: int
    token_file: Path
    log: Path


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    with sandbox(TWO) as kernel:
        token_file, log = kernel.home / "tokens", kernel.home / "door.log"
        token_file.write_text(LINES)
        token_file.chmod(0o600)
        with log.open("wb") as stderr:
            process = kernel.popen("serve", "--port=0", "--json", "--log", f"--token-file={token_file}", stderr=stderr)
        told = told_by(process)
        yield Door(kernel, told["port"], told["pid"], token_file, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
        said = log.read_bytes()
        assert process.stdout is not None
        process.stdout.close()
        for token in (LOOK, TALK, OPERATE):
            assert token.encode() not in said, "no token stands in a log"
        assert b"Traceback" not in said and b"E_INTERNAL" not in said


def body(text: str, agent: str = "main", **more: Any) -> bytes:
    return json.dumps({"text": text, "agent": agent, "instance": "red", **more}, ensure_ascii=False).encode()


def posted(door: Door, data: bytes, token: str = TALK, path: str = SEND, **more: str) -> bytes:
    lines = {"Content_Type": "application/json", "Content_Length": str(len(data))} | more
    return asks(door.port, head(door.port, path, "POST", token, **lines) + data)


def got(door: Door, path: str = "/api/v1/openapi.json", token: str = LOOK, method: str = "GET", **more: str) -> bytes:
    return asks(door.port, head(door.port, path, method, token, **more))


def raw(door: Door, text: bytes) -> bytes:
    return asks(door.port, text.replace(b"PORT", str(door.port).encode()).replace(b"TOKEN", TALK.encode()))


HEAD = b"Host: 127.0.0.1:PORT\r\nAuthorization: Bearer TOKEN\r\n"
#: name, the attempt, the statuses that may answer it (0: the connection is closed)
ATTEMPTS: list[tuple[str, Callable[[Door], bytes], tuple[int, ...]]] = [
    # a page of somebody else in the browser of the swarm's owner
    ("a form that another site posts", lambda d: posted(
        d, b"text=hi", token="", Origin=EVIL, Content_Type="application/x-www-form-urlencoded"), (403,)),
    ("a form without Origin, of another site", lambda d: posted(
        d, body("hi"), Sec_Fetch_Site="cross-site", Content_Type="text/plain"), (403,)),
    ("a form as plain text", lambda d: posted(d, body("hi"), Content_Type="text/plain"), (400, 415)),
    ("a form with the token's user name", lambda d: got(d, token="", Cookie=f"token={LOOK}"), (401,)),
    ("DNS rebinding", lambda d: got(d, Host=f"evil.example:{d.port}"), (421,)),
    ("DNS rebinding to the wrong port", lambda d: got(d, Host="127.0.0.1:80"), (421,)),
    ("a proxy's word for the host", lambda d: got(d, Host="evil.example", X_Forwarded_Host="127.0.0.1"), (421,)),
    ("Origin: null", lambda d: got(d, Origin="null"), (403,)),
    ("an origin that begins like ours", lambda d: got(d, Origin=f"http://127.0.0.1:{d.port}.evil.example"), (403,)),
    ("an EventSource of another site", lambda d: got(d, Accept="text/event-stream", Origin=EVIL), (403,)),
    ("a preflight", lambda d: got(
        d, SEND, method="OPTIONS", token="", Origin=EVIL, Access_Control_Request_Method="POST"), (403, 405)),
    # tokens
    ("no token", lambda d: got(d, token=""), (401,)),
    ("a token in the query", lambda d: got(d, f"/api/v1/openapi.json?token={LOOK}"), (400,)),
    ("a token in the query alone", lambda d: got(d, f"/api/v1/openapi.json?access%5Ftoken={LOOK}", token=""), (400,)),
    ("another scheme", lambda d: got(d, Authorization=f"Basic {LOOK}"), (401,)),
    ("two tokens", lambda d: raw(
        d, b"GET /api/v1/openapi.json HTTP/1.1\r\n" + HEAD + b"Authorization: Bearer TOKEN\r\n\r\n"), (401,)),
    ("the beginning of a token", lambda d: got(d, token=LOOK[:-1]), (401,)),
    ("a token of another case", lambda d: got(d, token=LOOK.upper()), (401,)),
    ("a token with something behind it", lambda d: got(d, token=LOOK + "\t\t,"), (401,)),
    ("a very long token", lambda d: got(d, token=LOOK * 400), (401,)),
    # one request in two
    ("TE with CL", lambda d: posted(d, b"0\r\n\r\nGET / HTTP/1.1\r\n\r\n", Transfer_Encoding="chunked"), (400,)),
    ("two lengths", lambda d: raw(
        d, b"POST /api/v1/messages HTTP/1.1\r\n" + HEAD + b"Content-Length: 3\r\nContent-Length: 5\r\n\r\nabc"),
        (400,)),
    ("a length with a sign", lambda d: posted(d, body("x"), Content_Length="+5"), (400,)),
    ("another transfer coding", lambda d: posted(
        d, b"", Content_Length="", Transfer_Encoding="gzip, chunked"), (400, 501)),
    ("a disguised transfer coding", lambda d: posted(
        d, b"0\r\n\r\n", Content_Length="", Transfer_Encoding="\x0bchunked"), (0, 400, 501)),
    ("a name with a blank behind it", lambda d: raw(
        d, b"GET / HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding : chunked\r\n\r\n"), (400,)),
    ("a header in two lines", lambda d: raw(
        d, b"GET / HTTP/1.1\r\nHost: evil.example\r\n 127.0.0.1:PORT\r\nAuthorization: Bearer TOKEN\r\n\r\n"),
        (400, 421)),
    ("HTTP/1.0", lambda d: raw(d, b"GET / HTTP/1.0\r\n" + HEAD + b"\r\n"), (505,)),
    ("HTTP/2 without a word before", lambda d: raw(d, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), (0, 400, 505)),
    ("HTTP/0.9", lambda d: raw(d, b"GET /\r\n\r\n"), (505,)),
    ("TLS", lambda d: raw(d, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64 + b"\r\n\r\n"), (0, 400)),
    ("an absolute target", lambda d: got(d, f"http://127.0.0.1:{d.port}/api/v1/openapi.json"), (400,)),
    ("an absolute target of somebody else", lambda d: got(d, "http://evil.example/"), (400,)),
    ("a tunnel", lambda d: raw(d, b"CONNECT evil.example:443 HTTP/1.1\r\n" + HEAD + b"\r\n"), (400, 405)),
    ("an upgrade", lambda d: got(d, Connection="upgrade", Upgrade="websocket"), (400,)),
    ("another method by a header", lambda d: got(d, f"{SEND}/x", X_HTTP_Method_Override="DELETE"), (404,)),
    # paths and heads
    ("steps in a path", lambda d: got(d, "/api/v1/../../etc/passwd"), (400,)),
    ("escaped steps", lambda d: got(d, "/api/v1/%2e%2e/%2e%2e/etc/passwd"), (400,)),
    ("steps that are escaped twice", lambda d: got(d, "/api/v1/%252e%252e/etc/passwd"), (404,)),
    ("overlong UTF-8", lambda d: got(d, "/api/v1/%c0%ae%c0%ae/"), (400,)),
    ("NUL in a path", lambda d: got(d, "/api/v1/openapi.json%00.txt"), (400,)),
    ("NUL in the target", lambda d: raw(d, b"GET /\0 HTTP/1.1\r\n" + HEAD + b"\r\n"), (0, 400)),
    ("a line end in a path", lambda d: got(d, "/api/v1/x%0d%0aSet-Cookie:%20a=b"), (400,)),
    ("a line end in a header", lambda d: posted(d, body("x"), Idempotency_Key="a\rSet-Cookie: a=b"), (0, 400)),
    ("a huge header", lambda d: got(d, Accept="x" * (1 << 20)), (0, 400, 431)),
    ("many headers", lambda d: raw(d, b"GET / HTTP/1.1\r\n" + HEAD + b"A: b\r\n" * 1000 + b"\r\n"), (400,)),
    ("a huge path", lambda d: got(d, "/" + "a" * 30_000), (400,)),
    # bodies
    ("100 MB that are announced", lambda d: posted(
        d, b"", Content_Length=str(100 << 20), Expect="100-continue"), (413,)),
    ("100 MB that are not", lambda d: posted(
        d, (b"100000\r\n" + b" " * (1 << 20) + b"\r\n") * 100, Content_Length="", Transfer_Encoding="chunked"),
        (0, 413)),
    ("a huge extension of a chunk", lambda d: posted(
        d, b"1;" + b"a" * (1 << 20), Content_Length="", Transfer_Encoding="chunked"), (0, 400)),
    ("a chunk of a huge size", lambda d: posted(
        d, b"f" * 40 + b"\r\n", Content_Length="", Transfer_Encoding="chunked"), (0, 400)),
    ("a packed body", lambda d: posted(d, b"\x1f\x8b\x08", Content_Encoding="gzip"), (415,)),
    ("broken UTF-8", lambda d: posted(d, b'{"agent":"main","text":"\xff\xfe\xc3"}'), (400,)),
    ("lone surrogates", lambda d: posted(d, b'{"agent":"main","text":"\\ud800"}'), (400,)),
    ("100,000 brackets", lambda d: posted(d, b'{"files":' + b"[" * 100_000), (400,)),
    ("100,000 brackets where anything goes", lambda d: posted(d, b'{"x":' + b"[" * 100_000 + b"]" * 100_000), (400,)),
    ("a number of 100,000 digits", lambda d: posted(d, b'{"text":"x","timeoutS":' + b"9" * 100_000 + b"}"), (400,)),
    ("an infinite number", lambda d: posted(d, b'{"agent":"main","text":"x","timeoutS":1e999}'), (400,)),
    ("a number that is none", lambda d: posted(d, b'{"agent":"main","text":"x","timeoutS":NaN}'), (400,)),
    ("an unknown field", lambda d: posted(d, body("x", role="operate")), (400,)),
    # more than the token gives
    ("look sends", lambda d: posted(d, body("x"), token=LOOK), (403,)),
    ("look cancels", lambda d: posted(d, b"", token=LOOK, path=f"{SEND}/x/cancel"), (403,)),
    ("talk chooses a folder", lambda d: posted(d, body("x", workdir="/")), (403,)),
    ("talk to another agent", lambda d: posted(d, body("x", "secret")), (403,)),
    ("an agent given twice", lambda d: posted(d, b'{"agent":"main","text":"x","agent":"secret"}'), (400, 403)),
    ("an agent of another case", lambda d: posted(d, body("x", "MAIN")), (403,)),
    ("an agent in wide letters", lambda d: posted(d, body("x", "\uff4dain")), (403,)),
    ("an agent with an escape", lambda d: posted(d, body("x", "%73ecret")), (403,)),
    ("an agent behind steps", lambda d: posted(d, body("x", "main/../secret")), (403,)),
    ("an agent behind NUL", lambda d: posted(d, body("x", "main\0secret")), (403,)),
    ("an agent of the kernel's own", lambda d: posted(d, body("x", "_operator"), token=OPERATE), (403,)),
    ("an agent as a pattern", lambda d: posted(d, body("x", "*")), (403,)),
    # A key may have any signs. Where it leads is looked at behind all attempts.
    ("an instance behind steps", lambda d: posted(d, body("x", instance="../secret/red")), (200, 400)),
    ("an escape sequence that is echoed", lambda d: posted(d, body("x", "\x1b]0;owned\x07")), (403,)),
    ("an escape sequence as a key", lambda d: posted(d, body("x"), Idempotency_Key="\x1b[2J"), (0, 400)),
    ("a position that is none", lambda d: posted(
        d, body("x"), Accept="text/event-stream", Last_Event_ID="9" * 5000), (400,)),
]  # fmt: skip


@pytest.mark.parametrize(("attempt", "wanted"), [one[1:] for one in ATTEMPTS], ids=[one[0] for one in ATTEMPTS])
def test_an_attempt_fails(door: Door, attempt: Callable[[Door], bytes], wanted: tuple[int, ...]) -> None:
    answer = attempt(door)
    assert status(answer) in wanted, answer[:500]
    assert b"Traceback" not in answer and b"\x1b" not in answer and b"\x07" not in answer
    assert b"set-cookie" not in answer.lower().split(b"\r\n\r\n")[0]
    assert b"access-control-" not in answer.lower()
    for token in (LOOK, TALK, OPERATE):
        assert token.encode() not in answer, "no token is echoed"


def test_the_door_is_as_it_was(door: Door) -> None:
    """Behind all attempts: it works, nobody has reached the other agent, and it has not grown."""
    answer = posted(door, body("hello"))
    assert status(answer) == 200, answer
    assert not list(door.kernel.home.glob("state/workspaces/*/instances/secret/*"))
    pages = int(Path(f"/proc/{door.pid}/statm").read_text().split()[1])
    assert pages * os.sysconf("SC_PAGE_SIZE") < 250 << 20


def test_a_key_of_another_token_is_another_message(door: Door) -> None:
    key = "the-same-key"
    first = posted(door, body("mine"), Idempotency_Key=key)
    again = posted(door, body("mine"), Idempotency_Key=key)
    other = posted(door, body("theirs"), token=OPERATE, Idempotency_Key=key)
    assert status(first) == status(again) == status(other) == 200
    ids = [json.loads(answer.partition(b"\r\n\r\n")[2])["eventId"] for answer in (first, again, other)]
    assert ids[0] == ids[1] != ids[2]
    assert status(posted(door, body("changed"), Idempotency_Key=key)) == 409
    assert status(posted(door, b"", path=f"{SEND}/{ids[2]}/cancel")) == 403, "nor is it cancelled"


def test_what_another_agent_was_told_is_not_read(door: Door) -> None:
    told = posted(door, body("private words", "secret"), token=OPERATE)
    event_id = json.loads(told.partition(b"\r\n\r\n")[2])["eventId"]
    for path in (f"{SEND}/{event_id}", f"{SEND}/{event_id}?agent=secret&instance=red", f"{SEND}/{event_id}/stream"):
        answer = got(door, path)
        assert status(answer) == 403, path
        assert b"private words" not in answer
    answer = got(door, f"{SEND}/{event_id}?agent=main&instance=red")
    assert b"private words" not in answer


def test_the_time_of_an_answer_does_not_tell_how_much_of_a_token_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By what is compared: digests, all of them, whichever fits, with the function that takes always as long."""
    from goondan.features.serve.api.rules import callers

    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr("hmac.compare_digest", compare)
    tokens = callers.parse(LINES)
    for token in (LOOK, TALK, OPERATE, LOOK[:-1], ""):
        compared.clear()
        tokens.known(callers.digest_of(token.encode()))
        assert len(compared) == 3
        assert {len(part) for pair in compared for part in pair} == {32}


def test_a_token_file_that_others_can_touch_is_refused_from_the_start(door: Door, tmp_path: Path) -> None:
    good = tmp_path / "tokens"
    good.write_text(LINES)
    link, folder = tmp_path / "link", tmp_path / "folder"
    link.symlink_to(good)
    folder.mkdir(mode=0o700)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for mode in (0o644, 0o640, 0o606, 0o622):
        good.chmod(mode)
        _refused(door, good)
    good.chmod(0o600)
    for path in (link, folder, tmp_path / "pipe", tmp_path / "none"):
        _refused(door, path)
    if os.geteuid() == 0:
        os.chown(good, 65534, 65534)
        _refused(door, good)


def _refused(door: Door, path: Path) -> None:
    done = door.kernel.gdn("serve", "--port=0", f"--token-file={path}")
    assert done.status == 2 and "E_USAGE" in done.err, (path, done)
    assert TALK not in done.err + done.out


def test_a_token_that_has_gone_from_the_file_is_none(door: Door) -> None:
    with socket.create_connection(("127.0.0.1", door.port), timeout=30) as held:
        held.sendall(head(door.port, "/api/v1/openapi.json", token=LOOK, Connection="keep-alive"))
        assert b"HTTP/1.1 401" not in held.recv(1 << 20)
        _write(door, LINES.replace(LOOK, "another-0123456789abcdef"))
        wait_until(lambda: status(got(door)) == 401, what="the token is none any more")
        assert status(got(door, token=TALK)) != 401
        held.sendall(head(door.port, "/api/v1/openapi.json", token=LOOK))
        came = b""
        while chunk := held.recv(1 << 16):
            came += chunk
        assert b"HTTP/1.1 401" in came, "on a connection that was open before, too"
    _write(door, LINES)
    os.kill(door.pid, signal.SIGHUP)
    wait_until(lambda: status(got(door)) != 401, what="it is one again")


def test_a_file_that_was_opened_to_others_or_is_rubbish_lets_nobody_in(door: Door) -> None:
    for text, mode in ((LINES, 0o644), ("phone operate " + TALK, 0o600)):
        _write(door, text)
        door.token_file.chmod(mode)
        if mode == 0o600:
            os.kill(door.pid, signal.SIGHUP)
        wait_until(lambda: status(got(door, token=OPERATE)) == 401, what="nobody comes in")
        _write(door, LINES)
        os.kill(door.pid, signal.SIGHUP)
        wait_until(lambda: status(got(door, token=OPERATE)) != 401, what="they come in again")


def _write(door: Door, text: str) -> None:
    """As an editor does that replaces the file."""
    new = door.token_file.with_suffix(".new")
    new.write_text(text)
    new.chmod(0o600)
    new.replace(door.token_file)


def test_a_kernel_that_is_gone_is_said_and_the_next_one_is_found(door: Door) -> None:
    door.kernel.gdn("stop")
    answer = posted(door, body("hello"), Prefer="respond-async")
    assert status(answer) == 503 and b"E_KERNEL_" in answer, answer
    door.kernel.detach()
    until = time.monotonic() + 30
    while status(posted(door, body("hello"))) != 200:
        assert time.monotonic() < until
