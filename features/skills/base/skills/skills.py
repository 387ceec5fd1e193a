"""The bundled extension `skills`: folders with a SKILL.md, which the model finds, opens, and runs commands in.

The model reads the names and descriptions of all skills with every step, and the whole text of those that it has
opened. Commands run in a jail: the Tool `skills` comes with this extension (features/skills/jail/skills).
`allowed-tools` in a skill's front matter is what its author asks for; nothing is granted because of it.

Opened skills are kept in the state of the instance: another process of the agent shows them as well.

Source: docs/skills.md; docs/design/tools.md section 14; requirements SKILL-01 to SKILL-18.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from goondan.features.skills.base.skills import finding
from goondan.schemas.wire.errors import fail
from goondan.schemas.worker.servers import SHARED_RESOURCES

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
        self._catalog: dict[str, finding.Skill] = {}
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
        self._take(root, await asyncio.to_thread(finding.find_skills, self._places(root)))

    def _take(self, root: str, found: Any) -> None:
        self._root, self._workdir, self._catalog = root, self._api.workdir, found.skills
        for problem in found.problems:
            self._api.logger.warn(f"Skills Extension: {problem}")

    def _places(self, root: str) -> list[finding.SkillPlace]:
        places: list[finding.SkillPlace] = []
        for directory in self._repo_dirs:
            place = finding.repository_place(root, directory)
            if place is None:
                self._api.logger.warn(f"Skills Extension: {directory!r} leads out of the repository")
            else:
                places.append(place)
        for directory in self._dirs:
            if directory.startswith("/"):
                places.append(finding.SkillPlace(directory))
            else:  # the kernel has made those of the bundle absolute; a patch of the config was not the kernel's
                self._api.logger.warn(f"Skills Extension: {directory!r} is no absolute path")
        return places

    @property
    def _all(self) -> dict[str, finding.Skill | finding.ServedSkill]:
        """The skills on disk, then those of MCP servers. Of two with one name that on disk counts."""
        resources = self._api.instance.shared.get(SHARED_RESOURCES)
        served = finding.served_skills(resources, finding.MAX_SKILLS) if resources else {}
        return {**self._catalog, **{name: skill for name, skill in served.items() if name not in self._catalog}}

    def _find(self, name: str) -> finding.Skill | finding.ServedSkill:
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
        if isinstance(skill, finding.ServedSkill):
            return {"name": skill.name, "path": skill.path, "dir": skill.dir, "content": "", "hint": skill.hint}
        try:
            content = await asyncio.to_thread(finding.read_skill, skill)
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
            self._take(self._api.workdir, finding.find_skills(self._places(self._api.workdir)))
        skill = self._find(args["name"])
        if isinstance(skill, finding.ServedSkill):
            message = f"Skill {skill.name} is an MCP server's: it has no directory here"
            raise fail("E_TOOL", message, suggestion=skill.hint)
        return skill.dir
