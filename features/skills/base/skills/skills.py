"""The bundled extension `skills`: folders with a SKILL.md, which the model finds, opens, and runs commands in.

The model reads the names and descriptions of all skills with every step, and the whole text of those that it has
opened. Commands run in a jail: the Tool `skills` comes with this extension (features/skills/jail/skills).
`allowed-tools` in a skill's front matter is what its author asks for; nothing is granted because of it.

Opened skills are kept in the state of the instance: another process of the agent shows them as well.

Skills are on disk and among the resources of servers. Tools and strangers can write where skills are: a folder of
skills may hold links, pipes, files of any size and thousands of names. So every name is opened from the descriptor of
its folder, links are not followed, only regular files are read, and everything is bounded. What a bound leaves out is
said once, in the log.

A server's skill is a resource whose URI is `skill://…/NAME/SKILL.md`. A server is hostile: what it says is bounded and
shown as text. Its skills have no folder here, so nothing runs in them. The model reads their files with the server's
own tool for resources.

Source: docs/skills.md; docs/design/tools.md section 14; requirements SKILL-01 to SKILL-18.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, Final

from msgspec import Struct

from goondan.features.skills import api as skill_text
from goondan.schemas.bundle.address import build_tool_name
from goondan.schemas.text.visible import visible_line
from goondan.schemas.wire.errors import fail
from goondan.schemas.worker.servers import READ_RESOURCE, SHARED_RESOURCES, ServerResource

# --- which skills there are -------------------------------------------------------------------------------------------


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


#: Where skills are looked for when the config does not say (SKILL-02).
REPO_SKILL_DIRS: Final = (".claude/skills",)
#: What all opened skills may have together (bytes of UTF-8): the model reads them with every step, and the state of an
#: extension has 1 MiB, in which a character may take six bytes.
MAX_OPEN: Final = 512 << 10
HINT: Final = "Use skills.run to execute scripts in the skill directory"


def register(api: Any) -> None:
    """Look for skills when the first turn begins and in each repository, and offer the tools."""
    config = api.extension.spec.config
    if config is None:
        api.logger.warn("Skills Extension: config is missing")
        return
    skills = _Skills(api, config)
    if skills.scans_repositories:
        api.events.on("workspace.repoAvailable", skills.enter_repository)
    api.pipelines.mutate("step.blocks", skills.show)
    api.tools.register(
        {
            "name": "skills.list",
            "description": "List all available skills with their descriptions",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
            "idempotent": True,
            "inReplay": True,
        },
        skills.list,
    )
    api.tools.register(
        {
            "name": "skills.open",
            "description": "Open a skill to read its full SKILL.md content and get the skill directory path",
            "parameters": _named("Name of the skill to open"),
            "idempotent": True,
            "inReplay": True,
        },
        skills.open,
    )
    api.tools.register(
        {
            "name": "skills.close",
            "description": "Close an opened skill (remove from context)",
            "parameters": _named("Name of the skill to close"),
            "inReplay": True,
        },
        skills.close,
    )
    api.tools.bring("skills.run", folder=skills.folder)


def _named(description: str) -> dict[str, Any]:
    properties = {"name": {"type": "string", "description": description}}
    return {"type": "object", "properties": properties, "required": ["name"], "additionalProperties": False}


class _Skills:
    """The skills of one instance."""

    def __init__(self, api: Any, config: dict[str, Any]) -> None:
        discovery, scans = config.get("discovery") or {}, config.get("autoScan") or {}
        self._api = api
        self._repo_dirs: list[str] = list(discovery.get("repoSkillDirs") or REPO_SKILL_DIRS)
        self._dirs: list[str] = list(discovery.get("skillDirs") or [])
        self._scans_at_first: bool = scans.get("onInit") is not False
        self.scans_repositories: bool = scans.get("onRepoAvailable") is not False
        self._catalog: dict[str, Skill] = {}
        #: The root of the last scan, and the workdir at that time; "" before the first scan.
        self._root = self._workdir = ""
        self._opened: dict[str, str] = dict(api.state.get().get("open", {}))
        self._scanning = asyncio.Lock()

    # --- finding

    async def enter_repository(self, payload: dict[str, Any]) -> None:
        """Handle `workspace.repoAvailable`: scan the repository (SKILL-06)."""
        async with self._scanning:
            await self._scan(payload.get("path") or self._root or self._api.workdir)
        self._api.logger.info(f"Skills rescanned: {len(self._catalog)} found")

    async def _be_ready(self) -> None:
        """Wait for a scan that runs, and make the first one (SKILL-17)."""
        async with self._scanning:
            if self._is_due():
                await self._scan(self._api.workdir)

    def _is_due(self) -> bool:
        return self._scans_at_first and self._workdir != self._api.workdir

    async def _scan(self, root: str) -> None:
        self._take(root, await asyncio.to_thread(find_skills, self._places(root)))

    def _take(self, root: str, found: Any) -> None:
        self._root, self._workdir, self._catalog = root, self._api.workdir, found.skills
        for problem in found.problems:
            self._api.logger.warn(f"Skills Extension: {problem}")

    def _places(self, root: str) -> list[SkillPlace]:
        places: list[SkillPlace] = []
        for directory in self._repo_dirs:
            place = repository_place(root, directory)
            if place is None:
                self._api.logger.warn(f"Skills Extension: {directory!r} leads out of the repository")
            else:
                places.append(place)
        for directory in self._dirs:
            if directory.startswith("/"):
                places.append(SkillPlace(directory))
            else:  # the kernel has made those of the bundle absolute; a patch of the config was not the kernel's
                self._api.logger.warn(f"Skills Extension: {directory!r} is no absolute path")
        return places

    @property
    def _all(self) -> dict[str, Skill | ServedSkill]:
        """The skills on disk, then those of MCP servers. Of two with one name that on disk counts."""
        resources = self._api.instance.shared.get(SHARED_RESOURCES)
        served = served_skills(resources, MAX_SKILLS) if resources else {}
        return {**self._catalog, **{name: skill for name, skill in served.items() if name not in self._catalog}}

    def _find(self, name: str) -> Skill | ServedSkill:
        """Raises LookupError, as the model reads it (SKILL-11)."""
        skill = self._all.get(name)
        if skill is None:
            raise LookupError(f"Skill not found: {name}")
        return skill

    # --- what the model reads

    async def show(self, ctx: Any) -> Any:
        """Handle `step.blocks`: the catalog, and the text of each opened skill (SKILL-07, SKILL-08)."""
        await self._be_ready()
        blocks = [*ctx.blocks]
        if skills := self._all:
            items = [{"name": skill.name, "description": skill.description} for skill in skills.values()]
            blocks.append({"type": "skills.catalog", "items": items})
        for name, content in self._opened.items():
            blocks.append({"type": "skills.open", "name": name, "content": content})
        return ctx.replace(blocks=blocks)

    # --- tools

    async def list(self, ctx: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Handle `skills.list`."""
        await self._be_ready()
        if self._root:  # what was written since the last scan counts
            async with self._scanning:
                await self._scan(self._root)
        items = [
            {"name": skill.name, "description": skill.description, "path": skill.path} for skill in self._all.values()
        ]
        return {"items": items, "total": len(items)}

    async def open(self, ctx: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Handle `skills.open`: from the next step on the model reads the skill's text (SKILL-10)."""
        await self._be_ready()
        skill = self._find(given["name"])
        if isinstance(skill, ServedSkill):
            return {"name": skill.name, "path": skill.path, "dir": skill.dir, "content": "", "hint": skill.hint}
        try:
            content = await asyncio.to_thread(read_skill, skill)
        except FileNotFoundError:
            raise LookupError(f"Skill not found: {skill.name}") from None
        except (OSError, ValueError) as error:
            raise fail("E_TOOL", f"{skill.path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        opened = {**self._opened, skill.name: content}
        if sum(len(text.encode()) for text in opened.values()) > MAX_OPEN:
            message = f"opened skills would have more than {MAX_OPEN >> 10} KiB together"
            raise fail("E_TOOL_LIMIT", message, suggestion="Close one with skills.close first.")
        self._keep(opened)
        return {"name": skill.name, "path": skill.path, "dir": skill.dir, "content": content, "hint": HINT}

    async def close(self, ctx: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Handle `skills.close` (SKILL-12)."""
        name = given["name"]
        closed = name in self._opened
        if closed:
            self._keep({other: text for other, text in self._opened.items() if other != name})
        return {"closed": closed, "name": name}

    def _keep(self, opened: dict[str, str]) -> None:
        self._api.state.set({"open": opened})
        self._opened = opened

    def folder(self, args: dict[str, Any]) -> str:
        """The folder of a call of `skills.run`."""
        if self._is_due():  # a turn that another process began, and that goes on here with this call
            self._take(self._api.workdir, find_skills(self._places(self._api.workdir)))
        skill = self._find(args["name"])
        if isinstance(skill, ServedSkill):
            message = f"Skill {skill.name} is an MCP server's: it has no directory here"
            raise fail("E_TOOL", message, suggestion=skill.hint)
        return skill.dir
