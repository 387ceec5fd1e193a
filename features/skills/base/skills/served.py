"""Skills that MCP servers offer: resources whose URI is `skill://…/NAME/SKILL.md`. Pure.

A server is hostile: what it says is bounded and shown as text. Its skills have no folder here, so nothing runs in them.
The model reads their files with the server's own tool for resources.

Source: docs/skills.md; docs/design/tools.md section 14.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from goondan.features.skills.wire.skill_text import MAX_DESCRIPTION, is_skill_name, read_skill_text
from goondan.schemas.bundle.address import build_tool_name
from goondan.schemas.text.visible import visible_line
from goondan.schemas.worker.servers import READ_RESOURCE, ServerResource

#: The longest URI of a skill (characters): the model is told it.
MAX_URI: Final = 2000
_URI: Final = re.compile(r"skill://(?:[^/?#\s]+/)*([^/?#\s]+)/SKILL\.md")


class ServedSkill(Struct, frozen=True):
    """A skill of an MCP server."""

    #: Its name.
    name: str
    #: What it is for, as its server says.
    description: str
    #: The URI of its SKILL.md.
    path: str
    #: The tool that reads resources of its server.
    reader: str

    @property
    def dir(self) -> str:
        """What the URIs of its files begin with."""
        return self.path.removesuffix("/SKILL.md")

    @property
    def hint(self) -> str:
        """How the model gets its text."""
        return f"Read it with {self.reader}, uri {self.path}; its other files are resources below {self.dir}/"


def served_skills(resources: Mapping[str, Sequence[Any]], limit: int) -> dict[str, ServedSkill]:
    """The skills among the resources of servers, by the prefixes of these; at most `limit`. Of two with one name the
    first counts.
    """
    found: dict[str, ServedSkill] = {}
    for prefix, listed in resources.items():
        for resource in listed:
            match = _URI.fullmatch(resource.uri) if isinstance(resource, ServerResource) else None
            if match is None or len(resource.uri) > MAX_URI or not is_skill_name(match[1]):
                continue
            if len(found) < limit and visible_line(resource.uri) == resource.uri:
                text = (resource.description or resource.name).replace("\n", " ")[: 2 * MAX_DESCRIPTION]
                described = read_skill_text(text, match[1]).description
                reader = build_tool_name(prefix, READ_RESOURCE)
                found.setdefault(match[1], ServedSkill(match[1], described, resource.uri, reader))
    return found
