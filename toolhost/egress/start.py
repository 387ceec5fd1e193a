"""The file that the egress proxy's interpreter is started with (-I -S): it finds our packages, and nothing else.

`python -I -S -B start.py FD` serves the tool host at the other end of the socket FD until it is closed.
"""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from toolhost.egress.proxy import main

sys.exit(main(int(sys.argv[1])))
