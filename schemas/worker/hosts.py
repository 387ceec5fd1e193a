"""Which hosts a jail may reach: names of hosts, rules over them, and how rules are merged. Pure, standard library only.

A rule is `host:port` (exact) or `*.domain:port` (every name below the domain, not the domain itself). A network is a
set of rules, or every public address (`public`), or both. A rule is confined when it leads to public addresses only:
patterns always are, and so is an exact rule that was cut out of `public`. Only a rule that is not confined reaches
private addresses. `localhost:*` is every port of a loopback host: logins to MCP servers may have it, and no jail.

Rules of merging. `meet` gives what both networks allow, `join` what either allows. Both are commutative, associative
and idempotent, and nothing that `meet` gives is refused by one of the two (tests/unit/schemas/test_hosts.py).

Host names have one spelling here: lower case, no final dot, IPv4 in four decimal numbers, IPv6 as RFC 5952 writes it.
Spellings that libraries read in different ways (0x7f.1, 2130706433, 127.1, 0177.0.0.1) are no names at all.

Source: docs/design/sandbox.md sections 1 and 6.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

MAX_PORT: Final = 65535
#: The port of a rule that is about every port of its host.
ANY_PORT: Final = 0
#: RFC 1035: characters of a name, and of one label.
MAX_NAME: Final = 253
MAX_LABEL: Final = 63
#: Rules of one tool. Each exact one is a listening socket in its jail.
MAX_RULES: Final = 64
_LABEL: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?\Z")
#: The last label of what some resolver would read as a number (WHATWG URL, "ends in a number").
_NUMBER: Final = re.compile(r"(?:[0-9]+|0x[0-9a-f]*)\Z")


class BadHost(ValueError):
    """A text is no host, or no rule. The message says why and repeats nothing of the text."""


class Rule(NamedTuple):
    """One host or pattern, and one port."""

    #: The host. Of a pattern: the domain behind `*.`.
    host: str
    #: The port, or ANY_PORT.
    port: int
    #: Every name below the domain matches, and not the domain itself.
    pattern: bool = False
    #: It leads to public addresses only.
    confined: bool = False

    def matches(self, host: str, port: int) -> bool:
        """Whether it is about this host (normalised) and port."""
        if self.port not in (ANY_PORT, port):
            return False
        return host.endswith("." + self.host) and not is_address(host) if self.pattern else host == self.host

    def covers(self, other: Rule) -> bool:
        """Whether it is about every host and port that `other` is about."""
        if self.port not in (ANY_PORT, other.port):
            return False
        if self.pattern and other.pattern:
            return other.host == self.host or other.host.endswith("." + self.host)
        return not other.pattern and self.matches(other.host, other.port)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'*.' if self.pattern else ''}{host}:{'*' if self.port == ANY_PORT else self.port}"


class Network(NamedTuple):
    """What may be reached. Make one with `network`, which brings rules into their one form."""

    public: bool = False
    rules: tuple[Rule, ...] = ()

    @property
    def none(self) -> bool:
        """Whether nothing may be reached."""
        return not self.public and not self.rules

    def rule_for(self, host: str, port: int) -> Rule | None:
        """The rule that decides about a host (normalised); the one that is not confined first. None: not allowed."""
        found = [rule for rule in self.rules if rule.matches(host, port)]
        if not found and self.public:
            return Rule(host, port, confined=True)
        return min(found, key=lambda rule: rule.confined, default=None)

    def __str__(self) -> str:
        names = (["public"] if self.public else []) + [str(rule) for rule in self.rules]
        return ", ".join(names) or "none"


NO_NETWORK: Final = Network()


# --- names ----------------------------------------------------------------------------------------------------------


def is_address(host: str) -> bool:
    """Whether a normalised host is an address and not a name."""
    return ":" in host or (host[-1:].isdigit() and _is_ipv4(host))


def _is_ipv4(host: str) -> bool:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def parse_host(text: str) -> str:
    """A host in its one spelling. An IPv6 address may stand in brackets. Raises BadHost.

    Only ASCII: a name with other letters is written in its `xn--` form.
    """
    if not text.isascii():
        raise BadHost("a name with letters beyond ASCII is written in its xn-- form")
    host = text.lower()
    if host.startswith("[") or ":" in host:
        inner = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        try:
            return ipaddress.IPv6Address(inner if "%" not in inner else "").compressed
        except ValueError:
            raise BadHost("not an IPv6 address") from None
    host = host.removesuffix(".")
    if not host or len(host) > MAX_NAME:
        raise BadHost("a name of a host has 1 to 253 characters")
    labels = host.split(".")
    if _NUMBER.match(labels[-1]):
        if not _is_ipv4(host):
            raise BadHost("an IPv4 address is written as four decimal numbers")
        return host
    for label in labels:
        if len(label) > MAX_LABEL or not _LABEL.match(label):
            raise BadHost("not the name of a host")
    return host


def parse_port(text: str) -> int:
    """A port, 1 to 65535. Raises BadHost."""
    if not text.isascii() or not text.isdigit() or len(text) > 5 or not 0 < int(text) <= MAX_PORT:
        raise BadHost("a port is a number from 1 to 65535")
    return int(text)


def parse_host_port(text: str) -> tuple[str, int]:
    """`host:port`, both needed; an IPv6 address in brackets. Raises BadHost."""
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        raise BadHost("expected host:port")
    if ":" in host and not host.startswith("["):
        raise BadHost("an IPv6 address before a port stands in brackets")
    return parse_host(host), parse_port(port)


def parse_rule(text: str) -> Rule:
    """`host:port` or `*.domain:port`. Raises BadHost."""
    pattern = text.startswith("*.")
    host, port = parse_host_port(text[2:] if pattern else text)
    if pattern and (is_address(host) or "." not in host):
        raise BadHost("a pattern needs a domain of at least two labels, such as *.example.org")
    return Rule(host, port, pattern, confined=pattern)


def parse_login_rule(text: str) -> Rule:
    """A rule, or `host:*` for every port of a loopback host. Raises BadHost.

    A login on this machine may lead to a server whose port nobody knows before it has started.
    """
    if not text.endswith(":*"):
        return parse_rule(text)
    host, _ = parse_host_port(f"{text[:-2]}:1")
    if not _is_loopback(host):
        raise BadHost("every port, :*, is for loopback hosts only, such as localhost or 127.0.0.1")
    return Rule(host, ANY_PORT)


def _is_loopback(host: str) -> bool:
    """Whether a host (normalised) is this machine by its form, whoever resolves it."""
    if is_address(host):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")


# --- networks -------------------------------------------------------------------------------------------------------


def network(rules: Iterable[Rule] = (), *, public: bool = False) -> Network:
    """A network in its one form: without rules that another one, or `public`, makes superfluous."""
    every = set(rules)
    kept = [
        rule
        for rule in every
        if not (public and rule.confined)
        and not any(other != rule and other.covers(rule) and (rule.confined or not other.confined) for other in every)
    ]
    return Network(public, tuple(sorted(kept)))


def read_network(value: Any) -> Network:
    """A network as manifests and launch specifications write it: none, public, {allow, public?, confined?}.

    Raises BadHost.
    """
    if value is None or value == "none":
        return NO_NETWORK
    if value == "public":
        return Network(public=True)
    if not isinstance(value, Mapping):
        raise BadHost("a network is none, public or {allow: [host:port]}")
    rules = [parse_login_rule(str(text)) for text in value.get("allow", ())]
    rules += [parse_login_rule(str(text))._replace(confined=True) for text in value.get("confined", ())]
    return network(rules, public=bool(value.get("public")))


def write_network(given: Network) -> Any:
    """The form that `read_network` reads; short where it can be."""
    if not given.rules:
        return "public" if given.public else "none"
    # A pattern is confined by its form; only exact rules need to say so.
    written: dict[str, Any] = {"allow": [str(rule) for rule in given.rules if rule.pattern or not rule.confined]}
    confined = [str(rule) for rule in given.rules if rule.confined and not rule.pattern]
    if confined:
        written["confined"] = confined
    if given.public:
        written["public"] = True
    return written


def meet(one: Network, other: Network) -> Network:
    """What both allow."""
    rules = [found for a in one.rules for b in other.rules if (found := _meet_rules(a, b)) is not None]
    if one.public:
        rules += [rule._replace(confined=True) for rule in other.rules]
    if other.public:
        rules += [rule._replace(confined=True) for rule in one.rules]
    return network(rules, public=one.public and other.public)


def _meet_rules(a: Rule, b: Rule) -> Rule | None:
    narrow = b if a.covers(b) else a if b.covers(a) else None
    return None if narrow is None else narrow._replace(confined=a.confined or b.confined)


def join(one: Network, other: Network) -> Network:
    """What either allows."""
    return network([*one.rules, *other.rules], public=one.public or other.public)


def beyond(asked: Network, given: Network) -> list[str]:
    """What `asked` names that `given` does not, as it is written. Whether a rule is confined plays no part."""
    missing = ["public"] if asked.public and not given.public else []
    if given.public:
        return missing
    return missing + [str(rule) for rule in asked.rules if not any(other.covers(rule) for other in given.rules)]
