"""A jail where root has no user namespaces: bubblewrap runs as root, and the jail drops that itself. Pure.

Elsewhere bubblewrap runs as the jail's own user, and what it does by mistake is done as nobody. Here it has root's
powers over mounts, while it walks through folders that other jails of the same workdir may be changing. So it gets a
root directory of its own, in memory, with what jails are made from and nothing else: no link leads it out of that.
Inside, the jail begins as root with three capabilities, whose only use is to lose everything (inside/dropping.py).

Source: docs/design/sandbox.md section 3.2; docs/decisions/038.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

#: What the boot stage gives itself up with, by the names that bubblewrap takes. Without them nothing can be dropped.
CAPABILITIES: Final = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")
#: Devices that bubblewrap takes from where it stands.
DEVICES: Final = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty"))
#: The accounts of a jail; `{uid}` is the number that its user has on this host, there being no other.
_ACCOUNTS: Final = {
    "passwd": (
        "root:x:0:0:root:/:/usr/sbin/nologin\n"
        "tool:x:{uid}:{uid}:tool:%s:/bin/sh\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "group": "root:x:0:\ntool:x:{uid}:\nnogroup:x:65534:\n",
}


class Enclosure(Struct, frozen=True, rename="camel"):
    """The root directory that bubblewrap gets: `shown` read-only at their own paths, `links` (name, target), `texts`
    (path, content with `{uid}` in it), and at `home` a memory file system of `home_bytes` that is the jail's user's.
    With `network` it gets a network namespace, too, in which nothing is up.
    """

    shown: list[str]
    links: list[tuple[str, str]]
    texts: list[tuple[str, str]]
    home: str
    home_bytes: int
    network: bool = False


def enclosure(
    stage: str, shown: list[str], links: list[tuple[str, str]], home: str, home_bytes: int, *, network: bool = False
) -> Enclosure:
    """`shown` are the folders and files of the system that a jail needs, `home` where its home stands inside."""
    texts = [(account(stage, name), text % home if "%s" in text else text) for name, text in _ACCOUNTS.items()]
    return Enclosure([*shown, *DEVICES, "/proc"], links, texts, f"{stage}/home", home_bytes, network)


def account(stage: str, name: str) -> str:
    """Where the file of accounts is taken from."""
    return f"{stage}/{name}"
