"""The page's files, which need no token, and how a person comes in: in one process, byte by byte."""

from __future__ import annotations

import json
import socket
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from goondan.features.page import door as page_door
from goondan.features.page.door import static
from goondan.features.serve.api.routing import ways
from goondan.features.serve.api.rules.callers import parse
from goondan.features.serve.api.swarm import Swarm
from goondan.kernel.cli.state import BundleTarget
from tests.features.serve.doors import LINES, LOOK, OPERATE, TALK, InProcess, in_process, status
from tests.kernel_fixture import wait_until


@dataclass
class Page:
    """A door with the page."""

    door: InProcess

    def asks(self, path: str, method: str = "GET", token: str = "", body: Any = None, **more: str) -> tuple[int, Any]:
        """The status and the document of an answer."""
        data = b"" if body is None else json.dumps(body).encode()
        if method == "POST":
            more |= {"Content_Type": "application/json", "Content_Length": str(len(data))}
        head = self.door.head(path, method, token, **(more if token else {"Authorization": "", **more}))
        answer = self.door.asks(head + data)
        return status(answer), json.loads(answer.partition(b"\r\n\r\n")[2])

    def code(self, kind: str = "look", token: str = OPERATE) -> str:
        found, told = self.asks("/page/api/codes", "POST", token, {"kind": kind})
        assert found == 200
        code: str = told["code"]
        return code

    def session(self, token: str) -> tuple[int, Any]:
        return self.asks("/page/api/session", "POST", token)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    swarm = Swarm(BundleTarget(str(tmp_path / "goondan.yaml"), str(tmp_path)))
    with in_process(ways([page_door], swarm), callers=swarm.callers) as door:
        yield Page(door)


def test_the_page_loads_without_a_token_and_says_what_it_may_do(page: Page) -> None:
    head, _, body = page.door.asks(page.door.head("/page/", token="", Authorization="")).partition(b"\r\n\r\n")
    assert status(head) == 200 and body == (static.FILES / "index.html").read_bytes()
    assert b"content-type: text/html" in head and b"cache-control: no-store" in head
    for said in (b"default-src 'none'", b"require-trusted-types-for 'script'", b"frame-ancestors 'none'"):
        assert said in head
    assert b"referrer-policy: no-referrer" in head and b"cross-origin-opener-policy: same-origin" in head
    assert b"cross-origin-resource-policy: same-origin" in head and b"x-content-type-options: nosniff" in head


def test_every_file_is_served_and_nothing_beside_them(page: Page) -> None:
    for path in static.FILES.rglob("*"):
        name, wanted = path.relative_to(static.FILES), path.suffix in static.TYPES
        if path.is_file() and path.name != "index.html":
            answer = page.door.asks(page.door.head(f"/page/{name}", Authorization=""))
            assert status(answer) == (200 if wanted else 401), name
    for other in ("/page/../__init__.py", "/page/%2e%2e/__init__.py", "/page/vendor/", "/page/x.js", "/page/api/codes"):
        assert page.asks(other)[0] in (400, 401), other
    assert page.asks("/page/", "POST")[0] == 401, "it is only read"


def test_the_digest_of_the_script_in_the_page_is_allowed_and_no_other() -> None:
    script = b'{"imports": {"preact": "./vendor/preact.js"}}'
    allowed = static.policy(b'<html><script type="importmap">' + script + b'</script><script src="x.js"></script>')
    digest = b64encode(sha256(script).digest()).decode()
    assert f"script-src 'self' 'sha256-{digest}';" in allowed and allowed.count("sha256-") == 1


def test_a_link_of_another_site_opens_the_page_and_nothing_else_loads_it(page: Page) -> None:
    followed = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}

    def loads(path: str = "/page/", **more: str) -> int:
        return status(page.door.asks(page.door.head(path, **{"Authorization": "", **more})))

    assert loads(**followed) == 200
    assert loads(**followed | {"Sec_Fetch_Dest": "iframe"}) == 403
    assert loads(**followed | {"Sec_Fetch_Mode": "no-cors", "Sec_Fetch_Dest": "script"}) == 403
    assert loads(**followed | {"Origin": "http://evil.example"}) == 403
    assert loads(Host="evil.example") == 421
    assert loads("/page/api/live", **followed, Authorization=f"Bearer {OPERATE}") == 403, "what needs a token"


def test_who_loads_files_stays_a_stranger_until_it_shows_a_token(page: Page) -> None:
    def strangers(*requests: bytes) -> int:
        with socket.create_connection(("127.0.0.1", page.door.port), timeout=20) as stream:
            for request in requests:
                stream.sendall(request)
                assert stream.recv(1 << 16)
            (connection,) = page.door.connections
            return len(connection.room._strangers)

    loads = page.door.head("/page/", Authorization="", Connection="")
    assert strangers(loads, loads) == 1
    wait_until(lambda: not page.door.connections, what="the connection is closed")
    assert strangers(loads, page.door.head("/page/api/nothing", Connection="")) == 0


def test_a_code_opens_a_session_once_and_nothing_else(page: Page) -> None:
    code = page.code()
    assert page.asks("/page/api/codes", "POST", code, {"kind": "act"})[0] == 401
    found, told = page.session(code)
    assert found == 200 and told["role"] == "look"
    assert page.session(code)[0] == 401
    assert page.session("abcd-efgh-2345")[0] == 401 and page.session("")[0] == 401
    assert page.session(told["token"]) == (200, {"token": None, "role": "look"}), "a token says what it may do"
    assert page.session(TALK) == (200, {"token": None, "role": "talk"})


def test_only_a_token_of_the_door_that_operates_makes_codes(page: Page) -> None:
    looks, acts = (page.session(page.code(kind))[1]["token"] for kind in ("look", "act"))
    for token, why in ((looks, "needs the role"), (acts, "makes no codes"), (LOOK, "needs the role")):
        found, told = page.asks("/page/api/codes", "POST", token, {"kind": "look"})
        assert found == 403 and why in told["detail"]
    assert page.asks("/page/api/codes", "POST", OPERATE, {"kind": "talk"})[0] == 400
    assert page.asks("/page/api/codes", "POST", "", {"kind": "look"})[0] == 401


def test_what_a_token_has_let_in_goes_with_it(page: Page) -> None:
    looks = page.session(page.code())[1]["token"]
    assert page.session(looks)[0] == 200
    without = "\n".join(line for line in LINES.splitlines() if OPERATE not in line)
    page.door.gate.replace(parse(without))
    assert page.session(looks)[0] == 401
    page.door.gate.replace(parse(LINES))
    acts = page.session(page.code("act"))[1]["token"]
    assert page.session(acts)[0] == 200
    page.door.gate.replace(parse(LINES.replace("owner operate", "owner talk")))
    assert (page.session(acts)[0], page.session(looks)[0]) == (401, 200), "neither may do more than its maker"
    page.door.gate.replace(parse(LINES.replace(f"{OPERATE} *", f"{OPERATE} main")))
    assert page.session(acts)[0] == page.session(looks)[0] == 401, "nor for more agents"
