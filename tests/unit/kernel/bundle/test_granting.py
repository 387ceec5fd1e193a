"""Who gets what: own tools, bundled tools, packaged tools before and after acceptance, agents, the policy."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from goondan.kernel.bundle.loader import Inspected, inspect_bundle, open_bundle
from goondan.kernel.bundle.rules.plan import tool_spec
from goondan.kernel.grants.granting import Accepted, status
from goondan.kernel.trust.policy import MARK, pin, write_decisions
from goondan.schemas.bundle.launch import Filesystem, SandboxSpec
from tests.checks import there
from tests.unit.kernel.bundle.conftest import GOOD, bundled, package

__all__ = ["bundled", "package"]

PACKAGE = """\
apiVersion: goondan.ai/v1
kind: Package
metadata: {name: "@acme/weather"}
spec: {version: 1.0.0}
---
apiVersion: goondan.ai/v1
kind: Tool
metadata: {name: forecast}
spec:
  entry: tools/forecast.py
  exports: [{name: get}]
  sandbox:
    isolation: call
    network: {allow: ["api.weather.example:443"]}
    filesystem: {read: [/]}
    env: [API_KEY]
    limits: {memoryMb: 64, cpuSeconds: 600}
---
apiVersion: goondan.ai/v1
kind: Tool
metadata: {name: modest}
spec: {entry: tools/forecast.py, exports: [{name: get}]}
"""
USING = GOOD.replace(
    "    - Tool/words\n",
    '    - Tool/words\n    - {kind: Tool, name: forecast, package: "@acme/weather"}\n'
    '    - {kind: Tool, name: modest, package: "@acme/weather"}\n',
)


class Home:
    """A state root with a package and a policy, and bundles that are looked at with it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "state"
        self.bundle = folder / "bundle"
        self.package = self.root / "packages" / "@acme" / "weather"
        (self.package / "tools").mkdir(parents=True)
        (self.bundle / "tools").mkdir(parents=True)
        (self.package / "goondan.yaml").write_text(PACKAGE)
        (self.package / "tools" / "forecast.py").write_text("handlers = {'get': lambda ctx, input: 1}\n")
        (self.bundle / "tools" / "words.py").write_text("handlers = {}\n")

    def policy(self, text: str, mode: int = 0o600) -> None:
        path = self.root / "policy.yaml"
        path.write_text(text)
        path.chmod(mode)

    def accept(self, digest: str | None = None) -> None:
        write_decisions(
            str(self.root / "policy.yaml"),
            [Accepted("@acme/weather/forecast", digest or pin(os.path.realpath(self.package)))],
            [],
        )

    def look(self, text: str = USING, policy: str | None = None) -> Inspected:
        path = self.bundle / "goondan.yaml"
        path.write_text(text)
        state = str(self.root / "workspaces" / "x")
        return inspect_bundle(str(path), state_dir=state, env={}, handlers=False, policy=policy)


@pytest.fixture
def home(tmp_path: Path, bundled: object) -> Home:
    return Home(tmp_path)


def granted(found: Inspected, name: str) -> SandboxSpec:
    assert not found.errors, found.errors
    return tool_spec(found.checked.tools[name]).sandbox


def stands(found: Inspected, name: str) -> str:
    return status(found.checked.tools[name], found.grant_context)


# --- packaged tools


def test_a_packaged_tool_gets_the_defaults_until_its_request_is_accepted(home: Home) -> None:
    found = home.look()
    left = granted(found, "forecast")
    assert (left.network, left.env, left.filesystem) == ("none", [], Filesystem())
    assert (left.isolation, left.limits.memory_mb, left.limits.cpu_seconds) == ("call", 64, 60)
    (warning,) = [problem for problem in found.warnings if problem.code == "W_CONFIG_NOT_GRANTED"]
    assert warning.file == str(home.package / "goondan.yaml")
    assert warning.line == 12
    for word in ("API_KEY", "read: /", "api.weather.example:443"):
        assert word in warning.message
    assert "gdn grant accept @acme/weather/forecast" in warning.suggestion
    assert (stands(found, "forecast"), stands(found, "modest")) == ("pending", "nothing")
    assert (stands(found, "words"), stands(found, "bash")) == ("own", "bundled")


def test_what_was_accepted_is_granted(home: Home) -> None:
    home.accept()
    found = home.look()
    left = granted(found, "forecast")
    assert (left.env, left.filesystem.read) == (["API_KEY"], ["/"])
    assert left.network == {"allow": ["api.weather.example:443"]}
    assert stands(found, "forecast") == "accepted"
    assert not [problem for problem in found.warnings if problem.code == "W_CONFIG_NOT_GRANTED"]


@pytest.mark.parametrize(
    "change",
    [
        lambda home: (home.package / "tools" / "forecast.py").write_text("handlers = {}\n"),
        lambda home: (home.package / "tools" / "__pycache__").mkdir(),
        lambda home: (home.package / "tools" / ".hidden").write_text(""),
        lambda home: (home.package / "goondan.yaml").write_text(PACKAGE + "# more\n"),
        lambda home: (home.package / "link").symlink_to("/etc"),
    ],
)
def test_another_byte_in_the_package_takes_the_grant_back(home: Home, change: Any) -> None:
    home.accept()
    change(home)
    found = home.look()
    assert granted(found, "forecast").env == []
    assert stands(found, "forecast") == "changed"


def test_what_was_accepted_for_one_tool_is_not_for_another(home: Home) -> None:
    text = PACKAGE.replace("  exports: [{name: get}]\n  sandbox:", "  exports: [{name: get}]\n  sandbox:", 1)
    text = text.replace(
        "metadata: {name: modest}\nspec: {entry", "metadata: {name: modest}\nspec: {sandbox: {env: [K]}, entry"
    )
    (home.package / "goondan.yaml").write_text(text)
    home.accept()
    found = home.look()
    assert stands(found, "forecast") == "accepted"
    assert stands(found, "modest") == "pending"
    assert granted(found, "modest").env == []


def test_nothing_of_our_environment_comes_into_a_package(home: Home) -> None:
    (home.package / "goondan.yaml").write_text(PACKAGE.replace("version: 1.0.0", 'version: "${HOME}"'))
    assert not home.look().errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.unlink(), "no YAML file"),
        (lambda file: file.write_text(PACKAGE.replace("@acme/weather", "@acme/x")), "names another"),
    ],
)  # fmt: skip
def test_a_folder_that_is_not_the_package_is_refused(home: Home, change: Any, message: str) -> None:
    change(home.package / "goondan.yaml")
    errors = home.look().errors
    assert errors
    assert any(message in error.message for error in errors), errors


@pytest.mark.parametrize("name", ["../../etc", "@acme/../x", "@acme", "@/x", "/etc", "@acme/weather/x", "a/b"])
def test_a_name_that_leads_elsewhere_is_no_package(home: Home, name: str) -> None:
    (error, *_) = home.look(USING.replace('"@acme/weather"', f"'{name}'")).errors
    assert error.code == "E_CONFIG_MISSING_REF"


def test_a_packaged_tool_needs_a_name_of_its_own(home: Home) -> None:
    (home.package / "goondan.yaml").write_text(PACKAGE.replace("name: modest", "name: words"))
    errors = home.look(USING.replace("name: modest", "name: words")).errors
    assert [error.code for error in errors] == ["E_CONFIG_DUPLICATE"]


# --- agents


def narrowed(found: Inspected, name: str) -> SandboxSpec | None:
    assert not found.errors, found.errors
    return tool_spec(found.checked.tools[name]).narrowed.get("helper")


def asking(sandbox: str, *, use: str = "", agent: str = "") -> str:
    text = GOOD.replace("  entry: tools/words.py\n", f"  entry: tools/words.py\n  sandbox: {sandbox}\n")
    if use:
        text = text.replace("    - Tool/words\n", f"    - {{ref: Tool/words, sandbox: {use}}}\n")
    return text.replace("  tools:\n", f"  sandbox: {agent}\n  tools:\n", 1) if agent else text


def test_an_agent_narrows_one_of_its_tools(home: Home) -> None:
    asks = "{network: public, env: [A, B], filesystem: {read: [/data]}, limits: {memoryMb: 256}}"
    use = "{network: {allow: ['a.example.org:443']}, env: [B], filesystem: {read: [/data/x]}, limits: {memoryMb: 64}}"
    found = home.look(asking(asks, use=use))
    left = there(narrowed(found, "words"))
    assert left.network == {"allow": [], "confined": ["a.example.org:443"]}
    assert (left.env, left.filesystem.read, left.limits.memory_mb) == (["B"], ["/data/x"], 64)
    assert granted(found, "words").env == ["A", "B"]
    assert narrowed(found, "bash") is None


def test_an_agent_narrows_all_of_its_tools(home: Home) -> None:
    found = home.look(asking("{env: [A, B]}", agent="{env: [A], limits: {wallSeconds: 5}}"))
    left = there(narrowed(found, "words"))
    assert (left.env, left.limits.wall_seconds) == (["A"], 5)
    other = there(narrowed(found, "bash"))
    assert other.limits.wall_seconds == 5


def test_what_an_agent_does_not_say_stays(home: Home) -> None:
    assert narrowed(home.look(asking("{network: public, env: [A]}", use="{}")), "words") is None
    left = there(narrowed(home.look(asking("{network: public, env: [A]}", use="{env: []}")), "words"))
    assert left.network == "public"


def test_an_agent_may_narrow_what_has_not_been_accepted_yet(home: Home) -> None:
    use = '{kind: Tool, name: forecast, package: "@acme/weather", sandbox: {env: [API_KEY], network: none}}'
    text = re.sub(r"\{kind: Tool, name: forecast, package: [^}]*\}", use, USING)
    found = home.look(text)
    assert granted(found, "forecast").env == []
    home.accept()
    left = there(narrowed(home.look(text), "forecast"))
    assert (left.env, left.network) == (["API_KEY"], "none")


# --- the operator


def test_the_operator_widens(home: Home) -> None:
    home.policy(
        "widen:\n"
        "  - {tool: words, sandbox: {env: [B], network: {allow: ['127.0.0.1:8080']}, limits: {memoryMb: 2048}}}\n"
        '  - {tool: "@goondan/base/bash", sandbox: {filesystem: {read: [/srv/data]}}}\n'
        "  - {tool: words, bundle: /elsewhere, sandbox: {env: [NOT]}}\n"
        '  - {tool: "@acme/weather/forecast", sandbox: {env: [OTHER]}}\n'
    )
    found = home.look(USING.replace("  entry: tools/words.py\n", "  entry: tools/words.py\n  sandbox: {env: [A]}\n"))
    words = granted(found, "words")
    assert (words.env, words.network, words.limits.memory_mb) == (["A", "B"], {"allow": ["127.0.0.1:8080"]}, 2048)
    assert granted(found, "bash").filesystem.read == ["/srv/data"]
    assert granted(found, "forecast").env == ["OTHER"]


def test_a_policy_of_the_command_line_comes_on_top(home: Home, tmp_path: Path) -> None:
    home.policy("widen:\n  - {tool: words, sandbox: {env: [A]}}\n")
    more = tmp_path / "more.yaml"
    more.write_text("widen:\n  - {tool: words, sandbox: {env: [B]}}\n")
    more.chmod(0o600)
    assert granted(home.look(policy=str(more)), "words").env == ["A", "B"]


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("widen:\n  - {tool: words, sandbox: {nework: none}}\n", "E_CONFIG_UNKNOWN_FIELD", 2),
        ("widen:\n  - {tool: words, sandbox: {network: {allow: ['0x7f.1:80']}}}\n", "E_CONFIG_INVALID_VALUE", 2),
        ("widen:\n  - tool: words\n    sandbox:\n      filesystem: {write: [/]}\n", "E_CONFIG_DANGEROUS", 4),
        ("widen:\n  - {tool: words, sandbox: {isolation: shared}}\n", "E_CONFIG_INVALID_VALUE", 2),
        ("- a\n", "E_CONFIG_INVALID_VALUE", 1),
        ("spawn:\n  workdirs: /srv/x\n", "E_CONFIG_INVALID_VALUE", 2),
        ("spawn:\n  workdirs:\n    - relative\n", "E_CONFIG_INVALID_VALUE", 3),
        ("spawn:\n  workdirs: [/srv/x, /etc]\n", "E_CONFIG_DANGEROUS", 2),
        ("spawn:\n  workdirs: ['~/.ssh']\n", "E_CONFIG_DANGEROUS", 2),
        ("widen: [\n", "E_CONFIG_SYNTAX", 2),
    ],
)
def test_what_is_wrong_with_a_policy_has_its_place(home: Home, text: str, code: str, line: int) -> None:
    home.policy(text)
    (error, *_) = home.look().errors
    assert (error.code, error.line, error.file) == (code, line, str(home.root / "policy.yaml"))


def test_a_policy_of_before_that_wants_file_systems_for_workdirs_is_told_once(home: Home) -> None:
    home.policy("widen: []\ndisk: {sized: true}\n")
    (error,) = home.look().errors
    assert (error.code, error.line, error.file) == ("E_CONFIG_UNKNOWN_FIELD", 2, str(home.root / "policy.yaml"))
    assert "`disk` is gone" in (error.suggestion or "")
    assert "Remove `disk`" in (error.suggestion or "")
    assert "workspace.ext4" in (error.suggestion or ""), "the files of a workdir may be in an image"


def test_the_operator_chooses_where_else_spawned_agents_may_work(home: Home) -> None:
    home.policy("spawn: {workdirs: [/srv/x/, /srv/y/../z]}\n")
    home.look()
    state = str(home.root / "workspaces" / "x")
    plan = open_bundle(str(home.bundle / "goondan.yaml"), state_dir=state, env={}, handlers=False).plan
    assert plan.spawn_workdirs == ["/srv/x", "/srv/z"]


def test_a_policy_that_others_could_have_written_is_refused(home: Home) -> None:
    home.policy("widen: []\n", mode=0o666)
    (error,) = home.look().errors
    assert "others can write to it" in error.message
    home.policy("widen: []\n", mode=0o644)
    assert not home.look().errors


def test_a_policy_that_was_named_must_be_there(home: Home) -> None:
    (error,) = home.look(policy="/nonexistent/policy.yaml").errors
    assert error.code == "E_CONFIG_NOT_FOUND"


@pytest.mark.parametrize(
    "path", ["/", "~", "~/.ssh", "/etc", "/usr/local", "/run", "STATE", "STATE/workspaces", "PYTHON"]
)
def test_what_no_tool_may_write_to(home: Home, path: str) -> None:
    import sys

    path = path.replace("STATE", str(home.root)).replace("PYTHON", os.path.realpath(sys.prefix))
    found = home.look(asking(f"{{filesystem: {{write: ['{path}']}}}}"))
    assert [error.code for error in found.errors] == ["E_CONFIG_DANGEROUS"]


@pytest.mark.parametrize(
    "path",
    [
        "STATE", "STATE/", "STATE/policy.yaml", "STATE/workspaces/d/logs", "/STATE/x", "~/.goondan", "~/x/../.goondan",
        "/tmp/goondan-UID/d", "RUNTIME/goondan", "STATE/packages/@acme/other", "STATE/packages/@acme/weather",
    ],
)  # fmt: skip
def test_what_no_tool_may_read(home: Home, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/somewhere")
    path = path.replace("STATE", str(home.root)).replace("UID", str(os.geteuid())).replace("RUNTIME", "/somewhere")
    found = home.look(asking(f"{{filesystem: {{read: ['{path}']}}}}"))
    assert [error.code for error in found.errors] == ["E_CONFIG_DANGEROUS"]
    assert "where the kernel keeps its state or its sockets" in found.errors[0].message


def test_what_is_written_by_hand_stays_when_grants_are_written(home: Home) -> None:
    home.policy("# mine\nwiden:\n  - {tool: words, sandbox: {env: [A]}}  # because\n")
    home.accept()
    text = (home.root / "policy.yaml").read_text()
    assert text.startswith("# mine\nwiden:\n  - {tool: words, sandbox: {env: [A]}}  # because\n")
    assert MARK in text
    assert granted(home.look(), "words").env == ["A"]
    assert stands(home.look(), "forecast") == "accepted"
    home.accept("sha256:other")
    assert stands(home.look(), "forecast") == "changed"
    write_decisions(str(home.root / "policy.yaml"), [], [])
    assert MARK not in (home.root / "policy.yaml").read_text()
    assert granted(home.look(), "words").env == ["A"]


def test_names_beyond_ascii_are_granted_as_the_network_knows_them(home: Home) -> None:
    found = home.look(asking("{network: {allow: ['BÜCHER.example:443', '*.Bücher.example.:443']}}"))
    assert granted(found, "words").network == {"allow": ["xn--bcher-kva.example:443", "*.xn--bcher-kva.example:443"]}


@pytest.mark.parametrize(("megabytes", "message"), [(64, None), (65, "has at most 64 MiB"), (0, "is at least 1")])
def test_an_output_has_a_limit_that_the_bus_can_carry(home: Home, megabytes: int, message: str | None) -> None:
    found = home.look(asking(f"{{limits: {{outputMb: {megabytes}}}}}"))
    told = [error.message for error in found.errors if "outputMb" in str(error.path)]
    assert (message is None and not told) or (message is not None and message in told[0])
