"""What a grant looks like inside a jail, how refusals are worded, and that messages arrive as they were sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.schemas.worker.hosts import network, parse_rule, read_network
from goondan.schemas.worker.worker_frames import WorkerError
from goondan.toolhost.calls.results import with_denial, without_network
from goondan.toolhost.traffic import messages
from goondan.toolhost.traffic.messages import Close, Denied, Failed, Open, Reached, Settle, Settled
from goondan.toolhost.traffic.rules import Listener, hosts_entries, judge, lay_out, unconnected, unheard


def test_exact_names_get_addresses_and_lines() -> None:
    layout = lay_out(read_network({"allow": ["db.example.org:5432", "db.example.org:5433", "api.example.org:443"]}))
    assert layout.addresses == {"api.example.org": "127.42.0.2", "db.example.org": "127.42.0.3"}
    assert layout.hosts.splitlines()[-2:] == ["127.42.0.2 api.example.org", "127.42.0.3 db.example.org"]
    assert layout.listeners == (
        Listener("dns", "127.42.0.1", 53),
        Listener("direct", "127.42.0.2", 443, "api.example.org"),
        Listener("direct", "127.42.0.3", 5432, "db.example.org"),
        Listener("direct", "127.42.0.3", 5433, "db.example.org"),
    )
    assert layout.environment == {}


def test_addresses_are_listened_on_themselves() -> None:
    layout = lay_out(read_network({"allow": ["10.1.2.3:22", "[2001:db8::1]:22", "localhost:80", "127.0.0.1:80"]}))
    assert {(item.address, item.port) for item in layout.listeners if item.kind == "direct"} == {
        ("10.1.2.3", 22), ("2001:db8::1", 22), ("127.0.0.1", 80), ("::1", 80),
    }  # fmt: skip
    assert "127.42.0.2" not in layout.hosts


@pytest.mark.parametrize("value", ["public", {"allow": ["*.example.org:443"]}, {"confined": ["a.example.org:443"]}])
def test_patterns_and_public_go_through_the_proxy(value: object) -> None:
    layout = lay_out(read_network(value))
    assert [item.kind for item in layout.listeners] == ["dns", "proxy"]
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        assert layout.environment[name] == "http://127.42.0.1:3128"
    assert layout.environment["NO_PROXY"] == layout.environment["no_proxy"] == ""


def test_many_names_have_an_address_each() -> None:
    layout = lay_out(network(parse_rule(f"h{number}.example.org:443") for number in range(600)))
    assert len(set(layout.addresses.values())) == 600
    assert all(address.startswith("127.42.") for address in layout.addresses.values())


def test_a_refusal_says_what_was_granted() -> None:
    net = read_network({"allow": ["a.example.org:443", "*.b.example.org:443"]})
    assert judge(net, "evil.example", 443) == "it was not granted; granted: a.example.org:443, *.b.example.org:443"
    assert not isinstance(judge(net, "x.b.example.org", 443), str)
    assert "not granted" in unheard(net, "evil.example")
    assert "HTTP proxy" in unheard(net, "x.b.example.org")
    assert "HTTP proxy" in unconnected(read_network("public"), "8.8.8.8", 443)
    assert unconnected(read_network("public"), "127.0.0.1", 443) == "it is this machine itself"
    assert "not granted" in unconnected(net, "8.8.8.8", 443)


def test_a_hosts_file() -> None:
    text = "127.0.0.1 localhost  # me\n\n#10.0.0.1 no\n10.0.0.2\tDB db.example.org.\n10.0.0.3 db\n"
    assert hosts_entries(text) == {
        "localhost": {"127.0.0.1"}, "db": {"10.0.0.2", "10.0.0.3"}, "db.example.org": {"10.0.0.2"},
    }  # fmt: skip


@pytest.mark.parametrize(
    "message",
    [
        Open(3, read_network({"allow": ["a.test:1"]}), (Listener("direct", "127.42.0.2", 1, "a.test"),), {"a": "b"}),
        Close(3), Settle(3, 4), Settled(3, 4), Reached(3, "a", 1), Denied(3, "a", 0, "why"), Failed(3, "a", 1, "why"),
    ],
)  # fmt: skip
def test_messages_arrive_as_they_were_sent(message: messages.Message) -> None:
    assert messages.decode(messages.encode(message)) == message


@given(st.binary(max_size=60) | st.sampled_from([b'{"kind":"Close"}', b'{"kind":"Denied","jail":1}', b"[]", b"{}"]))
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        messages.decode(data)


# --- the error that a caller sees


def test_a_denial_becomes_the_code_of_a_failed_connection() -> None:
    error = WorkerError(name="ConnectError", message="[Errno 111] Connection refused")
    denied = [Denied(1, "evil.example", 0, "it was not granted; granted: none")]
    shown = with_denial(error, denied)
    assert (shown.name, shown.code) == ("ConnectError", "E_SANDBOX_DENIED")
    assert shown.message.startswith("evil.example is not reachable from this sandbox: it was not granted")
    assert shown.message.endswith("([Errno 111] Connection refused)")
    assert "evil.example:PORT" in (shown.suggestion or "")


def test_the_denial_that_the_error_names_is_the_one() -> None:
    denied = [Denied(1, "a.example", 80, "first"), Denied(1, "b.example", 80, "second")]
    assert with_denial(WorkerError(name="E", message="cannot reach a.example"), denied).message.startswith(
        "a.example:80"
    )
    assert with_denial(WorkerError(name="E", message="no"), denied).message.startswith("b.example:80")


def test_an_error_with_a_cause_of_its_own_keeps_it() -> None:
    error = WorkerError(name="FileNotFoundError", message="no such file", code="ENOENT")
    assert with_denial(error, [Denied(1, "a.example", 80, "x")]) is error
    plain = WorkerError(name="ValueError", message="no")
    assert with_denial(plain, []) is plain
    assert without_network(plain) is plain
    refused = WorkerError(name="OSError", message="unreachable", code="ENETUNREACH")
    assert without_network(refused).code == "E_SANDBOX_DENIED"
