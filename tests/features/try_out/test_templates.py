"""What a new tool or extension is made of is part of an installation."""

from __future__ import annotations

import tomllib
from pathlib import Path

from goondan.features.try_out import command
from goondan.kernel.cli.commands.bundles import files_below

ROOT = Path(__file__).resolve().parents[3]
TEMPLATES = ROOT / "features" / "try_out" / "command" / "templates"


def test_every_file_of_a_template_is_part_of_an_installation() -> None:
    packed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    patterns = packed["goondan.features"]
    files = {path for pattern in patterns for path in (ROOT / "features").glob(pattern + "/*" * pattern.endswith("**"))}
    there = {TEMPLATES / path for path in files_below(str(TEMPLATES))}
    assert there and {path for path in there if path not in files} == set()
    assert {command._TOOL.template, command._EXTENSION.template, "typescript"} == {
        path.name for path in TEMPLATES.iterdir()
    }
