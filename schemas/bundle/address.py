"""Names and addresses: tools, agents, instances, and where an instance's files are.

An address stands in `from` and `to`. It is an agent's name, the reserved `orchestrator`, `client/<n>` or
`toolhost/<n>`. Agent names hold no slash, so no two forms can be confused. This module does not know which agents
exist.

Source: docs/design/tools.md section 2; docs/design/processes.md section 8; requirements NAME-01 to NAME-13, IPC-03.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

from goondan.schemas.text.visible import is_visible

SEPARATOR: Final = "__"
#: A resource's metadata.name: also safe as a folder name and, joined by `__`, as a model's tool name.
RESOURCE_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9-])?\Z")
#: An export's name (NAME-10).
EXPORT_NAME: Final = re.compile(r"[a-z0-9_-]{1,64}\Z")
#: What every vendor accepts as a tool's name.
SHOWN_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
#: Vendors refuse longer tool names; so do we, at validation.
MAX_TOOL_NAME: Final = 64
#: Characters of a name on the wire. Longer ones are refused where they enter; they are identifiers, not documents.
MAX_NAME: Final = 256
MAX_INSTANCE_KEY: Final = MAX_NAME
#: What an id from outside is made of. All that ids of ours have besides, such as `/`, `>`, `~`, `?` and `@`, says
#: something: no id from outside can say it.
_GIVEN_ID: Final = re.compile(r"[A-Za-z0-9_.:-]+")
#: Linux's PATH_MAX without the zero at the end: longer paths are refused by every system call.
MAX_PATH_BYTES: Final = 4095
#: A folder name is at most 255 bytes; longer encoded keys end in a digest instead.
_MAX_SEGMENT: Final = 120
_ENCODED: Final = re.compile(rb"%([0-9A-F]{2})")


class ToolName(NamedTuple):
    """The two halves of a full tool name."""

    resource_name: str
    export_name: str


def parse_tool_name(full_name: str) -> ToolName | None:
    """Split at the first `__`; None when there is none (NAME-07)."""
    resource, separator, export = full_name.partition(SEPARATOR)
    return ToolName(resource, export) if separator else None


def build_tool_name(resource_name: str, export_name: str) -> str:
    """`{resource}__{export}` (NAME-08)."""
    return resource_name + SEPARATOR + export_name


def tool_identity(resource_name: str) -> str:
    """`Tool/{name}` (NAME-13)."""
    return "Tool/" + resource_name


def is_resource_name(name: str) -> bool:
    """Whether `name` may be a resource's metadata.name: no `__`, and no `_` at its end (NAME-04, NAME-09)."""
    return RESOURCE_NAME.match(name) is not None and SEPARATOR not in name


def is_export_name(name: str) -> bool:
    """Whether `name` may be an export of a user's Tool (NAME-05, NAME-10)."""
    return EXPORT_NAME.match(name) is not None and SEPARATOR not in name


def shown_tool_name(name: str) -> str:
    """The form in which models see the name that an extension gives a tool: `skills.list` is `skills__list`. Only the
    first dot is replaced (NAME-14).
    """
    return name.replace(".", SEPARATOR, 1)


def is_shown_name(name: str) -> bool:
    """Whether every vendor accepts `name` as a tool's name."""
    return SHOWN_NAME.match(name) is not None


def is_instance_key(key: str) -> bool:
    """Whether `key` may name an instance: any name on the wire may."""
    return is_name(key)


def is_name(text: str, most: int = MAX_NAME) -> bool:
    """Whether `text` may be a name on the wire, such as `id`, `eventId`, `callId` and `instanceKey`: 1 to `most`
    characters that a person can see (schemas/text/visible.py). PROTOCOL.md "Names" has the rule.
    """
    return 0 < len(text) <= most and ((text.isascii() and text.isprintable()) or is_visible(text))


def is_given_id(text: str, most: int) -> bool:
    """Whether `text` may be an id that comes from outside: a model's name of its tool call, in an answer or in a
    recording of one, and a client's name of its event. 1 to `most` letters and digits of ASCII, `_`, `-`, `.`, `:`.
    """
    return len(text) <= most and _GIVEN_ID.fullmatch(text) is not None


@lru_cache(64)  # an agent's calls all have the same one
def is_path(text: str) -> bool:
    """Whether `text` can be given to the system as an absolute path, and sent: no zero byte, no lone surrogate, at most
    MAX_PATH_BYTES. Nothing is looked up.
    """
    if not text.startswith("/") or "\0" in text or len(text) > MAX_PATH_BYTES:
        return False
    try:
        return len(text.encode()) <= MAX_PATH_BYTES
    except UnicodeEncodeError:
        return False


def path_segment(key: str) -> str:
    """One folder name for any instance key: different keys never share one, and none means `.` or `..`.

    Letters, digits, `-` and `_` stay; everything else becomes `%XX` of its UTF-8 bytes; what would be too long is
    cut and ends in a digest of the whole key. Upper case is kept: state lives on case-sensitive file systems.
    """
    encoded = "".join(
        chr(b) if 48 <= b <= 57 or 65 <= b <= 90 or 97 <= b <= 122 or b in b"-_" else f"%{b:02X}"
        for b in key.encode("utf-8", "surrogatepass")
    )
    if len(encoded) <= _MAX_SEGMENT:
        return encoded
    import hashlib  # it loads OpenSSL, and a key is seldom that long

    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:24]
    return f"{encoded[: _MAX_SEGMENT - 25]}.{digest}"


def segment_key(segment: str) -> str | None:
    """The key that path_segment made `segment` of; None when it was cut, or is no segment of ours."""
    if not segment.isascii():
        return None
    data = _ENCODED.sub(lambda match: bytes.fromhex(match[1].decode()), segment.encode("ascii"))
    try:
        key = data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
    return key if path_segment(key) == segment else None


def instance_dir(state_dir: str, agent: str, instance_key: str) -> str:
    """Where an instance keeps its files (docs/design/processes.md section 8)."""
    return f"{state_dir}/instances/{path_segment(agent)}/{path_segment(instance_key)}"


def instance_workdir(state_dir: str, agent: str, instance_key: str) -> str:
    """An instance's workspace: `ctx.workdir` unless an operator named another one (CONTEXT-04)."""
    return instance_dir(state_dir, agent, instance_key) + "/workspace"


def blobs_dir(state_dir: str) -> str:
    """The folder of large payloads, which no jail sees."""
    return f"{state_dir}/blobs"
