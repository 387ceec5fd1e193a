"""Whether an agent process can go on with another specification, or has to be replaced. Pure.

The kernel and the agent decide it by the same function: the kernel to know whom to replace, the agent because what it
is told may come before it is told to leave.

Source: docs/design/turns.md section 9.
"""

from __future__ import annotations

import posixpath
from typing import Any, Final

from msgspec.structs import replace

from goondan.schemas.bundle.launch import AgentSpec, ExtensionSpec

#: What a process takes over at its next step. Everything else of a specification is read when a process, or a turn,
#: begins: the model and its connection, the file of the conversation.
_TAKEN: Final = (
    "system", "max_steps_per_turn", "registry", "catalog", "allow_registry", "addable", "dynamic", "extensions",
    "resource", "swarm", "revision", "parts",
)  # fmt: skip


def can_follow(old: AgentSpec, new: AgentSpec) -> bool:
    """Whether a process that runs `old` can run its next step with `new`.

    It cannot where code of an extension is another: Python cannot take a module back. Nor can an agent get its first
    extension that way: a turn that was begun without any has no place for one. Such a process has no memory of
    extensions that it could lose.
    """
    if replace(old, **{name: getattr(new, name) for name in _TAKEN}) != new:
        return False
    if new.extensions and not old.extensions:
        return False
    known = {extension.name: _code(extension) for extension in old.extensions}
    return all(known.get(extension.name, _code(extension)) == _code(extension) for extension in new.extensions)


def _code(extension: ExtensionSpec) -> tuple[Any, ...]:
    """Names the code of an extension. The folder is no part of it where the content is: a kernel may run a copy."""
    if extension.modules is None:
        return extension.entry, extension.bundled
    return posixpath.basename(extension.entry), extension.modules
