"""What a person looks at before a yes: an item that waits, and digests of the files that its arguments name.

Source: docs/approvals.md, "What happens to a call".
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from goondan.features.serve.api.routing import Asked, Operation
from goondan.kernel.cli.named_files import with_files


async def item(asked: Asked) -> dict[str, Any]:
    """One item with all of its arguments."""
    found = await asked.swarm.admin({"op": "approve.show", "id": asked.path["id"]})
    asked.caller.check_agent(found["agent"])
    return await asyncio.to_thread(with_files, found)


OPERATIONS: Final = (Operation("getItem", "GET", "/approvals/{id}", "look", "A call that waits, and its files.", item),)
