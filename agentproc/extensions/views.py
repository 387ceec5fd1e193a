"""Changes of the messages that the model sees in one step. Layers of the step ask for them. Pure.

A view is computed when the model is asked, from the conversation of that moment. It is not stored. A message that a
view leaves out is there again in the next step, and everybody who reads the conversation sees it.

Source: docs/design/turns.md section 8; requirement CONTEXT-10.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from goondan.agentproc.conversation import Append, Message
from goondan.agentproc.extensions.contexts import View
from goondan.agentproc.extensions.pipeline import MiddlewareError
from goondan.agentproc.extensions.values import error_of
from goondan.agentproc.transcript import read_event
from goondan.schemas.errors import GoondanError


def apply_views(views: Iterable[View], messages: list[Message]) -> list[Message]:
    """The messages after every change, in the order in which the layers asked. Raises GoondanError, which names the
    extension whose change fails or does not return a list of messages.
    """
    for view in views:
        try:
            messages = _read(view.change(list(messages)), messages, view.extension)
        except Exception as error:
            what = f"the view of the conversation of extension {view.extension} failed"
            raise GoondanError(error_of(error, "E_MIDDLEWARE", what)) from None
    return messages


def _read(given: Any, before: list[Message], extension: str) -> list[Message]:
    if not isinstance(given, list | tuple):
        raise MiddlewareError(f"it returned {type(given).__name__}, not a list of messages")
    at = before[-1].created_at if before else ""
    read: list[Message] = []
    for index, item in enumerate(given):
        if not isinstance(item, Message):
            event = read_event({"type": "append", "message": item}, message_id=f"view.{index}", source=extension, at=at)
            if not isinstance(event, Append):
                raise AssertionError("what is read as an append is one")
            item = event.message
        read.append(item)
    return read
