"""Which addresses a rule reaches: the deny table, embedded IPv4, and how far names may lead."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.toolhost.traffic.rules import Reach, is_local_name, reach_of, refusal

#: Addresses that pass for global in Python 3.11's ipaddress, or look like it, and must not.
_NOT_PUBLIC = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "127.0.0.1", "127.255.255.254", "169.254.169.254", "172.16.0.1",
    "172.31.255.255", "192.0.0.8", "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1", "198.51.100.7",
    "203.0.113.9", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255",
    "::", "::1", "::127.0.0.1", "::8.8.8.8", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::8.8.8.8",
    "64:ff9b::127.0.0.1", "64:ff9b:1::1", "100::1", "2001::1", "2001:db8::1", "2002:0808:0808::1", "2002:7f00:1::",
    "3fff::1", "5f00::1", "fc00::1", "fd12::1", "fe80::1", "fe80::1%eth0", "fec0::1", "feff::1", "ff02::1", "4000::1",
    "::2", "1::", "1fff:ffff::1", "4000::", "fbff::1",
]  # fmt: skip


@pytest.mark.parametrize("address", _NOT_PUBLIC)
def test_public_means_public(address: str) -> None:
    assert refusal(address, "public") is not None


_NO_MACHINE, _ITSELF, _LINK = "is no address of a single machine", "is this machine itself", "is a link-local address"
_PRIVATE, _SPECIAL, _CARRIES = "is a private address", "is an address for a special purpose", "carries the IPv4 address"
_RANGES = {
    "0.0.0.0/8": _NO_MACHINE, "224.0.0.0/4": _NO_MACHINE, "240.0.0.0/4": _NO_MACHINE, "ff00::/8": _NO_MACHINE,
    "127.0.0.0/8": _ITSELF, "::1/128": _ITSELF, "169.254.0.0/16": _LINK, "fe80::/10": _LINK,
    "10.0.0.0/8": _PRIVATE, "100.64.0.0/10": _PRIVATE, "172.16.0.0/12": _PRIVATE, "192.168.0.0/16": _PRIVATE,
    "fc00::/7": _PRIVATE, "fec0::/10": _PRIVATE,
    "192.0.0.0/24": _SPECIAL, "192.0.2.0/24": _SPECIAL, "192.31.196.0/24": _SPECIAL, "192.52.193.0/24": _SPECIAL,
    "192.88.99.0/24": _SPECIAL, "192.175.48.0/24": _SPECIAL, "198.18.0.0/15": _SPECIAL, "198.51.100.0/24": _SPECIAL,
    "203.0.113.0/24": _SPECIAL, "100::/64": _SPECIAL, "2001:1::/32": _SPECIAL, "2001:1ff::/32": _SPECIAL,
    "2001:db8::/32": _SPECIAL, "3fff::/20": _SPECIAL, "5f00::/16": _SPECIAL,
    "64:ff9b::/96": _CARRIES, "64:ff9b:1::/48": _CARRIES, "2002::/16": _CARRIES, "2001::/32": _CARRIES,
    "::8.0.0.0/104": _CARRIES,
}  # fmt: skip


@pytest.mark.parametrize("net", _RANGES)
def test_each_range_is_refused_from_its_first_address_to_its_last_and_says_what_it_is(net: str) -> None:
    """For IPv6 there are two walls: what is none of the internet's own range 2000::/3 is refused as well."""
    parsed = ipaddress.ip_network(net)
    for address in (parsed[0], parsed[-1]):
        assert (refusal(str(address), "public") or "").startswith(_RANGES[net]), address


REACHES: tuple[Reach, ...] = ("public", "named", "local")
#: The narrowest reach that has an address.
_NARROWEST = {
    "public": ["8.8.8.8", "1.1.1.1", "93.184.216.34", "172.15.0.1", "172.32.0.1", "2606:4700::1111", "::ffff:8.8.8.8"],
    "named": ["10.1.2.3", "192.168.0.7", "172.20.0.1", "100.64.1.1", "fd00::5"],
    "local": ["127.0.0.1", "::1", "169.254.169.254", "fe80::1", "::ffff:169.254.169.254"],
    "none": ["0.0.0.0", "224.0.0.1", "255.255.255.255", "ff02::1", "fe80::1%lo", "no", ""],
}


@pytest.mark.parametrize(("reach", "address"), [(reach, one) for reach, them in _NARROWEST.items() for one in them])
def test_an_exact_name_reaches_private_networks_and_no_name_this_machine(reach: str, address: str) -> None:
    reached = [name for name in REACHES if refusal(address, name) is None]
    assert reached == ([] if reach == "none" else [*REACHES[REACHES.index(reach) :]])


def test_an_address_of_this_machine_is_refused_wherever_it_lies() -> None:
    assert refusal("8.8.8.8", "public", own=True) == "is this machine itself"
    assert refusal("10.0.0.1", "named", own=True) == "is this machine itself"
    assert refusal("10.0.0.1", "local", own=True) is None


@given(st.ip_addresses())
def test_public_is_never_more_than_named_and_named_never_more_than_local(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    allowed = [refusal(str(address), reach) is None for reach in ("public", "named", "local")]
    assert allowed == sorted(allowed)
    if allowed[0]:
        assert address.is_global
        assert not address.is_multicast


@given(st.ip_addresses(v=4))
def test_a_mapped_address_is_what_it_carries(address: ipaddress.IPv4Address) -> None:
    for reach in ("public", "named", "local"):
        assert refusal(f"::ffff:{address}", reach) == refusal(str(address), reach)


@given(st.ip_addresses(v=4))
def test_an_address_inside_another_is_not_public(address: ipaddress.IPv4Address) -> None:
    number = int(address)
    for carrier in (number, 0x64FF9B << 96 | number, 0x2002 << 112 | number << 80, 0x20010000 << 96 | number):
        assert refusal(str(ipaddress.IPv6Address(carrier)), "public") is not None
        assert refusal(str(ipaddress.IPv6Address(carrier)), "named") is not None


@pytest.mark.parametrize("name", ["localhost", "db", "a.local", "a.b.internal", "x.test", "y.example", "pi.home.arpa"])
def test_names_that_no_registry_hands_out(name: str) -> None:
    assert is_local_name(name)
    assert reach_of(name, confined=False) == "local"
    assert reach_of(name, confined=True) == "public"


def test_how_far_a_rule_goes() -> None:
    assert reach_of("api.example.com", confined=False) == "named"
    assert reach_of("api.example.com", confined=False, in_hosts_file=True) == "local"
    assert reach_of("169.254.169.254", confined=False) == "local"
    assert reach_of("localhost.example.com", confined=False) == "named"
