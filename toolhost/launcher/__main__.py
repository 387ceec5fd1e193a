"""`python -I -S toolhost/launcher/__main__.py FD UMASK [helper]`: started by the tool host, and ends with it.

It is a launcher. Under root it is the privileged helper, which forks launchers. What jails write is made under UMASK
(octal digits; `-` for the one that we were started with). What we make is closed to others.
"""

import os
import resource
import socket
import sys

ROOT = __file__.rpartition("/toolhost/launcher/")[0]

# -I leaves our own root out of the path, and it is on it for this one name alone: it may be a workdir of tools, and a
# `json.py` there must not be ours.
sys.path.insert(0, ROOT)
import toolhost  # noqa: E402, F401

sys.path.remove(ROOT)

from toolhost.launcher import privileged_helper, program  # noqa: E402

inherited = os.umask(0o077)
umask = inherited if sys.argv[2] == "-" else int(sys.argv[2], 8)
# What jails are given passes through here. It is no more than this: a process whose memory is closed as well could not
# set up the namespaces of another, as root without CAP_SYS_PTRACE, nor its niceness, as an ordinary user.
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
# What it was given beside its socket: tokens, a shell's leftovers.
os.closerange(int(sys.argv[1]) + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
os.set_inheritable(int(sys.argv[1]), False)
channel = socket.socket(fileno=int(sys.argv[1]))
if sys.argv[3:] == ["helper"]:
    privileged_helper.serve(channel, umask)
program.serve(channel, umask)
