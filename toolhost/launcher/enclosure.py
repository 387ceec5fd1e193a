"""The root directory of a bubblewrap that runs as root. It has what jails are made from, and nothing else of the host.

bubblewrap follows paths in folders that other jails may be changing at that moment. A link there can lead only to
something in this root directory. For the same reason bubblewrap gets no power over files: it may look everywhere, and
write only where root as an owner could. Here that is the memory that this directory is made of.

Source: docs/decisions/038; toolhost/policy/enclosure.py says what is in it.
"""

from __future__ import annotations

import os
import stat
from typing import Final

from goondan.toolhost.launcher import staging, syscalls
from goondan.toolhost.launcher.descriptors import opened
from goondan.toolhost.launcher.places import ReadOnlyPlace
from goondan.toolhost.launcher.request import Enclosure, Stage

#: CAP_DAC_READ_SEARCH (to mount in folders that are closed to root); SETGID, SETUID and SETPCAP (the jail drops them);
#: NET_ADMIN (the loopback interface); SYS_ADMIN (mounts and namespaces).
KEPT: Final = (2, 6, 7, 8, 12, 21)
#: CAP_DAC_OVERRIDE, in place of the first: containers have this one.
_ELSE: Final = 1
#: Room for mount points and accounts, which need inodes most of all.
_OPTIONS: Final = "mode=0755,size=1m,nr_inodes=2k"


def enter(
    top: str, enclosure: Enclosure, stages: list[Stage], trees: list[staging.Tree], uid: int, kept: list[ReadOnlyPlace]
) -> None:
    """In a new mount namespace, make that directory and go there. `top` is a folder that it may cover for that."""
    shown = [_copied(path) for path in enclosure["shown"]]  # now: `top` may cover some, and then they are another's
    syscalls.leave_mount_namespace()
    if enclosure["network"]:
        syscalls.leave_network_namespace()
    syscalls.mount_tmpfs(top, _OPTIONS)
    for path, is_folder, tree in shown:
        staging.put(top + path, is_folder, tree)
    for name, target in enclosure["links"]:
        os.symlink(target, top + name)
    for folder in ("/tmp", enclosure["home"]):  # bubblewrap begins in the first
        os.makedirs(top + folder, 0o755, exist_ok=True)
    staging.place(top, stages, trees, kept)
    syscalls.mount_tmpfs(top + enclosure["home"], f"mode=0700,size={enclosure['homeBytes']},uid={uid},gid={uid}")
    for path, text in enclosure["texts"]:
        staging.write(top + path, text.replace("{uid}", str(uid)).encode())
    syscalls.change_root(top)
    syscalls.bound_capabilities(KEPT if syscalls.is_bounding(KEPT[0]) else (*KEPT, _ELSE))


def _copied(path: str) -> tuple[str, bool, int]:
    """A path, whether it is a folder, and a detached copy of what it leads to."""
    with opened(path, os.O_PATH) as fd:
        mode = os.fstat(fd).st_mode
        tree = syscalls.copy_tree(fd, recursive=True)
    if not stat.S_ISCHR(mode):
        syscalls.set_attributes(tree, read_only=True, user_namespace=None, recursive=True)
    return path, stat.S_ISDIR(mode), tree
