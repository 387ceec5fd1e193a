"""Finds skills, on disk and among the resources of servers, and reads those on disk.

Tools and strangers can write where skills are: a folder of skills may hold links, pipes, files of any size and
thousands of names. So every name is opened from the descriptor of its folder, links are not followed, only regular
files are read, and everything is bounded. What a bound leaves out is said once, in the log.

A server's skill is a resource whose URI is `skill://…/NAME/SKILL.md`. A server is hostile: what it says is bounded and
shown as text. Its skills have no folder here, so nothing runs in them. The model reads their files with the server's
own tool for resources.

Source: docs/skills.md; docs/design/tools.md section 14; requirements SKILL-04, SKILL-05.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, Final

from msgspec import Struct

from goondan.features.skills.wire import skill_text
from goondan.schemas.bundle.address import build_tool_name
from goondan.schemas.text.visible import visible_line
from goondan.schemas.worker.servers import READ_RESOURCE, ServerResource

#: The largest SKILL.md (bytes). The public format advises 500 lines; the model reads all of it with every step.
MAX_SKILL_FILE: Final = 256 << 10
#: Names that are looked at in one directory of skills, and skills in all: the model reads every description with every
#: step.
MAX_NAMES: Final = 2000
MAX_SKILLS: Final = 256
#: Bytes of a SKILL.md in which its front matter or first line is looked for: a character has four at most.
_HEAD: Final = 4 * skill_text.MAX_FRONT_MATTER
#: Problems of one scan that are told; a hostile folder could fill the log.
MAX_PROBLEMS: Final = 20
#: The longest URI of a skill (characters): the model is told it.
MAX_URI: Final = 2000
_URI: Final = re.compile(r"skill://(?:[^/?#\s]+/)*([^/?#\s]+)/SKILL\.md")
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class SkillPlace(Struct, frozen=True):
    """A directory of skills."""

    #: A folder that may be named through links: the repository, or a place that the bundle names.
    root: str
    #: The folders that lead from there to the directory. None of them may be a link.
    names: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """Its path."""
        return "/".join((self.root.rstrip("/"), *self.names))


class Skill(Struct, frozen=True):
    """A skill that was found."""

    #: Its name, which is its folder's.
    name: str
    #: What it is for.
    description: str
    #: The directory in which it was found.
    place: SkillPlace

    @property
    def dir(self) -> str:
        """The path of its folder."""
        return f"{self.place.path}/{self.name}"

    @property
    def path(self) -> str:
        """The path of its SKILL.md."""
        return f"{self.dir}/{skill_text.SKILL_FILE}"


class Found(Struct):
    """What a scan has found."""

    #: The skills by their names, in the order of the directories.
    skills: dict[str, Skill]
    #: What is wrong with some, a sentence each.
    problems: list[str]


def repository_place(root: str, directory: str) -> SkillPlace | None:
    """The place of a directory that is named from a repository's root; None when it leads out of it."""
    names = [name for name in directory.split("/") if name not in ("", ".")]
    if directory.startswith("/") or ".." in names or "\0" in directory:
        return None
    return SkillPlace(root, tuple(names))


def find_skills(places: Iterable[SkillPlace]) -> Found:
    """The skills in these directories. Of two with one name, that of the earlier directory counts (SKILL-05)."""
    found = Found({}, [])
    left_out = 0
    for place in places:
        for name in _names(place, found.problems):
            text = _look(place, name, found.problems)
            if text is None:
                continue
            known = found.skills.get(name)
            if known is not None:
                shown = visible_line(f"{place.path}/{name}")
                found.problems.append(f"there are two skills {name!r}; {known.dir} counts, and not {shown}")
            elif len(found.skills) >= MAX_SKILLS:
                left_out += 1
            else:
                found.skills[name] = Skill(name, text.description, place)
                found.problems += [f"{visible_line(place.path)}/{name}: {problem}" for problem in text.problems]
    if left_out:
        found.problems.append(f"there are more than {MAX_SKILLS} skills; {left_out} were left out")
    if len(found.problems) > MAX_PROBLEMS:
        more = len(found.problems) - MAX_PROBLEMS
        found.problems = [*found.problems[:MAX_PROBLEMS], f"and {more} more"]
    return found


def read_skill(skill: Skill) -> str:
    """The whole text of a skill's SKILL.md. What is no UTF-8 in it becomes U+FFFD. Raises OSError, and ValueError when
    it is too large or no file.
    """
    with _folder(skill.place, skill.name) as folder:
        return _text(folder, MAX_SKILL_FILE)


def _names(place: SkillPlace, problems: list[str]) -> list[str]:
    """The names of the folders in a directory of skills, in their order; none when it is not there."""
    try:
        with _folder(place) as top, os.scandir(top) as entries:
            looked_at = list(islice(entries, MAX_NAMES + 1))
            if len(looked_at) > MAX_NAMES:
                problems.append(f"{visible_line(place.path)} has more than {MAX_NAMES} names; some were left out")
            return sorted(entry.name for entry in looked_at[:MAX_NAMES] if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:
        problems.append(f"{visible_line(place.path)} cannot be read: {_reason(error)}")
        return []


def _look(place: SkillPlace, name: str, problems: list[str]) -> skill_text.SkillText | None:
    """What the skill of this name says; None when it is none. When it has a SKILL.md, the problems say why."""
    shown = visible_line(f"{place.path}/{name}")
    try:
        with _folder(place, name) as folder:
            text = _text(folder, MAX_SKILL_FILE, head=_HEAD)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        problems.append(f"{shown} is left out: {skill_text.SKILL_FILE} {_reason(error)}")
        return None
    if not skill_text.is_skill_name(name):
        problems.append(f"{shown} is left out: a skill has a name of 1 to 64 characters")
        return None
    return skill_text.read_skill_text(text, name)


@contextmanager
def _folder(place: SkillPlace, *more: str) -> Iterator[int]:
    """A descriptor of a folder in a place. Raises OSError, also where a link is on the way."""
    here = os.open(place.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in (*place.names, *more):
            below = os.open(name, _FOLDER, dir_fd=here)
            os.close(here)
            here = below
        yield here
    finally:
        with suppress(OSError):
            os.close(here)


def _text(folder: int, limit: int, *, head: int | None = None) -> str:
    """The text of the SKILL.md in a folder, or its first `head` bytes. Raises OSError, ValueError."""
    with open(os.open(skill_text.SKILL_FILE, _FILE, dir_fd=folder), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is no file")
        data = file.read(limit + 1 if head is None else min(head, limit + 1))
        if status.st_size > limit or len(data) > limit:
            raise ValueError(f"has more than {limit >> 10} KiB")
    return data.decode("utf-8", "replace")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror}"
    return str(error)


# --- skills of servers ------------------------------------------------------------------------------------------------


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
            if match is None or len(resource.uri) > MAX_URI or not skill_text.is_skill_name(match[1]):
                continue
            if len(found) < limit and visible_line(resource.uri) == resource.uri:
                text = (resource.description or resource.name).replace("\n", " ")[: 2 * skill_text.MAX_DESCRIPTION]
                described = skill_text.read_skill_text(text, match[1]).description
                reader = build_tool_name(prefix, READ_RESOURCE)
                found.setdefault(match[1], ServedSkill(match[1], described, resource.uri, reader))
    return found
