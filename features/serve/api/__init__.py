"""What features may call that have ways of their own in a door. Who serves HTTP itself uses `gate.py` and `http.py`.

A feature's `door.py` has `routes(swarm)`, its ways: `Way`, which says the role and the size of the body, or any other
route of Starlette, which needs `operate`. `FORMS` of it says how errors below a prefix of a path are answered; without
one they are problem documents. A way finds its `Caller` as `request.state.caller`. It may raise GoondanError, and
`refused(status, …)` where HTTP has a status for it. It is cancelled when its client goes, and when the door ends if its
answer is a stream of events.

Source: docs/design/features.md section 1.
"""

from goondan.features.serve.api.gate import Formatter, Refused, Way, refused
from goondan.features.serve.api.problems import problem, status_of
from goondan.features.serve.api.rules.callers import Caller, Role
from goondan.features.serve.api.swarm import Swarm

__all__ = ["Caller", "Formatter", "Refused", "Role", "Swarm", "Way", "problem", "refused", "status_of"]
