"""The one question to a model server, which models it has, and what its answer says of a model; and who listens on a
port of this machine, from /proc/net/tcp and /proc/net/tcp6. Pure.

No text of the server is repeated but names of models: it may repeat the key, or say anything.

A port can have several listeners, and the more specific address gets a connection. So a port is somebody's only if all
its listeners that a connection within the machine can reach are theirs.

Source: docs/design/commands.md section 10; proc_net_tcp(5).
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Collection, Iterable
from typing import Final, Literal
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Struct

from goondan.schemas.bundle.launch import ModelSpec, key_headers
from goondan.schemas.models import model_providers, origins, server_answers
from goondan.schemas.text import redaction, visible

#: Models of a list that are looked at.
MAX_MODELS: Final = 2000
#: The most of a model's name that is shown (characters).
MAX_NAME: Final = 120

State = Literal["answered", "refused", "no list", "failing", "unreachable", "slow"]


class Question(Struct, frozen=True):
    """The request for the list."""

    #: The URL, without user and password.
    url: str
    #: The headers. They contain the key.
    headers: dict[str, str]
    #: Whether the server is on this machine, so that no proxy leads to it.
    here: bool


class Learned(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What the answer says. In `state`: `refused` means the key, `failing` the server's own trouble."""

    #: How it went.
    state: State
    #: The HTTP status; 0: there was no answer.
    status: int = 0
    #: Of a server without an answer: why, in the system's words.
    reason: str = ""
    #: How many models it lists.
    models: int = 0
    #: The model that an agent gets: the one that is named, else the first of the list.
    model: str = ""
    #: Whether the list has it; None: nobody knows, because the list has more pages.
    there: bool | None = None
    #: The tokens of its context; None: nobody says.
    window: int | None = None


class _Item(Struct):
    """One model of a list."""

    #: Its name.
    id: str = ""


class _List(Struct):
    """A server's list."""

    #: The models.
    data: list[_Item]
    #: Whether there are more pages.
    has_more: bool = False


def question(model: ModelSpec) -> Question | None:
    """The request for a model's server. None when there is none to ask: the console, an endpoint that is no URL, or a
    key that belongs to another server.
    """
    provider = model_providers.BY_NAME.get(model.provider)
    base = model.endpoint or (provider.server if provider is not None else "")
    origin = origins.origin_of(base)
    if provider is None or not provider.listing or origin is None:
        return None
    if (model.api_key or model.headers) and not origins.key_may_go(base, model.key_origin, provider.server):
        return None
    headers = {**model.headers, **key_headers(model)}
    if provider.version_header is not None:
        headers[provider.version_header] = model.api_version or provider.version
    parts = urlsplit(base)
    if parts.username or parts.password:
        words = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
        headers["authorization"] = f"Basic {b64encode(words.encode()).decode()}"
    path = parts.path.rstrip("/") + provider.listing
    return Question(origin + path, headers, parts.scheme == "http" and not origins.is_open(origin))


def learn(model: ModelSpec, status: int, body: bytes) -> Learned:
    """What an answer says of a model."""
    if status in (401, 403, 407):
        return Learned(state="refused", status=status)
    if status == 429 or (status >= 500 and status != 501):
        return Learned(state="failing", status=status)
    listed = read_list(body) if status == 200 else None
    if listed is None:
        return Learned(state="no list", status=status)
    names = [item.id for item in listed.data[:MAX_MODELS] if item.id.strip()]
    name = model.model or (names[0] if names else "")
    there = name in names if name else False
    window = server_answers.in_listing(body, name).window if there else None
    shown = visible.visible_line(redaction.Redactor(model.api_key, *model.headers.values())(name))[:MAX_NAME]
    return Learned(
        state="answered",
        status=status,
        models=len(names),
        model=shown,
        there=None if not there and listed.has_more else there,
        window=model.context_tokens or window or server_answers.known_window(name),
    )


def read_list(body: bytes) -> _List | None:
    """A list of models; None for anything else."""
    try:
        return msgspec.json.decode(body, type=_List)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def line_of(learned: Learned, keyed: bool) -> str:
    """What was learned, in a few words. `keyed`: the question had a key."""
    if learned.state == "answered":
        parts = ["reachable", *(["the key is accepted"] if keyed else []), _model_words(learned)]
        return ", ".join([*parts, *([f"{learned.window:,} tokens of context"] if learned.window else [])])
    if learned.state == "refused":
        what = "the key is refused" if keyed else "it wants a key"
        return f"{what} ({learned.status})"
    if learned.state == "no list":
        return f"reachable, without a list of models ({learned.status})"
    if learned.state == "failing":
        return f"reachable, and it fails at the moment ({learned.status})"
    return "no answer yet" if learned.state == "slow" else f"not reachable: {learned.reason}"


def _model_words(learned: Learned) -> str:
    if not learned.model:
        return "it has no model"
    if learned.there is None:
        return f"{learned.model} is not on the first page of its list"
    return f"{learned.model} is there" if learned.there else f"{learned.model} is not in its list of {learned.models}"


#: The state of a socket that listens.
_LISTENS: Final = "0A"
_ANY_4: Final = "0" * 8
_ANY_6: Final = "0" * 32
_LOOP_6: Final = "00000000000000000000000001000000"
#: The beginning of an address of version 4 in version 6.
_MAPPED: Final = "0000000000000000FFFF0000"


class Listener(Struct, frozen=True):
    """A socket that listens, and that a connection within the machine can reach."""

    #: Its port.
    port: int
    #: The user that made it.
    uid: int
    #: Whether 127.0.0.1 reaches it; else only ::1 does.
    v4: bool


def listeners(*tables: str) -> list[Listener]:
    """The listeners in such tables. A line that is none is passed over."""
    found = (_read_listener(line.split()) for table in tables for line in table.splitlines()[1:])
    return [listener for listener in found if listener is not None]


def _read_listener(fields: list[str]) -> Listener | None:
    if len(fields) < 8 or fields[3] != _LISTENS:
        return None
    address, _, port = fields[1].partition(":")
    try:
        number, uid = int(port, 16), int(fields[7])
    except ValueError:
        return None
    four = address.removeprefix(_MAPPED) if len(address) == len(_ANY_6) else address
    v4 = four == _ANY_4 or (len(four) == len(_ANY_4) and four.endswith("7F"))
    if not v4 and address not in (_ANY_6, _LOOP_6):
        return None
    return Listener(number, uid, v4 or address == _ANY_6)


def owned(found: Iterable[Listener], uids: Collection[int]) -> dict[int, str]:
    """The ports whose listeners all belong to these users, each with the host that reaches it."""
    ports: dict[int, list[Listener]] = {}
    for listener in found:
        ports.setdefault(listener.port, []).append(listener)
    return {
        port: "127.0.0.1" if any(listener.v4 for listener in group) else "[::1]"
        for port, group in ports.items()
        if all(listener.uid in uids for listener in group)
    }
