"""Bundles in a temporary directory, checked without looking into modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from goondan.kernel.bundle import documents
from goondan.kernel.bundle.loader import Inspected, inspect_bundle
from goondan.kernel.bundle.rules.checked import CheckedTool

BASE_MANIFEST = """\
apiVersion: goondan.ai/v1
kind: Tool
metadata:
  name: bash
  labels: {tier: base}
spec:
  entry: ./tool.py
  errorMessageLimit: 1200
  exports:
    - name: exec
      description: "Run ${NAME} as it stands"
      parameters: {type: object, properties: {command: {type: string}}, required: [command]}
    - name: setChatAction
"""

#: A bundle without a mistake; tests change one thing in it.
GOOD = """\
apiVersion: goondan.ai/v1
kind: Model
metadata:
  name: main
spec:
  provider: embedded
---
apiVersion: goondan.ai/v1
kind: Agent
metadata:
  name: helper
spec:
  modelConfig:
    modelRef: Model/main
  prompt:
    system: You help.
  tools:
    - Tool/words
    - ref: Tool/bash
---
apiVersion: goondan.ai/v1
kind: Tool
metadata:
  name: words
spec:
  entry: tools/words.py
  exports:
    - name: count
      description: Count words.
      parameters:
        type: object
        properties:
          text: {type: string}
        required: [text]
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata:
  name: default
spec:
  entryAgent: Agent/helper
  agents:
    - ref: Agent/helper
"""

Look = Callable[..., Inspected]


def sound(found: Inspected) -> Inspected:
    """A bundle without errors."""
    assert found.errors == []
    return found


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CheckedTool]:
    """A bundled package with one tool."""
    folder = tmp_path_factory.mktemp("base") / "bash"
    folder.mkdir()
    (folder / "tool.yaml").write_text(BASE_MANIFEST)
    (folder / "tool.py").write_text("handlers = {}\n")
    return documents.load_manifests([str(folder)])


@pytest.fixture
def bundled(package: dict[str, CheckedTool], monkeypatch: pytest.MonkeyPatch) -> dict[str, CheckedTool]:
    """That package in the place of the real one."""
    monkeypatch.setattr(documents, "base_tools", lambda: package)
    return package


@pytest.fixture
def look(tmp_path: Path, bundled: dict[str, CheckedTool]) -> Look:
    """Write a bundle and look at it: `look(text, files={path: content}, env={}, name="goondan.yaml")`."""

    def run(
        text: str | bytes,
        *,
        files: Mapping[str, str | bytes] | None = None,
        env: Mapping[str, str] | None = None,
        name: str = "goondan.yaml",
        directory: bool = False,
    ) -> Inspected:
        written: dict[str, str | bytes] = {"tools/words.py": "handlers = {}\n", **(files or {}), name: text}
        for place, content in written.items():
            target = tmp_path / place
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.encode() if isinstance(content, str) else content)
        path = tmp_path if directory else tmp_path / name
        return inspect_bundle(str(path), state_dir=None, env=env or {}, handlers=False)

    return run
