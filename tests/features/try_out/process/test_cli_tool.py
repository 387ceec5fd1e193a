"""`gdn tool new|test`: what it makes, and what it finds wrong, with real calls in real jails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from goondan.features.try_out.command import module_name
from goondan.kernel.bundle.documents import base_tools
from goondan.kernel.cli import execute
from tests.javascript_runtimes import runtime
from tests.kernel_fixture import BUNDLE, ROOT, Sandbox
from tests.process.test_cli_tool import PACKAGE, TOOLS, WORDS


def test_a_packages_tool_is_tested_by_its_name_alone_and_not_without_the_network(kernel: Sandbox) -> None:
    folder = kernel.home / "state" / "packages" / "@acme" / "weather"
    folder.mkdir(parents=True)
    (folder / "goondan.yaml").write_text(PACKAGE)
    (folder / "forecast.py").write_text("handlers = {'get': lambda ctx, input: 'sun'}\n")
    use = '{kind: Tool, name: forecast, package: "@acme/weather"}'
    kernel.bundle.write_text(BUNDLE.replace("[Tool/bash]", f"[{use}]"))
    assert kernel.gdn("tool", "test", "--json").json["examples"] == []
    assert kernel.gdn("tool", "test", "forecast", "--json").json["skipped"] == 1


def test_examples_are_real_calls_and_what_is_wrong_is_said(home: Sandbox) -> None:
    left = set(Path("/tmp").glob("gdn-tool-test-*/given.txt"))  # by a run that was killed
    before, found, after = home.bundle.read_text().partition("{input: {txt:")
    home.bundle.write_text(f"{before}\n    {found}{after}")
    result = home.gdn("tool", "test", "--json")
    assert result.status == 1
    report = result.json
    assert (report["valid"], report["passed"], report["failed"], report["skipped"]) == (True, 3, 3, 1)
    assert report["withoutExamples"] == ["words__bare"]
    outcomes = [(row["tool"], row["index"], row["status"], row.get("differences")) for row in report["examples"]]
    assert outcomes == [
        ("words__count", 0, "passed", None),
        ("words__count", 1, "failed", ["output.words: expected 1, got 0"]),
        ("words__count", 2, "failed", ["the call failed: no [E_TOOL]"]),
        ("words__count", 3, "failed", ['output: expected null, got {"words": 1}']),
        ("words__keep", 0, "passed", None),  # each finds the files given, and not what the one before it made
        ("words__keep", 1, "passed", None),
        ("far__get", 0, "skipped", None),
    ]
    assert report["examples"][1]["line"] == before.count("\n") + 2
    one = home.gdn("tool", "test", "words__keep")
    assert (one.status, one.err) == (0, "")
    assert one.out.endswith("2 passed\n")
    assert set(Path("/tmp").glob("gdn-tool-test-*/given.txt")) <= left


#: Each row of the checklist: what is changed in a Tool that is right, the code, where it is reported.
CHECKLIST = [
    ("  entry: ./tools/words.py\n", "", "E_CONFIG_MISSING_FIELD", "spec.entry"),
    ("./tools/words.py", "./tools/gone.py", "E_CONFIG_ENTRY", "spec.entry"),
    ("./tools/words.py", "./tools/plain.py", "E_CONFIG_ENTRY", "spec.entry"),
    ("{name: bare}", "{name: naked}", "E_CONFIG_ENTRY", "spec.exports[1].name"),
    ("{name: bare}", "{name: ba__re}", "E_CONFIG_INVALID_NAME", "spec.exports[1].name"),
    ("{name: right}", "{name: wro__ng}", "E_CONFIG_INVALID_NAME", "metadata.name"),
    ("type: string", "type: strng", "E_CONFIG_SCHEMA", "spec.exports[0].parameters.properties.text.type"),
    ("{text: a b}", "{text: 3}", "E_CONFIG_INVALID_VALUE", "spec.exports[0].examples[0].input"),
    ("exports: [", "exports: []\n  # [", "E_CONFIG_INVALID_VALUE", "spec.exports"),
]
RIGHT = """\
apiVersion: goondan.ai/v1
kind: Tool
metadata: {name: right}
spec:
  entry: ./tools/words.py
  exports: [
    {name: count, parameters: {type: object, properties: {text: {type: string}}}, examples: [{input: {text: a b}}]},
    {name: bare}]
"""


@pytest.mark.requirement("VALIDATE-01", "VALIDATE-02", "VALIDATE-03", "VALIDATE-04", "SCHEMA-02", "SCHEMA-03")
def test_every_row_of_the_checklist_is_reported_with_its_place_and_nothing_runs(home: Sandbox) -> None:
    (home.home / "tools" / "plain.py").write_text("x = 1\n")
    documents = []
    for number, (before, after, _, _) in enumerate(CHECKLIST):
        assert before in RIGHT
        changed = RIGHT.replace(before, after, 1)
        if after.endswith("# ["):
            changed = changed[: changed.index("  # [")]
        documents.append(changed.replace("{name: right}", f"{{name: right-{number}}}"))
    home.bundle.write_text("---\n".join([RIGHT, *documents]) + "---\n" + BUNDLE)
    report = home.gdn("tool", "test", "--json")
    assert report.status == 2
    errors = report.json["errors"]
    for number, (_, _, code, path) in enumerate(CHECKLIST):
        resource = (
            "Tool/wro__ng" if code == "E_CONFIG_INVALID_NAME" and path == "metadata.name" else f"Tool/right-{number}"
        )
        (error,) = [one for one in errors if (one["resource"], one["code"], one["path"]) == (resource, code, path)]
        assert error["line"] > 0 and error["column"] > 0
        assert error["suggestion"] and error["file"] == str(home.bundle)
    assert {error["resource"] for error in errors} & {"Tool/right"} == set()
    assert (report.json["valid"], report.json["examples"]) == (False, [])
    person = home.gdn("tool", "test")
    assert person.status == 2
    assert person.out.count("goondan.yaml:") >= len(CHECKLIST)
    assert not list(home.home.glob("state/workspaces/*/logs/supervisor.log")), "a kernel was started"


def test_every_example_of_the_bundled_tools_holds(kernel: Sandbox) -> None:
    """What the documentation of the bundled tools shows is what they do."""
    result = kernel.gdn("tool", "test", "@goondan/base", "--json", timeout=60)
    report = result.json
    assert [row for row in report["examples"] if row["status"] == "failed"] == []
    # A handle is known only where some work has gone on: tests/process/test_pending.py.
    assert (result.status, report["withoutExamples"]) == (0, ["tool-result__get"])
    closed = {row["tool"].partition("__")[0] for row in report["examples"] if row["status"] == "skipped"}
    assert closed == {
        name for name, tool in base_tools().items() if tool.body.sandbox.network != "none" or tool.in_agent
    }
    passed = {row["tool"].partition("__")[0] for row in report["examples"] if row["status"] == "passed"}
    assert passed == base_tools().keys() - closed - {"tool-result"}


def test_a_manifest_of_its_own_can_be_tested(kernel: Sandbox) -> None:
    folder = kernel.home / "alone"
    folder.mkdir()
    (folder / "words.py").write_text(WORDS)
    (folder / "tool.yaml").write_text(RIGHT.replace("./tools/", "./"))
    report = kernel.gdn("tool", "test", "alone/tool.yaml", "--json").json
    assert (report["passed"], report["failed"]) == (1, 0)
    assert [warning["code"] for warning in report["warnings"]] == ["W_CONFIG_NO_AGENT"]


# --- gdn tool new


def test_a_new_tool_is_valid_works_and_has_a_test_that_passes(kernel: Sandbox) -> None:
    before = kernel.bundle.read_text()
    made = kernel.gdn("tool", "new", "word-count", "--json")
    assert made.json["files"] == ["tests/test_word_count.py", "tools/word_count.py"]
    assert kernel.bundle.read_text().startswith(before + "---\n")
    assert kernel.gdn("validate", "--json").json["valid"]
    assert kernel.gdn("tool", "test", "word-count").out.endswith("1 passed\n")
    command = [sys.executable, "-B", "-m", "unittest", "discover", "-s", "tests"]
    passed = subprocess.run(command, cwd=kernel.home, capture_output=True, text=True, timeout=30, check=False)
    assert passed.returncode == 0, passed.stderr
    again = kernel.gdn("tool", "new", "word-count", "--json")
    assert (again.status, again.json["error"]["code"]) == (1, "E_INIT")
    shell = [step["command"] for step in made.json["next"] if step["command"].startswith("gdn call")]
    (arguments,) = [line.split("'")[1] for line in shell]
    assert kernel.gdn("call", "word-count__run", arguments).json["output"] == {"words": 1}


@pytest.mark.skipif(shutil.which("jq") is None, reason="there is no jq")
def test_a_new_tool_in_shell_is_a_program_with_its_test(kernel: Sandbox) -> None:
    made = kernel.gdn("tool", "new", "shell-count", "--language", "sh", "--json")
    assert made.json["files"] == ["tests/test_shell_count.sh", "tools/shell_count.sh"]
    assert os.access(kernel.home / "tools" / "shell_count.sh", os.X_OK)
    assert kernel.gdn("validate", "--json").json["valid"]
    assert kernel.gdn("tool", "test", "shell-count").out.endswith("1 passed\n")
    (command,) = [step["command"] for step in made.json["next"] if step["command"].startswith("sh ")]
    passed = subprocess.run(command.split(), cwd=kernel.home, capture_output=True, text=True, timeout=30, check=False)
    assert (passed.returncode, passed.stdout) == (0, "passed\n"), passed.stderr
    program = kernel.home / "tools" / "shell_count.sh"
    program.write_text(program.read_text().replace("words:", "word:"))
    wrong = subprocess.run(command.split(), cwd=kernel.home, capture_output=True, text=True, timeout=30, check=False)
    assert wrong.returncode == 1
    assert "output.words: missing" in kernel.gdn("tool", "test", "shell-count").out


def test_a_new_tool_in_typescript_has_its_types_and_a_test(kernel: Sandbox) -> None:
    kernel.env["GOONDAN_NODE"] = node = runtime("node")
    made = kernel.gdn("tool", "new", "typed-count", "--language", "typescript", "--json")
    project = ["tsconfig.json", "types/goondan-core.d.ts"]
    assert made.json["files"] == ["tests/typed_count.test.ts", "tools/typed_count.ts", *project]
    written = json.loads((kernel.home / "tsconfig.json").read_text())["compilerOptions"]["paths"]
    assert written == {"@goondan/core": ["./types/goondan-core.d.ts"]}
    core = ROOT / "toolhost" / "inside" / "javascript" / "core" / "index.d.ts"
    assert (kernel.home / "types" / "goondan-core.d.ts").read_text() == core.read_text()
    assert kernel.gdn("tool", "test", "typed-count").out.endswith("1 passed\n")
    (command,) = [step["command"] for step in made.json["next"] if step["command"].startswith("node ")]
    argv = [node, *command.split()[1:]]
    passed = subprocess.run(argv, cwd=kernel.home, capture_output=True, text=True, timeout=30, check=False)
    assert passed.returncode == 0, passed.stdout + passed.stderr
    tool = kernel.home / "tools" / "typed_count.ts"
    tool.write_text(tool.read_text().replace("words.length", "words.length + 1"))
    wrong = subprocess.run(argv, cwd=kernel.home, capture_output=True, text=True, timeout=30, check=False)
    assert wrong.returncode == 1
    (kernel.home / "tsconfig.json").write_text("{}")
    second = kernel.gdn("tool", "new", "second-count", "--language", "typescript", "--json").json
    assert second["files"] == ["tests/second_count.test.ts", "tools/second_count.ts"]
    assert (kernel.home / "tsconfig.json").read_text() == "{}", "what all tools share is the author's"


def test_a_new_tool_in_a_folder_without_a_bundle(kernel: Sandbox) -> None:
    result = kernel.gdn("tool", "new", "9-lives", "--dir", "fresh")
    assert result.status == 0, result.err
    assert sorted(str(path.relative_to(kernel.home / "fresh")) for path in (kernel.home / "fresh").rglob("*.*")) == [
        "goondan.yaml",
        "tests/test_tool_9_lives.py",
        "tools/tool_9_lives.py",
    ]
    assert kernel.gdn("tool", "test", "fresh/").out.endswith("1 passed\n")


@pytest.mark.parametrize(
    ("name", "bundle", "code", "status"),
    [
        ("Bad", BUNDLE, "E_USAGE", 2),
        ("a__b", BUNDLE, "E_USAGE", 2),
        ("x" * 64, BUNDLE, "E_USAGE", 2),
        ("bash", BUNDLE, "E_INIT", 1),
        ("taken", BUNDLE, "E_INIT", 1),
        ("fine", "a: [1\n", "E_CONFIG_SYNTAX", 2),
        ("main", TOOLS.replace("name: words", "name: main") + BUNDLE, "E_INIT", 1),
    ],
)
def test_nothing_is_overwritten_and_a_refusal_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, bundle: str, code: str, status: int
) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "taken.py").write_text("mine")
    (tmp_path / "goondan.yaml").write_text(bundle)
    before = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert execute(["tool", "new", name, "--dir", str(tmp_path), "--json"]) == status
    assert json.loads(capsys.readouterr().out)["error"]["code"] == code
    assert {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_bundle_that_is_a_link_is_another_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(BUNDLE)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "goondan.yaml").symlink_to(theirs)
    assert execute(["tool", "new", "fine", "--dir", str(folder), "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["code"], error["message"]) == ("E_INIT", f"{folder}/goondan.yaml is a link")
    assert theirs.read_text() == BUNDLE
    assert [path.name for path in folder.iterdir()] == ["goondan.yaml"]


def test_module_names_can_be_imported() -> None:
    assert [module_name(name) for name in ("a", "a-b", "9a")] == ["a", "a_b", "tool_9a"]
