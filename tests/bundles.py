"""Bundles as text, for tests."""

from __future__ import annotations


def documents(*rows: str) -> str:
    """The YAML of resources, one for each row: its kind, its name, and its spec in braces."""
    texts = []
    for row in rows:
        kind, name, spec = row.split(" ", 2)
        texts.append(f"apiVersion: goondan.ai/v1\nkind: {kind}\nmetadata: {{name: {name}}}\nspec: {spec}\n")
    return "---\n".join(texts)
