"""`python -P kernel/start.py MODULE ARG…`: run a module of this installation, and no other of that name.

`python -m` would put the current directory first on the module path, where a user's `json.py` waits; a plain `-P -m`
would not find packages that run from a source tree. So the folder that this file's package lies in goes last.

What the program was given as descriptors stays its own: none of them passes on to what it starts.
"""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import suppress

if __name__ == "__main__":
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own is closed already
            if int(name) > 2:
                os.set_inheritable(int(name), False)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if root not in sys.path:
        sys.path.append(root)
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
