"""What `make conformance` makes of the package's findings, and what its forwarder does to a request."""

from __future__ import annotations

import socket

from scripts.conformance import PASSES, compared, head_of, merged, verdict
from tests.conformance.let_in import LetIn


def test_a_scenario_passes_when_no_check_of_it_failed() -> None:
    assert verdict([{"status": "SUCCESS"}, {"status": "SKIPPED"}]) == PASSES
    assert verdict([{"status": "SUCCESS"}, {"status": "FAILURE", "errorMessage": "no"}]) == "no"
    assert verdict([{"status": "FAILURE", "id": "a"}]) == "a"


def test_whatever_is_other_than_listed_is_said() -> None:
    known = {"a": PASSES, "b": "not offered", "c": PASSES, "d": "not offered"}
    assert compared("r", known, {"a": PASSES, "b": "Method not found", "c": PASSES, "d": "x"}) == []
    lines = compared("r", known, {"a": "broken", "b": PASSES, "c": PASSES, "e": PASSES})
    assert [line.split(":")[0] for line in lines] == ["r a", "r b", "r d", "r e"]


def test_reasons_are_kept_and_what_passes_is_named() -> None:
    known = {"r": {"a": "reason", "b": "reason", "c": PASSES}}
    assert merged(known, {"r": {"a": "found", "b": PASSES, "c": "found", "d": "found"}}) == {
        "r": {"a": "reason", "b": PASSES, "c": "found", "d": "found"}
    }
    assert head_of("# one\n# two\na: b\n") == "# one\n# two\n"


def test_only_its_own_address_is_renamed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        forwarder = LetIn(listening, 81, "token")
        for host, seen in (
            (f"localhost:{port}", "127.0.0.1:81"),
            ("evil.example", "evil.example"),
            (f"x.localhost:{port}",) * 2,
        ):
            head = f"POST /mcp HTTP/1.1\r\nHost: {host}\r\nX: a  \r\nConnection: keep-alive\r\nOrigin: http://{host}"
            lines = forwarder.rewritten(head.encode()).decode().split("\r\n")
            assert lines == [
                "POST /mcp HTTP/1.1",
                f"Host: {seen}",
                "X: a  ",
                f"Origin: http://{seen}",
                "Authorization: Bearer token",
                "Connection: close",
            ]
