"""A checked bundle to what its processes are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from goondan.kernel.bundle.loader import open_bundle
from goondan.kernel.bundle.rules.problems import BundleError
from goondan.schemas.bundle.launch import CatalogItem, ExportSpec, KernelPlan, Limits, ModelSpec, ToolSource
from goondan.schemas.wire.frames import OPERATOR_AGENT
from tests.unit.kernel.bundle.conftest import GOOD, bundled, package

__all__ = ["bundled", "package"]

RICH = GOOD
for old, new in {
    "  entry: tools/words.py\n": """\
  entry: tools/words.py
  errorMessageLimit: 77
  sandbox:
    isolation: call
    network: {allow: ['a.example:443']}
    filesystem: {read: [data, /etc/hosts]}
    env: [TOKEN]
    limits: {memoryMb: 64}
""",
    "    - name: count\n": """\
    - name: count
      idempotent: true
      background: true
      aliases: {txt: text}
""",
    "  entryAgent: Agent/helper\n": """\
  entryAgent: Agent/helper
  policy: {maxStepsPerTurn: 5, durability: process, maxLiveAgents: 9, agentIdleSeconds: 1.5}
""",
    "    - ref: Tool/bash\n": """\
    - ref: Tool/bash
  policy: {toolCalls: {allowRegistry: ['bash__*']}, stallTimeoutS: 90, conversationMb: 64}
""",
}.items():
    RICH = RICH.replace(old, new)


def plan_of(tmp_path: Path, text: str, module: str = "handlers = {}\n") -> KernelPlan:
    (tmp_path / "tools").mkdir(exist_ok=True)
    (tmp_path / "tools" / "words.py").write_text(module)
    path = tmp_path / "goondan.yaml"
    path.write_text(text)
    return open_bundle(str(path), state_dir="/state", env={}, handlers=False).plan


MORE = (
    GOOD.replace("    - ref: Agent/helper\n", "    - ref: Agent/helper\n    - ref: Agent/other\n")
    + """\
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: other}
spec:
  modelConfig: {modelRef: Model/main}
"""
)


@pytest.mark.parametrize(("swarm", "helper", "waits"), [(None, None, 60_000), (7, None, 7), (7, 9, 9), (None, 9, 9)])
def test_how_long_an_agent_waits_for_another(
    tmp_path: Path, bundled: object, swarm: int | None, helper: int | None, waits: int
) -> None:
    text = GOOD
    for said, place in ((swarm, "  entryAgent: Agent/helper\n"), (helper, "    - ref: Tool/bash\n")):
        policy = "" if said is None else f"  policy: {{requestTimeoutMs: {said}}}\n"
        text = text.replace(place, place + policy)
    assert plan_of(tmp_path, text).agents["helper"].request_timeout_ms == waits


@pytest.mark.parametrize(("swarm", "helper", "other", "sharing"), [
    ("", "", "", []),
    ("shared", "", "", ["helper", "other"]),
    ("shared", "", "own", ["helper"]),
    ("own", "", "shared", ["helper", "other"]),
    ("", "shared", "", ["helper"]),
    ("shared", "own", "own", []),
    ("shared", "own", "", ["helper", "other"]),
])  # fmt: skip
def test_who_shares_a_working_directory(
    tmp_path: Path, bundled: object, swarm: str, helper: str, other: str, sharing: list[str]
) -> None:
    """The entry agent does as soon as anybody does: the folder is its own."""
    text = MORE
    for at, value in (
        ("  entryAgent: Agent/helper\n", swarm),
        ("  modelConfig:\n    modelRef: Model/main\n", helper),
        ("  modelConfig: {modelRef: Model/main}\n", other),
    ):
        text = text.replace(at, f"{at}  workdir: {value}\n" if value else at)
    assert plan_of(tmp_path, text).sharing_agents == sharing


@pytest.mark.requirement("CATALOG-01", "CATALOG-02", "CATALOG-04", "CATALOG-08", "NAME-01", "NAME-06", "ITEM-04")
def test_the_registry_holds_everything_and_the_catalog_what_is_named(tmp_path: Path, bundled: object) -> None:
    plan = plan_of(tmp_path, GOOD.replace("    - Tool/words\n", ""))
    agent = plan.agents["helper"]
    assert [item.name for item in agent.registry] == ["words__count", "bash__exec", "bash__setChatAction"]
    assert agent.catalog == ["bash__exec", "bash__setChatAction"]
    assert agent.registry[0].source == ToolSource("config", "words")
    assert plan_of(tmp_path, GOOD).agents["helper"].catalog == ["words__count", "bash__exec", "bash__setChatAction"]


def test_the_operators_catalog_is_the_registry(tmp_path: Path, bundled: object) -> None:
    operator = plan_of(tmp_path, GOOD.replace("    - Tool/words\n", "")).agents[OPERATOR_AGENT]
    assert (
        operator.catalog
        == [item.name for item in operator.registry]
        == ["words__count", "bash__exec", "bash__setChatAction"]
    )
    assert operator.model == ModelSpec(provider="embedded")


@pytest.mark.requirement("SCHEMA-05", "ERROR-04")
def test_what_a_document_says_arrives(tmp_path: Path, bundled: object) -> None:
    plan = plan_of(tmp_path, RICH)
    agent = plan.agents["helper"]
    assert (agent.system, agent.max_steps_per_turn, agent.durability) == ("You help.", 5, "process")
    assert (agent.stall_timeout_s, agent.conversation_mb) == (90.0, 64)
    assert (agent.allow_registry, agent.idle_s, agent.state_dir) == (["bash__*"], 1.5, "/state")
    assert (plan.max_live_agents, plan.agent_idle_s, plan.entry_agent) == (9, 1.5, "helper")
    schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    assert agent.registry[0] == CatalogItem(
        name="words__count", description="Count words.", parameters=schema, source=ToolSource("config", "words"),
        error_message_limit=77, idempotent=True, aliases={"txt": "text"},
    )  # fmt: skip
    words, bash = plan.toolhost.tools
    assert words.exports == [
        ExportSpec(name="count", parameters=schema, idempotent=True, background=True, aliases={"txt": "text"})
    ]
    assert (words.entry, words.root) == (str(tmp_path / "tools/words.py"), str(tmp_path / "tools"))
    assert (words.sandbox.isolation, words.sandbox.network) == ("call", {"allow": ["a.example:443"]})
    assert words.sandbox.filesystem.read == [str(tmp_path / "data"), "/etc/hosts"]
    assert (words.sandbox.env, words.sandbox.limits) == (["TOKEN"], Limits(memory_mb=64))
    assert (words.bundled, bash.bundled, bash.error_message_limit) == (False, True, 1200)
    assert plan_of(tmp_path, GOOD).toolhost.tools[0].error_message_limit == 1000


def test_a_bundled_manifest_is_taken_as_it_is(tmp_path: Path, bundled: object) -> None:
    items = {item.name: item for item in plan_of(tmp_path, GOOD).agents["helper"].registry}
    assert items["bash__exec"].description == "Run ${NAME} as it stands"


def test_documents_prompts_and_tool_folders_are_protected(tmp_path: Path, bundled: object) -> None:
    (tmp_path / "prompt.md").write_text("hi")
    plan = plan_of(tmp_path, GOOD.replace("system: You help.", "systemRef: prompt.md"))
    expected = [str(tmp_path / name) for name in ("goondan.yaml", "prompt.md", "tools")]
    assert plan.protected == plan.toolhost.protected == expected


def test_the_revision_names_the_content(tmp_path: Path, bundled: object) -> None:
    first = plan_of(tmp_path, GOOD).revision
    assert plan_of(tmp_path, GOOD).revision == first
    assert plan_of(tmp_path, GOOD + "# a comment\n").revision != first
    assert plan_of(tmp_path, GOOD, "handlers = {'count': len}\n").revision != first
    agents = plan_of(tmp_path, GOOD).agents.values()
    assert {agent.revision for agent in agents} == {first}


def test_a_bundle_with_errors_has_no_plan(tmp_path: Path, bundled: object) -> None:
    with pytest.raises(BundleError) as caught:
        plan_of(tmp_path, GOOD.replace("Tool/bash", "Tool/x").replace("Model/main", "Model/x"))
    assert [p.code for p in caught.value.problems] == ["E_CONFIG_MISSING_REF"] * 2


def test_a_bundle_of_tools_alone_has_no_entry_agent(tmp_path: Path, bundled: object) -> None:
    tool = GOOD.split("---\n")[2]
    plan = plan_of(tmp_path, tool)
    assert plan.entry_agent == ""
    assert list(plan.agents) == [OPERATOR_AGENT]
