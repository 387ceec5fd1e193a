"""A jail where root has no user namespaces: bubblewrap runs as root, and the jail drops that itself. Pure.

Elsewhere bubblewrap runs as the jail's own user, so its mistakes do no harm. Here it has root's powers over mounts,
while it goes through folders that other jails of the same workdir may be changing. So it gets a root directory of its
own, in memory, with what jails are made from and nothing else: no link leads out of it. The jail begins there as root
with three capabilities. They can be used only to give everything up (inside/dropping.py).

Source: docs/design/sandbox.md section 3.2; docs/decisions/038.
"""

from __future__ import annotations

from typing import Final

from goondan.toolhost.launcher.request import Enclosure
from goondan.toolhost.policy.conventions import HOME_BYTES, JAIL_HOME
from goondan.toolhost.policy.subject import HostFacts

#: With these the boot stage gives itself up; bubblewrap takes these names. Without them nothing can be dropped.
CAPABILITIES: Final = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")
#: Devices that bubblewrap takes from its own root directory.
DEVICES: Final = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty"))
#: The accounts of a jail. The launcher replaces `{uid}` by the number of the jail's user on this host.
ACCOUNTS: Final = {
    "passwd": (
        "root:x:0:0:root:/:/usr/sbin/nologin\n"
        f"tool:x:{{uid}}:{{uid}}:tool:{JAIL_HOME}:/bin/sh\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "group": "root:x:0:\ntool:x:{uid}:\nnogroup:x:65534:\n",
}


def enclosure_of(host: HostFacts) -> Enclosure | None:
    """The root directory of bubblewrap; None where it needs none.

    A file of ACCOUNTS is taken from `stage`/NAME. Without net_admin bubblewrap gets a network namespace, in which
    nothing is up.
    """
    if host.stage is None or host.user_namespaces:
        return None
    around = [] if host.bwrap_root is None else [host.bwrap_root]
    return {
        "shown": ["/usr", *host.dirs, *host.etc, *around, *DEVICES, "/proc"],
        "links": host.links,
        "texts": [(f"{host.stage}/{name}", text) for name, text in ACCOUNTS.items()],
        "home": f"{host.stage}/home",
        "homeBytes": HOME_BYTES,
        "network": not host.net_admin,
    }
