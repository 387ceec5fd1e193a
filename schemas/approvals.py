"""The messages of agents, the broker and clients about items that wait for a person."""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

import hashlib
from typing import Any, Final, Literal

from msgspec import Raw, Struct

from goondan.schemas.wire.frames import NO_PAYLOAD, OptionalRaw

#: `approval`: may this call run? `question`: what is the value that a schema describes?
Kind = Literal["approval", "question"]
#: Arguments that a person is shown, and answers that a person gives (bytes of msgpack). A person reads no more on a
#: screen, and every item lies in the journal.
MAX_ARGS_BYTES: Final = 256 << 10
MAX_ANSWER_BYTES: Final = 64 << 10
#: Text of a question, and reasons that people give (characters).
MAX_MESSAGE: Final = 4000
#: Digits of the short name of an item.
CODE_DIGITS: Final = 10

#: The codes with which the broker answers a call that does not run.
WAITS: Final = "E_APPROVAL_WAITS"
DENIED: Final = "E_APPROVAL_DENIED"


class ApprovalAsk(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """Payload of `approval.ask`. The frame names the call. Either the call is to run in the agent's own process, or
    such a call asks a question.
    """

    #: A call that waits for approval, or a question.
    kind: Kind = "approval"
    #: The arguments of the call: a JSON object.
    args: Raw = NO_PAYLOAD
    #: Of a question: its text.
    message: str | None = None
    #: Of a question: the JSON Schema of its answer.
    schema: OptionalRaw = None
    #: Of a question: how long it waits (seconds). None: as long as an approval waits.
    expires_s: float | None = None
    #: Of a question: nobody wants the answer any more, and the item is withdrawn.
    over: bool = False


class ApprovalState(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The `reply` to `approval.ask`."""

    #: `run`: the call may run now. `waits`: a person has not decided yet, and `approval.news` follows when one has.
    #: `denied`: the call may not run, or the question was declined. `answered`: the question has its answer.
    state: Literal["run", "waits", "denied", "answered"]
    #: With `run`: the same was said before.
    again: bool = False
    #: With `denied`: why.
    reason: str | None = None
    #: With `answered`: the answer.
    answer: OptionalRaw = None
    #: With `denied`: no person has decided, because the time was over.
    expired: bool = False


class ApprovalItem(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One item as `gdn approve` and `gdn run` get it."""

    #: The callId.
    id: str
    #: A short name of the item, for people.
    code: str
    #: A call that waits for approval, or a question.
    kind: Kind
    #: The agent that asks.
    agent: str
    #: The instance that asks.
    instance_key: str
    #: The event whose turn asks.
    event_id: str
    #: Full name of the tool.
    tool: str
    #: SHA-256 of tool, working directory and arguments, in hexadecimal digits.
    digest: str
    #: When it was asked (milliseconds since 1970).
    asked_ms: int
    #: It waits, or how it was decided.
    state: Literal["waits", "approved", "denied", "answered", "started"]
    #: The event that all this work began with.
    root_event: str | None = None
    #: The instances that wait for this turn: each waits for the next one, and the last one waits for this turn.
    waited_for_by: list[str] = []
    #: The working directory of the call.
    workdir: str | None = None
    #: The final arguments. None when they are too large for a list.
    args: Any = None
    #: The size of the arguments, when they are too large for a list.
    args_bytes: int = 0
    #: Of a question: its text.
    message: str | None = None
    #: Of a question: the JSON Schema of its answer.
    schema: Any = None
    #: Why a rule wants a person to decide.
    reason: str | None = None
    #: When it ends without a decision (milliseconds since 1970).
    expires_ms: int | None = None
    #: The user whose token decided. -1: the token names no user. None: the kernel decided, because the time was over.
    uid: int | None = None
    #: When it was decided (milliseconds since 1970).
    decided_ms: int | None = None
    #: What the person said about the decision.
    decided_reason: str | None = None
    #: Of a call that a script of code mode makes: the script. None when it is too large for a list.
    script: str | None = None
    #: How many calls of this tool in the script a yes is for, this one included. 0: this call alone.
    covers: int = 0


class ApprovalDecided(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One decision, as `gdn approve list --answered` gets it: who decided what, and when. An answer is not kept."""

    #: The short name of the item.
    code: str
    #: The callId.
    id: str
    #: A call that waited for approval, or a question.
    kind: Kind
    #: The agent that asked.
    agent: str
    #: The instance that asked.
    instance_key: str
    #: The event whose turn asked.
    event_id: str
    #: Full name of the tool.
    tool: str
    #: As in ApprovalItem.
    digest: str
    #: The beginning of the call's arguments as JSON, or of the question. Keys of models are taken out.
    what: str
    #: When it was asked (milliseconds since 1970).
    asked_ms: int
    #: When it was decided (milliseconds since 1970).
    decided_ms: int
    #: How it was decided.
    how: Literal["approved", "denied", "answered"]
    #: As in ApprovalItem.
    uid: int | None = None
    #: What the person said about the decision.
    reason: str | None = None


class ApprovalDecision(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The operator's request `{op: "approve.answer"}`."""

    #: Always `approve.answer`.
    op: str
    #: The id or the code of an item.
    id: str
    #: What the person decided.
    decision: Literal["yes", "no", "answer"]
    #: What the person says about it.
    reason: str | None = None
    #: With `answer`: a JSON value.
    answer: OptionalRaw = None


def code_of(agent: str, instance_key: str, call_id: str) -> str:
    """The short name of an item."""
    name = f"{agent}\0{instance_key}\0{call_id}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(name).hexdigest()[:CODE_DIGITS]
