"""Every rule of a bundle: its code, and the line and column it points at."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import yaml

from goondan.kernel.bundle.loader import Inspected
from tests.unit.kernel.bundle.conftest import GOOD, Look, sound


def found(inspected: Inspected) -> list[tuple[str, str, int, int]]:
    return [(p.code, p.path, p.line, p.column) for p in inspected.errors]


def at(text: str, needle: str) -> tuple[int, int]:
    """Line and column of the only `needle`."""
    assert text.count(needle) == 1, f"{needle!r} stands {text.count(needle)} times"
    before = text[: text.index(needle)]
    return before.count("\n") + 1, len(before) - before.rfind("\n")


def test_a_bundle_without_a_mistake(look: Look) -> None:
    inspected = look(GOOD)
    assert (inspected.errors, inspected.warnings) == ([], [])
    assert inspected.checked.entry_agent == "helper"
    assert list(inspected.checked.tools) == ["words", "bash"]


MISTAKES: dict[str, dict[str, str]] = yaml.safe_load((Path(__file__).parent / "mistakes.yaml").read_text())


@pytest.mark.requirement(
    "SCHEMA-02", "SCHEMA-03", "SCHEMA-04", "SCHEMA-06", "SCHEMA-07", "SCHEMA-08", "SCHEMA-09",
    "NAME-05", "NAME-10", "VALIDATE-01", "VALIDATE-03",
)  # fmt: skip
@pytest.mark.parametrize("case", MISTAKES.values(), ids=MISTAKES.keys())
def test_one_mistake_is_one_error_at_its_place(look: Look, case: dict[str, str]) -> None:
    assert case["old"] in GOOD
    text = GOOD.replace(case["old"], case["new"])
    inspected = look(text, files={"tools.py/x": ""})
    assert [(p.code, p.path) for p in inspected.errors] == [(case["code"], case["path"])]
    problem = inspected.errors[0]
    if case["at"] is not None:
        assert (problem.line, problem.column) == at(text, case["at"])
    assert problem.message
    assert problem.suggestion
    assert problem.help_url == f"https://docs.goondan.ai/errors/{case['code']}"


@pytest.mark.requirement("VALIDATE-03", "VALIDATE-04")
def test_every_fault_of_a_schema_is_reported(look: Look) -> None:
    text = GOOD.replace("type: string", "type: strin, minLength: x, $ref: '#/nowhere'")
    errors = look(text).errors
    assert {p.code for p in errors} == {"E_CONFIG_SCHEMA"}
    assert {p.path.rpartition(".")[2] for p in errors} >= {"type", "minLength"}
    assert [p.suggestion for p in errors if p.path.endswith(".type")] == ["Did you mean 'string'?"]
    assert all(p.line and p.column for p in errors)


@pytest.mark.requirement("VALIDATE-04")
def test_everything_is_reported_together_in_reading_order(look: Look) -> None:
    text = GOOD.replace("provider: embedded", "provider: none").replace("Tool/bash", "Tool/zsh")
    text = (
        text.replace("name: count", "name: a__b")
        .replace("tools/words.py", "nope.py")
        .replace("type: string", "type: x")
    )
    inspected = look(text)
    assert [p.code for p in inspected.errors] == [
        "E_CONFIG_INVALID_VALUE", "E_CONFIG_MISSING_REF", "E_CONFIG_ENTRY", "E_CONFIG_INVALID_NAME", "E_CONFIG_SCHEMA",
    ]  # fmt: skip
    assert [p.line for p in inspected.errors] == sorted(p.line for p in inspected.errors)
    assert [p.resource for p in inspected.errors] == [
        "Model/main",
        "Agent/helper",
        "Tool/words",
        "Tool/words",
        "Tool/words",
    ]


@pytest.mark.requirement("NAME-04", "NAME-09")
@pytest.mark.parametrize("name", ["a__b", "a_", "__a", "a__"])
def test_a_tool_name_that_could_not_be_split_again(look: Look, name: str) -> None:
    inspected = look(GOOD.replace("name: words", f"name: {name}").replace("Tool/words", f"Tool/{name}"))
    assert [p.code for p in inspected.errors] == ["E_CONFIG_INVALID_NAME"]


def test_a_full_name_of_65_characters(look: Look) -> None:
    export = "x" * 59  # words__ and 59 are 66
    inspected = look(GOOD.replace("name: count", f"name: {export}"))
    assert [p.code for p in inspected.errors] == ["E_CONFIG_INVALID_NAME"]
    assert "66 characters" in inspected.errors[0].message
    assert look(GOOD.replace("name: count", f"name: {export[:57]}")).errors == []


def test_the_kernels_own_address_is_no_agent(look: Look) -> None:
    inspected = look(GOOD.replace("name: helper", "name: orchestrator").replace("Agent/helper", "Agent/orchestrator"))
    assert found(inspected) == [("E_CONFIG_INVALID_NAME", "metadata.name", *at(GOOD, "helper\nspec"))]


def test_two_resources_of_one_name_even_in_two_versions(look: Look) -> None:
    twice = "apiVersion: {}\nkind: Extension\nmetadata: {{name: x}}\nspec: {{entry: ext/x.py}}\n---\n"
    text = twice.format("goondan.ai/v1") + twice.format("agents.example.io/v1alpha1") + GOOD
    inspected = look(text, files={"ext/x.py": "def register(api): ..."})
    assert [(p.code, p.line) for p in inspected.errors] == [("E_CONFIG_DUPLICATE", 8)]
    assert "goondan.yaml:3" in inspected.errors[0].message


def test_one_mistake_does_not_hide_references_behind_it(look: Look) -> None:
    """A document whose kind is misspelt is there all the same: what refers to it is not missing."""
    inspected = look(GOOD.replace("kind: Tool", "kind: Tol"))
    assert [p.code for p in inspected.errors] == ["E_CONFIG_UNKNOWN_KIND"]


def test_what_follows_a_syntax_error_is_not_missing(look: Look) -> None:
    inspected = look(GOOD.replace("kind: Tool\n", "kind: 'Tool\n"))
    assert [p.code for p in inspected.errors] == ["E_CONFIG_SYNTAX"]


def test_suggestions(look: Look) -> None:
    def hint(old: str, new: str) -> str:
        return look(GOOD.replace(old, new)).errors[0].suggestion

    assert hint("kind: Swarm", "kind: Swram") == "Did you mean 'Swarm'?"
    assert hint("kind: Swarm", "kind: swarm") == "Did you mean 'Swarm'?"
    assert hint("provider: embedded", "provider: openia") == "Did you mean 'openai'?"
    assert hint("Tool/bash", "Tool/bsh") == "Did you mean 'bash'?"
    assert hint("Tool/bash", "Tool/bash__exec") == "A reference names the whole Tool: Tool/bash."
    assert hint("description: Count", "descripton: Count") == "Did you mean 'description'?"
    assert hint("    - Tool/words", "    - words") == "Write Tool/NAME."
    assert "agents" not in hint("entryAgent: Agent/helper", "entryAgent: Agent/zzz")


# --- versions -------------------------------------------------------------------------------------------------------

V09 = """\
apiVersion: agents.example.io/v1alpha1
kind: {kind}
metadata: {{name: old}}
spec:
  runtime: node
  entry: tools/words.py
{more}"""


@pytest.mark.requirement("COMPAT-01", "COMPAT-02", "EXT-01", "EXT-02", "EXT-03")
def test_v09_extension_loads_with_one_warning(look: Look) -> None:
    old = V09.format(kind="Extension", more="  config: {a: [1, {b: null}]}\n").replace("tools/words", "ext/old")
    inspected = sound(look(old + "---\n" + GOOD, files={"ext/old.py": "def register(api): ..."}))
    assert [(w.code, w.line, w.path) for w in inspected.warnings] == [("W_CONFIG_IGNORED", 5, "spec.runtime")]
    absent = look(old.replace("  runtime: node\n", "") + "---\n" + GOOD)
    assert (absent.errors, absent.warnings) == ([], [])


@pytest.mark.requirement("COMPAT-02", "SCHEMA-06")
def test_v09_tool_loads_with_warnings(look: Look) -> None:
    more = "  auth: {oauthAppRef: OAuthApp/x}\n  exports: [{name: do}]\n"
    inspected = sound(look(V09.format(kind="Tool", more=more) + "---\n" + GOOD))
    assert [w.path for w in inspected.warnings] == ["spec.runtime", "spec.auth"]
    assert "old" in inspected.checked.tools


@pytest.mark.requirement("COMPAT-02")
def test_runtime_of_an_extension_is_refused_in_v1(look: Look) -> None:
    text = V09.format(kind="Extension", more="").replace("agents.example.io/v1alpha1", "goondan.ai/v1")
    text = text.replace("tools/words", "ext/old")
    inspected = look(text + "---\n" + GOOD, files={"ext/old.py": "def register(api): ..."})
    assert [(p.code, p.path) for p in inspected.errors] == [("E_CONFIG_UNKNOWN_FIELD", "spec.runtime")]
    assert "Remove it" in inspected.errors[0].suggestion


def test_kinds_that_only_one_version_has(look: Look) -> None:
    agent = look(GOOD.replace("goondan.ai/v1\nkind: Agent", "agents.example.io/v1alpha1\nkind: Agent"))
    assert [(p.code, p.path) for p in agent.errors] == [("E_CONFIG_INVALID_VALUE", "apiVersion")]


@pytest.mark.feature("oauth")
def test_a_kind_of_a_feature_that_only_one_version_has(look: Look) -> None:
    app = "apiVersion: {}\nkind: OAuthApp\nmetadata: {{name: app}}\nspec:\n  authorizationUrl: https://a/\n"
    app += "  tokenUrl: https://t/\n  clientId: {{valueFrom: {{env: ID}}}}\n---\n"
    assert look(app.format("agents.example.io/v1alpha1") + GOOD).errors == []
    assert [p.path for p in look(app.format("goondan.ai/v1") + GOOD).errors] == ["apiVersion"]


@pytest.mark.parametrize(
    ("suffix", "errors"),
    [
        *((suffix, []) for suffix in ("js", "mjs", "ts", "mts")),
        *((suffix, [("E_CONFIG_ENTRY", "spec.entry")]) for suffix in ("cjs", "cts", "tsx")),
    ],
)
def test_what_is_loaded_as_a_tool(look: Look, suffix: str, errors: list[tuple[str, str]]) -> None:
    seen = look(GOOD.replace("tools/words.py", f"tools/words.{suffix}"), files={f"tools/words.{suffix}": ""})
    assert [(p.code, p.path) for p in seen.errors] == errors
    assert errors or "words" in seen.checked.tools


def test_a_program_is_executable_and_asks_nobody(look: Look, tmp_path: Path) -> None:
    text = GOOD.replace("tools/words.py", "tools/count.sh")
    seen = look(text, files={"tools/count.sh": "#!/bin/sh\n"})
    program = tmp_path / "tools" / "count.sh"
    assert [(p.code, p.path, p.suggestion) for p in seen.errors] == [
        ("E_CONFIG_ENTRY", "spec.entry", f"chmod +x {program}")
    ]
    program.chmod(0o755)
    good = look(text)
    assert (good.errors, good.warnings, good.checked.tools["words"].entry) == ([], [], str(program))
    asking = look(
        text.replace("  entry: tools/count.sh\n", "  entry: tools/count.sh\n  sandbox: {permissions: [agents]}\n")
    )
    assert [(p.code, p.path) for p in asking.errors] == [("E_CONFIG_INVALID_VALUE", "spec.sandbox.permissions[0]")]
    assert [p.code for p in look(GOOD.replace("words.py", "words.cjs")).errors] == ["E_CONFIG_ENTRY"]


def test_a_runtime_is_chosen_for_javascript_alone(look: Look) -> None:
    chosen = GOOD.replace("entry: tools/words.py", "entry: tools/words.py\n  sandbox: {javascript: bun}")
    wrong = look(chosen)
    assert [(p.code, p.path) for p in wrong.errors] == [("E_CONFIG_INVALID_VALUE", "spec.sandbox.javascript")]
    sound(look(chosen.replace("words.py", "words.ts"), files={"tools/words.ts": ""}))


def test_the_entry_agent_may_be_named_alone(look: Look) -> None:
    assert look(GOOD.replace("entryAgent: Agent/helper", "entryAgent: helper")).checked.entry_agent == "helper"
    wrong = look(GOOD.replace("entryAgent: Agent/helper", "entryAgent: helpr"))
    assert [(p.code, p.suggestion) for p in wrong.errors[:1]] == [("E_CONFIG_MISSING_REF", "Did you mean 'helper'?")]


@pytest.mark.requirement("DYNAMIC-09")
@pytest.mark.parametrize(
    ("ref", "shown"),
    [
        ("Tool/skills.list", "skills__list"),
        ("Tool/skills__list", "skills__list"),
        ("{kind: Tool, name: myExt.getStatus}", "myExt__getStatus"),
        ("Tool/words__count", None),  # a Tool of the bundle is named whole
        ("Tool/skills", None),
        ("Tool/a.b.c", None),
        ("Tool/skills.", None),
        ("{kind: Tool, name: skills.list, package: '@goondan/base'}", None),
    ],
)
def test_spec_tools_may_name_what_an_extension_registers(look: Look, ref: str, shown: str | None) -> None:
    files = {"ext/log.py": "def register(api): ..."}
    text = EXTENSION.format("ext/log.py") + USES_IT.replace("    - Tool/words\n", f"    - {ref}\n", 1)
    seen = look(text, files=files)
    if shown is None:
        assert [p.code for p in seen.errors] == ["E_CONFIG_MISSING_REF"]
        return
    assert seen.errors == []
    agent = seen.checked.agents["helper"]
    assert (agent.tools, agent.dynamic) == (["bash"], [shown])
    without = look(GOOD.replace("    - Tool/words\n", f"    - {ref}\n", 1))
    assert [p.code for p in without.errors] == ["E_CONFIG_MISSING_REF"]  # nobody could register it


EXTENSION = "apiVersion: goondan.ai/v1\nkind: Extension\nmetadata: {{name: log}}\nspec: {{entry: '{}'}}\n---\n"


USES_IT = GOOD.replace("  tools:\n", "  extensions:\n    - {ref: Extension/log, config: {level: 2}}\n  tools:\n", 1)


@pytest.mark.parametrize("entry", ["ext/log.js", "@goondan/base/no-such"])
def test_an_extension_that_cannot_run_is_fine_until_an_agent_uses_it(look: Look, entry: str) -> None:
    files = {"ext/log.js": "export function register() {}"}
    assert look(EXTENSION.format(entry) + GOOD, files=files).errors == []
    used = look(EXTENSION.format(entry) + USES_IT, files=files)
    assert [(p.code, p.path) for p in used.errors] == [("E_CONFIG_UNSUPPORTED", "spec.extensions[0]")]


@pytest.mark.requirement("EXT-01", "EXT-02", "EXT-10")
def test_an_agent_gets_its_extensions_in_order_with_its_own_config(look: Look) -> None:
    second = EXTENSION.format("ext/b.py").replace("log", "second")
    first = EXTENSION.format("ext/log.py").replace(
        "{name: log}", "{name: log, labels: {tier: own}, annotations: {example.org/team: infra}}"
    )
    text = first + second + USES_IT.replace("  tools:\n", "    - Extension/second\n  tools:\n", 1)
    seen = sound(look(text, files={"ext/log.py": "def register(api): ...", "ext/b.py": "from c import register"}))
    log, other = seen.checked.agents["helper"].extensions
    assert (log.name, log.config, log.exposes_tools) == ("log", {"level": 2}, True)
    assert log.resource["spec"] == {"entry": "ext/log.py", "config": {"level": 2}}
    assert (log.resource["apiVersion"], log.resource["kind"]) == ("goondan.ai/v1", "Extension")
    written = {"name": "log", "labels": {"tier": "own"}, "annotations": {"example.org/team": "infra"}}
    assert log.resource["metadata"] == written
    assert log.entry.endswith("/ext/log.py")
    assert (other.name, other.config) == ("second", {})
    (root,) = seen.checked.extension_roots
    assert root.endswith("/ext")


@pytest.mark.parametrize("annotated", [False, True])
def test_tools_of_a_v09_extension_are_shown_only_when_it_asks_for_that(look: Look, annotated: bool) -> None:
    text = EXTENSION.format("ext/log.py").replace("goondan.ai/v1", "agents.example.io/v1alpha1")
    if annotated:
        text = text.replace("{name: log}", "{name: log, annotations: {goondan.ai/expose-tools: auto}}")
    (log,) = look(text + USES_IT, files={"ext/log.py": "register = print"}).checked.agents["helper"].extensions
    assert log.exposes_tools is annotated


@pytest.mark.requirement("EXT-06")
@pytest.mark.parametrize(
    "code", ["", "def other(api): ...", "def register(", "class A:\n    def register(self): ...", "\0"]
)
def test_a_module_without_register_is_an_error(look: Look, code: str) -> None:
    seen = look(EXTENSION.format("ext/log.py") + GOOD, files={"ext/log.py": code})
    assert [(p.code, p.path) for p in seen.errors] == [("E_CONFIG_ENTRY", "spec.entry")]


@pytest.mark.parametrize(
    "code",
    [
        "async def register(api): ...",
        "register: object = print",
        "try:\n    from a import register\nexcept ImportError:\n    pass",
        "if True:\n    pass\nelse:\n    def register(api): ...",
        "from a import *",
    ],
)
def test_register_may_be_defined_in_many_ways(look: Look, code: str) -> None:
    assert look(EXTENSION.format("ext/log.py") + GOOD, files={"ext/log.py": code}).errors == []


def test_an_extension_stands_once_in_an_agent(look: Look) -> None:
    text = EXTENSION.format("ext/log.py") + USES_IT.replace("  tools:\n", "    - Extension/log\n  tools:\n", 1)
    seen = look(text, files={"ext/log.py": "def register(api): ..."})
    assert [(p.code, p.path) for p in seen.errors] == [("E_CONFIG_DUPLICATE", "spec.extensions[1]")]


def test_an_extension_imports_what_its_folder_holds(look: Look) -> None:
    files = {
        "ext/log.py": "register = print",
        "ext/inner/deep.py": "",
        "ext/native.so": "",
        "ext/notes.txt": "",
        "ext/__pycache__/log.pyc": "",
        "beside.py": "",
    }
    seen = look(EXTENSION.format("./ext/log.py") + USES_IT, files=files)
    (log,) = seen.checked.agents["helper"].extensions
    assert list(log.modules or {}) == ["inner/deep.py", "log.py", "native.so"]
    assert (log.modules or {})["log.py"] == hashlib.sha256(b"register = print").hexdigest()


def test_an_extension_in_the_root_imports_what_it_names(look: Look) -> None:
    files = {
        "log.py": "def register(api):\n    import first, os, missing.part\n    from second.part import x\n",
        "first.py": "from . import relative\nimport third",
        "second/part.py": "import log",
        "third.py": "broken (",
        "setup.py": "",
        "relative.py": "",
    }
    seen = look(EXTENSION.format("./log.py") + USES_IT, files=files)
    (log,) = seen.checked.agents["helper"].extensions
    assert sorted(log.modules or {}) == ["first.py", "log.py", "second/part.py", "third.py"]
    assert [path.rpartition("/")[2] for path in seen.checked.extension_roots] == [
        "first.py",
        "log.py",
        "second",
        "third.py",
    ]


def test_entries_of_extensions(look: Look) -> None:
    assert [p.code for p in look(EXTENSION.format("nope.js") + GOOD).errors] == ["E_CONFIG_ENTRY"]
    assert [p.code for p in look(EXTENSION.format("@goondan/base/A b") + GOOD).errors] == ["E_CONFIG_ENTRY"]
    assert [p.code for p in look(EXTENSION.format("@other/x") + GOOD).errors] == ["E_CONFIG_ENTRY"]


CONNECTOR = """\
apiVersion: goondan.ai/v1
kind: Connector
metadata: {name: cli}
spec:
  entry: tools/words.py
  events: [{name: line}]
---
"""
CONNECTION = """\
apiVersion: goondan.ai/v1
kind: Connection
metadata: {name: c}
spec:
  connectorRef: Connector/cli
  swarmRef: Swarm/default
  secrets: {TOKEN: {valueFrom: {env: T}}, OTHER: plain}
  ingress:
    rules:
      - match: {event: line}
        route: {agentRef: Agent/helper}
      - route: {}
---
"""


def test_connectors_are_validated_and_connections_refused(look: Look) -> None:
    declared = look(CONNECTOR + GOOD)
    assert (declared.errors, [w.code for w in declared.warnings]) == ([], ["W_CONFIG_NOT_STARTED"])
    used = look(CONNECTOR + CONNECTION + GOOD)
    assert [(p.code, p.path) for p in used.errors] == [("E_CONFIG_UNSUPPORTED", "kind")]
    broken = CONNECTION.replace("Connector/cli", "Connector/x").replace("Agent/helper", "Agent/x")
    broken = broken.replace("route: {}", "route: {instanceKey: a, instanceKeyProperty: b}")
    broken = broken.replace("{valueFrom: {env: T}}", "{}")
    paths = [p.path for p in look(CONNECTOR + broken + GOOD).errors]
    assert paths == [
        "kind", "spec.connectorRef", "spec.secrets.TOKEN", "spec.ingress.rules[0].route.agentRef",
        "spec.ingress.rules[1].route.instanceKeyProperty",
    ]  # fmt: skip
    twice = CONNECTOR.replace("[{name: line}]", "[{name: line}, {name: line}]")
    assert [p.code for p in look(twice + GOOD).errors] == ["E_CONFIG_DUPLICATE"]


PACKAGE = "apiVersion: goondan.ai/v1\nkind: Package\nmetadata: {{name: '{}'}}\nspec: {{version: 1.0.0}}\n---\n"


def test_packages(look: Look) -> None:
    assert look(PACKAGE.format("@acme/swarm") + GOOD).errors == []
    assert look(PACKAGE.format("swarm") + GOOD).errors == []
    assert [p.code for p in look(PACKAGE.format("@acme/Swarm") + GOOD).errors] == ["E_CONFIG_INVALID_NAME"]
    two = PACKAGE.format("a") + PACKAGE.format("b") + GOOD
    assert [(p.code, p.path) for p in look(two).errors] == [("E_CONFIG_DUPLICATE", "kind")]
    own = PACKAGE.format("@acme/swarm") + GOOD
    named = own.replace("    - Tool/words", "    - {kind: Tool, name: words, package: '@acme/swarm'}")
    assert look(named).errors == []


# --- bundled tools --------------------------------------------------------------------------------------------------


def test_a_bundled_tool_by_every_spelling(look: Look) -> None:
    for spelling in ("Tool/bash", "{kind: Tool, name: bash}", "{kind: Tool, name: bash, package: '@goondan/base'}"):
        for item in (spelling, f"{{ref: {spelling}}}"):
            inspected = look(GOOD.replace("    - ref: Tool/bash", f"    - {item}"))
            assert inspected.errors == [], item
            assert inspected.checked.agents["helper"].tools == ["words", "bash"]


def test_an_own_tool_takes_the_place_of_a_bundled_one(look: Look) -> None:
    text = GOOD.replace("name: words", "name: bash").replace("    - Tool/words\n", "")
    inspected = look(text)
    assert (inspected.errors, [w.code for w in inspected.warnings]) == ([], ["W_CONFIG_SHADOWED"])
    assert not inspected.checked.tools["bash"].bundled
    hidden = look(text.replace("- ref: Tool/bash", "- {kind: Tool, name: bash, package: '@goondan/base'}"))
    assert [(p.code, p.path) for p in hidden.errors] == [("E_CONFIG_DUPLICATE", "spec.tools[0].name")]


@pytest.mark.requirement("NAME-10", "NAME-12")
def test_published_names_are_exempt_in_the_bundled_package_only(look: Look) -> None:
    assert "setChatAction" in [e.name for e in look(GOOD).checked.tools["bash"].body.exports]
    own = look(GOOD.replace("name: count", "name: setChatAction"))
    assert [p.code for p in own.errors] == ["E_CONFIG_INVALID_NAME"]


# --- the swarm ------------------------------------------------------------------------------------------------------

SECOND = """\
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: other}
spec: {modelConfig: {modelRef: {kind: Model, name: main}}}
"""
NO_SWARM = GOOD[: GOOD.index("---\napiVersion: goondan.ai/v1\nkind: Swarm")]


def test_without_a_swarm_the_only_agent_is_the_entry(look: Look) -> None:
    inspected = look(NO_SWARM)
    assert (inspected.errors, inspected.checked.entry_agent) == ([], "helper")
    two = look(NO_SWARM + SECOND)
    assert [(p.code, p.resource) for p in two.errors] == [("E_CONFIG_MISSING_REF", "Agent/helper")]


def test_tools_alone_are_a_bundle_for_gdn_call(look: Look) -> None:
    tool = NO_SWARM[NO_SWARM.index("apiVersion: goondan.ai/v1\nkind: Tool") :]
    inspected = look(tool)
    assert (inspected.errors, inspected.checked.entry_agent) == ([], "")
    assert [w.code for w in inspected.warnings] == ["W_CONFIG_NO_AGENT"]


def test_an_agent_outside_the_swarm_does_not_run(look: Look) -> None:
    inspected = sound(look(GOOD + SECOND))
    assert list(inspected.checked.agents) == ["helper"]
    assert [(w.code, w.resource) for w in inspected.warnings] == [("W_CONFIG_UNUSED", "Agent/other")]
    everyone = look(GOOD.replace("  agents:\n    - ref: Agent/helper\n", "") + SECOND)
    assert list(everyone.checked.agents) == ["helper", "other"]


def test_the_entry_agent_must_belong_to_the_swarm(look: Look) -> None:
    text = GOOD.replace("entryAgent: Agent/helper", "entryAgent: Agent/other") + SECOND
    inspected = look(text)
    assert [(p.code, p.path) for p in inspected.errors] == [("E_CONFIG_MISSING_REF", "spec.entryAgent")]


def test_two_swarms(look: Look) -> None:
    second = GOOD[GOOD.index("apiVersion: goondan.ai/v1\nkind: Swarm") :].replace("name: default", "name: more")
    assert [p.code for p in look(GOOD + "---\n" + second).errors] == ["E_CONFIG_UNSUPPORTED"]


# --- values from the environment ------------------------------------------------------------------------------------


def test_variables_are_put_in_and_never_shown(look: Look) -> None:
    secret = "s3cr3t-value"
    text = GOOD.replace("system: You help.", "system: 'Help ${WHOM} $${WHOM} $WHOM ${1} ${'")
    inspected = sound(look(text, env={"WHOM": "me"}))
    assert inspected.checked.agents["helper"].system == "Help me ${WHOM} $WHOM ${1} ${"
    spoilt = GOOD.replace("provider: embedded", "provider: ${S}").replace("modelRef: Model/main", "modelRef: '${S}'")
    spoilt = spoilt.replace("entry: tools/words.py", "entry: '${S}'").replace("name: count", "name: '${S}!'")
    spoilt = spoilt.replace("type: string", "type: '${S}'").replace("name: default", "name: '${S}!'")
    spoilt = spoilt.replace("    - ref: Tool/bash", "    - ref: Tool/${S}").replace("name: words", "name: 'X${S}'")
    inspected = look(spoilt, env={"S": secret})
    assert len(inspected.errors) >= 8
    assert secret not in repr(inspected.errors) + repr(inspected.warnings)


def with_schema(schema: str) -> str:
    """The bundle with this schema of the tool's arguments."""
    start, end = GOOD.index("        type: object\n"), GOOD.index("---\napiVersion: goondan.ai/v1\nkind: Swarm")
    return GOOD[:start].rstrip("\n") + f" {schema}\n" + GOOD[end:]


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ("{type: object, properties: {a: {type: [strin]}}}", "properties.a.type"),
        ("{type: object, properties: {a: {minLength: -1}}}", "properties.a.minLength"),
        ("{type: object, properties: {a: 3}}", "properties.a"),
        ("{type: object, properties: {a: {pattern: '(a{1000}){1000}'}}}", "properties.a.pattern"),
        ("{type: object, required: [a, a]}", "required"),
        ("{type: object, additionalProperties: maybe}", "additionalProperties"),
        ("{type: object, enum: 3}", "enum"),
        ("{type: object, $ref: '#/nope'}", ""),
        ("{type: object, properties: {a: {$ref: 'http://127.0.0.1:9/x'}}}", ""),
        ("{type: object, $schema: 'http://127.0.0.1:9/x'}", ""),
        ("{$schema: 'http://json-schema.org/draft-07/schema#', type: object, required: a}", "required"),
    ],
)
def test_what_is_no_json_schema(look: Look, schema: str, path: str) -> None:
    inspected = look(with_schema(schema))
    where = "spec.exports[0].parameters" + (f".{path}" if path else "")
    assert [(p.code, p.path) for p in inspected.errors] == [("E_CONFIG_SCHEMA", where)]
    assert "127.0.0.1" not in inspected.errors[0].message


def test_a_pattern_that_needs_look_around_is_refused_in_words(look: Look) -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"pattern": "^(?!x)y"},
            "b": {"patternProperties": {"(?<=a)b": {}}},
            "c": {"pattern": "^c"},
        },
    }
    inspected = look(with_schema(json.dumps(schema)))
    where = "spec.exports[0].parameters.properties"
    assert [(p.code, p.path) for p in inspected.errors] == [
        ("E_CONFIG_SCHEMA", f"{where}.a.pattern"),
        ("E_CONFIG_SCHEMA", f"{where}.b.patternProperties['(?<=a)b']"),
    ]
    assert all("look-around" in p.message and "in the handler" in str(p.suggestion) for p in inspected.errors)


@pytest.mark.requirement("SCHEMA-10", "SCHEMA-11")
def test_any_valid_json_schema_is_taken(look: Look) -> None:
    schema = {
        "type": "object",
        "properties": {
            "filters": {"type": "object", "properties": {"status": {"enum": ["active", 3, None]}}},
            "id": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "tree": {"$ref": "#/$defs/node"},
        },
        "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
        "unknownKeyword": {"x": 1},
    }
    inspected = sound(look(with_schema(json.dumps(schema))))
    assert inspected.checked.tools["words"].body.exports[0].parameters == schema


def test_values_are_not_expanded_again(look: Look) -> None:
    inspected = look(GOOD.replace("You help.", "${A}"), env={"A": "${B}"})
    assert inspected.checked.agents["helper"].system == "${B}"


def test_a_huge_variable_does_not_multiply(look: Look) -> None:
    items = "\n".join("      - '${A}'" for _ in range(64))
    text = GOOD.replace("  provider: embedded", "  provider: embedded\n  params:\n    stop:\n" + items)
    inspected = look(text, env={"A": "x" * 65536})
    assert [p.code for p in inspected.errors][:1] == ["E_CONFIG_INVALID_VALUE"]
    assert "characters" in inspected.errors[0].message
