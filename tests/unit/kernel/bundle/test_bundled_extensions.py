"""Bundled extensions as a bundle names them, their config, and what they ask of their user: nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kernel.bundle.base_extensions import BaseExtensions
from schemas.extension_config import check_config
from tests.unit.kernel.bundle.conftest import GOOD, Look

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
    seen = look(using(item))
    assert seen.errors == []
    assert seen.warnings == []
    (spec,) = seen.checked.agents["helper"].extensions
    assert (spec.name, spec.bundled, spec.modules) == ("logging", True, None)
    assert spec.entry.endswith("/agentproc/base/logging/logging.py")
    assert not [power for power in seen.judgement.powers if type(power).__name__ == "Module"]


def test_an_extension_of_the_bundle_can_have_its_code(look: Look) -> None:
    entry = 'entry: "@goondan/base/logging"'
    seen = look(own(f"{entry}, config: {{level: debug}}") + using("Extension/mine"))
    assert seen.errors == []
    (spec,) = seen.checked.agents["helper"].extensions
    assert (spec.name, spec.bundled, spec.config) == ("mine", True, {"level": "debug"})
    wrong = look(own(f"{entry}, config: {{levle: debug}}") + GOOD)
    assert [(p.code, p.path, p.suggestion) for p in wrong.errors] == [
        ("E_CONFIG_UNKNOWN_FIELD", "spec.config.levle", "Did you mean 'level'?")
    ]


def test_one_of_that_name_in_the_bundle_takes_its_place_with_a_warning(look: Look) -> None:
    mine = own("entry: ext/a.py").replace("mine", "logging")
    seen = look(mine + using("Extension/logging"), files={"ext/a.py": "def register(api): ..."})
    assert seen.errors == []
    assert [p.code for p in seen.warnings] == ["W_CONFIG_SHADOWED"]
    assert not seen.checked.agents["helper"].extensions[0].bundled


@pytest.mark.parametrize(
    ("config", "code", "path", "hint"),
    [
        ("{levle: info}", "E_CONFIG_UNKNOWN_FIELD", "config.levle", "Did you mean 'level'?"),
        ("{level: loud}", "E_CONFIG_INVALID_VALUE", "config.level", "It has: of, level, arguments, maxChars."),
        ("{maxChars: many}", "E_CONFIG_INVALID_VALUE", "config.maxChars", "It has: of, level, arguments, maxChars."),
        ("{of: [turn, walk]}", "E_CONFIG_INVALID_VALUE", "config.of", "It has: of, level, arguments, maxChars."),
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
    given = look(own(f"entry: ext/a.py, {schema}") + using("{ref: Extension/mine, config: {size: 3}}"), files=files)
    assert given.errors == []
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
        "from kernel.bundle.base_extensions import BaseExtensions\n"
        "import kernel.bundle.base_extensions as module\n"
        "module.read_manifest = lambda *a: sys.exit(1)\n"
        "import agentproc.loop\n"
        "loaded = [name for name in sys.modules if name.startswith('agentproc.base.')]\n"
        "print(sorted(loaded))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    tools = {"agents", "handoff", "self_restart"}
    assert {name.split(".")[2] for name in eval(done.stdout)} == tools
