"""Pending work that an operator's calls have begun in an ordinary agent. Its end is told to nobody by itself: the model
of the agent has not asked for it, and an operator polls.
"""

from __future__ import annotations

from typing import Final

import msgspec

from goondan.agentproc.store import ConversationStore

#: The name that the turns are kept under.
_NAME: Final = "operators.work"
#: So many turns are known, the last ones: more pieces of work of one instance never run at once.
MAX_KNOWN: Final = 256


def note_work(store: ConversationStore, turn_id: str) -> None:
    """An operator's call in this turn has begun pending work (inside `write`)."""
    known = [one for one in operators_work(store) if one != turn_id]
    store.remember(_NAME, msgspec.msgpack.encode([*known[1 - MAX_KNOWN :], turn_id]))


def operators_work(store: ConversationStore) -> list[str]:
    """The turns in which operators' calls have begun pending work."""
    kept = store.remembered(_NAME)
    return [] if kept is None else msgspec.msgpack.decode(kept, type=list[str])
