"""What a network grant looks like inside a jail, and how the proxy judges a request. Pure.

Each exact name is in the jail's /etc/hosts with an address of 127.42.0.0/16. The proxy listens on that address, and on
granted addresses themselves, inside the jail's network namespace, so any TCP client works. Patterns and `public` go
through an HTTP proxy, because only a request says which name it is for.

Source: docs/design/sandbox.md section 6.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from goondan.schemas.worker.hosts import ANY_PORT, Network, Rule, is_address
from goondan.toolhost.traffic.addresses import reach_of, refusal

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
