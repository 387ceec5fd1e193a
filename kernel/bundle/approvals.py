"""The rules of an agent's `approval` extensions, as the broker gets them, and what is wrong with them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from goondan.schemas.approval_rules import Policy, read_policy
from goondan.schemas.bundle.launch import ExtensionSpec

#: How the entry of the bundled extension ends.
_ENTRY: Final = "/base/approval/approval.py"


def is_approval(entry: str, bundled: bool) -> bool:
    """Whether an extension with this entry is the bundled `approval`, under whatever name."""
    return bundled and entry.endswith(_ENTRY)


def policies_of(extensions: Iterable[ExtensionSpec]) -> list[Policy]:
    """The policies of one agent, one for each such extension."""
    found = [extension for extension in extensions if is_approval(extension.entry, extension.bundled)]
    return [read_policy(extension.name, extension.config)[0] for extension in found]


def describe_faults(config: dict[str, Any]) -> list[str]:
    """The faults of rules that fit the schema of the config. They are worded as the schema's issues are."""
    return [
        "config"
        + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in fault.path)
        + f": {fault.message}"
        for fault in read_policy("", config)[1]
    ]
