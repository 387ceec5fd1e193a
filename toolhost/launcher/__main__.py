"""`python -I -S goondan/toolhost/launcher/__main__.py FD UMASK [helper]`: the tool host starts it, and it ends with
the tool host.

It is a launcher. With `helper` it is the privileged helper (under root), which forks launchers. Jails write files under
UMASK (octal digits; `-` for the one that we were started with). Files that we make are closed to others.
"""

import gc
import os
import resource
import socket
import sys

gc.disable()  # imports leave no garbage; `program.begin` turns it on
ROOT = __file__.rpartition("/goondan/toolhost/")[0]

# -I leaves our own root out of the path. It is added for this one import alone: the root may be a workdir of tools, and
# a `json.py` there must not be imported by us.
sys.path.insert(0, ROOT)
import goondan  # noqa: E402, F401

sys.path.remove(ROOT)

from goondan.toolhost.launcher import program  # noqa: E402

inherited = os.umask(0o077)
umask = inherited if sys.argv[2] == "-" else int(sys.argv[2], 8)
# What jails are given passes through here. No more is closed than this: a process whose memory is closed as well could
# not set up the namespaces of another process, as root without CAP_SYS_PTRACE, nor its niceness, as an ordinary user.
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
# Descriptors that came in addition to its socket: tokens, a shell's leftovers.
os.closerange(int(sys.argv[1]) + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
os.set_inheritable(int(sys.argv[1]), False)
channel = socket.socket(fileno=int(sys.argv[1]))
if sys.argv[3:] == ["helper"]:
    program.serve_operations(channel, umask)
program.serve_launches(channel, umask)
