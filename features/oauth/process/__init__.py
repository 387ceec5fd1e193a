"""The process that holds OAuth tokens: `python -m goondan.features.oauth.process`.

Each kernel has at most one. It starts when a token is first asked for. It is a peer of the broker on the control
socket: each order gets one answer. `authority.py` carries orders out. `rules/` is pure.
`vault.py` has the files, `http.py` has the sockets.

Source: docs/oauth.md; docs/decisions/068.
"""

from __future__ import annotations

import os
from typing import Final

from goondan.features.oauth.wire import OAUTH
from goondan.kernel import paths, spawn
from goondan.kernel.supervisor.programs import Program

#: The name of the file of the key.
KEY_NAME: Final = "oauth.key"


def _arguments(state_dir: str) -> list[str]:
    return ["--state-dir", state_dir, "--key-file", paths.key_file(os.environ, os.path.expanduser("~"), KEY_NAME)]


#: Its servers may be behind the same proxy as those of models.
PROGRAM: Final = Program(OAUTH, "goondan.features.oauth.process", _arguments, spawn.AGENT_ENVIRONMENT)
