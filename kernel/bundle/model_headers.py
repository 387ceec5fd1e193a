"""The headers that a Model adds to its requests: which may be set, and their values from the environment. Pure.

A header that says where a request ends, who it is for or who asks is the kernel's own. With one of those a bundle could
send a second request inside the first, or take the key's place.

Source: docs/design/bundle.md section 6; RFC 9110 sections 5.6.2 and 7.6.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from goondan.kernel.bundle.problems import Path
from goondan.schemas.bundle.resources import ValueLike, ValueSource
from goondan.schemas.models.model_providers import PROVIDERS

#: Headers of one Model: more than any gateway wants, and a request stays small.
MAX_HEADERS: Final = 32
#: The longest name and the longest value (characters). Servers refuse heads of more than some 8,000 bytes.
MAX_NAME: Final = 64
MAX_VALUE: Final = 4096
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
#: What may be set elsewhere, and the field for it.
_ELSEWHERE: Final = {
    "authorization": "apiKey",
    "x-api-key": "apiKey with auth: x-api-key",
    **{provider.version_header: "apiVersion" for provider in PROVIDERS if provider.version_header is not None},
}
#: What a request has anyway, and what is between two machines only.
_OWN: Final = frozenset(
    (
        "accept", "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect",
        "host", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade", "user-agent",
    )
)  # fmt: skip


def name_fault(name: str) -> tuple[str, str] | None:
    """What is wrong with the name of a header, and what to do about it; None when it may be set."""
    if len(name) > MAX_NAME or not _NAME.match(name):
        return "that is no name of a header", f"Write letters, digits and -, {MAX_NAME} at most."
    if (field := _ELSEWHERE.get(name.lower())) is not None:
        return f"the header {name.lower()} is not set here", f"Use {field}."
    if name.lower() in _OWN:
        return f"the header {name.lower()} belongs to the connection", "Leave it out."
    return None


def names_fault(names: list[str]) -> str | None:
    """What is wrong with the names together."""
    if len(names) > MAX_HEADERS:
        return f"{len(names)} headers, {MAX_HEADERS} at most"
    return "a header stands twice: upper and lower case are the same" if len(_folded(names)) < len(names) else None


def _folded(names: list[str]) -> set[str]:
    return {name.lower() for name in names}


def header_values(
    headers: Mapping[str, ValueLike], env: Mapping[str, str]
) -> dict[str, str] | tuple[str, str, Path, str]:
    """The headers with their values, the names in lower case; else code, message, place and suggestion of the fault.

    What `name_fault` refuses is left out: that was reported for the document.
    """
    found: dict[str, str] = {}
    for name, value in headers.items():
        if name_fault(name) is not None:
            continue
        at: Path = ("spec", "headers", name)
        text = value if isinstance(value, str) else value.value or ""
        if isinstance(value, ValueSource) and value.value_from is not None:
            text = env.get(value.value_from.env, "")
            if not text.strip():
                message = "the environment variable {} is not set"
                return "E_CONFIG_MISSING_ENV", message, (*at, "valueFrom", "env"), "Set it."
        text = text.strip()
        if len(text) > MAX_VALUE or not text.isascii() or not text.isprintable():
            message = f"the value of the header {name.lower()} cannot be sent"
            return "E_CONFIG_INVALID_VALUE", message, at, f"Give at most {MAX_VALUE} printable ASCII characters."
        found[name.lower()] = text
    return found
