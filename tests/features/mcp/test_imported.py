"""Servers of other programs as Extensions: nothing that may be a secret comes through, and the YAML says the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.features.mcp.bundle.document import extension_document, usable_name, yaml_text
from goondan.features.mcp.command.rules.importing import Imported, import_servers, plain_json, servers_of
from goondan.features.mcp.command.rules.packages import package_command
from goondan.kernel.bundle.rules.positions import Allowance, compose, plain
from goondan.schemas.bundle.address import is_resource_name
from goondan.schemas.wire.errors import GoondanError

SECRET = "hunter2-Zk8fW0qSECRET77"


def imported(servers: Any, tools: tuple[str, ...] = ("bash",)) -> list[Imported]:
    return import_servers(servers_of({"mcpServers": servers}), tools)


def one(**server: Any) -> Imported:
    return imported({"x": server})[0]


def transport(found: Imported) -> dict[str, Any]:
    assert found.document is not None
    made: dict[str, Any] = found.document["spec"]["config"]["transport"]
    return made


def read_again(text: str) -> Any:
    composed = compose(text, Allowance())
    assert not composed.faults
    return plain(composed.documents[0])


# --- secrets

PLACES: dict[str, dict[str, Any]] = {
    "a variable": {"command": "a", "env": {"GITHUB_TOKEN": SECRET}},
    "a variable with a harmless name": {"command": "a", "env": {"NAME": SECRET}},
    "a number that is a secret": {"command": "a", "env": {"USER_PIN": 482913}},
    "an option's value": {"command": "a", "args": ["--api-key", SECRET]},
    "a short one": {"command": "a", "args": ["--password", "hunter2"]},
    "an option with =": {"command": "a", "args": [f"--api-key={SECRET}"]},
    "a variable of a container": {"command": "docker", "args": ["run", "-e", f"TOKEN={SECRET}", "image"]},
    "an argument alone": {"command": "npx", "args": ["-y", "pkg", "ghp_abcdefghijklmnop"]},
    "a base64 text": {"command": "a", "args": ["wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"]},
    "a URL with a password": {"command": "npx", "args": ["-y", "pg", f"postgresql://me:{SECRET}@db/x"]},
    "a header of a program": {
        "command": "npx",
        "args": ["mcp-remote", "u", "--header", f"Authorization: Bearer {SECRET}"],
    },
    "a header": {"url": "https://h.example/mcp", "headers": {"Authorization": f"Bearer {SECRET}"}},
    "a header of any name": {"url": "https://h.example/mcp", "headers": {"X-Any": SECRET}},
    "a query": {"url": f"https://h.example/mcp?k={SECRET}"},
    "a user": {"url": f"https://me:{SECRET}@h.example/mcp"},
    "a path": {"url": f"https://h.example/s/{SECRET}/mcp"},
    "a default": {"command": "a", "env": {"X": "${X:-" + SECRET + "}"}},
    "text around a reference": {"command": "a", "env": {"X": "${A}" + SECRET}},
    "a key that is not known": {"command": "a", "password": SECRET},
    "an object for a text": {"command": "a", "env": {"X": [SECRET]}},
}
#: What must not come through, of those that have another secret.
OTHERS = {"a number that is a secret": "482913", "an argument alone": "ghp_abcdef", "a short one": "hunter2"} | {
    "a base64 text": "bPxRfiCY"
}


@pytest.mark.parametrize("place", PLACES)
def test_no_secret_comes_through(place: str) -> None:
    found = one(**PLACES[place])
    said = json.dumps([found.document, found.attention, found.variables])
    assert OTHERS.get(place, SECRET) not in said
    assert "hunter2" not in said


@given(
    st.dictionaries(st.sampled_from(["API_KEY", "HOST", "ANY", "MODE"]), st.text(min_size=6, max_size=40), min_size=1)
)
def test_no_value_of_a_variable_comes_through_unless_it_is_harmless(env: dict[str, str]) -> None:
    from goondan.schemas.text.secret_values import REFERENCE, is_harmless

    made = transport(one(command="a", env=env))["env"]
    for name, value in env.items():
        assert made[name] == value if is_harmless(name, value) else made[name] != value or REFERENCE.search(value)


def test_what_is_hidden_is_named_and_reaches_the_program() -> None:
    found = one(command="npx", args=["-y", "pkg", "--api-key", SECRET], env={"LEVEL": "debug"})
    assert transport(found) == {
        "type": "stdio",
        "command": ["/bin/sh", "-c", 'exec npx -y pkg --api-key "${MCP_X_API_KEY}"'],
        "env": {"LEVEL": "debug", "MCP_X_API_KEY": "${MCP_X_API_KEY}"},
    }
    assert found.variables == ["MCP_X_API_KEY"]
    assert any("MCP_X_API_KEY" in text for text in found.attention)


def test_two_servers_that_mean_two_things_by_one_name_get_two_variables() -> None:
    first, second = imported(
        {
            "a": {"command": "x", "env": {"API_KEY": "one-secret"}},
            "b": {"command": "x", "env": {"API_KEY": "two-secret"}},
        }
    )
    assert transport(first)["env"] == {"API_KEY": "${MCP_A_API_KEY}"}
    assert transport(second)["env"] == {"API_KEY": "${MCP_B_API_KEY}"}
    same = imported({name: {"command": "x", "env": {"API_KEY": "same"}} for name in "ab"})
    assert {transport(server)["env"]["API_KEY"] for server in same} == {"${API_KEY}"}


# --- forms


@pytest.mark.parametrize(
    "value",
    [
        {"mcpServers": {"x": {"command": "a", "args": ["b"]}}},
        {"servers": {"x": {"type": "stdio", "command": "a", "args": ["b"]}}, "inputs": []},
        {"mcp": {"servers": {"x": {"command": "a", "args": ["b"]}}}},
        {"mcp": {"x": {"type": "local", "command": ["a", "b"], "enabled": True}}},
        {"context_servers": {"x": {"command": {"path": "a", "args": ["b"]}}}},
        {"projects": {"/p": {"mcpServers": {"x": {"command": "a", "args": ["b"]}}}}, "theme": "dark"},
        {"x": {"command": "a", "args": ["b"]}},
    ],
)
def test_each_form_of_a_list_is_read(value: Any) -> None:
    (found,) = import_servers(servers_of(value), ())
    assert (found.name, transport(found)["command"]) == ("mcp-x", ["a", "b"])


@pytest.mark.parametrize("key", ["url", "httpUrl", "serverUrl", "endpoint"])
def test_each_name_of_an_address_is_read(key: str) -> None:
    assert transport(one(**{key: "http://127.0.0.1:8080/mcp"})) == {
        "type": "http",
        "endpoint": "http://127.0.0.1:8080/mcp",
    }


@pytest.mark.parametrize("value", [None, 1, [], {}, {"mcpServers": {}}, {"mcpServers": []}, {"a": {"b": 1}}, "text"])
def test_what_has_no_server_is_refused(value: Any) -> None:
    with pytest.raises(GoondanError) as caught:
        servers_of(value)
    assert caught.value.info.code == "E_USAGE"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(["command", "args", "env", "url", "headers", "type", "cwd", "x"]), inner)
        ),
        max_leaves=12,
    )
)
def test_whatever_a_file_holds_is_converted_or_refused(value: Any) -> None:
    try:
        servers = servers_of({"mcpServers": {"x": value}})
    except GoondanError:
        return
    for found in import_servers(servers, ()):
        assert found.document is None or read_again(yaml_text(found.document)) == found.document
        assert found.document is not None or found.attention


def test_comments_and_closing_commas_are_no_part_of_the_json() -> None:
    text = '{ // "a"\n "a": "x // no, /* no */", /* b */ "b": [1, 2, ],\n}'
    assert json.loads(plain_json(text)) == {"a": "x // no, /* no */", "b": [1, 2]}


def test_what_needs_attention_is_said() -> None:
    found = one(
        command="npx", args=["-y", "@scope/pkg", "/srv/data", "${workspaceFolder}"], disabled=True, autoApprove=["a"],
        timeout=3, excludeTools=["b"], cwd="/", color="red",
    )  # fmt: skip
    said = "\n".join(found.attention)
    for part in ("gdn mcp add x -- npx -y @scope/pkg", "sandbox.filesystem", "switched off", "autoApprove", "`timeout`",
                 "expose.tools", "cwd", "`color`"):  # fmt: skip
        assert part in said, part
    assert found.document is not None
    assert found.document["spec"]["config"]["attach"] == {"mode": "stateful", "scope": "agent"}
    assert transport(found)["command"][-1] == "${WORKDIR}"


def test_the_only_tools_are_the_only_ones_here() -> None:
    found = one(command="a", includeTools=["get_*", "add"])
    assert found.document is not None
    assert found.document["spec"]["config"]["expose"]["tools"] == ["get_*", "add"]
    assert not any("includeTools" in text for text in found.attention)
    assert any("excludeTools" in text for text in one(command="a", excludeTools=["x"], includeTools=[1]).attention)


def test_the_older_transport_and_containers_are_said_to_be_impossible() -> None:
    assert any("sse" in text for text in one(type="sse", url="https://h.example/sse").attention)
    assert any("cannot be started in a jail" in text for text in one(command="docker", args=["run", "i"]).attention)


# --- names and text


@given(st.lists(st.text(max_size=40), max_size=8))
def test_every_server_gets_a_name_of_its_own_that_a_resource_may_have(names: list[str]) -> None:
    taken: set[str] = set()
    for wanted in names:
        name = usable_name(wanted, {"bash", "wait"}, taken)
        assert is_resource_name(name)
        assert name not in taken
        assert name.removeprefix("mcp-") not in {"bash", "wait"}
        taken.add(name)


@given(
    st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"]))),
    st.dictionaries(
        st.from_regex(r"[A-Z_]{1,9}", fullmatch=True), st.text(alphabet=st.characters(exclude_categories=["Cs"]))
    ),
)
def test_the_yaml_says_what_the_document_says(command: list[str], env: dict[str, str]) -> None:
    document = extension_document("mcp-x", {"type": "stdio", "command": command, "env": env}, scope="agent")
    assert read_again(yaml_text(document)) == document


@pytest.mark.parametrize(
    "word",
    [
        "true",
        "yes",
        "Null",
        "1e3",
        "0x1f",
        "1_000",
        "12:30",
        "2001-01-01",
        "~",
        "",
        "- a",
        "a: b",
        "#",
        "=",
        "<<",
        "é",
        "\u2028",
        "\x07",
    ],
)
def test_a_text_that_looks_like_something_else_stays_a_text(word: str) -> None:
    assert read_again(yaml_text({"a": word})) == {"a": word}


# --- packages


@pytest.mark.parametrize(
    ("command", "registry", "package", "wanted", "program", "arguments"),
    [
        ("npx -y @scope/server /a b", "npm", "@scope/server", "", None, ["/a", "b"]),
        ("npx --yes server@1.2.3", "npm", "server", "1.2.3", None, []),
        ("npx -y @s/p@^1 --flag", "npm", "@s/p", "^1", None, ["--flag"]),
        ("npx -y -p @s/p run --x", "npm", "@s/p", "", "run", ["--x"]),
        ("/usr/bin/npx -y --package=p -- prog a", "npm", "p", "", "prog", ["a"]),
        ("bunx p", "npm", "p", "", None, []),
        ("npm exec -- p a", "npm", "p", "", None, ["a"]),
        ("uvx mcp-server-time --local-timezone=UTC", "pypi", "mcp-server-time", "", None, ["--local-timezone=UTC"]),
        ("uvx p@1.0", "pypi", "p", "==1.0", None, []),
        ("uvx --from p[cli]==2 prog x", "pypi", "p", "==2", "prog", ["x"]),
        ("uv tool run p@latest", "pypi", "p", "", None, []),
        ("pipx run p", "pypi", "p", "", None, []),
        ("pip install p>=1,<2", "pypi", "p", ">=1,<2", None, []),
    ],
)
def test_what_installs_a_package_is_understood(
    command: str, registry: str, package: str, wanted: str, program: str | None, arguments: list[str]
) -> None:
    found = package_command(command.split())
    assert found is not None
    assert (found.registry, found.package, found.wanted) == (registry, package, wanted)
    assert (found.program, found.arguments) == (program, arguments)


@pytest.mark.parametrize(
    "command",
    ["", "node x.js", "npx", "npx -y", "npx --registry=http://x p", "npx -y git+https://h/x", "npx -y ../x",
     "npx -y ./x", "npx -y p@file:../x", "npx -y http://h/x.tgz", "uvx --index-url x p", "uvx git+https://h/x",
     "uvx ./x", "pip install -r x", "pip install p @ file:///x", "uvx p;os_name", "npx -y p@npm:other"],
)  # fmt: skip
def test_what_would_take_a_package_from_elsewhere_is_not(command: str) -> None:
    found = package_command(command.split())
    assert found is None or (found.arguments and command.endswith(tuple(found.arguments)) and found.package == "p")


@pytest.mark.parametrize(
    "text",
    ['{"a": 1,\n' + "/" * 200 + '\n"b": 2}', '"' + '\\"' * 100_000, "/*" * 100_000, ",/*" * 100_000, ", " * 100_000],
    ids=["a line of slashes", "a string without an end", "comments", "commas and comments", "commas"],
)
def test_no_file_takes_long_to_read(text: str) -> None:
    """Each took minutes, or years, when a part of it could be read in several ways."""
    plain_json(text)
    assert json.loads(plain_json('{"a": [1, // one,\n' + "/" * 200 + "\n],}")) == {"a": [1]}


def test_a_secret_that_is_one_plain_word_is_not_copied() -> None:
    server = {"command": "node", "args": ["--token=hunter2secret", "--api-key", "hunter2secret", "--level=debug"]}
    (made,) = import_servers(servers_of({"mcpServers": {"s": server}}), set())
    assert "hunter2secret" not in json.dumps(made.document)
    assert "--level=debug" in json.dumps(made.document)
