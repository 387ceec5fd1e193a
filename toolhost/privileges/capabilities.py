"""What a tool host that root has started becomes: a user of its own with three powers, and no way to more.

The privileged helper and the launcher (launcher/), which were started before, do what it can no longer do. With its
three powers it reads folders that are closed to others, looks at what jails use, and ends their processes. Where root
has no number for it, as in some containers, it stays root and keeps only the powers that it needs.

Source: docs/design/sandbox.md section 3.1; capabilities(7); docs/decisions/039.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import Final

from goondan.schemas.system.own_users import TOOLHOST_UID
from goondan.toolhost.launcher import syscalls

#: The powers that it keeps: reach closed folders; end jails; look at their memory and their files in /proc.
KEPT: Final = {"DAC_READ_SEARCH": 2, "KILL": 5, "SYS_PTRACE": 19}
#: What it also keeps where it must stay root: with this, root opens what it does not own.
OF_ROOT: Final = {"DAC_OVERRIDE": 1}
#: Without these it cannot become another user, or could not work as one.
_NEEDED: Final = {"CHOWN": 0, "DAC_READ_SEARCH": 2, "SETGID": 6, "SETUID": 7, "SETPCAP": 8}


def future_user() -> int:
    """The user that this process, which is root, will become: TOOLHOST_UID, or 0 where that is not possible."""
    held = syscalls.permitted_capabilities()
    able = all(held >> number & 1 for number in _NEEDED.values())
    return TOOLHOST_UID if able and _is_mapped("uid_map") and _is_mapped("gid_map") else 0


def _is_mapped(name: str) -> bool:
    with suppress(OSError, ValueError), open(f"/proc/self/{name}", encoding="ascii") as source:
        for line in source:
            first, _, count = map(int, line.split())
            if first <= TOOLHOST_UID < first + count:
                return True
    return False


def drop_capabilities(user: int, filter_program: bytes | None) -> None:
    """Become `user` (see `future_user`) and give up the rest for good.

    Call it before there are threads, because each thread has powers of its own. `filter_program` is for this process
    and all its threads; None on a machine without a filter. Raises OSError when the system refuses.
    """
    held = syscalls.permitted_capabilities()
    wanted = KEPT if user else KEPT | OF_ROOT
    kept = held & sum(1 << number for number in wanted.values())
    if held >> _NEEDED["SETPCAP"] & 1:
        syscalls.bound_capabilities(())
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        syscalls.prctl(syscalls.PR_SET_KEEPCAPS, 1)  # else a change of user leaves nothing to keep
        os.setresuid(user, user, user)
        syscalls.prctl(syscalls.PR_SET_KEEPCAPS, 0)
        # Other processes of this user, such as tool hosts of other kernels, may not look into us.
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    syscalls.keep_capabilities(kept)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    try:
        if filter_program is not None:
            syscalls.install_filter(filter_program)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EINVAL):
            raise
        # A kernel that has none, or an emulated machine. No jail can be made there either, and the probe says so.
