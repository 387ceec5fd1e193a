"""What a changeset may change of documents, and which paths it may have."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from goondan.features.changesets.process.rules import (
    FileChange,
    Places,
    Written,
    fold,
    refused_documents,
    refused_files,
    twins,
    why_refused,
)

AGENT: dict[str, Any] = {
    "apiVersion": "goondan.ai/v1",
    "kind": "Agent",
    "metadata": {"name": "a"},
    "spec": {
        "modelConfig": {"modelRef": "Model/m"},
        "prompt": {"systemRef": "prompts/system.md"},
        "tools": ["Tool/own", {"ref": "Tool/bash", "sandbox": {"network": "none"}}],
        "extensions": ["Extension/one", {"ref": "Extension/two", "config": {"level": 1}}],
        "policy": {"toolCalls": {"allowRegistry": []}},
    },
}


def extension(name: str, entry: str, config: Any = None) -> dict[str, Any]:
    return {"kind": "Extension", "metadata": {"name": name}, "spec": {"entry": entry, "config": config or {}}}


def bundle(agent: dict[str, Any] | None = None, **changed: dict[str, Any]) -> list[Written]:
    tool = {"kind": "Tool", "metadata": {"name": "own"}, "spec": {"exports": [{"name": "run"}, {"name": "end"}]}}
    documents = {
        "Agent/a": agent or AGENT,
        "Tool/own": tool,
        "Tool/other": {**tool, "metadata": {"name": "other"}},
        "Extension/one": extension("one", "./one.py"),
        "Extension/two": extension("two", "./two.py", {"transport": {"type": "stdio"}, "level": 0}),
        "Extension/guard": extension("guard", "@goondan/base/approval", {"rules": [1]}),
        **changed,
    }
    return [Written("goondan.yaml", name, value) for name, value in documents.items()]


def agent(**spec: Any) -> dict[str, Any]:
    made = copy.deepcopy(AGENT)
    made["spec"].update(spec)
    return made


def refused(made: list[Written], before: list[Written] | None = None) -> list[str]:
    return refused_documents(before or bundle(), made, {"prompts/system.md", "persona.txt"})


TOOLS = AGENT["spec"]["tools"]
ALLOWED = {
    "a prompt in place": bundle(agent(prompt={"system": "Be short."})),
    "another prompt": bundle(agent(prompt={"systemRef": "persona.txt"})),
    "a new prompt": bundle(agent(prompt={"systemRef": "prompts/new.md"})),
    "a tool of the bundle": bundle(agent(tools=[*TOOLS, "Tool/other"])),
    "a tool less": bundle(agent(tools=TOOLS[1:])),
    "the order of tools": bundle(agent(tools=TOOLS[::-1])),
    "another spelling": bundle(agent(tools=[{"kind": "Tool", "name": "own"}, TOOLS[1]])),
    "the order of extensions": bundle(agent(extensions=AGENT["spec"]["extensions"][::-1])),
    "a config": bundle(agent(extensions=["Extension/one", {"ref": "Extension/two", "config": {"level": 2}}])),
    "a resource's config": bundle(
        **{"Extension/two": extension("two", "./two.py", {"level": 9, "transport": {"type": "stdio"}})}
    ),
}

REFUSED = {
    "a model": bundle(agent(modelConfig={"modelRef": "Model/n"})),
    "policy": bundle(agent(policy={"toolCalls": {"allowRegistry": ["*"]}})),
    "a sandbox of the agent": bundle(agent(sandbox={"network": "public"})),
    "a field that nobody knows yet": bundle(agent(oauth={"any": True})),
    "a prompt that is no prompt": bundle(agent(prompt={"systemRef": ".env"})),
    "a bundled tool": bundle(agent(tools=[*TOOLS, "Tool/file-system"])),
    "a packaged tool": bundle(agent(tools=[*TOOLS, {"kind": "Tool", "name": "own", "package": "@x/y"}])),
    "a wider sandbox": bundle(agent(tools=["Tool/own", {"ref": "Tool/bash", "sandbox": {"network": "public"}}])),
    "a tool's sandbox less": bundle(agent(tools=["Tool/own", "Tool/bash"])),
    "a narrowed tool less": bundle(agent(tools=["Tool/own"])),
    "a tool with a sandbox": bundle(agent(tools=[*TOOLS, {"ref": "Tool/other", "sandbox": {}}])),
    "an extension more": bundle(agent(extensions=["Extension/one", "Extension/two", "Extension/guard"])),
    "an extension less": bundle(agent(extensions=["Extension/one"])),
    "a guard's config": bundle(**{"Extension/guard": extension("guard", "@goondan/base/approval", {"rules": []})}),
    "a transport": bundle(**{"Extension/two": extension("two", "./two.py", {"transport": {"type": "http"}})}),
    "a transport below": bundle(
        **{"Extension/one": extension("one", "./one.py", {"servers": [{"Transport": {"command": ["sh"]}}]})}
    ),
    "an entry": bundle(**{"Extension/one": extension("one", "./two.py")}),
    "a Tool": bundle(**{"Tool/own": {"kind": "Tool", "metadata": {"name": "own"}, "spec": {"exports": []}}}),
    "metadata": bundle({**AGENT, "metadata": {"name": "a", "annotations": {"x": "y"}}}),
    "a version": bundle({**AGENT, "apiVersion": "agents.example.io/v1alpha1"}),
    "a document more": [*bundle(), Written("goondan.yaml", "Agent/b", AGENT)],
    "a document less": bundle()[1:],
    "a document twice": [*bundle(), bundle()[0]],
    "a document in another file": [Written("b.yaml", one.resource, one.value) for one in bundle()],
    "one that is a number now": bundle(agent(policy={"toolCalls": {"allowRegistry": 0}})),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_changeset_may_change(name: str) -> None:
    assert refused(ALLOWED[name]) == []


@pytest.mark.requirement("BUNDLE-07")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_the_operators(name: str) -> None:
    found = refused(REFUSED[name])
    assert found and all(found)


@pytest.mark.parametrize(
    ("patterns", "tool", "allowed"),
    [
        (["other__*"], "Tool/other", True),
        (["other__run"], "Tool/other", False),
        ([], "Tool/other", False),
        (["file-system__*"], "Tool/file-system", True),
        (["file-system__read"], "Tool/file-system", False),
        (["other__*"], "Tool/file-system", False),
    ],
)
def test_the_bound_of_tools(patterns: list[str], tool: str, allowed: bool) -> None:
    before = agent(policy={"toolCalls": {"extensionsMayAdd": patterns}})
    after = copy.deepcopy(before)
    after["spec"]["tools"].append(tool)

    assert (refused(bundle(after), bundle(before)) == []) is allowed


def test_bundled_extensions_widen_nothing() -> None:
    before = agent(extensions=["Extension/guard"])
    after = copy.deepcopy(before)
    after["spec"]["tools"].append("Tool/other")

    assert refused(bundle(after), bundle(before)) != []


PLACES = Places(prefix="b", documents={"b/goondan.yaml"}, prompts={"b/persona.txt"}, code={"b/tools/one", "b/ext.py"})


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        (FileChange("b/goondan.yaml", "100644", "100644"), True),
        (FileChange("b/goondan.yaml", "100644", None), False),
        (FileChange("b/other.yaml", None, "100644"), False),
        (FileChange("b/persona.txt", "100644", None), True),
        (FileChange("b/notes/a.md", None, "100644"), True),
        (FileChange("b/notes/a.md", None, "100755"), False),
        (FileChange("b/notes/a.md", "100755", "100644"), False),
        (FileChange("b/notes/a.md", "120000", "100644"), False),
        (FileChange("b/tools/one/a.md", None, "100644"), False),
        (FileChange("b/ext.py", "100644", "100644"), False),
        (FileChange("bb/a.md", None, "100644"), False),
        (FileChange("a.md", None, "100644"), False),
        (FileChange("b/../a.md", None, "100644"), False),
        (FileChange("b/.github/a.md", None, "100644"), False),
    ],
)
def test_which_files_a_changeset_may_have(change: FileChange, allowed: bool) -> None:
    assert (refused_files([change], PLACES) == []) is allowed


SEEN = st.text(st.characters(categories=["L", "M", "N", "P", "S"]), max_size=12)


@given(st.lists(SEEN | st.sampled_from([".", ".github", "a", "b.md"]), min_size=1, max_size=3))
def test_a_path_that_is_allowed_means_the_same_everywhere(names: list[str]) -> None:
    path = "/".join(names)
    assume(why_refused(path) is None)
    parts = path.split("/")
    assert path and not path.startswith("/") and ".." not in parts and "." not in parts
    assert path.isprintable() and "\\" not in path
    assert not any(fold(part).startswith(".git") for part in parts)


@given(st.lists(st.from_regex(r"[a-z0-9_][a-z0-9_-]{0,8}(\.md)?", fullmatch=True), min_size=1, max_size=5))
def test_plain_names_are_allowed(names: list[str]) -> None:
    assert why_refused("/".join(names)) is None


@pytest.mark.parametrize(
    "path",
    [".git/config", "a/.GIT/b", ".gitattributes", "x/.gıtmodules".replace("ı", "i"), "GIT~1", ".g\u200dit", "a\\b"],
)
def test_what_git_reads_is_refused(path: str) -> None:
    assert why_refused(path) is not None


def test_twins() -> None:
    assert twins(["a/B.md"], ["a/b.md"]) == [("a/B.md", "a/b.md")]
    assert twins(["A/c.md"], ["a/b.md"]) == [("A/c.md", "a")]
    assert twins(["x.md", "X.md"], []) == [("X.md", "x.md")]
    assert twins(["a/c.md"], ["a/b.md"]) == []
