"""Takes the place of bubblewrap and puts up no wall. The worker, its socket and its frames are the real ones.

Called as `no_walls.py INSIDE --args FD -- …`, where INSIDE is the folder of the worker's package.
"""

from __future__ import annotations

import json
import os
import sys

#: The descriptor on which the host reads the pid of the first process (goondan.toolhost.policy.subject.STATUS_FD).
STATUS_FD = 4
#: Descriptors above the worker's socket are for bubblewrap and the boot stage.
FIRST_FD, LAST_FD = 4, 64
#: As in a jail: it decides how the interpreter handles text.
ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8"}
BOOT = """
import sys
sys.path.insert(0, {parent!r})
from {package}.worker import main
main()
"""


def main() -> None:
    """Fork as bubblewrap does, report the child's pid, and wait for the child."""
    parent, package = os.path.split(sys.argv[1])
    child = os.fork()
    if child == 0:
        os.closerange(FIRST_FD, LAST_FD)
        source = BOOT.format(parent=parent, package=package)
        os.execve(sys.executable, [sys.executable, "-I", "-S", "-B", "-c", source], ENVIRONMENT)
    os.write(STATUS_FD, json.dumps({"child-pid": child}).encode() + b"\n")
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


main()
