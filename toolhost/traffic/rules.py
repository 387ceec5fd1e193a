"""What a network grant looks like inside a jail, which addresses may be connected to, and how the proxy judges a
request. Pure.

`ipaddress` alone is not enough: in Python 3.11 it calls 64:ff9b::/96, 2002::/16, fec0::/10, ::/96 and multicast global.
So an address is public here when it is in none of the tables below. An IPv6 address must be in 2000::/3 as well.

How far a rule goes (`Reach`):
- `public`: patterns, and `public` itself. They reach public addresses only, whatever a name resolves to.
- `named`: an exact rule with a name. It reaches private networks too, where databases are. It does not reach this
  machine and link-local addresses: the owner of the name could point it at a cloud's metadata service.
- `local`: an exact rule with an address, or with a name whose address only this machine or its own network can give
  (`localhost`, names in its hosts file, names that no public registry hands out). It reaches every address that a
  packet can be sent to.

Each exact name is in the jail's /etc/hosts with an address of 127.42.0.0/16. The proxy listens on that address, and on
granted addresses themselves, inside the jail's network namespace, so any TCP client works. Patterns and `public` go
through an HTTP proxy, because only a request says which name it is for.

Source: docs/design/sandbox.md section 6.
"""

from __future__ import annotations

import ipaddress
from typing import Final, Literal, NamedTuple

from goondan.schemas.worker.hosts import ANY_PORT, Network, Rule, is_address

# --- addresses --------------------------------------------------------------------------------------------------------

Reach = Literal["public", "named", "local"]
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

#: Never reached, whatever was granted: unspecified (Linux takes it for loopback), multicast, reserved.
_NEVER: Final = ("0.0.0.0/8", "224.0.0.0/4", "240.0.0.0/4", "::/128", "ff00::/8")
_HERE: Final = ("127.0.0.0/8", "::1/128")
_LINK_LOCAL: Final = ("169.254.0.0/16", "fe80::/10")
_PRIVATE: Final = ("10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fec0::/10")
#: Neither private nor of use: protocol assignments, documentation, benchmarks, discarded, segment routing.
_SPECIAL: Final = (
    "192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.175.48.0/24",
    "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
    "100::/64", "2001::/23", "2001:db8::/32", "3fff::/20", "5f00::/16",
)  # fmt: skip
#: IPv6 addresses that carry an IPv4 one, and at which bit from the right it begins.
_EMBEDDING: Final = (
    ("::ffff:0:0/96", 0), ("::/96", 0), ("64:ff9b::/96", 0), ("64:ff9b:1::/48", 0), ("2002::/16", 80), ("2001::/32", 0),
)  # fmt: skip
_GLOBAL_V6: Final = ipaddress.IPv6Network("2000::/3")

#: Last labels that no public registry hands out (RFC 2606, 6761, 6762, 8375, 9476, and what companies use).
_LOCAL_LABELS: Final = (
    "localhost", "local", "internal", "intranet", "lan", "home", "corp", "private", "test", "example", "invalid", "alt",
)  # fmt: skip


def _networks(texts: tuple[str, ...]) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    return tuple(ipaddress.ip_network(text) for text in texts)


_TABLES: Final = (
    ("is no address of a single machine", _networks(_NEVER), frozenset[str]()),
    ("is this machine itself", _networks(_HERE), frozenset(("local",))),
    ("is a link-local address", _networks(_LINK_LOCAL), frozenset(("local",))),
    ("is a private address", _networks(_PRIVATE), frozenset(("local", "named"))),
    ("is an address for a special purpose", _networks(_SPECIAL), frozenset(("local",))),
)
_CARRIERS: Final = tuple((ipaddress.IPv6Network(text), shift) for text, shift in _EMBEDDING)


def is_local_name(host: str) -> bool:
    """Whether a normalised name has an address only through this machine or its own network."""
    return "." not in host or host.rpartition(".")[2] in _LOCAL_LABELS or host.endswith(".home.arpa")


def refusal(address: str, reach: Reach, *, own: bool = False) -> str | None:
    """Why `address` (as a resolver gives it) may not be connected to; None when it may.

    `own`: it is an address of this machine. What cannot be read is refused.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return "is no address"
    found = _refusal(parsed, reach)
    if found is None and own and reach != "local":
        return "is this machine itself"
    return found


def _refusal(address: _Address, reach: Reach) -> str | None:
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            return "names an interface"
        if int(address) == 1:  # before ::/96, in which it lies
            return None if reach == "local" else "is this machine itself"
        for carrier, shift in _CARRIERS:
            if address in carrier:
                return _carried(address, carrier, shift, reach)
    for reason, table, allowed in _TABLES:
        if any(address in net for net in table if net.version == address.version):
            return None if reach in allowed else reason
    if isinstance(address, ipaddress.IPv6Address) and address not in _GLOBAL_V6:
        return None if reach == "local" else "is not in use on the internet"
    return None


def _carried(address: ipaddress.IPv6Address, carrier: ipaddress.IPv6Network, shift: int, reach: Reach) -> str | None:
    """An IPv6 form of an IPv4 address. A mapped one counts as what it carries; the others lead through a gateway."""
    inner = ipaddress.IPv4Address(int(address) >> shift & 0xFFFFFFFF)
    if carrier.prefixlen == 96 and int(carrier.network_address) == 0xFFFF << 32:
        return _refusal(inner, reach)
    if reach != "local":
        return f"carries the IPv4 address {inner}"
    return _refusal(inner, reach)


def reach_of(host: str, *, confined: bool, in_hosts_file: bool = False) -> Reach:
    """How far a rule for `host` goes. `confined` as in schemas/worker/hosts.py; `in_hosts_file`: this machine's."""
    if confined:
        return "public"
    return "local" if is_address(host) or in_hosts_file or is_local_name(host) else "named"


# --- grants and requests ----------------------------------------------------------------------------------------------

#: Where the jail finds its resolver and its HTTP proxy.
PROXY_ADDRESS: Final = "127.42.0.1"
PROXY_PORT: Final = 3128
DNS_PORT: Final = 53
#: Granted names count from here: 127.42.0.2 and up.
_FIRST: Final = 2
_BASE_HOSTS: Final = "127.0.0.1 localhost\n::1 localhost\n127.0.1.1 tool\n"
#: TCP, because a jail's seccomp filter knows no datagrams; nobody else answers, so one short try is enough.
RESOLVER: Final = f"nameserver {PROXY_ADDRESS}\noptions use-vc timeout:2 attempts:1\n"


class Listener(NamedTuple):
    """One listening socket in a jail, or a connector."""

    #: A granted host itself, the HTTP proxy, or the resolver. `connector`: a socket that makes connections to the HTTP
    #: proxy for an MCP worker, which has no network of its own.
    kind: Literal["direct", "proxy", "dns", "connector"]
    #: The address that it listens on.
    address: str
    #: The port that it listens on.
    port: int
    #: The granted host behind it; empty for the other kinds.
    host: str = ""


class Layout(NamedTuple):
    """What a jail gets for its network grant."""

    #: The sockets that the proxy listens on.
    listeners: tuple[Listener, ...]
    #: The text of its hosts file.
    hosts: str
    #: Variables for its programs.
    environment: dict[str, str]
    #: Addresses in the jail of granted names.
    addresses: dict[str, str]


def lay_out(network: Network) -> Layout:
    """The inside of a network grant that grants something."""
    addresses: dict[str, str] = {}
    listeners: dict[tuple[str, int], Listener] = {}

    def listen(kind: Literal["direct", "proxy", "dns"], address: str, port: int, host: str = "") -> None:
        listeners.setdefault((address, port), Listener(kind, address, port, host))

    listen("dns", PROXY_ADDRESS, DNS_PORT)
    through_proxy = network.public or any(rule.confined for rule in network.rules)
    if through_proxy:
        listen("proxy", PROXY_ADDRESS, PROXY_PORT)
    for rule in network.rules:
        if rule.confined or rule.port == ANY_PORT:  # nothing listens on every port
            continue
        if is_address(rule.host):
            listen("direct", rule.host, rule.port, rule.host)
        elif rule.host == "localhost" or rule.host.endswith(".localhost"):  # clients know these without asking
            addresses[rule.host] = "127.0.0.1"
            listen("direct", "127.0.0.1", rule.port, rule.host)
            listen("direct", "::1", rule.port, rule.host)
        else:
            number = _FIRST + len(addresses)
            address = addresses.setdefault(rule.host, f"127.42.{number >> 8}.{number & 255}")
            listen("direct", address, rule.port, rule.host)
    names = "".join(f"{address} {name}\n" for name, address in addresses.items() if name != "localhost")
    environment = _proxy_variables() if through_proxy else {}
    return Layout(tuple(listeners.values()), _BASE_HOSTS + names, environment, addresses)


def _proxy_variables() -> dict[str, str]:
    """curl ignores HTTP_PROXY in upper case; Node.js reads none without NODE_USE_ENV_PROXY (24.0 and newer)."""
    url = f"http://{PROXY_ADDRESS}:{PROXY_PORT}"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
    return {**dict.fromkeys(names, url), "NO_PROXY": "", "no_proxy": "", "NODE_USE_ENV_PROXY": "1"}


def judge(network: Network, host: str, port: int) -> Rule | str:
    """The rule that allows a request, or why there is none. `host` is normalised."""
    rule = network.rule_for(host, port)
    return rule if rule is not None else f"it was not granted; granted: {network}"


_BY_PROXY: Final = "it is reached through the HTTP proxy only (HTTP_PROXY, HTTPS_PROXY)"


def unheard(network: Network, host: str) -> str:
    """Why a name that a program looked up has no address in the jail."""
    if network.public or any(rule.pattern and host.endswith("." + rule.host) for rule in network.rules):
        return _BY_PROXY
    return f"it was not granted; granted: {network}"


def unconnected(network: Network, address: str, port: int) -> str:
    """Why a connection to an address found nobody in the jail."""
    rule = judge(network, address, port)
    if isinstance(rule, str):
        return rule
    refused = refusal(address, reach_of(address, confined=rule.confined))
    return _BY_PROXY if refused is None else f"it {refused}"


def hosts_entries(text: str) -> dict[str, set[str]]:
    """Names in a hosts file, in lower case, and their addresses."""
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        fields = line.partition("#")[0].split()
        for name in fields[1:]:
            found.setdefault(name.lower().removesuffix("."), set()).add(fields[0])
    return found
