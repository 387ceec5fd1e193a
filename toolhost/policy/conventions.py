"""What all jails have in common: descriptors, places, the user."""

from __future__ import annotations

from typing import Final

from goondan.schemas.worker_frames import WORKER_FD

#: Descriptors that jails/launch.py puts where the plan says. The worker's socket is WORKER_FD.
STATUS_FD: Final = 4
ARGS_FD: Final = 5
WORKDIR_FD: Final = 6
FILTER_FD: Final = 7
BOOT_FD: Final = 8
#: The first of the descriptors that hold LaunchPlan.files, in their order.
FILES_FD: Final = 10

#: Where this package's `inside` folder is in a jail. Tools import it by its name.
JAIL_CODE: Final = "/run/goondan/goondan_tool"
#: The home of every jail. It is private, empty at the start and gone with the jail; then its room (bytes).
JAIL_HOME: Final = "/run/goondan/home"
HOME_BYTES: Final = 64 << 20
#: The user of every jail, as the jail sees it; never 0, whoever runs the host.
JAIL_UID: Final = 1000
JAIL_GID: Final = 1000
JAIL_HOSTNAME: Final = "tool"
JAIL_PATH: Final = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"

_FDS: Final = {WORKER_FD, STATUS_FD, ARGS_FD, WORKDIR_FD, FILTER_FD, BOOT_FD}
assert len(_FDS) == 6
assert max(_FDS) < FILES_FD
