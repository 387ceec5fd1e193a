"""What features may call that have ways of their own in a door. Who serves HTTP itself uses `gate.py` and `http.py`.

A feature's `door.py` has `routes(swarm)`, its ways: `Operation` (kernel/cli/operations.py), for which it needs nothing
from here; or `Way`, a route of Starlette that says the role and the size of the body. `FORMS` of it says how errors
below a prefix of a path are answered; without one they are problem documents. A way finds its `Caller` as
`request.state.caller`. It may raise GoondanError, and `refused(status, …)` where HTTP has a status for
it. It is cancelled when its client goes, and when the door ends if its answer is a stream of events.

Importing this raises GoondanError E_USAGE where the packages of a door are not installed.

Source: docs/design/features.md section 1.
"""

import sys

from goondan.schemas.wire.errors import fail

if sys.modules.get("typing_extensions", sys) is None:  # set aside for quicker starts (kernel/cli/__init__.py)
    del sys.modules["typing_extensions"]
try:
    import uvicorn  # noqa: F401 - now, while nothing else has happened

    from goondan.features.serve.api.gate import Formatter, Refused, Way, refused
except ModuleNotFoundError as error:
    message = f"the package {error.name} is not installed"
    raise fail("E_USAGE", message, suggestion="Install goondan-kernel[serve].") from None
from goondan.features.serve.api.problems import problem, status_of
from goondan.features.serve.api.rules.callers import Caller, Role
from goondan.features.serve.api.swarm import Swarm

__all__ = ["Caller", "Formatter", "Refused", "Role", "Swarm", "Way", "problem", "refused", "status_of"]
