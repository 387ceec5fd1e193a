"""Which conversation a request goes on with, and what of it is new.

A client of chat completions sends its whole conversation each time, and names none. So each message is hashed into a
chain: the digest after a message stands for everything up to it, for one token and one agent. Of each conversation the
**tip** is kept: the few digests that stand for where it is now. They are those after the last message that was asked,
and after the answer to it in every form in which a client may send it back: as it is, and with the words that stood
before tool calls. Only tips are kept, because an earlier place cannot be gone on from: the agent knows more by then.

- The longest known beginning of a request is its conversation, and the messages behind it are new.
- A request without an answer of the agent has no history: it begins a conversation, or goes on with the one it names.
- A history that is not known was edited, regenerated, or is of elsewhere. It goes on in a new instance, which is told
  the history in words (`worded`): the kernel copies no conversations, and what an agent remembers of its tools cannot
  be made up. The owner may have it refused instead, where the conversation is known by how it begins.
- Of an answer whose client has left, the client has a part. That counts as the answer.

Keys alone cannot do it: two conversations that both begin with "hi" need two instances, so a table says where each is.

Source: docs/conversations.md; docs/design/delivery.md section 2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct

from goondan.features.openai_door.door.rules.requests import Attached, Said

#: How many messages of the user behind the last answer may be known already: those of turns that had no answer.
MAX_UNANSWERED: Final = 16


class Place(Struct, frozen=True):
    """A conversation that is known, and where it is."""

    #: Its number in the table.
    number: int
    #: The instance of the agent.
    instance: str
    #: How many turns were begun from here.
    turns: int
    #: Digest of the instructions that it was told last.
    told: bytes | None
    #: What its client has of the last answer, which it did not wait for.
    part: str | None
    #: Whether the last turn has given an answer.
    answered: bool


def beginning(caller: str, agent: str) -> bytes:
    """The digest before the first message."""
    return hashlib.sha256(msgspec.json.encode([caller, agent])).digest()


def after(before: bytes, said: Said) -> bytes:
    """The digest after one more message. Blanks around it do not count: clients cut them off."""
    data = msgspec.json.encode([said.role, plain(said.text), [file.digest.hex() for file in said.files]])
    return hashlib.sha256(before + data).digest()


def chain(start: bytes, said: Sequence[Said]) -> list[bytes]:
    """The digests before each message, and after the last one."""
    found = [start]
    for one in said:
        found.append(after(found[-1], one))
    return found


def plain(text: str) -> str:
    """A text as it is compared."""
    return text.replace("\r\n", "\n").strip()


def history(said: Sequence[Said]) -> int:
    """How many messages are history: up to the last answer of an agent."""
    return next((at for at in range(len(said), 0, -1) if said[at - 1].role == "assistant"), 0)


def candidates(said: Sequence[Said]) -> list[int]:
    """Which beginnings of a request may be known, as numbers of messages, the longest first."""
    known = history(said)
    return [] if not known else [*range(len(said), max(known, len(said) - MAX_UNANSWERED), -1), known]


def root(digests: Sequence[bytes], said: Sequence[Said]) -> bytes:
    """The digest after the first message of the user: how a conversation begins."""
    return digests[next((at for at, one in enumerate(said) if one.role == "user"), 0) + 1]


def instructions_of(said: Sequence[Said]) -> bytes | None:
    """The digest of all instructions in these messages; None without any."""
    texts = [plain(one.text) for one in said if one.role == "system"]
    return hashlib.sha256(msgspec.json.encode(texts)).digest() if texts else None


def new_in(place: Place, said: Sequence[Said], known: int) -> Sequence[Said]:
    """What is new of a request whose first `known` messages a conversation has. Nothing: its last answer is wanted once
    more, which is another conversation. A message whose turn has failed is said again.
    """
    return said[known:] if known < len(said) or place.answered else said[history(said) :]


def has_part(place: Place, said: Sequence[Said]) -> bool:
    """Whether the last answer in these messages is what a client kept of one that it did not wait for."""
    return place.part is not None and plain(place.part).startswith(plain(said[history(said) - 1].text))


def without_told(place: Place | None, said: Sequence[Said]) -> Sequence[Said]:
    """These messages, without the instructions that a conversation was told last."""
    if place is None or place.told is None or instructions_of(said) != place.told:
        return said
    return [one for one in said if one.role != "system"]


def worded(said: Sequence[Said]) -> str:
    """Messages as one text for the agent: what is new as it is, instructions and a history before it."""
    known = history(said)
    instructions = [one.text for one in said if one.role == "system" and one.text]
    parts = []
    if instructions:
        parts += ["Instructions of the program that this comes through:", *instructions]
    if known:
        parts.append("What was said before, as that program tells it, the oldest first, one JSON object a line:")
        parts.append("\n".join([_line(one) for one in said[:known] if one.role != "system"]))
    new = [one.text for one in said[known:] if one.role == "user"]
    return "\n\n".join([*parts, "The message:", *new] if parts else new)


def _line(said: Said) -> str:
    files = {"files": len(said.files)} if said.files else {}
    return msgspec.json.encode({"role": said.role, "content": said.text, **files}).decode()


def files_of(said: Sequence[Said]) -> list[Attached]:
    """All files of these messages."""
    return [file for one in said for file in one.files]
