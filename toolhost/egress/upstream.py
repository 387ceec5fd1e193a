"""Connections of the proxy to the network: resolve, judge every address, connect to the very address that was judged.

Source: docs/design/sandbox.md section 6.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from goondan.schemas.worker.hosts import Rule, is_address
from goondan.toolhost.traffic.rules import hosts_entries, reach_of, refusal

#: How long a name service may take (seconds): a slower one is as good as none.
RESOLVE_S: Final = 10.0
#: How long one address may take to answer (seconds), and how many addresses are tried.
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
        try:
            return await _connect(address, port)
        except TimeoutError:
            problem = "it did not answer in time"
        except OSError as error:
            problem = error.strerror or "failed"
    raise Unreachable(problem.lower())


def _socket(address: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)


async def _connect(address: str, port: int) -> socket.socket:
    made = _socket(address)
    try:
        made.setblocking(False)
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().sock_connect(made, (address, port))
    except BaseException:
        made.close()
        raise
    return made


async def _resolve(host: str, port: int) -> list[str]:
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
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
    try:
        with _socket(address) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
