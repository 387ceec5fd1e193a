"""`python -I -S toolhost/launcher/__main__.py FD`: started by the tool host with its socket, and ends with it."""

import sys

sys.path.insert(0, __file__.rpartition("/toolhost/launcher/")[0])

from toolhost.launcher.program import main  # -I leaves our own root out of the path

main(int(sys.argv[1]))
