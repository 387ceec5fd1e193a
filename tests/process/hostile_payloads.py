"""Payloads that a peer sends who means harm: seeded, of any shape, for frames that the broker opens itself.

A payload is bytes: much of what is hostile is no value that an encoder of ours would make.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any, Final

import msgspec

#: What agents ask of the kernel, with the fields of a sound payload.
ASKED_BY_AGENTS: Final[dict[str, dict[str, Any]]] = {
    "config.propose": {
        "id": "p",
        "patches": [{"op": "add", "path": "/tools/-", "value": "Tool/notes"}],
        "revision": 0,
        "base": "0" * 16,
        "reason": "why",
        "scope": "instance",
        "extension": "one",
        "registered": ["a.b"],
    },
    "approval.ask": {"kind": "question", "args": {"a": 1}, "message": "m", "schema": {"type": "object"}, "expiresS": 9},
    "budget.reserve": {"id": "m", "kind": "model", "inputTokens": 10, "outputTokens": 10},
    "budget.settle": {
        "id": "m",
        "unused": False,
        "known": True,
        "inputTokens": 5,
        "outputTokens": 5,
        "cachedTokens": 1,
    },
    "model.permit": {
        "id": "m",
        "model": "",
        "tokens": 10,
        "askedMs": 10,
        "patienceMs": 10,
        "refused": {"waitMs": 10},
    },
    "model.over": {"id": "m", "model": "", "accepted": True, "tokens": 5, "limits": {"requestsLeft": 1}},
    "model.out": {"id": "m", "model": "", "outMs": 5},
    "oauth.token": {"app": "app", "scopes": ["read"], "subject": "local"},
    "changeset.open": {"reason": "why"},
    "changeset.commit": {"changesetId": "0" * 16, "message": "m"},
}
#: What operators ask with `admin`.
ASKED_BY_OPERATORS: Final[tuple[dict[str, Any], ...]] = (
    {"op": "config.list", "agent": "coder", "instanceKey": "k"},
    {"op": "config.show", "agent": "coder", "instanceKey": "k"},
    {"op": "config.revert", "patchId": "p"},
    {
        "op": "config.propose",
        "id": "o",
        "agent": "coder",
        "instanceKey": "k",
        "patches": [{"op": "replace", "path": "/prompt/system", "value": "x"}],
        "reason": "why",
        "revision": 0,
    },
    {"op": "approve.list", "all": True, "answered": True},
    {"op": "approve.show", "id": "c"},
    {"op": "approve.watch"},
    {"op": "approve.answer", "id": "nothing", "decision": "yes", "uid": 0, "reason": "why", "answer": {"a": 1}},
    {"op": "auth.login", "app": "app", "subject": "local", "device": True, "scopes": ["read"]},
    {"op": "auth.wait", "app": "app", "subject": "local"},
    {"op": "auth.list"},
    {"op": "auth.revoke", "app": "app", "subject": "local"},
    {"op": "budget", "eventId": "e1"},
    {"op": "dead.list"},
    {"op": "dead.show", "eventId": "d"},
    {"op": "dead.requeue", "eventId": "d"},
    {"op": "dead.drop", "eventId": "d"},
    {"op": "events", "agent": "coder", "instanceKey": "k"},
    {"op": "cancel", "eventId": "nothing"},
    {"op": "instance.delete", "agent": "nobody", "instanceKey": "k", "force": False},
    {"op": "generation", "agent": "coder"},
    {"op": "why"},
    {"op": "peers"},
    {"op": "stats"},
)

_encode = msgspec.msgpack.Encoder().encode
#: Values that are ill-behaved wherever they stand, as bytes.
_BYTES: Final[tuple[bytes, ...]] = (
    b"\xa3\xed\xa0\x80",  # a lone surrogate
    b"\xa2\xff\xfe",  # no UTF-8
    b"\xa1\x00",  # NUL
    b"\xc4\x02\xff\x00",  # binary
    b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
    b"\xc7\x03\x05abc",  # an extension type
    b"\xcb" + struct.pack(">d", float("nan")),
    b"\xcb" + struct.pack(">d", float("-inf")),
    b"\xcb" + struct.pack(">d", -1.5),
    b"\xd3" + struct.pack(">q", -(2**63)),
    b"\xcf" + struct.pack(">Q", 2**64 - 1),
    b"\xff",  # -1
    b"\x00",
    b"\xc0",
    b"\xc2",
    b"\xc3",
    b"\x90",
    b"\x80",
    b"\xa0",
    b"\x81\x90\xc0",  # a map whose key is a list
    b"\x81\x80\xc0",  # a map whose key is a map
    b"\x81\x81\x80\x80\xc0",
    b"\x82\xa1a\x01\xa1a\x02",  # one key twice
    b"\x81\xcb" + struct.pack(">d", float("nan")) + b"\xc0",
    b"\xdd\xff\xff\xff\xff",  # a list that claims four billion values
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xffx",
    b"\x91" * 63 + b"\xc0",
    b"\x91" * 70 + b"\xc0",
    b"\x91" * 20_000 + b"\xc0",
    b"\x81\xa1a" * 20_000 + b"\xc0",
    b"\xc1",
)
_TEXTS: Final = (
    "a" * 65,
    "a" * 300,
    "a" * 200_000,
    "\0",
    "a\0b",
    "../../etc/passwd",
    "é\u202e\x1b[2J",
    "~0~1",
    "/",
    "/tools/-",
    "/extensions/0/config",
    "/extensions/0/config/level",
    "/model/model",
    "/" * 5000,
    "t1/c1",
    "e1",
    "e2",
    "coder",
    "reviewer",
    "_operator",
    "k",
    "Tool/bash",
    "Extension/one",
    "0" * 16,
    "waits",
    "yes",
    "model",
    "tool",
    "question",
    "${KEY}",
)


def _big_map() -> bytes:
    return _encode({f"k{number}": number for number in range(20_000)})


def _big_list() -> bytes:
    return _encode(["x"] * 60_000)


_LARGE: Final[tuple[Callable[[], bytes], ...]] = (_big_map, _big_list)


def value(dice: random.Random, of: Any = None) -> bytes:
    """A value in the place of `of`, as msgpack."""
    match dice.randrange(8):
        case 0 | 1:
            return dice.choice(_BYTES)
        case 2 | 3:
            return _encode(dice.choice(_TEXTS))
        case 4:
            return _encode([dice.choice(_TEXTS) for _ in range(dice.randrange(4))])
        case 5 if dice.random() < 0.05:
            return dice.choice(_LARGE)()
        case 6 if isinstance(of, dict):
            return payload(dice, of)
        case 6 if isinstance(of, list) and of:
            items = [value(dice, of[0]) for _ in range(dice.randrange(1, 4))]
            return bytes([0x90 + len(items)]) + b"".join(items)
        case _:
            return _encode(of)


def payload(dice: random.Random, sound: dict[str, Any]) -> bytes:
    """A payload like `sound`, with something else in the place of some of its fields, fewer of them, or more."""
    if dice.random() < 0.05:
        return dice.choice(_BYTES)
    fields: list[bytes] = []
    changed = dice.choice((0.05, 0.05, 0.2, 0.5, 1.0))
    for name, given in sound.items():
        if dice.random() < 0.05:
            continue
        keep = name == "op" and dice.random() < 0.97
        fields.append(_encode(name) + (_encode(given) if keep or dice.random() >= changed else value(dice, given)))
    if dice.random() < 0.1:
        fields.append(value(dice) + value(dice))
    return bytes([0x80 + len(fields)]) + b"".join(fields)
