"""Ids of traces and spans: hexadecimal as in W3C trace context, made of names that last (pure).

A trace is everything that began with one message; a span is one turn, step, model call or tool call of it. A trace id
has 32 hexadecimal digits, a span id 16; lower case, and not all of them zero.

Span ids are digests of names. So every process gets the same id without asking: an agent that resumes a turn, the
broker and a tool host that pass on what a call asks for, and whoever reads a trace.

Source: PROTOCOL.md "Traces"; W3C Trace Context.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

try:  # hashlib's, of OpenSSL, takes longer to begin than a name takes to digest, and each step has three names
    import _sha256 as _hashes  # type: ignore[import-not-found]
except ImportError:  # a later Python has it elsewhere
    import hashlib as _hashes

#: The environment variable of the kernel: "1" has each request to a model say which span it belongs to
#: (`traceparent`), so that its server can hang its own spans there.
VARIABLE: Final = "GOONDAN_TRACEPARENT"

_TRACE: Final = re.compile(r"(?!0{32})[0-9a-f]{32}\Z")
#: A turn needs the same few spans again and again; each takes some 200 bytes.
_REMEMBERED: Final = 64
#: A text: few programs read such headers, and all import this.
_TRACEPARENT: Final = r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-(?s:.*))?\Z"
_SPAN: Final = re.compile(r"(?!0{16})[0-9a-f]{16}\Z")


def is_trace_id(text: str) -> bool:
    """Whether `text` is a trace id."""
    return _TRACE.match(text) is not None


def is_span_id(text: str) -> bool:
    """Whether `text` is a span id."""
    return _SPAN.match(text) is not None


def traceparent(trace_id: str, span_id: str) -> str:
    """The header of W3C trace context that says: this belongs to that span."""
    return f"00-{trace_id}-{span_id}-01"


def read_traceparent(header: str) -> tuple[str, str] | None:
    """The trace and the span that such a header names; None for what is none. Later versions may say more behind it."""
    found = re.match(_TRACEPARENT, header.strip())
    if found is None or found[1] == "ff" or (found[1] == "00" and found[4]):
        return None
    return (found[2], found[3]) if is_trace_id(found[2]) and is_span_id(found[3]) else None


def trace_id_of(*names: str) -> str:
    """The trace that began with what these names tell apart from everything else."""
    return _digest("\0".join(names))[:32]


def turn_span(turn_id: str) -> str:
    """A turn's span."""
    return _digest(turn_id)[:16]


@lru_cache(maxsize=_REMEMBERED)
def step_span(turn_id: str, step: int) -> str:
    """The span of a step, counted from 1; 0 stands for the turn of an operator call, which has no steps."""
    return turn_span(turn_id) if step < 1 else _digest(f"{turn_id}#{step}")[:16]


def model_span(turn_id: str, step: int) -> str:
    """The span of a step's model call."""
    return _digest(f"{turn_id}#{step}/model")[:16]


@lru_cache(maxsize=_REMEMBERED)
def call_span(call_id: str) -> str:
    """A tool call's span, by its callId (`{turnId}/{toolCallId}`)."""
    return _digest(call_id)[:16]


def _digest(name: str) -> str:
    return str(_hashes.sha256(name.encode("utf-8", "surrogatepass")).hexdigest())
