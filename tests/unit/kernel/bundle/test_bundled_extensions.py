"""Bundled extensions as a bundle names them, their config, and what they ask of their user: nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from goondan.kernel.bundle import documents
from goondan.kernel.bundle.documents import (
    BROUGHT_MANIFEST,
    EXTENSION_MANIFEST,
    IN_AGENTS,
    IN_JAILS,
    MANIFEST,
    BaseExtensions,
)
from goondan.kernel.bundle.rules.plan import build_plan
from goondan.kernel.grants.powers import Reach
from goondan.schemas.bundle.effective_config import reachable_tools
from goondan.schemas.bundle.extensions import check_config
from goondan.schemas.bundle.launch import ToolSource
from goondan.schemas.wire.frames import OPERATOR_AGENT
from tests.unit.kernel.bundle.conftest import GOOD, Look, sound

WITH = GOOD.replace("  tools:\n", "  extensions:\n    - {use}\n  tools:\n", 1)
OWN = """\
apiVersion: goondan.ai/v1
kind: Extension
metadata: {name: mine}
spec: {SPEC}
---
"""


def using(item: str) -> str:
    return WITH.replace("{use}", item)


def own(spec: str) -> str:
    return OWN.replace("{SPEC}", "{" + spec + "}")


@pytest.mark.parametrize("name", BaseExtensions().names())
def test_every_manifest_can_be_read_and_its_code_is_there(name: str) -> None:
    found = BaseExtensions().find(name)
    assert found is not None
    assert found.name == name
    assert Path(found.entry).is_file()
    assert found.schema is not None
    assert found.schema["additionalProperties"] is False
    check_config(found.schema, {})  # it is a JSON Schema, or this raises
    assert all(len(wanted.get("description", "")) > 10 for wanted in found.schema["properties"].values())


@pytest.mark.parametrize("item", ["Extension/logging", '{kind: Extension, name: logging, package: "@goondan/base"}'])
def test_a_bundle_names_one_and_is_asked_nothing_for_it(look: Look, item: str) -> None:
    seen = sound(look(using(item)))
    assert seen.warnings == []
    (spec,) = seen.checked.agents["helper"].extensions
    assert (spec.name, spec.bundled, spec.modules) == ("logging", True, None)
    assert spec.entry.endswith("/agentproc/base/logging/logging.py")
    assert not [power for power in seen.judgement.powers if type(power).__name__ == "Module"]


def test_an_extension_of_the_bundle_can_have_its_code(look: Look) -> None:
    entry = 'entry: "@goondan/base/logging"'
    seen = sound(look(own(f"{entry}, config: {{level: debug}}") + using("Extension/mine")))
    (spec,) = seen.checked.agents["helper"].extensions
    assert (spec.name, spec.bundled, spec.config) == ("mine", True, {"level": "debug"})
    wrong = look(own(f"{entry}, config: {{levle: debug}}") + GOOD)
    assert [(p.code, p.path, p.suggestion) for p in wrong.errors] == [
        ("E_CONFIG_UNKNOWN_FIELD", "spec.config.levle", "Did you mean 'level'?")
    ]


def test_one_of_that_name_in_the_bundle_takes_its_place_with_a_warning(look: Look) -> None:
    mine = own("entry: ext/a.py").replace("mine", "logging")
    seen = sound(look(mine + using("Extension/logging"), files={"ext/a.py": "def register(api): ..."}))
    assert [p.code for p in seen.warnings] == ["W_CONFIG_SHADOWED"]
    assert not seen.checked.agents["helper"].extensions[0].bundled


@pytest.mark.parametrize(
    ("config", "code", "path", "hint"),
    [
        ("{levle: info}", "E_CONFIG_UNKNOWN_FIELD", "config.levle", "Did you mean 'level'?"),
        ("{level: loud}", "E_CONFIG_INVALID_VALUE", "config.level", "Correct the value."),
        ("{maxChars: many}", "E_CONFIG_INVALID_VALUE", "config.maxChars", "Correct the value."),
        ("{of: [turn, walk]}", "E_CONFIG_INVALID_VALUE", "config.of", "Correct the value."),
    ],
)
def test_a_config_that_does_not_fit_is_told_where_it_is_written(
    look: Look, config: str, code: str, path: str, hint: str
) -> None:
    seen = look(using(f"{{ref: Extension/logging, config: {config}}}"))
    assert [(p.code, p.path, p.suggestion) for p in seen.errors] == [(code, f"spec.extensions[0].{path}", hint)]
    assert "Extension/logging" in seen.errors[0].message


def test_an_own_extension_declares_what_its_config_is(look: Look) -> None:
    schema = "configSchema: {type: object, properties: {size: {type: integer}}, required: [size]}"
    files = {"ext/a.py": "def register(api): ..."}
    missing = look(own(f"entry: ext/a.py, {schema}") + using("Extension/mine"), files=files)
    assert [(p.code, p.path) for p in missing.errors] == [("E_CONFIG_MISSING_FIELD", "spec.extensions[0]")]
    sound(look(own(f"entry: ext/a.py, {schema}") + using("{ref: Extension/mine, config: {size: 3}}"), files=files))
    wrong = look(own(f"entry: ext/a.py, config: {{size: x}}, {schema}") + using("Extension/mine"), files=files)
    assert [(p.code, p.path) for p in wrong.errors] == [("E_CONFIG_INVALID_VALUE", "spec.config.size")]
    broken = look(own("entry: ext/a.py, configSchema: {type: 3}") + using("Extension/mine"), files=files)
    assert [(p.code, p.path) for p in broken.errors] == [("E_CONFIG_SCHEMA", "spec.configSchema")]


def test_a_misspelt_one_is_told_the_nearest(look: Look) -> None:
    (problem,) = look(using("Extension/loging")).errors
    assert (problem.code, problem.suggestion) == ("E_CONFIG_MISSING_REF", "Did you mean 'logging'?")


def test_a_bundle_without_any_reads_no_manifest_and_imports_no_code() -> None:
    program = (
        "import sys\n"
        "from goondan.kernel.bundle.documents import BaseExtensions\n"
        "import goondan.kernel.bundle.documents as module\n"
        "module.read_manifest = lambda *a: sys.exit(1)\n"
        "import goondan.agentproc.turn.runner\n"
        "files = {name: getattr(module, '__file__', None) for name, module in sys.modules.items()}\n"
        "print({name: file for name, file in files.items() if file})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name: Path(file) for name, file in eval(done.stdout).items()}
    assert [name for name, file in loaded.items() if (file.parent / EXTENSION_MANIFEST).exists()] == []
    assert (loaded["goondan.agentproc.base.agents.agents"].parent / MANIFEST).exists(), "a tool has no other process"


# --- Tools that bundled extensions bring ------------------------------------------------------------------------------

BRINGS = """\
apiVersion: goondan.ai/v1
kind: Extension
metadata: {name: power-drill}
spec:
  entry: ./power_drill.py
  tools: [power-drill]
  configSchema: {type: object, additionalProperties: false}
"""
BROUGHT = """\
apiVersion: goondan.ai/v1
kind: Tool
metadata: {name: power-drill}
spec:
  entry: ./power_drill.py
  exports:
    - {name: turn, description: Make a hole., parameters: {type: object, properties: {deep: {type: integer}}}}
  sandbox: {network: public}
"""
TWO = (
    using("Extension/power-drill")
    .replace(
        "---\napiVersion: goondan.ai/v1\nkind: Tool",
        """\
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: other}
spec:
  modelConfig: {modelRef: Model/main}
  tools: [Tool/words]
---
apiVersion: goondan.ai/v1
kind: Tool""",
        1,
    )
    .replace("    - ref: Agent/helper\n", "    - ref: Agent/helper\n    - ref: Agent/other\n")
)


@pytest.fixture
def bringing(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundled package in which the extension `power-drill` brings the Tool `power-drill`."""
    top = tmp_path_factory.mktemp("package")
    folders = {}
    for package, name, text in ((IN_AGENTS, EXTENSION_MANIFEST, BRINGS), (IN_JAILS, BROUGHT_MANIFEST, BROUGHT)):
        folder = top / package / "power_drill"
        folder.mkdir(parents=True)
        (folder / name).write_text(text)
        (folder / "power_drill.py").write_text("handlers = {}\n")
        folders[package] = [str(folder)]
    monkeypatch.setattr(documents, "tool_folders", folders.__getitem__)
    return top


def test_a_brought_tool_is_its_agents_alone(look: Look, bringing: Path) -> None:
    seen = sound(look(TWO))
    tool = seen.checked.tools["power-drill"]
    assert (tool.bundled, tool.brought, tool.entry) == (
        True, True, str(bringing / "goondan.toolhost/power_drill/power_drill.py"),
    )  # fmt: skip
    plan = build_plan(seen.checked, bundle=seen.path, state_dir="/state", revision="r", documents=[])
    helper, other = plan.agents["helper"], plan.agents["other"]
    (item,) = [item for item in helper.registry if item.name == "power-drill__turn"]
    assert (item.source, item.in_agent) == (ToolSource("extension", "power-drill"), False)
    assert helper.extensions[0].tools == ["power-drill"]
    assert "power-drill__turn" in reachable_tools(helper)
    assert "power-drill__turn" not in helper.catalog
    for agent in (other, plan.agents[OPERATOR_AGENT]):
        assert "power-drill__turn" not in {item.name for item in agent.registry}
        assert "power-drill__turn" not in reachable_tools(agent)
    assert "power-drill" in [tool.name for tool in plan.toolhost.tools]
    assert Reach("power-drill", "public") in seen.judgement.powers


def test_without_the_extension_there_is_no_such_tool(look: Look, bringing: Path) -> None:
    seen = look(GOOD)
    assert "power-drill" not in seen.checked.tools
    assert Reach("power-drill", "public") not in seen.judgement.powers
    (problem,) = look(TWO.replace("[Tool/words]", "[Tool/power-drill]")).errors
    assert problem.code == "E_CONFIG_MISSING_REF"


def test_patterns_of_other_agents_do_not_reach_it(look: Look, bringing: Path) -> None:
    open_wide = TWO.replace(
        "  tools: [Tool/words]", "  tools: [Tool/words]\n  policy: {toolCalls: {allowRegistry: ['*']}}"
    )
    seen = sound(look(open_wide))
    plan = build_plan(seen.checked, bundle=seen.path, state_dir="/state", revision="r", documents=[])
    assert "power-drill__turn" not in reachable_tools(plan.agents["other"])
    assert "words__count" in reachable_tools(plan.agents["other"])


def test_an_agent_narrows_a_brought_tool_as_any_other(look: Look, bringing: Path) -> None:
    seen = sound(look(TWO.replace("  extensions:\n", "  sandbox: {network: none}\n  extensions:\n", 1)))
    assert seen.checked.tools["power-drill"].narrowed["helper"].network == "none"
    assert Reach("power-drill", "public") not in seen.judgement.powers


def test_a_document_of_the_bundle_runs_the_code_and_brings_the_tool(look: Look, bringing: Path) -> None:
    seen = sound(look(own('entry: "@goondan/base/power-drill"') + using("Extension/mine")))
    plan = build_plan(seen.checked, bundle=seen.path, state_dir="/state", revision="r", documents=[])
    (item,) = [item for item in plan.agents["helper"].registry if item.name == "power-drill__turn"]
    assert item.source == ToolSource("extension", "mine")


def test_a_tool_of_the_bundle_with_that_name_is_an_error(look: Look, bringing: Path) -> None:
    (problem,) = look(TWO.replace("words", "power-drill").replace("tools/power-drill.py", "tools/words.py")).errors
    assert (problem.code, problem.path) == ("E_CONFIG_DUPLICATE", "spec.extensions[0]")
    assert "brings a Tool 'power-drill'" in problem.message
