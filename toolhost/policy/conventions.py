"""What every jail has: its descriptors, its own places, its user."""

from __future__ import annotations

from typing import Final

from schemas.worker_frames import WORKER_FD

#: Descriptors that jails/launch.py puts where the plan says; the worker's socket is schemas.worker_frames.WORKER_FD.
STATUS_FD: Final = 4
ARGS_FD: Final = 5
WORKDIR_FD: Final = 6
FILTER_FD: Final = 7
BOOT_FD: Final = 8
#: The first of the descriptors that hold LaunchPlan.files, in their order.
FILES_FD: Final = 10

#: Where this package's `inside` folder stands in a jail; its name is how tools import it.
JAIL_CODE: Final = "/run/goondan/goondan_tool"
#: Home of every jail: private, empty, gone with it; its room (bytes).
JAIL_HOME: Final = "/run/goondan/home"
HOME_BYTES: Final = 64 << 20
#: The one user of every jail; never 0, whoever runs the host.
JAIL_UID: Final = 1000
JAIL_GID: Final = 1000
JAIL_HOSTNAME: Final = "tool"
JAIL_PATH: Final = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"

_FDS: Final = {WORKER_FD, STATUS_FD, ARGS_FD, WORKDIR_FD, FILTER_FD, BOOT_FD}
assert len(_FDS) == 6
assert max(_FDS) < FILES_FD
