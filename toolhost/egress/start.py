"""The file that the egress proxy's interpreter is started with (-I -S): it finds our packages, and nothing else.

`python -I -S -B start.py FD FILTER_FD` serves the tool host at the other end of the socket FD until it is closed, under
the system call filter that FILTER_FD holds.
"""

import sys

ROOT = __file__.rpartition("/goondan/toolhost/")[0]

# Only this one: the folder itself may be a workdir of tools, and must not be asked for modules of other names.
sys.path.insert(0, ROOT)
import goondan  # noqa: E402, F401

sys.path.remove(ROOT)

from goondan.toolhost.egress.proxy import main  # noqa: E402

sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
