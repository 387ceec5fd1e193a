"""What agents, the broker and clients tell each other about items that wait for a person."""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

import hashlib
from typing import Any, Final, Literal

from msgspec import Raw, Struct

from schemas.frames import NO_PAYLOAD, OptionalRaw

#: `approval`: may this call run? `question`: what is the value that a schema describes?
Kind = Literal["approval", "question"]
#: Arguments that a person is shown, and answers that a person gives (bytes of msgpack). Nobody reads more on a screen,
#: and every item lies in the journal.
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
    """Payload of `approval.ask`: a call that is to run in the agent's own process, or a question of such a call.

    The frame names the call. `args` are the call's, a JSON object. A question has `message` and `schema`, and
    `expires_s` (seconds; None: as long as an approval waits).
    """

    kind: Kind = "approval"
    args: Raw = NO_PAYLOAD
    message: str | None = None
    schema: OptionalRaw = None
    expires_s: float | None = None


class ApprovalState(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The `reply` to `approval.ask`.

    `run`: the call may run now; with `again` that was said before. `waits`: a person has not decided; `approval.news`
    comes when one has. `denied`: it may not, or the question was declined, for this `reason`. `answered`: with
    `answer`.
    """

    state: Literal["run", "waits", "denied", "answered"]
    again: bool = False
    reason: str | None = None
    answer: OptionalRaw = None


class ApprovalItem(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One item as `gdn approve` and `gdn run` get it.

    `id` is the callId, `code` a short name for people. `agent` and `instance_key` are who asks, `event_id` in which
    turn, `root_event` what all of it began with, `waited_for_by` the instances that wait for that turn, the first of
    them last. `args` are the final arguments, None where they are too many for a list (`args_bytes` has their size).
    `digest` is SHA-256 of tool, working directory and arguments (hexadecimal). `asked_ms` and `expires_ms` are
    milliseconds since 1970. `state`: `waits`, or how it was decided. `uid` is the user whose token decided (-1: it
    names none), None: the kernel, because the time was over.
    """

    id: str
    code: str
    kind: Kind
    agent: str
    instance_key: str
    event_id: str
    tool: str
    digest: str
    asked_ms: int
    state: Literal["waits", "approved", "denied", "answered", "started"]
    root_event: str | None = None
    waited_for_by: list[str] = []
    workdir: str | None = None
    args: Any = None
    args_bytes: int = 0
    message: str | None = None
    schema: Any = None
    reason: str | None = None
    expires_ms: int | None = None
    uid: int | None = None
    decided_ms: int | None = None
    decided_reason: str | None = None


class ApprovalDecided(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One decision, as `gdn approve list --answered` gets it: who decided what, and when.

    `what` is the beginning of the call's arguments as JSON, or of the question, without keys of models; an answer is
    not kept. `uid` as of ApprovalItem. Times are milliseconds since 1970.
    """

    code: str
    id: str
    kind: Kind
    agent: str
    instance_key: str
    event_id: str
    tool: str
    digest: str
    what: str
    asked_ms: int
    decided_ms: int
    how: Literal["approved", "denied", "answered"]
    uid: int | None = None
    reason: str | None = None


class ApprovalDecision(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """`{op: "approve.answer"}` of an operator: `id` is an item's id or code. `answer` is a JSON value, of `answer`."""

    op: str
    id: str
    decision: Literal["yes", "no", "answer"]
    reason: str | None = None
    answer: OptionalRaw = None


def code_of(agent: str, instance_key: str, call_id: str) -> str:
    """The short name of an item."""
    name = f"{agent}\0{instance_key}\0{call_id}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(name).hexdigest()[:CODE_DIGITS]
