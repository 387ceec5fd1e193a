"""The bundled extension `skills` in a bundle: its directories, which are powers, and what pins give."""

from __future__ import annotations

from pathlib import Path

import pytest

from goondan.kernel.bundle.loader import Inspected, inspect_bundle
from goondan.kernel.bundle.rules.plan import build_plan, tool_spec
from goondan.kernel.grants.granting import Accepted, PinnedFolder
from goondan.kernel.grants.powers import Folder, Power
from goondan.kernel.trust.policy import write_decisions
from goondan.schemas.bundle.launch import Filesystem, FolderGrants, SandboxSpec, ToolSpec
from goondan.schemas.bundle.resources import NetworkAllow, SandboxPart
from tests.unit.kernel.bundle.conftest import GOOD, Look, bundled, package

__all__ = ["bundled", "package"]

WITH = GOOD.replace("  tools:\n", "  extensions:\n    - {ref: Extension/skills, config: CONFIG}\n  tools:\n", 1)
ANOTHER = """\
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: other}
spec:
  modelConfig: {modelRef: Model/main}
  extensions: [{ref: Extension/skills, config: CONFIG}]
---
"""


def using(config: str) -> str:
    return WITH.replace("CONFIG", config)


def tool_of(seen: Inspected) -> ToolSpec:
    assert seen.errors == []
    return tool_spec(seen.checked.tools["skills"])


def powers_about_folders(seen: Inspected) -> list[Power]:
    return [power for power in seen.judgement.powers if isinstance(power, Folder)]


def test_by_default_nothing_is_granted_and_nobody_is_asked(look: Look) -> None:
    seen = look(using("{}"))
    tool = tool_of(seen)
    assert tool.sandbox == SandboxSpec()
    assert tool.folders == {"helper": FolderGrants(workdir=SandboxSpec())}
    assert powers_about_folders(seen) == []
    plan = build_plan(seen.checked, bundle=seen.path, state_dir="/state", revision="r", documents=[])
    names = [item.name for item in plan.agents["helper"].registry]
    assert "skills__run" in names
    assert [tool.name for tool in plan.toolhost.tools if tool.folders] == ["skills"]


def test_directories_elsewhere_are_powers_and_are_granted_for_reading(look: Look, tmp_path: Path) -> None:
    (tmp_path / "mine/deploy").mkdir(parents=True)
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    config = f"{{discovery: {{skillDirs: [mine, {outside}, /nonexistent/skills]}}}}"
    seen = look(using(config))
    tool = tool_of(seen)
    assert tool.sandbox.filesystem == Filesystem(read=sorted([str(outside), str(tmp_path / "mine")]))
    assert tool.folders["helper"].workdir == SandboxSpec(), "a skill in the workdir gets nothing of that"
    assert powers_about_folders(seen) == [Folder("skills", "read", str(outside))]
    (spec,) = seen.checked.agents["helper"].extensions
    absolute = [str(tmp_path / "mine"), str(outside), "/nonexistent/skills"]
    assert spec.config["discovery"]["skillDirs"] == absolute
    assert spec.resource["spec"]["config"]["discovery"]["skillDirs"] == absolute


def test_each_agent_has_the_directories_that_it_names(look: Look, tmp_path: Path) -> None:
    for name in ("one", "two/inner"):
        (tmp_path / name).mkdir(parents=True)
    text = ANOTHER.replace("CONFIG", "{discovery: {skillDirs: [two/inner]}}") + using(
        "{discovery: {skillDirs: [one, two]}}"
    ).replace("    - ref: Agent/helper\n", "    - ref: Agent/helper\n    - ref: Agent/other\n")
    tool = tool_of(look(text))
    assert tool.sandbox.filesystem.read == [str(tmp_path / "one"), str(tmp_path / "two")]
    assert tool.narrowed["other"].filesystem.read == [str(tmp_path / "two/inner")]
    assert "helper" not in tool.narrowed


@pytest.mark.requirement("SKILL-02")
@pytest.mark.parametrize("path", ["../elsewhere", "/etc", "~/skills", "a/../../b"])
def test_a_directory_of_the_repository_does_not_lead_out_of_it(look: Look, path: str) -> None:
    (problem,) = look(using(f"{{discovery: {{repoSkillDirs: [.claude/skills, {path}]}}}}")).errors
    assert problem.code == "E_CONFIG_INVALID_VALUE"
    assert problem.path == "spec.extensions[0].config.discovery.repoSkillDirs[1]"
    document = f"""\
apiVersion: goondan.ai/v1
kind: Extension
metadata: {{name: mine}}
spec: {{entry: "@goondan/base/skills", config: {{discovery: {{repoSkillDirs: [{path}]}}}}}}
---
"""
    (problem,) = look(document + GOOD).errors
    assert problem.path == "spec.config.discovery.repoSkillDirs[0]"


class Home:
    """A bundle with skills, and the operator's policy."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "state"
        self.bundle = folder / "bundle"
        self.root.mkdir(mode=0o700)
        (self.bundle / "tools").mkdir(parents=True)
        (self.bundle / "tools/words.py").write_text("handlers = {}\n")

    def look(self, text: str) -> Inspected:
        path = self.bundle / "goondan.yaml"
        path.write_text(text)
        state = str(self.root / "workspaces" / "x")
        return inspect_bundle(str(path), state_dir=state, env={}, handlers=False)


@pytest.fixture
def home(tmp_path: Path, bundled: object) -> Home:
    return Home(tmp_path)


def test_a_pin_gives_what_the_tool_has_and_what_the_operator_says(home: Home) -> None:
    policy = home.root / "policy.yaml"
    policy.write_text("widen:\n  - {tool: skills, sandbox: {env: [GENERAL]}}\n")
    policy.chmod(0o600)
    part = SandboxPart(network=NetworkAllow(["deploy.example:443"]), env=["TOKEN"])
    pins = [PinnedFolder("deploy", "sha256:1", part), PinnedFolder("plain", "sha256:2")]
    write_decisions(str(policy), [Accepted("@a/b/c", "sha256:0")], pins)
    assert "widen:" in policy.read_text()
    tool = tool_of(home.look(using("{}")))
    grants = tool.folders["helper"]
    assert tool.sandbox.env == ["GENERAL"]
    assert grants.workdir == SandboxSpec(), "the operator's general word is not for skills that tools can write"
    assert grants.pinned == {
        "sha256:1": SandboxSpec(env=["GENERAL", "TOKEN"], network={"allow": ["deploy.example:443"]}),
        "sha256:2": SandboxSpec(env=["GENERAL"]),
    }


def test_what_an_agent_narrows_it_narrows_of_pins_too(home: Home) -> None:
    write_decisions(
        str(home.root / "policy.yaml"), [], [PinnedFolder("deploy", "sha256:1", SandboxPart(env=["TOKEN"]))]
    )
    text = using("{}").replace("  extensions:\n", "  sandbox: {env: [], limits: {wallSeconds: 9}}\n  extensions:\n", 1)
    grants = tool_of(home.look(text)).folders["helper"]
    assert grants.pinned["sha256:1"].env == []
    assert (grants.pinned["sha256:1"].limits.wall_seconds, grants.workdir.limits.wall_seconds) == (9, 9)


def test_a_pin_that_nobody_may_give_is_an_error_with_its_place(home: Home) -> None:
    policy = home.root / "policy.yaml"
    policy.write_text(
        "pinned:\n"
        "  - {folder: a, digest: d, sandbox: {filesystem: {write: [/etc]}}}\n"
        "  - {folder: b, digest: e, sandbox: {isolation: call}}\n"
    )
    policy.chmod(0o600)
    found = home.look(using("{}")).errors
    assert [(problem.code, problem.path) for problem in found] == [
        ("E_CONFIG_DANGEROUS", "pinned[0].sandbox.filesystem.write"),
        ("E_CONFIG_INVALID_VALUE", "pinned[1].sandbox.isolation"),
    ]
