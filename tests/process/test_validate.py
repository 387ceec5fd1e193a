"""`gdn validate` as a person runs it: modules are loaded in jails, nothing else is started."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.bundles import documents
from tests.javascript_runtimes import RUNTIMES, runtime
from tests.kernel_fixture import Result, Sandbox, environment

ROOT = Path(__file__).parent.parent.parent
START = ROOT / "goondan" / "kernel" / "start.py"

HEAD = documents(
    "Model main {provider: embedded}",
    "Agent helper {modelConfig: {modelRef: Model/main}}",
)
TOOL = """\
---
apiVersion: goondan.ai/v1
kind: Tool
metadata: {{name: {name}}}
spec:
  entry: {name}/tool.py
  sandbox: {{env: [GRANTED]}}
  exports:
    - name: run
"""
GOOD = "def run(ctx, input):\n    return 1\nhandlers = {'run': run}\n"


def bundle(folder: Path, modules: Mapping[str, str]) -> Path:
    for name, source in modules.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "tool.py").write_text(source)
    path = folder / "goondan.yaml"
    path.write_text(HEAD + "".join(TOOL.format(name=name) for name in modules))
    return path


def gdn(*arguments: str | Path, state: Path, cwd: Path, **env: str) -> Result:
    made = Sandbox(cwd, environment(state, **env), cwd / "goondan.yaml")
    return made.gdn("validate", *map(str, arguments), timeout=50)


def errors(result: Result) -> dict[str, Any]:
    """resource -> its only error"""
    found = result.json["errors"]
    assert len({error["resource"] for error in found}) == len(found), found
    return {error["resource"]: error for error in found}


def test_the_quickstart_is_valid_from_anywhere(tmp_path: Path) -> None:
    named = gdn(ROOT / "examples" / "quickstart", state=tmp_path / "s", cwd=tmp_path)
    assert (named.status, named.err) == (0, "")
    assert "valid" in named.out
    assert "assistant (entry)" in named.out
    option = gdn("--bundle", ROOT / "examples" / "quickstart", state=tmp_path / "s", cwd=tmp_path)
    assert (option.status, option.out) == (0, named.out)
    default = gdn("--json", state=tmp_path / "s", cwd=tmp_path)
    report = default.json
    assert (default.status, report["valid"], report["errors"]) == (0, True, [])
    assert {"name": "text-file__count", "source": "bundle"} in report["tools"]
    assert {"name": "bash__exec", "source": "@goondan/base"} in report["tools"]
    tools = ["bash", "file-system", "json-query", "text-transform", "wait", "text-file"]
    assert report["agents"][0]["tools"] == tools


@pytest.mark.requirement("VALIDATE-02", "HANDLER-03", "HANDLER-04", "VALIDATE-04")
def test_every_module_is_loaded_and_every_failure_reported(tmp_path: Path) -> None:
    modules = {
        "good": GOOD,
        "other-name": GOOD.replace("'run'", "'runs'"),
        "full-name": GOOD.replace("'run'", "'full-name__run'"),
        "no-handlers": "x = 1\n",
        "not-a-mapping": "handlers = [1]\n",
        "not-callable": "handlers = {'run': 1}\n",
        "no-module": "import nothing_of_that_name\n",
        "syntax": "def f(:\n",
        "raises": "raise RuntimeError('boom\\n\\x1b[31mred')\n",
        "exits": "import sys\nsys.exit(0)\n",
        "dies": "import os\nos.kill(os.getpid(), 9)\n",
        "garbage": "import os\nos.write(3, b'\\xff' * 1000)\n" + GOOD,
        "chatty": "print('x' * 100_000)\n" + GOOD,
    }
    programs = {"shell": "#!/bin/sh\n", "no-interpreter": "#!/no/such\n", "no-program": "hello\n"}
    path = bundle(tmp_path, modules)
    for name, source in programs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "tool").write_text(source)
        (tmp_path / name / "tool").chmod(0o755)
        with path.open("a") as out:
            out.write(TOOL.format(name=name).replace("tool.py", "tool"))
    result = gdn(path, "--json", state=tmp_path / "s", cwd=tmp_path)
    assert (result.status, result.err) == (2, "")
    found = errors(result)
    assert found.keys() == {f"Tool/{name}" for name in [*modules, *programs]} - {
        "Tool/good",
        "Tool/chatty",
        "Tool/shell",
    }
    assert {error["code"] for error in found.values()} == {"E_CONFIG_ENTRY"}
    assert all(error["message"].isprintable() for error in found.values())
    assert found["Tool/other-name"]["path"] == "spec.exports[0].name"
    assert found["Tool/other-name"]["suggestion"] == "Did you mean 'runs'?"
    assert "export names alone" in found["Tool/full-name"]["suggestion"]
    for name in ("no-handlers", "not-a-mapping", "not-callable"):
        assert "handlers" in found[f"Tool/{name}"]["message"]
        assert found[f"Tool/{name}"]["path"] == "spec.entry"
    assert "nothing_of_that_name" in found["Tool/no-module"]["message"]
    assert "SyntaxError" in found["Tool/syntax"]["message"]
    assert "boom" in found["Tool/raises"]["message"]
    assert "the first line of tool names /no/such" in found["Tool/no-interpreter"]["message"]
    assert "tool is no program" in found["Tool/no-program"]["message"]


@pytest.mark.requirement("HANDLER-05")
@pytest.mark.parametrize("name", RUNTIMES)
def test_modules_in_typescript_are_loaded_too(tmp_path: Path, name: str) -> None:
    modules = {
        "good": "export const handlers = { run: (ctx: unknown): number => 1 }",
        "other": "export const handlers = { walk: (): number => 1 }",
        "none": "export const runs = 1",
        "text": "export const handlers = { run: 'text' }",
        "broken": "export const handlers = {",
    }
    path = bundle(tmp_path, modules)
    text = path.read_text().replace("tool.py", "tool.ts").replace("env: [GRANTED]", f"javascript: {name}")
    path.write_text(text)
    for tool in modules:
        (tmp_path / tool / "tool.py").rename(tmp_path / tool / "tool.ts")
    found = gdn("--json", tmp_path, state=tmp_path / "s", cwd=tmp_path, **{f"GOONDAN_{name.upper()}": runtime(name)})
    said = {problem["resource"]: problem for problem in found.json["errors"]}
    assert {resource: problem["code"] for resource, problem in said.items()} == dict.fromkeys(
        ("Tool/other", "Tool/none", "Tool/text", "Tool/broken"), "E_CONFIG_ENTRY"
    )
    assert "no function 'run'" in said["Tool/other"]["message"]
    assert "walk" in said["Tool/other"]["suggestion"]
    assert "exports no `handlers`" in said["Tool/none"]["message"]
    assert "handlers['run'] is no function" in said["Tool/text"]["message"]
    assert ["an object" in said[f"Tool/{one}"].get("suggestion", "") for one in ("none", "text", "broken")] == [
        True,
        True,
        False,
    ]


def test_without_a_runtime_a_bundle_is_valid_with_a_warning_that_helps(tmp_path: Path) -> None:
    path = bundle(tmp_path, {"one": "export const handlers = {}"})
    (tmp_path / "one" / "tool.py").rename(tmp_path / "one" / "tool.ts")
    path.write_text(path.read_text().replace("tool.py", "tool.ts").replace("env: [GRANTED]", "javascript: node"))
    found = gdn("--json", tmp_path, state=tmp_path / "s", cwd=tmp_path, GOONDAN_NODE="/nonexistent/node")
    assert found.status == 0
    (said,) = [one for one in found.json["warnings"] if one["resource"] == "Tool/one"]
    assert said["code"] == "W_CONFIG_UNCHECKED"
    assert "/nonexistent/node (GOONDAN_NODE)" in said["message"]
    assert "goondan-kernel[node]" in said["suggestion"]


def test_modules_see_nothing_but_their_folder_and_what_was_granted(tmp_path: Path) -> None:
    probe = f"""\
import os
seen = [path for path in ({str(tmp_path / "goondan.yaml")!r}, {str(tmp_path / "secret.txt")!r}) if os.path.exists(path)]
assert not seen, seen
assert os.environ.get("GRANTED") == "yes" and "PRIVATE" not in os.environ, sorted(os.environ)
try:
    open(os.path.join(os.path.dirname(__file__), "written"), "w")
except OSError:
    pass
else:
    raise AssertionError("the tool's folder is writable")
"""
    path = bundle(tmp_path, {"probe": probe + GOOD})
    (tmp_path / "secret.txt").write_text("key")
    result = gdn(path, "--json", state=tmp_path / "s", cwd=tmp_path, GRANTED="yes", PRIVATE="no")
    assert (result.status, result.json["errors"]) == (0, [])
    assert not (tmp_path / "probe" / "written").exists()
    assert not list(tmp_path.rglob("__pycache__"))


def test_a_second_look_starts_no_program(tmp_path: Path) -> None:
    path = bundle(tmp_path, {"good": GOOD})
    path.write_text(path.read_text().replace("  sandbox: {env: [GRANTED]}\n", ""))
    assert gdn(path, state=tmp_path / "s", cwd=tmp_path).status == 0
    (memory,) = (tmp_path / "s").rglob("handlers.json")
    assert memory.stat().st_mode & 0o777 == 0o600
    # Whoever is asked again would hear of this instead.
    memory.write_text(memory.read_text().replace('["run"]', '["walk"]'))
    again = gdn(path, "--json", state=tmp_path / "s", cwd=tmp_path)
    assert errors(again)["Tool/good"]["suggestion"] == "The module has: 'walk'."
    (tmp_path / "good" / "tool.py").write_text(GOOD + "# changed\n")
    assert gdn(path, state=tmp_path / "s", cwd=tmp_path).status == 0


def test_a_state_root_that_cannot_be_used_is_one_error_with_the_line_to_use(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = gdn(bundle(tmp_path, {"good": GOOD}), "--json", state=tmp_path / "file", cwd=tmp_path)
    assert (result.status, result.err) == (2, "")
    (error,) = result.json["errors"]
    assert error["code"] == "E_STATE"
    assert "is not a directory" in error["message"]
    assert "export GOONDAN_STATE_ROOT=" in error["suggestion"]


def test_text_for_a_person(tmp_path: Path) -> None:
    path = bundle(tmp_path, {"good": GOOD})
    path.write_text(path.read_text().replace("embedded", "embeded").replace("kind: Agent", "kind: Agnet"))
    result = gdn(state=tmp_path / "s", cwd=tmp_path)
    assert (result.status, result.err) == (2, "")
    assert result.out.splitlines() == [
        "goondan.yaml:4:18: E_CONFIG_INVALID_VALUE Model/main: "
        "'embeded' is not one of anthropic, auto, embedded, openai, replay, responses (spec.provider)",
        "    Did you mean 'embedded'?",
        "goondan.yaml:7:7: E_CONFIG_UNKNOWN_KIND unknown kind 'Agnet' (kind)",
        "    Did you mean 'Agent'?",
        "gdn explain E_CONFIG_INVALID_VALUE",
        "gdn explain E_CONFIG_UNKNOWN_KIND",
        "goondan.yaml: 2 errors, 0 warnings",
    ]


@pytest.mark.parametrize("named", ["nope", "", "/dev/zero"])
def test_what_is_no_bundle(tmp_path: Path, named: str) -> None:
    result = gdn(named, "--json", state=tmp_path / "s", cwd=tmp_path)
    report = result.json
    assert (result.status, result.err, report["valid"]) == (2, "", False)
    assert [error["code"] for error in report["errors"]] == ["E_CONFIG_NOT_FOUND"]


# --- the program that looks into modules -----------------------------------------------------------------------------


def inspection(request: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", str(START), "goondan.toolhost.inspection"],
        input=request,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_modules_that_never_end_are_given_up_side_by_side(tmp_path: Path) -> None:
    def look(*asked: dict[str, Any], limit_s: float) -> tuple[subprocess.CompletedProcess[str], float]:
        began = time.monotonic()
        result = inspection(json.dumps({"tools": asked, "stateDir": str(tmp_path / "s"), "timeoutS": limit_s}))
        return result, time.monotonic() - began

    tools = []
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tool.py").write_text("while True: pass\n" if name != "d" else GOOD)
        entry = str(tmp_path / name / "tool.py")
        tools.append({"name": name, "entry": entry, "root": str(tmp_path / name), "exports": [{"name": "run"}]})
    _, looks_s = look(tools[-1], limit_s=20)
    limit_s = max(1.0, 3 * looks_s)
    result, taken_s = look(*tools, limit_s=limit_s)
    assert taken_s < 3 * limit_s, "one after the other"
    found = {item["name"]: item for item in json.loads(result.stdout)["tools"]}
    assert {found[name]["error"]["reason"] for name in "abc"} == {"timeout"}
    assert (found["d"]["method"], found["d"]["exports"]) == ("jail", ["run"])


@pytest.mark.parametrize("request_text", ["", "{}", "[1]", '{"tools": [{}], "stateDir": "/s"}'])
def test_a_request_that_is_none(request_text: str) -> None:
    result = inspection(request_text)
    assert (result.returncode, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr
