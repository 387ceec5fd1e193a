"""What a span shows of a turn's conversation: its messages, and the pictures and PDFs beside them.

A trace has arguments and results in short. The whole is in the instance's file, in the messages of the turn, and is
read for the one span that a person looks at.

Source: docs/traces.md, "Arguments and results"; docs/design/files.md section 1.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct
from starlette.responses import Response

from goondan.features.serve.api.routing import Asked
from goondan.kernel.cli.operations import Operation
from goondan.kernel.cli.session import opened_files
from goondan.kernel.traces.conversations import turn_messages
from goondan.schemas.bundle.address import instance_dir

#: The largest message that is shown whole (bytes, as JSON): a browser takes a second for it. Of a larger one the trace
#: has the beginning.
MAX_SHOWN: Final = 8 << 20


class Said(Struct, forbid_unknown_fields=True):
    """Which messages of a turn."""

    #: The agent.
    agent: str
    #: The event of the turn.
    event: str
    #: The instance.
    instance: str = "default"
    #: Those with this call: what the model wrote, and the result.
    call: str | None = None
    #: The answer of the model with this number, from 0. Without `call` and this: the first message and the last answer.
    answer: Annotated[int, Meta(ge=0)] | None = None


class Kept(Struct, forbid_unknown_fields=True):
    """Which file."""

    #: The agent.
    agent: str
    #: The name of the file, as the message has it.
    file: Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    #: The instance.
    instance: str = "default"


def messages(asked: Asked) -> dict[str, list[msgspec.Raw]]:
    """Messages of a turn as they are stored; of one that was taken back there are none."""
    (agent, key), query = asked.place, asked.query
    found = chosen(turn_messages(asked.swarm.state_dir, agent, key, query.event), query.call, query.answer)
    encoded = [msgspec.json.encode(message) for message in found]
    return {"messages": [msgspec.Raw(text) for text in encoded if len(text) <= MAX_SHOWN]}


def chosen(found: Sequence[Any], call: str | None, answer: int | None) -> list[Any]:
    """The messages that are wanted of a turn's (pure). Those of another form than ours are never."""
    told = [one for one in found if isinstance(one, dict) and isinstance(one.get("data"), dict)]
    if call is not None:
        return [one for one in told if any(part.get("toolCallId") == call for part in _parts(one))]
    said = [one for one in told if one["data"].get("role") == "assistant"]
    return told[:1] + said[-1:] if answer is None else said[answer : answer + 1]


def _parts(message: Any) -> list[Any]:
    content = message["data"].get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def file(asked: Asked) -> Response:
    """A picture or a PDF of a conversation."""
    folder = instance_dir(asked.swarm.state_dir, *asked.place)
    with opened_files([f"{folder}/files/{asked.query.file}"], links=False) as (kept,):
        return Response(os.pread(kept.descriptor, kept.size, 0), media_type=kept.media_type)


OPERATIONS: Final = (
    Operation("getTurnMessages", "GET", "/messages", "look", "Messages of a turn.", messages, query=Said),
    Operation("getFile", "GET", "/files", "look", "A picture or a PDF of a conversation.", file, query=Kept),
)
