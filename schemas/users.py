"""The user that a tool host becomes when root starts it. Pure.

Numbers from 0x70000000 to 0x7FFFFFFE have nothing assigned in systemd's table (https://systemd.io/UIDS-GIDS/). The tool
host gives the others of them to jails (toolhost/policy/uids.py). How it is let in to what is root's:
startup.admit_toolhost.

Source: docs/decisions/039.
"""

from __future__ import annotations

from typing import Final

#: User and group of every tool host that root has started.
TOOLHOST_UID: Final = 0x77FFFFFF
