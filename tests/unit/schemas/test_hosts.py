"""Hosts, rules and networks: one spelling each, and merging that never gives more than both sides allow."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.schemas.worker.hosts import (
    ANY_PORT,
    NO_NETWORK,
    BadHost,
    Network,
    Rule,
    beyond,
    is_address,
    join,
    meet,
    network,
    parse_host,
    parse_host_port,
    parse_login_rule,
    parse_rule,
    read_network,
    write_network,
)

# Few names and ports, so that rules often meet.
_HOSTS = ["example.org", "a.example.org", "b.a.example.org", "other.test", "10.0.0.1", "::1", "localhost"]
_DOMAINS = ["example.org", "a.example.org", "other.test"]
_PORTS = [80, 443]
_rules = st.one_of(
    st.builds(Rule, st.sampled_from(_HOSTS), st.sampled_from(_PORTS), st.just(False), st.booleans()),
    st.builds(Rule, st.sampled_from(_DOMAINS), st.sampled_from(_PORTS), st.just(True), st.just(True)),
    st.builds(Rule, st.sampled_from(["::1", "localhost"]), st.just(ANY_PORT), st.just(False), st.booleans()),
)
_networks = st.builds(lambda rules, public: network(rules, public=public), st.lists(_rules, max_size=6), st.booleans())
_targets = st.tuples(st.sampled_from([*_HOSTS, "c.other.test"]), st.sampled_from([*_PORTS, 22]))


def power(net: Network, target: tuple[str, int]) -> int:
    """What a network lets a request do: 0 nothing, 1 public addresses, 2 private ones too."""
    rule = net.rule_for(*target)
    return 0 if rule is None else 1 if rule.confined else 2


@given(_networks, _networks, _targets)
def test_what_both_allow_is_the_lesser_of_the_two(a: Network, b: Network, target: tuple[str, int]) -> None:
    assert power(meet(a, b), target) == min(power(a, target), power(b, target))
    assert power(join(a, b), target) == max(power(a, target), power(b, target))


@given(_networks, _networks, _networks)
def test_merging_is_commutative_associative_and_idempotent(a: Network, b: Network, c: Network) -> None:
    for merge in (meet, join):
        assert merge(a, b) == merge(b, a)
        assert merge(merge(a, b), c) == merge(a, merge(b, c))
        assert merge(a, a) == a
    assert meet(a, join(a, b)) == a
    assert join(a, meet(a, b)) == a
    assert meet(a, NO_NETWORK) == NO_NETWORK
    assert join(a, NO_NETWORK) == a


@given(_networks, _networks)
def test_nothing_of_what_both_allow_is_beyond_either(a: Network, b: Network) -> None:
    assert beyond(meet(a, b), a) == beyond(meet(a, b), b) == []
    assert beyond(a, join(a, b)) == []


@given(_networks)
def test_a_network_reads_back_as_it_was_written(net: Network) -> None:
    assert read_network(write_network(net)) == net


def test_what_goes_beyond_is_named() -> None:
    asked = read_network({"allow": ["api.example.org:443", "*.other.test:80", "10.0.0.1:22"]})
    given_ = read_network({"allow": ["*.example.org:443"]})
    assert beyond(asked, given_) == ["10.0.0.1:22", "*.other.test:80"]
    assert beyond(read_network("public"), given_) == ["public"]
    assert beyond(asked, read_network("public")) == []


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("Example.ORG", "example.org"),
        ("example.org.", "example.org"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("_dmarc.example.org", "_dmarc.example.org"),
        ("127.0.0.1", "127.0.0.1"),
        ("[::1]", "::1"),
        ("2001:DB8:0:0:0:0:0:1", "2001:db8::1"),
        ("::ffff:10.0.0.1", "::ffff:a00:1"),
        ("1.2.3.4.example", "1.2.3.4.example"),
    ],
)
def test_one_spelling(text: str, host: str) -> None:
    assert parse_host(text) == host


@pytest.mark.parametrize(
    "text",
    [
        "", ".", "..", "a..b", "-a", "a-", "a b", "a/b", "a@b", "a%41", "a\\b", "a\n", "a\0", "*.a.b", "a" * 64,
        "0x7f.1", "0x7f000001", "2130706433", "127.1", "0177.0.0.1", "127.0.0.1.", "1.2.3", "1.2.3.4.5", "1.2.3.256",
        "0x", "a.0x1", "a.1", "::1%lo", "[::1", "::1]", "[127.0.0.1]", "1::2::3", "ü.example", "１２７.0.0.1", "a。b",
        ".".join(["a" * 60] * 5),
    ],
)  # fmt: skip
def test_what_libraries_read_differently_is_no_host(text: str) -> None:
    if text == "127.0.0.1.":  # a final dot is taken off names and addresses alike
        assert parse_host(text) == "127.0.0.1"
        return
    with pytest.raises(BadHost):
        parse_host(text)


@given(st.text(max_size=40) | st.from_regex(r"[0-9xa-fA-F:.\[\]*-]{0,24}", fullmatch=True))
def test_any_text_is_a_host_in_its_one_spelling_or_none(text: str) -> None:
    try:
        host = parse_host(text)
    except BadHost:
        return
    assert parse_host(host) == host == host.lower()
    if is_address(host):
        assert ipaddress.ip_address(host).compressed == host
    else:
        with pytest.raises(ValueError, match="address"):
            ipaddress.ip_address(host)
    shown = f"[{host}]" if ":" in host else host
    assert parse_host_port(f"{shown}:443") == (host, 443)


#: What reads it -> what it refuses: a rule needs a host and a port, a pattern a domain; of no host but this machine's
#: a login may have every port.
BAD: dict[Callable[[Any], object], list[Any]] = {
    parse_rule: [
        *("a", "a:", ":80", "a:0", "a:65536", "a:-1", "a:8 0", "a:８０", "::1:80", "a:080000"),
        *("*.org:443", "*.10.0.0.1:80", "*:443", "a.*.org:443", "**.a.org:1", "*.[::1]:80"),
    ],
    parse_login_rule: [
        *("example.org:*", "*.localhost:*", "10.0.0.1:*", "[::]:*", "0.0.0.0:*", "*:*", ":*", "localhost.org:*"),
        *("[::ffff:10.0.0.1]:*", "notlocalhost:*", "localhost:**", "127.1:*"),
    ],
    read_network: ["all", 3, ["a:1"], {"allow": ["a"]}, {"allow": ["2130706433:80"]}],
}


@pytest.mark.parametrize(("read", "value"), [(read, value) for read, values in BAD.items() for value in values])
def test_what_is_no_rule_and_no_network(read: Callable[[Any], object], value: Any) -> None:
    with pytest.raises(BadHost):
        read(value)


def test_a_pattern_is_about_names_below_its_domain() -> None:
    rule = parse_rule("*.Example.org:443")
    assert str(rule) == "*.example.org:443"
    assert rule.confined
    assert rule.matches("a.example.org", 443)
    assert rule.matches("b.a.example.org", 443)
    assert not rule.matches("example.org", 443)
    assert not rule.matches("badexample.org", 443)
    assert not rule.matches("a.example.org", 80)


@pytest.mark.parametrize("host", ["localhost", "as.localhost", "127.0.0.1", "127.8.8.8", "[::1]"])
def test_a_login_may_have_every_port_of_a_loopback_host_and_no_other_rule_may(host: str) -> None:
    rule = parse_login_rule(f"{host}:*")
    assert str(rule) == f"{host}:*"
    assert rule.matches(host.strip("[]"), 1)
    assert rule.matches(host.strip("[]"), 65535)
    assert not rule.matches("example.org", 1)
    with pytest.raises(BadHost):
        parse_rule(f"{host}:*")
