"""An event with the facts that the broker states about it (pure): its payload, and the header's facts about its sender.

The sender of an event writes the payload. The broker states in the header who the sender is and on whose behalf it
acts.

Source: PROTOCOL.md, "What a receiver checks itself".
"""

from __future__ import annotations

from msgspec.structs import replace

from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.frames import AgentEvent, Frame


def told_event(frame: Frame) -> AgentEvent:
    """The event in a frame, with `auth` and `source` of the header. Raises GoondanError E_FRAME_INVALID."""
    event = from_raw(frame.payload, AgentEvent)
    auth = None if frame.auth is None else from_raw(frame.auth, object)
    return replace(event, auth=auth, source=frame.source or event.source)
