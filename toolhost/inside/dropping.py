"""How a jail without a user namespace stops being root. Its boot stage does this first, before any code of a tool.

bubblewrap was root on the host, and so is this process. It has three capabilities and nothing to use them on. It
becomes the jail's user for good, and forks. The parent is the first process of the namespace and only waits. The
child goes on.

Source: docs/design/sandbox.md section 3.2; toolhost/policy/plan.py.
"""

from __future__ import annotations

import posix

from .init import wait_with_host
from .system import PR_CAPBSET_READ, PR_SET_DUMPABLE, bound_capabilities, call, drop_capabilities

#: More than any kernel has; the last one is found by asking.
_CAPABILITIES = 64
#: Standard error, a pipe that the tool host reads.
_OUTPUT = 2


def drop(user: int, folder: str) -> None:
    """Become that user (and group), and go on in `folder`, in a new process. Raises OSError."""
    bound_capabilities([number for number in range(_CAPABILITIES) if _is_bounding(number)])
    posix.setgroups([])
    posix.setresgid(user, user, user)
    posix.setresuid(user, user, user)
    drop_capabilities()  # what could be inherited outlives the change of user
    if user == 0 or posix.getresuid() != (user,) * 3 or posix.getresgid() != (user,) * 3 or posix.getgroups():
        raise OSError(f"it is still {posix.getresuid()}")
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    posix.chdir(folder)  # which root without capabilities may not enter
    child = posix.fork()
    if child:
        wait_with_host(child, _OUTPUT)
    call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # or else its own /proc would be closed to it


def _is_bounding(number: int) -> bool:
    try:
        return call("prctl", PR_CAPBSET_READ, number, 0, 0, 0) == 1
    except OSError:  # there is none of that number
        return False
