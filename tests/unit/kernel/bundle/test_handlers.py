"""What a finding about a module means for its document, and what is remembered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from goondan.kernel.bundle.handlers import Check, Inspector, check_handlers, inspect, judge
from goondan.kernel.bundle.loader import inspect_bundle, may_declare_tools
from goondan.kernel.bundle.rules.checked import CheckedTool
from goondan.kernel.bundle.rules.problems import Report
from goondan.kernel.start import INSPECTION
from goondan.schemas.bundle.launch import SandboxSpec
from goondan.schemas.text.redaction import Redactor
from goondan.schemas.worker.inspection import ModuleReport, Reason, Refusal
from tests.unit.kernel.bundle.conftest import GOOD, Look


class Answering(Inspector):
    """Answers what it is told to; the real program is tested in tests/process."""

    def __init__(self, state_dir: str | None, *findings: ModuleReport) -> None:
        super().__init__(state_dir)
        self.findings = list(findings)
        self.asked: list[list[str]] = []

    def ask(self, tools: Any, documents: Any, values: Any) -> list[ModuleReport]:
        self.asked.append([tool.name for tool in tools])
        self.specs = list(tools)
        self.values = dict(values)
        return self.findings


def check(inspector: Answering, *, reviewed: bool = True, **env: str) -> Check:
    return Check(inspector, [], Redactor(*env.values()), env, reviewed=reviewed)


@pytest.fixture
def tool(look: Look) -> CheckedTool:
    return look(GOOD).checked.tools["words"]


def judged(tool: CheckedTool, finding: ModuleReport) -> Report:
    report = Report()
    judge(tool, finding, check(Answering(None)), report)
    return report


@pytest.mark.requirement("VALIDATE-02")
def test_an_export_without_a_handler(tool: CheckedTool) -> None:
    assert judged(tool, ModuleReport(name="words", method="jail", exports=["count", "more"])).errors == []
    report = judged(tool, ModuleReport(name="words", method="jail", exports=["cuont"]))
    assert [(p.code, p.path) for p in report.errors] == [("E_CONFIG_ENTRY", "spec.exports[0].name")]
    assert report.errors[0].suggestion == "Did you mean 'cuont'?"


@pytest.mark.requirement("HANDLER-04")
def test_full_names_are_no_keys_of_handlers(tool: CheckedTool) -> None:
    report = judged(tool, ModuleReport(name="words", method="jail", exports=["words__count"]))
    assert "export names alone" in report.errors[0].suggestion


@pytest.mark.requirement("HANDLER-03")
@pytest.mark.parametrize("reason", ["import", "handlers", "timeout", "crash"])
def test_a_module_that_cannot_serve(tool: CheckedTool, reason: Reason) -> None:
    report = judged(tool, ModuleReport(name="words", method="jail", error=Refusal(reason, "a\nb\x1b[31m" + "x" * 999)))
    assert [(p.code, p.path, p.line) for p in report.errors] == [("E_CONFIG_ENTRY", "spec.entry", 26)]
    assert report.errors[0].message.isprintable()
    assert len(report.errors[0].message) < 400


def test_a_jail_that_cannot_be_had_is_no_fault_of_the_module(tool: CheckedTool) -> None:
    report = judged(tool, ModuleReport(name="words", method="jail", error=Refusal("sandbox", "/gone does not exist")))
    assert [(p.code, p.path) for p in report.errors] == [("E_SANDBOX_DENIED", "spec.sandbox")]
    assert "/gone does not exist" in report.errors[0].message


def test_what_only_the_source_says_is_a_warning(tool: CheckedTool) -> None:
    report = judged(tool, ModuleReport(name="words", method="source", exports=None))
    assert (report.errors, [w.code for w in report.warnings]) == ([], ["W_CONFIG_UNCHECKED"])
    missing = judged(tool, ModuleReport(name="words", method="source", exports=[]))
    assert [p.code for p in missing.errors] == ["E_CONFIG_ENTRY"]


def test_no_answer_is_a_warning(tool: CheckedTool) -> None:
    report = Report()
    check_handlers([tool], check(Answering(None)), report)
    assert (report.errors, [w.code for w in report.warnings]) == ([], ["W_CONFIG_UNCHECKED"])


def test_bundled_tools_are_not_looked_at(look: Look) -> None:
    inspector = Answering(None)
    check_handlers([look(GOOD).checked.tools["bash"]], check(inspector), Report())
    assert inspector.asked == []


def test_a_finding_is_remembered_until_the_files_change(tool: CheckedTool, tmp_path: Path) -> None:
    finding = ModuleReport(name="words", method="jail", exports=["count"])
    state = str(tmp_path / "state")
    first = Answering(state, finding)
    assert inspect([tool], check(first)) == {"words": finding}
    second = Answering(state)
    assert inspect([tool], check(second)) == {"words": finding}
    assert (first.asked, second.asked) == ([["words"]], [])
    Path(tool.entry).write_text("handlers = {'x': print}\n")
    third = Answering(state, finding)
    inspect([tool], check(third))
    assert third.asked == [["words"]]


@pytest.mark.parametrize(
    "finding",
    [
        ModuleReport(name="words", method="source", exports=["count"]),
        ModuleReport(name="words", method="jail", error=Refusal("timeout", "x")),
        ModuleReport(name="words", method="jail", error=Refusal("crash", "x")),
    ],
    ids=["source", "timeout", "crash"],
)
def test_what_may_be_different_tomorrow_is_asked_again(
    tool: CheckedTool, tmp_path: Path, finding: ModuleReport
) -> None:
    inspect([tool], check(Answering(str(tmp_path / "state"), finding)))
    again = Answering(str(tmp_path / "state"))
    inspect([tool], check(again))
    assert again.asked == [["words"]]


def test_a_broken_or_unwritable_memory_only_costs_time(tool: CheckedTool, tmp_path: Path) -> None:
    finding = ModuleReport(name="words", method="jail", exports=["count"])
    state = tmp_path / "state"
    (state / "cache").mkdir(parents=True)
    (state / "cache" / "handlers.json").write_text("{nonsense")
    assert inspect([tool], check(Answering(str(state), finding))) == {"words": finding}
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert inspect([tool], check(Answering(str(blocked), finding))) == {"words": finding}


def test_grants_and_environments_are_never_remembered(look: Look, tmp_path: Path) -> None:
    tool = look(
        GOOD.replace("  entry: tools/words.py", "  entry: tools/words.py\n  sandbox: {env: [HOME]}")
    ).checked.tools
    finding = ModuleReport(name="words", method="jail", exports=["count"])
    inspect([tool["words"]], check(Answering(str(tmp_path / "state"), finding)))
    assert not (tmp_path / "state").exists()


GREEDY = GOOD.replace(
    "  entry: tools/words.py",
    "  entry: tools/words.py\n"
    "  sandbox: {env: [API_KEY], network: public, filesystem: {read: [/opt]}, limits: {memoryMb: 900}}",
)


def test_a_bundle_that_was_not_reviewed_gets_nothing_that_it_asks_for(look: Look, tmp_path: Path) -> None:
    words = look(GREEDY).checked.tools["words"]
    finding = ModuleReport(name="words", method="jail", exports=["count"])
    strangers = Answering(str(tmp_path / "state"), finding)
    inspect([words], check(strangers, reviewed=False, API_KEY="k" * 20))
    assert (strangers.specs[0].sandbox, strangers.specs[0].narrowed, strangers.values) == (SandboxSpec(), {}, {})
    own = Answering(None, finding)
    inspect([words], check(own, API_KEY="k" * 20, OTHER="o" * 20))
    assert (own.specs[0].sandbox.env, own.values) == (["API_KEY"], {"API_KEY": "k" * 20})


def test_a_module_that_needs_what_it_did_not_get_is_a_warning(look: Look) -> None:
    words = look(GREEDY).checked.tools["words"]
    report = Report()
    finding = ModuleReport(name="words", method="jail", error=Refusal("import", "KeyError: 'API_KEY'"))
    judge(words, finding, check(Answering(None), reviewed=False), report)
    assert (report.errors, [w.code for w in report.warnings]) == ([], ["W_CONFIG_UNCHECKED"])
    assert "gdn trust" in report.warnings[0].suggestion


def test_a_module_that_raises_what_it_was_given_shows_nothing_of_it(look: Look) -> None:
    words = look(GREEDY).checked.tools["words"]
    report = Report()
    key = "sk-Ab3dEf6hIj9lMn0"
    # Cut by the inspection in the middle of the key.
    finding = ModuleReport(
        name="words", method="jail", error=Refusal("import", f"KeyError: '{key.upper()}' and {key[:12]}")
    )
    judge(words, finding, check(Answering(None), API_KEY=key), report)
    assert report.errors[0].message.endswith("KeyError: '***' and ***")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("kind: Tool\n", True),
        ("a: 1\n---\nkind:   'Tool'\n", True),
        ('{"kind": "Tool", "metadata": {}}', True),
        ('tools: [{kind: Tool, name: forecast, package: "@acme/weather"}]', True),
        ("kind: Agent\nspec: {tools: [Tool/bash]}\n", False),
        ("kind: Toolbox\n", False),
    ],
)
def test_the_inspection_starts_early_only_for_bundles_with_tools_to_look_at(source: str, expected: bool) -> None:
    assert may_declare_tools(source.encode()) is expected


def test_in_a_folder_without_tools_of_its_own_nothing_is_started(tmp_path: Path) -> None:
    started = []

    def start(module: str, arguments: Sequence[str], **given: object) -> int:
        started.append(module)
        raise OSError

    (tmp_path / "goondan.yaml").write_text("kind: Swarm\n")
    inspect_bundle(str(tmp_path), state_dir=None, start=start)
    assert not started
    (tmp_path / "more.yaml").write_text("kind: Tool\n")
    inspect_bundle(str(tmp_path), state_dir=None, start=start)
    assert started == [INSPECTION]
