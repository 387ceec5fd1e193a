"""The directories of skills that a bundle names (config.discovery of the bundled extension `skills`). Pure.

`repoSkillDirs` are in the repository in which the agent works, so they may not lead out of it. `skillDirs` are
anywhere: relative to the bundle, absolute, or in the home directory. The agents get them as absolute paths, and the
Tool that the extension brings is granted those that exist, for reading. So they are powers that the bundle's trust
names, and agents narrow them like every other read grant.

Source: docs/design/tools.md section 14; requirements SKILL-02, SKILL-04.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from goondan.kernel.bundle.extensions import CheckedExtension
from goondan.kernel.bundle.lookup import Files
from goondan.kernel.bundle.problems import Path, Report
from goondan.kernel.bundle.shape import Document
from goondan.schemas.bundle.launch import ExtensionSpec


class SkillDirs(Struct, frozen=True):
    """One agent's use of the extension."""

    #: The extension's specification, with absolute paths in its config.
    spec: ExtensionSpec
    #: The existing directories outside of workdirs, as absolute paths.
    granted: list[str]


def takes_skills(extension: CheckedExtension) -> bool:
    """Whether it is the extension `skills`, under whatever name."""
    return any(tool.takes_folder for tool in extension.tools)


def skill_dirs(spec: ExtensionSpec, files: Files) -> SkillDirs:
    """The directories that a config names, which fits the extension's schema."""
    discovery = _discovery(spec.config)
    named = [path for path in discovery.get("skillDirs") or [] if isinstance(path, str)]
    if not named:
        return SkillDirs(spec, [])
    places = [files.resolve(path) for path in named]
    config = {**spec.config, "discovery": {**discovery, "skillDirs": places}}
    resource = {**spec.resource, "spec": {**spec.resource["spec"], "config": config}}
    granted = [place for place in places if files.is_folder(place)]
    return SkillDirs(replace(spec, config=config, resource=resource), granted)


def unseen_skills(spec: ExtensionSpec) -> str | None:
    """What to say of a config that names no directory of skills; None for one that does."""
    if _discovery(spec.config):
        return None
    where = "in .claude/skills of a workdir, and those of MCP servers"
    return f"Extension/{spec.name} names no directory of skills: it finds only those {where}"


def check_skill_dirs(config: dict[str, Any], document: Document, at: Path, report: Report) -> None:
    """Report directories that lead out of the repository. `at` is the place of the config in the document."""
    for index, path in enumerate(_discovery(config).get("repoSkillDirs") or []):
        if not isinstance(path, str) or not (path.startswith(("/", "~")) or ".." in path.split("/")):
            continue
        place = document.place(*at, "discovery", "repoSkillDirs", index)
        text = document.text(*at, "discovery", "repoSkillDirs", index)
        message = f"the directory of skills {text} is not in the repository in which the agent works"
        report.error("E_CONFIG_INVALID_VALUE", message, place, "Name it in discovery.skillDirs.")


def _discovery(config: dict[str, Any]) -> dict[str, Any]:
    discovery = config.get("discovery")
    return discovery if isinstance(discovery, dict) else {}
