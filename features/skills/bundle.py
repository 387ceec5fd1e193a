"""The directories of skills that a bundle names (config.discovery of the bundled extension `skills`). Pure.

`repoSkillDirs` are in the repository in which the agent works, so they may not lead out of it. `skillDirs` are
anywhere: relative to the bundle, absolute, or in the home directory. The agents get them as absolute paths, and the
Tool that the extension brings is granted those that exist, for reading. So they are powers that the bundle's trust
names, and agents narrow them like every other read grant.

Source: docs/design/tools.md section 14; requirements SKILL-02, SKILL-04.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec.structs import replace

from goondan.kernel.bundle.rules import kinds, lookup, problems, shape
from goondan.schemas.bundle.launch import ExtensionSpec


class SkillFolders:
    """The bundled extension `skills`, under whatever name a bundle has it (kernel/bundle/rules/kinds.py)."""

    extension: Final = "skills"

    def check(
        self, config: Mapping[str, Any], document: shape.Document, at: problems.Path, report: problems.Report
    ) -> None:
        """Report directories that lead out of the repository."""
        check_skill_dirs(config, document, at, report)

    def resolve(self, spec: ExtensionSpec, files: lookup.Files) -> kinds.NamedFolders:
        """The directories that a config names, and whether it names none."""
        return skill_dirs(spec, files)


FOLDERS: Final = SkillFolders()
_NAME_THEM: Final = "Name where they are: config: {discovery: {skillDirs: [./skills]}}."


def skill_dirs(spec: ExtensionSpec, files: lookup.Files) -> kinds.NamedFolders:
    """The directories that a config names, which fits the extension's schema."""
    said = unseen_skills(spec)
    warning = None if said is None else ("W_CONFIG_SKILLS", said, _NAME_THEM)
    discovery = _discovery(spec.config)
    named = [path for path in discovery.get("skillDirs") or [] if isinstance(path, str)]
    if not named:
        return kinds.NamedFolders(spec, [], warning)
    places = [files.resolve(path) for path in named]
    config = {**spec.config, "discovery": {**discovery, "skillDirs": places}}
    resource = {**spec.resource, "spec": {**spec.resource["spec"], "config": config}}
    granted = [place for place in places if files.is_folder(place)]
    return kinds.NamedFolders(replace(spec, config=config, resource=resource), granted, warning)


def unseen_skills(spec: ExtensionSpec) -> str | None:
    """What to say of a config that names no directory of skills; None for one that does."""
    if _discovery(spec.config):
        return None
    where = "in .claude/skills of a workdir, and those of MCP servers"
    return f"Extension/{spec.name} names no directory of skills: it finds only those {where}"


def check_skill_dirs(
    config: Mapping[str, Any], document: shape.Document, at: problems.Path, report: problems.Report
) -> None:
    """Report directories that lead out of the repository. `at` is the place of the config in the document."""
    for index, path in enumerate(_discovery(config).get("repoSkillDirs") or []):
        if not isinstance(path, str) or not (path.startswith(("/", "~")) or ".." in path.split("/")):
            continue
        place = document.place(*at, "discovery", "repoSkillDirs", index)
        text = document.text(*at, "discovery", "repoSkillDirs", index)
        message = f"the directory of skills {text} is not in the repository in which the agent works"
        report.error("E_CONFIG_INVALID_VALUE", message, place, "Name it in discovery.skillDirs.")


def _discovery(config: Mapping[str, Any]) -> dict[str, Any]:
    discovery = config.get("discovery")
    return discovery if isinstance(discovery, dict) else {}
