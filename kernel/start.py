"""`python -P kernel/start.py MODULE ARG…`: run a module of this installation, and no other of that name.

`python -m` would put the current directory first on the module path, where a user's `json.py` waits; a plain `-P -m`
would not find packages that run from a source tree. So the folder that this file's package lies in goes last.
"""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if root not in sys.path:
        sys.path.append(root)
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
