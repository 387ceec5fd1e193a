"""Patches as the journal keeps them, and as a person reads them. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import structs

from goondan.kernel.broker.live_config.patches import ConfigPatched, Patch, State


def record_of(patch: Patch, *, reverted: int = 0) -> ConfigPatched:
    """The record of a patch."""
    fields = {name: getattr(patch, name) for name in ConfigPatched.__struct_fields__}
    return ConfigPatched(**{**fields, "reverted": reverted})


def patch_of(record: ConfigPatched) -> Patch:
    """The patch of a record."""
    state: State = "rejected" if record.error is not None else "reverted" if record.reverted else "accepted"
    return Patch(**structs.asdict(record), state=state)


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
