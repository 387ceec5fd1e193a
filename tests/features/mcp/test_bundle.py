"""MCP servers of a bundle: what a config may say, what the tool host and agents are told, what a user agrees to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from goondan.features.mcp.bundle import MAX_PREFIX
from goondan.features.mcp.wire import ServerLogin
from goondan.kernel.bundle.loader import open_bundle
from goondan.kernel.bundle.rules.problems import BundleError
from goondan.kernel.grants.powers import Command, Folder, Reach, ServerEndpoint, Variable
from goondan.schemas.bundle.launch import KernelPlan, ServerSpec, ToolSpec
from goondan.schemas.wire.frames import OPERATOR_AGENT
from tests.unit.kernel.bundle.conftest import GOOD, Look

EXTENSION = """\
apiVersion: goondan.ai/v1
kind: Extension
metadata: {name: NAME}
spec:
  entry: "@goondan/base/mcp"
  config: CONFIG
---
"""
STDIO = "transport: {type: stdio, command: [/usr/bin/server]}"
HTTP = "transport: {type: http, endpoint: 'http://localhost:8080/mcp'}"
ALL = "expose: {tools: true, resources: true, prompts: true}"


def bundle(config: str, name: str = "mcp-github", use: str | None = None) -> str:
    """A bundle whose agent has one server."""
    item = use or f"Extension/{name}"
    agent = GOOD.replace("  tools:\n", f"  extensions:\n    - {item}\n  tools:\n", 1)
    agent = agent.replace("  agents:\n    - ref: Agent/helper\n", "")
    return EXTENSION.replace("NAME", name).replace("CONFIG", config) + agent


def plan_of(folder: Path, text: str, env: dict[str, str] | None = None) -> KernelPlan:
    for place in ("tools/words.py", "servers/one/main.py", "alone.py"):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text("handlers = {}\n")
    (folder / "goondan.yaml").write_text(text)
    return open_bundle(
        str(folder / "goondan.yaml"), state_dir=str(folder / "state"), env=env or {}, handlers=False
    ).plan


def server_of(plan: KernelPlan, prefix: str = "github") -> tuple[ToolSpec, ServerSpec]:
    (tool,) = [tool for tool in plan.toolhost.tools if tool.name == prefix]
    assert tool.server is not None
    return tool, tool.server


@pytest.mark.requirement("MCP-02", "MCP-08", "MCP-09", "MCP-10")
def test_what_the_config_says_arrives_at_the_tool_host(tmp_path: Path) -> None:
    text = bundle(
        "{transport: {type: stdio, command: [/usr/bin/server, --fast], env: {TOKEN: 'x'}},"
        " attach: {mode: stateless, scope: agent}, expose: {tools: [get_*], prompts: true},"
        " deadlines: {idleSeconds: 5, totalSeconds: 50}, grants: [roots],"
        " sandbox: {network: {allow: ['api.example:443']}, limits: {memoryMb: 256}}}"
    )
    tool, server = server_of(plan_of(tmp_path, text))
    assert server == ServerSpec(
        extension="mcp-github",
        transport="stdio",
        worker="mcp",
        command=["/usr/bin/server", "--fast"],
        env={"TOKEN": "x"},
        mode="stateless",
        scope="agent",
        tools=True,
        resources=False,
        prompts=True,
        grants=["roots"],
        idle_s=5.0,
        total_s=50.0,
        digest=server.digest,
    )
    assert len(server.digest) == 64
    assert (tool.exports, tool.entry, tool.root) == ([], "", "")
    assert tool.sandbox.network == {"allow": ["api.example:443"]}
    assert tool.sandbox.limits.memory_mb == 256


def test_agents_may_reach_the_servers_that_their_extensions_name_and_nobody_else(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, bundle(f"{{{STDIO}, {ALL}}}"))
    assert plan.agents["helper"].servers == ["github"]
    assert plan.agents[OPERATOR_AGENT].servers == []
    (extension,) = plan.agents["helper"].extensions
    assert (extension.server, extension.server_digest) == ("github", server_of(plan)[1].digest)
    assert not [item for item in plan.agents["helper"].registry if item.name.startswith("github")]


@pytest.mark.requirement("MCP-03", "MCP-04", "MCP-06")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{transport: {type: stdio}, EXPOSE}", "config.transport.command: MCP stdio transport requires command"),
        (
            "{transport: {type: stdio, command: []}, EXPOSE}",
            "config.transport.command: MCP stdio transport requires command",
        ),
        ("{transport: {type: http}, EXPOSE}", "config.transport.endpoint: MCP http transport requires endpoint"),
        (
            "{transport: {type: http, endpoint: ''}, EXPOSE}",
            "config.transport.endpoint: MCP http transport requires endpoint",
        ),
        ("{transport: {type: sse, endpoint: 'http://h/'}, EXPOSE}", "config.transport.type: "),
        ("{transport: {command: [x]}, EXPOSE}", "config.transport.type: required property is missing"),
        ("{transport: {type: stdio, command: x}, EXPOSE}", "config.transport.command: "),
        ("{transport: {type: stdio, command: [3]}, EXPOSE}", "config.transport.command[0]: "),
        ("{transport: {type: stdio, command: [x], env: {A: 1}}, EXPOSE}", "config.transport.env.A: "),
        ("{transport: {type: stdio, command: [x], env: {'A B': x}}, EXPOSE}", "config.transport.env: 'A B' is no name"),
        ("{transport: {type: stdio, command: [x], endpoint: y}, EXPOSE}", "config.transport.endpoint: a transport of"),
        ("{transport: {type: http, endpoint: 'http://h/', command: [x]}, EXPOSE}", "config.transport.command: a trans"),
        ("{transport: {type: http, endpoint: 'ftp://h/'}, EXPOSE}", "config.transport.endpoint: it is no http or"),
        ("{transport: {type: http, endpoint: 'http://u:p@h/'}, EXPOSE}", "config.transport.endpoint: a URL without"),
        ("{transport: {type: http, endpoint: 'http://h/', headers: {'X Y': a}}, EXPOSE}", "config.transport.headers: "),
        (
            '{transport: {type: http, endpoint: "http://h/", headers: {X: "a\\r\\nHost: b"}}, EXPOSE}',
            "config.transport.headers: 'X' is no header",
        ),
        ("{STDIO}", "config.expose: required property is missing"),
        ("{EXPOSE}", "config.transport: required property is missing"),
        ("{STDIO, EXPOSE, attach: {mode: sometimes}}", "config.attach.mode: "),
        ("{STDIO, EXPOSE, attach: {scope: swarm}}", "config.attach.scope: "),
        ("{STDIO, expose: {tools: 3}}", "config.expose.tools: "),
        ("{STDIO, expose: {resources: [a]}}", "config.expose.resources: "),
        ("{STDIO, EXPOSE, namePrefix: a__b}", "config.namePrefix: the prefix of its tools' names"),
        ("{STDIO, EXPOSE, sandbox: {netwrok: none}}", "config.sandbox: object contains unknown field `netwrok`"),
        ("{STDIO, EXPOSE, sandbox: {filesystem: {read: x}}}", "config.sandbox.filesystem.read: expected `array`"),
        ("{STDIO, EXPOSE, sandbox: {isolation: call}}", "config.sandbox.isolation: attach.scope says"),
        ("{STDIO, EXPOSE, sandbox: {permissions: [agents]}}", "config.sandbox.permissions: an MCP server asks"),
        ("{HTTP, EXPOSE, sandbox: {network: public}}", "config.sandbox: a server at an endpoint has no jail"),
        ("{STDIO, EXPOSE, deadlines: {idleSeconds: 9, totalSeconds: 3}}", "config.deadlines: idleSeconds is more"),
        ("{STDIO, EXPOSE, grants: [everything]}", "config.grants[0]: "),
        ("{STDIO, EXPOSE, grants: 3}", "config.grants: "),
        ("{transport: {type: stdio, command: [{a: b}]}, EXPOSE}", "config.transport.command[0]: "),
        ("{transport: {type: http, endpoint: 'http://h/', oauth: 1.5}, EXPOSE}", "config.transport.oauth: "),
        ("{STDIO, EXPOSE, '': 1}", "config.: unexpected property"),
        (
            "{transport: {type: stdio, command: [x, '${WORKDIR}']}, EXPOSE}",
            "config.transport: ${WORKDIR} needs attach.scope: agent",
        ),
    ],
)
def test_a_config_that_does_not_fit_is_told_where_it_is_written(look: Look, config: str, message: str) -> None:
    written = config.replace("EXPOSE", ALL).replace("STDIO", STDIO).replace("HTTP", HTTP)
    for seen, at in (
        (look(bundle(written)), "spec.config"),
        (look(bundle("{}", use=f"{{ref: Extension/mcp, config: {written}}}")), "spec.extensions[0].config"),
    ):
        (error,) = seen.errors
        assert message in error.message
        assert error.path.startswith(at), error.path


def test_an_extension_that_nobody_uses_is_looked_at_and_makes_no_server(look: Look) -> None:
    lonely = EXTENSION.replace("NAME", "mcp-x").replace("CONFIG", f"{{transport: {{type: stdio}}, {ALL}}}") + GOOD
    (error,) = look(lonely).errors
    assert "MCP stdio transport requires command" in error.message
    good = look(EXTENSION.replace("NAME", "words").replace("CONFIG", f"{{{STDIO}, {ALL}}}") + GOOD)
    assert (good.errors, good.checked.servers) == ([], {})


@pytest.mark.requirement("MCP-19")
@pytest.mark.parametrize("config", ["{}", "null"])
def test_without_a_config_it_is_a_warning_and_no_server(tmp_path: Path, look: Look, config: str) -> None:
    seen = look(bundle(config))
    assert seen.errors == []
    (warning,) = seen.warnings
    assert warning.message == "MCP Extension: config is missing"
    plan = plan_of(tmp_path, bundle(config))
    assert plan.agents["helper"].servers == []
    assert plan.agents["helper"].extensions[0].server == ""
    bare = look(bundle("{}", use="Extension/mcp"))
    assert [one.message for one in bare.warnings] == ["MCP Extension: config is missing"]


# --- names


@pytest.mark.requirement("MCP-15")
@pytest.mark.parametrize(
    ("name", "prefix", "found"),
    [
        ("mcp-github", None, "github"),
        ("github", None, "github"),
        ("mcp-mcp-x", None, "mcp-x"),
        ("mcp-github", "gh", "gh"),
        ("other-mcp-x", None, "other-mcp-x"),
    ],
)
def test_the_prefix_is_the_configs_or_the_name_without_mcp(
    tmp_path: Path, name: str, prefix: str | None, found: str
) -> None:
    more = "" if prefix is None else f", namePrefix: {prefix}"
    plan = plan_of(tmp_path, bundle(f"{{{STDIO}, {ALL}{more}}}", name))
    assert plan.agents["helper"].servers == [found]


@pytest.mark.parametrize(
    "taken",
    [
        "words",
        "bash",
        pytest.param("code", marks=pytest.mark.feature("code_mode")),
        pytest.param("skills", marks=pytest.mark.feature("skills")),
    ],
)
def test_a_prefix_is_no_tools_name(look: Look, taken: str) -> None:
    (error,) = look(bundle(f"{{{STDIO}, {ALL}}}", f"mcp-{taken}")).errors
    assert error.code == "E_TOOL_NAME_CONFLICT"
    assert f"Extension/mcp-{taken} has the prefix '{taken}'" in error.message
    assert error.suggestion == f"Give it another namePrefix, such as {taken}-mcp."


def test_two_servers_have_two_prefixes(look: Look) -> None:
    config = f"{{{STDIO}, {ALL}, namePrefix: gh}}"
    two = EXTENSION.replace("NAME", "one").replace("CONFIG", config) + bundle(config, "two")
    two = two.replace("    - Extension/two\n", "    - Extension/one\n    - Extension/two\n")
    (error,) = look(two).errors
    assert error.code == "E_TOOL_NAME_CONFLICT"
    assert error.message == "Extension/two and Extension/one both have the prefix 'gh'"


def test_a_prefix_leaves_room_for_names(look: Look) -> None:
    assert look(bundle(f"{{{STDIO}, {ALL}}}", "mcp-" + "a" * MAX_PREFIX)).errors == []
    (error,) = look(bundle(f"{{{STDIO}, {ALL}}}", "mcp-" + "a" * (MAX_PREFIX + 1))).errors
    assert "the prefix of its tools' names has at most" in error.message


# --- an agent's own config


TWO = """\
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: second}
spec:
  modelConfig: {modelRef: Model/main}
  extensions: [{ref: Extension/mcp-github, config: CONFIG}]
  sandbox: CAP
"""


def test_an_agents_own_config_takes_the_place_of_the_documents(tmp_path: Path) -> None:
    own = "{transport: {type: stdio, command: [/usr/bin/other]}, " + ALL + ", sandbox: {env: [A]}}"
    text = bundle(f"{{{STDIO}, {ALL}}}") + TWO.replace("CONFIG", own).replace("CAP", "{}")
    plan = plan_of(tmp_path, text)
    tool, server = server_of(plan)
    assert list(tool.servers) == ["second"]
    assert (server.command, tool.servers["second"].command) == (["/usr/bin/server"], ["/usr/bin/other"])
    assert tool.narrowed["second"].env == ["A"]
    digests = {plan.agents[name].extensions[0].server_digest for name in ("helper", "second")}
    assert digests == {server.digest, tool.servers["second"].digest}
    assert len(digests) == 2


def test_agents_with_the_same_config_share_the_server_and_one_that_narrows_it_does_not(tmp_path: Path) -> None:
    config = f"{{{STDIO}, {ALL}, sandbox: {{network: {{allow: ['a.example:443', 'b.example:443']}}}}}}"
    same = plan_of(tmp_path, bundle(config) + TWO.replace("CONFIG", config).replace("CAP", "{}"))
    tool, server = server_of(same)
    assert (tool.servers, tool.narrowed) == ({}, {})
    cap = "{network: {allow: ['a.example:443']}}"
    narrowed = plan_of(tmp_path, bundle(config) + TWO.replace("CONFIG", config).replace("CAP", cap))
    tool, server = server_of(narrowed)
    assert tool.narrowed["second"].network == {"allow": ["a.example:443"]}
    assert tool.servers["second"].digest != server.digest


# --- values of the environment


@pytest.mark.requirement("MCP-07")
def test_values_of_the_environment_reach_the_tool_host_and_no_agent(tmp_path: Path) -> None:
    text = bundle(
        "{transport: {type: stdio, command: [/usr/bin/x], env: {GITHUB_TOKEN: '${GITHUB_TOKEN}'}}, " + ALL + "}"
    ) + TWO.replace(
        "CONFIG",
        "{transport: {type: http, endpoint: 'https://h.example/mcp',"
        " headers: {Authorization: 'Bearer ${API_TOKEN}'}}, " + ALL + "}",
    ).replace("CAP", "{}")
    plan = plan_of(tmp_path, text, {"GITHUB_TOKEN": "ghp_secret", "API_TOKEN": "api_secret"})
    tool, server = server_of(plan)
    assert server.env == {"GITHUB_TOKEN": "ghp_secret"}
    assert tool.servers["second"].headers == {"Authorization": "Bearer api_secret"}
    for name in ("helper", "second"):
        told = msgspec.json.encode(plan.agents[name])
        assert b"_secret" not in told
        assert b'"***"' in told
        assert plan.agents[name].extensions[0].confidential
    assert "_secret" not in repr(server) + repr(tool.servers["second"])
    other = plan_of(tmp_path, text, {"GITHUB_TOKEN": "ghp_other", "API_TOKEN": "api_secret"})
    assert server_of(other)[1].digest != server.digest  # another value is another server


@pytest.mark.requirement("MCP-07")
def test_a_variable_that_is_not_set_is_an_error(tmp_path: Path) -> None:
    text = bundle("{transport: {type: stdio, command: [/usr/bin/x], env: {T: '${GITHUB_TOKEN}'}}, " + ALL + "}")
    with pytest.raises(BundleError) as caught:
        plan_of(tmp_path, text)
    assert [problem.code for problem in caught.value.problems] == ["E_CONFIG_MISSING_ENV"]


def test_the_workdir_is_no_variable(tmp_path: Path) -> None:
    transport = "transport: {type: stdio, command: [/usr/bin/x, '${WORKDIR}/in'], env: {A: '${WORKDIR}', B: '${B}'}}"
    text = bundle(f"{{{transport}, {ALL}, attach: {{scope: agent}}}}")
    _, server = server_of(plan_of(tmp_path, text, {"WORKDIR": "/wrong", "B": "b"}))
    assert server.command == ["/usr/bin/x", "${WORKDIR}/in"]
    assert server.env == {"A": "${WORKDIR}", "B": "b"}


# --- paths of a command


def test_a_path_outside_of_the_bundle_has_to_be_granted(look: Look) -> None:
    command = (
        "transport: {type: stdio, command: [/usr/bin/node, /opt/x/index.js, --root=/data/a, /etc/hosts, name, /tmp/x]}"
    )
    seen = look(bundle(f"{{{command}, {ALL}}}"))
    assert [error.path for error in seen.errors] == [
        "spec.config.transport.command[1]",
        "spec.config.transport.command[2]",
    ]
    assert "the command names '/opt/x/index.js', which the server's jail does not show" in seen.errors[0].message
    granted = "sandbox: {filesystem: {read: [/opt/x], write: [/data]}}"
    assert look(bundle(f"{{{command}, {ALL}, {granted}}}")).errors == []


def test_a_path_of_the_bundle_is_shown_with_its_folder_and_in_the_root_alone(tmp_path: Path) -> None:
    for path, root in (("./servers/one/main.py", "servers/one"), ("./alone.py", "alone.py")):
        plan = plan_of(tmp_path, bundle(f"{{transport: {{type: stdio, command: [python3, {path}, ./no]}}, {ALL}}}"))
        tool, server = server_of(plan)
        assert server.command == ["python3", str(tmp_path / path), "./no"]
        assert (tool.root, tool.entry) == (str(tmp_path / root), str(tmp_path / path))
        assert tool.root in plan.protected
        assert tool.digest
    both = plan_of(
        tmp_path, bundle(f"{{transport: {{type: stdio, command: [./alone.py, --x=./servers/one/main.py]}}, {ALL}}}")
    )
    tool, server = server_of(both)
    assert server.command == [str(tmp_path / "alone.py"), f"--x={tmp_path}/servers/one/main.py"]
    assert tool.sandbox.filesystem.read == [str(tmp_path / "servers/one")]


@pytest.mark.parametrize("word", ["link/key", "link", "key", "--x=link/key"])
def test_a_link_of_the_bundle_shows_a_server_nothing_from_elsewhere(tmp_path: Path, word: str) -> None:
    bundled, elsewhere = tmp_path / "bundle", tmp_path / "elsewhere"
    for folder in (bundled, elsewhere):
        folder.mkdir()
    (elsewhere / "key").write_text("secret")
    (bundled / "link").symlink_to(elsewhere)
    (bundled / "key").symlink_to(elsewhere / "key")
    option, equals, path = word.rpartition("=")
    command = f"[python3, '{option}{equals}{bundled}/{path}']"
    tool, _ = server_of(plan_of(bundled, bundle(f"{{transport: {{type: stdio, command: {command}}}, {ALL}}}")))
    assert (tool.root, tool.sandbox.filesystem.read) == ("", [])


def test_an_agents_own_program_is_shown_to_it(tmp_path: Path) -> None:
    (tmp_path / "servers/two").mkdir(parents=True)
    (tmp_path / "servers/two/main.py").write_text("1")
    config = "{transport: {type: stdio, command: [python3, ./servers/NAME/main.py]}, " + ALL + "}"
    own = TWO.replace("CONFIG", config.replace("NAME", "two")).replace("CAP", "{}")
    tool, _ = server_of(plan_of(tmp_path, bundle(config.replace("NAME", "one")) + own))
    assert tool.root == str(tmp_path / "servers/one")
    assert tool.narrowed["second"].filesystem.read == [str(tmp_path / "servers/two")]


def test_what_its_folder_holds_makes_another_server(tmp_path: Path) -> None:
    text = bundle(f"{{transport: {{type: stdio, command: [python3, ./servers/one/main.py]}}, {ALL}}}")
    first = server_of(plan_of(tmp_path, text))[1].digest
    assert server_of(plan_of(tmp_path, text))[1].digest == first
    (tmp_path / "servers/one/more.py").write_text("1")
    assert server_of(plan_of(tmp_path, text))[1].digest != first


def test_a_program_of_the_bundle_has_to_be_there(look: Look) -> None:
    (error,) = look(bundle(f"{{transport: {{type: stdio, command: [./nowhere.py]}}, {ALL}}}")).errors
    assert (error.code, error.path) == ("E_CONFIG_ENTRY", "spec.config.transport.command[0]")


def test_what_nobody_may_grant_is_not_granted_to_a_server(look: Look) -> None:
    seen = look(bundle(f"{{{STDIO}, {ALL}, sandbox: {{filesystem: {{write: [/usr/lib]}}}}}}"))
    (error,) = seen.errors
    assert (error.code, error.path) == ("E_CONFIG_DANGEROUS", "spec.config.sandbox.filesystem.write[0]")
    seen = look(bundle(f"{{{STDIO}, {ALL}, sandbox: {{network: {{allow: [nonsense]}}}}}}"))
    assert [error.path for error in seen.errors] == ["spec.config.sandbox.network.allow[0]"]


def test_a_program_that_installs_is_a_warning(look: Look) -> None:
    seen = look(bundle(f"{{transport: {{type: stdio, command: [npx, -y, some-server]}}, {ALL}}}"))
    assert seen.errors == []
    assert [(one.code, one.path) for one in seen.warnings] == [
        ("W_CONFIG_MCP_INSTALLS", "spec.config.transport.command[0]")
    ]


# --- what the user agrees to


@pytest.mark.parametrize(
    ("endpoint", "rule"),
    [
        ("http://localhost:8080/mcp", "localhost:8080"),
        ("http://127.0.0.1/mcp", "127.0.0.1:80"),
        ("https://API.Example/mcp?x=1", "api.example:443"),
        ("http://[::1]:9/", "[::1]:9"),
    ],
)
def test_the_endpoint_is_the_only_place_that_an_http_server_reaches(tmp_path: Path, endpoint: str, rule: str) -> None:
    plan = plan_of(tmp_path, bundle(f"{{transport: {{type: http, endpoint: '{endpoint}'}}, {ALL}}}"))
    tool, server = server_of(plan)
    assert tool.sandbox.network == {"allow": [rule]}
    assert server.endpoint == endpoint


def powers(seen: Any) -> list[Any]:
    kinds = (Command, ServerEndpoint, Folder, Reach, Variable)
    return [power for power in seen.judgement.powers if isinstance(power, kinds)]


def test_commands_and_endpoints_are_powers(look: Look) -> None:
    config = "{transport: {type: stdio, command: [/usr/bin/node, 'a b', '${X}'], env: {T: '${T}'}}, EXPOSE, SANDBOX}"
    sandbox = "sandbox: {network: {allow: ['a.example:443']}, filesystem: {read: [/data]}, env: [HOME]}"
    seen = look(bundle(config.replace("EXPOSE", ALL).replace("SANDBOX", sandbox)), env={"X": "secret", "T": "t"})
    assert powers(seen) == [
        Variable("X", "Extension"),
        Variable("T", "Extension"),
        Variable("HOME", "tool github"),
        Folder("github", "read", "/data"),
        Reach("github", "a.example:443"),
        Command("github", "/usr/bin/node 'a b' '${X}'"),
    ]
    http = look(bundle(f"{{transport: {{type: http, endpoint: 'https://h.example/mcp'}}, {ALL}}}"))
    assert powers(http) == [ServerEndpoint("github", "https://h.example:443")]
    named = look(
        bundle(f"{{transport: {{type: http, endpoint: '${{URL}}'}}, {ALL}}}"), env={"URL": "https://h.example"}
    )
    assert powers(named)[-1] == ServerEndpoint("github", "${URL}")


def test_an_agents_own_config_asks_as_well(look: Look) -> None:
    own = "{transport: {type: stdio, command: [/usr/bin/other]}, " + ALL + ", sandbox: {filesystem: {read: [/data]}}}"
    seen = look(bundle(f"{{{STDIO}, {ALL}}}") + TWO.replace("CONFIG", own).replace("CAP", "{}"))
    assert powers(seen) == [
        Folder("github", "read", "/data"),
        Command("github", "/usr/bin/server"),
        Command("github", "/usr/bin/other"),
    ]


OAUTH = "{transport: {type: http, endpoint: 'https://tracker.example/mcp', oauth: OAUTH}, expose: {tools: true}}"


def test_how_a_server_is_logged_in_to_arrives_at_the_tool_host_and_its_secret_nowhere_else(tmp_path: Path) -> None:
    oauth = (
        "{clientId: mine, clientSecret: '${SECRET}', issuer: 'https://login.example', scopes: [read],"
        " hosts: ['login.example:443']}"
    )
    plan = plan_of(tmp_path, bundle(OAUTH.replace("OAUTH", oauth)), {"SECRET": "a secret"})
    tool, server = server_of(plan)
    assert msgspec.convert(server.login, ServerLogin) == ServerLogin(
        client_id="mine", client_secret="a secret", issuer="https://login.example", scopes=["read"]
    )
    assert server.login_secrets == ["a secret"] and "a secret" not in repr(server)
    assert set(tool.sandbox.network["allow"]) == {"login.example:443", "tracker.example:443"}
    for agent in plan.agents.values():
        assert b"a secret" not in msgspec.msgpack.encode(agent)


def test_a_login_can_be_turned_off(tmp_path: Path) -> None:
    _, server = server_of(plan_of(tmp_path, bundle(OAUTH.replace("OAUTH", "false"))))
    assert msgspec.convert(server.login, ServerLogin) == ServerLogin(enabled=False)


@pytest.mark.parametrize(
    ("oauth", "fault"),
    [
        ("{hosts: [login.example]}", "expected host:port"),
        ("{hosts: ['login.example:*']}", "for loopback hosts only"),
        ("{clientSecret: x}", "it belongs to a clientId"),
        ("{flow: clientCredentials, clientId: x, clientSecret: y}", "needs clientId, clientSecret and issuer"),
        ("{issuer: 'login.example'}", "it is no http or https URL"),
        ("{redirectUri: 'https://elsewhere.example/callback'}", "no address that can be listened on here"),
        ("true", "transport"),
        ("{client: x}", "client"),
        ("{clientMetadataUrl: 'http://client.example/me'}", "clientMetadataUrl"),
    ],
)
def test_what_a_login_cannot_be(tmp_path: Path, oauth: str, fault: str) -> None:
    with pytest.raises(BundleError) as refused:
        plan_of(tmp_path, bundle(OAUTH.replace("OAUTH", oauth)))
    assert any(fault in str(problem) for problem in refused.value.problems)


def test_a_header_with_a_token_needs_no_login(tmp_path: Path) -> None:
    config = OAUTH.replace("OAUTH", "{scopes: [read]}, headers: {authorization: 'Bearer x'}")
    with pytest.raises(BundleError) as refused:
        plan_of(tmp_path, bundle(config))
    assert "nobody logs in" in str(refused.value.problems)
    plan_of(tmp_path, bundle(OAUTH.replace("OAUTH", "false, headers: {authorization: 'Bearer x'}")))


def test_hosts_of_a_login_are_powers(look: Look) -> None:
    seen = look(bundle(OAUTH.replace("OAUTH", "{hosts: ['login.example:443', 'localhost:*']}")))
    assert powers(seen) == [
        ServerEndpoint("github", "https://tracker.example:443"),
        Reach("github", "login.example:443"),
        Reach("github", "localhost:*"),
    ]
