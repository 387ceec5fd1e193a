"""The page's ways: its files, which need no token, and what its scripts ask that the API does not have.

Source: docs/decisions/176; docs/serve.md, "One more door".
"""

from __future__ import annotations

from goondan.features.page.door import granting, looking, static, turns
from goondan.features.page.door.entering import Entering, Wanted
from goondan.features.page.door.live import Live, Wish
from goondan.features.serve.api.gate import Way
from goondan.features.serve.api.swarm import Swarm
from goondan.kernel.cli.operations import Operation

#: Where what the page's scripts ask is.
PREFIX = "/page/api"


def routes(swarm: Swarm) -> list[Way | Operation]:
    """All of them."""
    entering, live = Entering(swarm), Live(swarm.onlookers)
    operations = (
        Operation("makeCode", "POST", "/codes", "operate", "A code.", entering.code, body=Wanted),
        Operation("openSession", "POST", "/session", None, "Its token.", entering.session, max_body=1024),
        Operation("live", "GET", "/live", "look", "What happens.", live.stream, query=Wish),
        Operation("listRuns", "GET", "/runs", "look", "Runs.", looking.runs, query=looking.Runs),
        Operation("getRuns", "POST", "/runs/details", "look", "Turns.", looking.details, body=looking.Details),
        Operation("getSwarm", "GET", "/swarm", "look", "Which swarm it is.", looking.swarm),
        Operation("listLines", "GET", "/logs", "look", "Lines of logs.", looking.lines, query=looking.Lines),
        *granting.OPERATIONS,
        *turns.OPERATIONS,
    )
    return [*static.ways(), *(operation._replace(prefix=PREFIX) for operation in operations)]
