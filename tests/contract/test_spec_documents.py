"""The documents that the specification shows load as they stand there, with stand-in entry files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from goondan.kernel.bundle.loader import Inspected, inspect_bundle
from goondan.schemas.bundle.address import build_tool_name
from goondan.schemas.bundle.resources import ToolBody

DOCUMENTS = Path(__file__).parent / "spec_documents"
MODEL = """\
---
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: claude}
spec: {provider: anthropic, model: claude-sonnet-4-5, apiKey: {valueFrom: {env: ANTHROPIC_API_KEY}}}
"""
TOOL = """\
---
apiVersion: goondan.ai/v1
kind: Tool
metadata: {{name: {0}}}
spec: {{entry: tools/{0}.py, exports: [{{name: do}}]}}
"""


def load(tmp_path: Path, text: str, env: dict[str, str] | None = None) -> Inspected:
    for entry in re.findall(r"entry: \"?([^\s\",}]+)", text):
        path = tmp_path / entry
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (tmp_path / "goondan.yaml").write_text(text)
    return inspect_bundle(str(tmp_path / "goondan.yaml"), state_dir=None, env=env or {}, handlers=False)


def document(name: str) -> str:
    return (DOCUMENTS / f"{name}.yaml").read_text()


def test_no_document_is_forgotten() -> None:
    assert len(list(DOCUMENTS.glob("*.yaml"))) == 9


@pytest.mark.requirement("SCHEMA-12", "SCHEMA-01", "SCHEMA-05", "NAME-11", "BASE-04")
@pytest.mark.parametrize(
    ("name", "limit", "exports"),
    [
        ("tool_bash", 1200, {"exec": ["command"], "script": ["path"]}),
        ("tool_file_system", 2000, {"read": ["path"], "write": ["path", "content"]}),
        ("tool_http_fetch", 1000, {"get": ["url"], "post": ["url"]}),
    ],
)
def test_the_tools(tmp_path: Path, name: str, limit: int, exports: dict[str, list[str]]) -> None:
    inspected = load(tmp_path, document(name))
    assert inspected.errors == []
    codes = {warning.code for warning in inspected.warnings}
    assert codes - {"W_CONFIG_SHADOWED"} == {"W_CONFIG_NO_AGENT"}
    (found,) = inspected.loaded.documents
    resource = name.removeprefix("tool_").replace("_", "-")
    assert found.resource == f"Tool/{resource}"
    body = built(tmp_path, document(name), resource)
    assert body.error_message_limit == limit
    assert {e.name: (e.parameters or {}).get("required") for e in body.exports} == exports
    assert all(e.description for e in body.exports)
    assert [build_tool_name(resource, e.name) for e in body.exports] == [f"{resource}__{e}" for e in exports]


def built(tmp_path: Path, text: str, name: str) -> ToolBody:
    inspected = load(tmp_path, text)
    tool = inspected.checked.tools[name]
    assert isinstance(tool.body, ToolBody)
    assert "labels" in str(tool.document.node)
    return tool.body


def test_details_of_the_parameters(tmp_path: Path) -> None:
    files = built(tmp_path, document("tool_file_system").replace("index.ts", "index.py"), "file-system")
    read = files.exports[0].parameters
    assert read is not None
    assert read["properties"]["maxBytes"] == {"type": "number", "description": "최대 읽기 바이트 (기본: 100000)"}
    fetch = built(tmp_path, document("tool_http_fetch").replace("index.ts", "index.py"), "http-fetch")
    post = fetch.exports[1].parameters
    assert post is not None
    assert {name: schema["type"] for name, schema in post["properties"].items()} == {
        "url": "string", "body": "object", "headers": "object",
    }  # fmt: skip


@pytest.mark.requirement("BASE-03", "CATALOG-08")
def test_the_agent(tmp_path: Path) -> None:
    """As it is printed, with a Model beside it: its tools are those that come along."""
    inspected = load(tmp_path, document("agent") + MODEL, {"ANTHROPIC_API_KEY": "k"})
    assert inspected.errors == []
    agent = inspected.checked.agents["my-agent"]
    assert agent.tools == ["bash", "file-system", "http-fetch", "agents"]
    assert agent.system == "당신은 유용한 어시스턴트입니다."
    assert inspected.checked.entry_agent == "my-agent"


@pytest.mark.requirement("EXT-14", "SKILL-18", "COMPAT-01", "COMPAT-02")
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("extension_compaction", {"maxTokens": 8000, "maxChars": 32000, "enableLogging": True}),
        (
            "extension_mcp_github",
            {
                "transport": {"type": "stdio", "command": ["npx", "-y", "@modelcontextprotocol/server-github"]},
                "attach": {"mode": "stateful", "scope": "instance"},
                "expose": {"tools": True, "resources": True, "prompts": True},
            },
        ),
        ("extension_skills", {"discovery": {"repoSkillDirs": [".claude/skills", ".agent/skills"]}}),
        (
            "extension_skills_all",
            {
                "discovery": {"repoSkillDirs": [".claude/skills", ".agent/skills", "skills"]},
                "autoScan": {"onRepoAvailable": True, "onInit": True},
            },
        ),
    ],
)
def test_the_extensions(tmp_path: Path, name: str, config: dict[str, Any]) -> None:
    inspected = load(tmp_path, document(name))
    assert inspected.errors == []
    assert [w.path for w in inspected.warnings if w.code == "W_CONFIG_IGNORED"] == ["spec.runtime"]
    assert configs(inspected) == [config]


@pytest.mark.requirement("MCP-25")
def test_both_mcp_documents(tmp_path: Path) -> None:
    inspected = load(tmp_path, document("extensions_mcp"), {"GITHUB_TOKEN": "g", "API_TOKEN": "a"})
    assert inspected.errors == []
    github, custom = configs(inspected)
    assert github["transport"]["env"] == {"GITHUB_TOKEN": "${GITHUB_TOKEN}"}
    assert custom["transport"]["endpoint"] == "http://localhost:8080/mcp"
    assert (custom["attach"], custom["expose"]["resources"]) == ({"mode": "stateless", "scope": "agent"}, False)
    unset = load(tmp_path, document("extensions_mcp"), {"GITHUB_TOKEN": "g"})
    assert [(p.code, p.path) for p in unset.errors] == [
        ("E_CONFIG_MISSING_ENV", "spec.config.transport.headers.Authorization")
    ]


def configs(inspected: Inspected) -> list[Any]:
    """The config of every Extension as it stands in the file."""
    from goondan.kernel.bundle.rules.positions import Mapping, plain

    values = []
    for found in inspected.loaded.documents:
        spec = found.node.get("spec")
        assert isinstance(spec, Mapping)
        config = spec.get("config")
        assert config is not None
        values.append(plain(config))
    return values
