"""Patches as the journal keeps them, and as a person reads them. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kernel.broker.journal.records import ConfigPatched
from kernel.broker.live_config.patches import Patch, State

#: Fields of a patch that a record has under the same name, as they are.
_SAME: Final = (
    "number", "id", "agent", "key", "change", "asked", "by", "by_key", "extension", "event_id", "reason", "made_from",
    "at_ms", "dynamic", "error",
)  # fmt: skip


def record_of(patch: Patch, *, reverted: int = 0) -> ConfigPatched:
    """The record of a patch."""
    touched = sorted(list(names) for names in patch.touched)
    return ConfigPatched(touched=touched, reverted=reverted, **{name: getattr(patch, name) for name in _SAME})


def patch_of(record: ConfigPatched) -> Patch:
    """The patch of a record."""
    state: State = "rejected" if record.error is not None else "reverted" if record.reverted else "accepted"
    touched = frozenset(tuple(names) for names in record.touched)
    fields = {name: getattr(record, name) for name in _SAME}
    return Patch(touched=touched, state=state, reverted=record.reverted, **fields)


def entry_of(patch: Patch, idle: list[str]) -> dict[str, Any]:
    """One line of the audit. `idle`: the parts of the patch that have nothing to act on now."""
    return {
        "patchId": patch.id,
        "revision": patch.number,
        "agent": patch.agent,
        "instanceKey": patch.key,
        "status": patch.state,
        "revertedAt": patch.reverted or None,
        "by": patch.by,
        "byInstance": patch.by_key,
        "extension": patch.extension,
        "eventId": patch.event_id,
        "reason": patch.reason,
        "madeFrom": patch.made_from,
        "atMs": patch.at_ms,
        "asked": patch.asked,
        "change": msgspec.to_builtins(patch.change),
        "idle": idle,
        "error": None if patch.error is None else msgspec.to_builtins(patch.error),
    }
