"""`python -I -S toolhost/launcher/__main__.py FD`: started by the tool host with its socket, and ends with it."""

import sys

ROOT = __file__.rpartition("/toolhost/launcher/")[0]

# -I leaves our own root out of the path, and it is on it for this one name alone: it may be a workdir of tools, and a
# `json.py` there must not be ours.
sys.path.insert(0, ROOT)
import toolhost  # noqa: E402, F401

sys.path.remove(ROOT)

from toolhost.launcher.program import main  # noqa: E402

main(int(sys.argv[1]))
