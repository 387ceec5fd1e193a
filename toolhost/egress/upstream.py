"""Connections of the proxy to the network: resolve, judge every address, connect to the very address that was judged.

Source: docs/design/sandbox.md section 6.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from schemas.hosts import Rule, is_address
from toolhost.egress.addresses import reach_of, refusal
from toolhost.egress.rules import hosts_entries

#: A name service that answers no sooner is as good as none (seconds).
RESOLVE_S: Final = 10.0
#: What one address may take to answer (seconds), and how many are tried.
CONNECT_S: Final = 10.0
MAX_ADDRESSES: Final = 4
_HOSTS_FILE: Final = "/etc/hosts"
_MAX_HOSTS_FILE: Final = 1 << 20


class Refused(Exception):
    """No address of the host may be connected to; the text says why."""


class Unreachable(Exception):
    """The host could not be resolved or did not answer; the text says why."""


async def connect(rule: Rule, host: str, port: int) -> socket.socket:
    """A connection to `host`, which `rule` allows. Raises Refused, Unreachable."""
    loop = asyncio.get_running_loop()
    addresses = [host] if is_address(host) else await _resolve(host, port)
    reach = reach_of(host, confined=rule.confined, in_hosts_file=not rule.confined and _in_hosts_file(host, addresses))
    allowed: list[str] = []
    reason = ""
    for address in addresses:
        why = refusal(address, reach, own=_is_own(address))
        if why is None:
            allowed.append(address)
        else:
            reason = reason or (f"it {why}" if address == host else f"it resolves to {address}, which {why}")
    if not allowed:
        raise Refused(reason)
    problem = "no address"
    for address in allowed[:MAX_ADDRESSES]:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        made: socket.socket | None = None
        try:
            made = socket.socket(family, socket.SOCK_STREAM)
            made.setblocking(False)
            async with asyncio.timeout(CONNECT_S):
                await loop.sock_connect(made, (address, port))
        except (OSError, TimeoutError) as error:
            problem = "it did not answer in time" if isinstance(error, TimeoutError) else (error.strerror or "failed")
            if made is not None:
                made.close()
        except BaseException:
            if made is not None:
                made.close()
            raise
        else:
            return made
    raise Unreachable(problem.lower())


async def _resolve(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise Unreachable("its name was not resolved in time") from None
    except (OSError, UnicodeError) as error:
        raise Unreachable(f"its name cannot be resolved: {getattr(error, 'strerror', None) or error}") from None
    return list(dict.fromkeys(str(item[4][0]) for item in found))


def _in_hosts_file(host: str, addresses: list[str]) -> bool:
    """Whether this machine's own hosts file gives the name all of these addresses."""
    try:
        with open(_HOSTS_FILE, encoding="utf-8", errors="replace") as source:
            entries = hosts_entries(source.read(_MAX_HOSTS_FILE))
    except OSError:
        return False
    return bool(addresses) and set(addresses) <= entries.get(host, set())


def _is_own(address: str) -> bool:
    """Whether this machine has the address: only then can a socket be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
