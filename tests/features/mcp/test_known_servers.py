"""Servers that `gdn mcp add` knows by their names, and the agent that gets them in goondan.yaml."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from goondan.features.mcp import command
from goondan.features.mcp.command.add import known_server, naming
from goondan.features.mcp.command.rules.packages import package_command
from goondan.kernel.bundle.rules.positions import Allowance, compose, plain
from goondan.schemas.wire.errors import GoondanError

KNOWN = json.loads(Path(command.__file__).with_name("known_servers.json").read_bytes())


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_server_says_what_is_installed(name: str) -> None:
    known = known_server(name)
    assert known.keys() <= {"command", "env", "values", "sandbox", "scope"}
    assert package_command(known["command"]) is not None


def test_another_name_is_refused_with_the_names_that_are_known() -> None:
    with pytest.raises(GoondanError) as caught:
        known_server("no-such-server")
    assert caught.value.info.code == "E_USAGE"
    assert "filesystem" in str(caught.value.info.suggestion)


HEAD = "kind: Agent\nmetadata: {name: main}\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("spec:\n  tools: [a] # kept\n", "spec:\n  extensions: [Extension/x]\n  tools: [a] # kept\n"),
        ("spec: {tools: [a]}\n", "spec: {extensions: [Extension/x], tools: [a]}\n"),
        ("spec:\n  extensions: [E/a]\n", "spec:\n  extensions: [Extension/x, E/a]\n"),
        (
            "spec:\n  extensions:\n    # why\n    - ref: E/a\n      config: {}\n",
            "spec:\n  extensions:\n    # why\n    - Extension/x\n    - ref: E/a\n      config: {}\n",
        ),
        (
            "spec:\n  extensions:\n  - E/ä\n  tools: []\n",
            "spec:\n  extensions:\n  - Extension/x\n  - E/ä\n  tools: []\n",
        ),
    ],
)
def test_one_name_is_added_and_the_rest_stays_as_it_is_written(before: str, after: str) -> None:
    other = "kind: Agent\nmetadata: {name: other}\nspec: {tools: [b]}\n---\n"
    made = naming("f", (other + HEAD + before).encode(), "main", "x").decode()
    assert made == other + HEAD + after
    assert [plain(one)["kind"] for one in compose(made, Allowance()).documents] == ["Agent", "Agent"]


@pytest.mark.parametrize(
    "text", ["spec:\n  extensions: []\n  tools: []\n", "spec: {}\n", "spec:\n  extensions: *a\n", ""]
)
def test_what_cannot_be_changed_safely_is_left_to_the_person(text: str) -> None:
    with pytest.raises(GoondanError) as caught:
        naming("f", (HEAD + text).encode(), "main", "x")
    assert "spec.extensions" in str(caught.value.info.suggestion)
