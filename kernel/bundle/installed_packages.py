"""The packages beside a bundle, as its rules see them: an interface (packages.py reads them)."""

from __future__ import annotations

from typing import Protocol

from goondan.kernel.bundle.tools import CheckedTool


class Package:
    """A package that is installed: its name, its folder, its tools by name, its documents."""

    __slots__ = ("documents", "name", "root", "tools")

    def __init__(self, name: str, root: str, tools: dict[str, CheckedTool], documents: list[str]) -> None:
        self.name = name
        self.root = root
        self.tools = tools
        self.documents = documents


class Packages(Protocol):
    """The packages beside a bundle."""

    def find(self, name: str) -> Package | str:
        """The package, or why it cannot be used."""


class NoPackages:
    """None are installed."""

    def find(self, name: str) -> Package | str:
        """Why it cannot be used."""
        return "it is not installed"
