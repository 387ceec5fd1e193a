"""Who may patch the config of an extension that comes with the kernel, under whatever name a bundle has it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from goondan.features.live_config.broker.rules import Proposer, judge
from goondan.features.live_config.wire import Operation
from goondan.kernel.bundle.documents import BaseExtensions
from goondan.kernel.bundle.rules.extensions import extension_spec
from goondan.schemas.bundle.effective_config import declared
from goondan.schemas.bundle.launch import AgentSpec, ModelSpec
from goondan.schemas.wire.errors import GoondanError

SERVER: dict[str, Any] = {
    "transport": {"type": "stdio", "command": ["x"]},
    "attach": {"mode": "stateful"},
    "expose": {"tools": True},
}


def spec_of(name: str, config: dict[str, Any], own_name: str | None) -> AgentSpec:
    """An agent with one bundled extension: by itself, or as the code of an Extension of the bundle."""
    found = BaseExtensions().find(name)
    assert found is not None
    extension = extension_spec(found, config)
    if own_name is not None:
        resource = {"kind": "Extension", "metadata": {"name": own_name}}
        resource["spec"] = {"entry": f"@goondan/base/{name}", "config": config}
        extension = msgspec.structs.replace(extension, name=own_name, resource=resource)
    model = ModelSpec(provider="embedded")
    return AgentSpec(
        name="a", model=model, registry=[], catalog=[], state_dir="/s", revision="r", extensions=[extension]
    )


def allowed(spec: AgentSpec, path: str, value: Any, *, operator: bool) -> bool:
    """Whether the patch is judged to be allowed. What is refused for another reason raises."""
    try:
        judge(spec, declared(spec), [Operation("add", path, value)], Proposer(operator))
    except GoondanError as error:
        if error.info.code != "E_CHANGESET_DENIED":
            raise
        return False
    return True


NAMES = pytest.mark.parametrize("own_name", [None, "mine"])


@NAMES
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("approval", marks=pytest.mark.feature("approvals")),
        pytest.param("budget", marks=pytest.mark.feature("budgets")),
        "required-tools-guard",
    ],
)
def test_what_guards_an_agent_is_not_patched_by_its_extensions(name: str, own_name: str | None) -> None:
    spec = spec_of(name, {}, own_name)
    assert not allowed(spec, "/extensions/0/config/x", 1, operator=False)
    assert allowed(spec, "/extensions/0/config/x", 1, operator=True)


@NAMES
def test_others_are(own_name: str | None) -> None:
    assert allowed(spec_of("message-window", {}, own_name), "/extensions/0/config/maxMessages", 3, operator=False)


@NAMES
@pytest.mark.feature("mcp")
@pytest.mark.requirement("MCP-22")
@pytest.mark.parametrize(
    ("path", "value", "by_operator"),
    [
        ("expose/tools", ["get_*"], True),
        ("instructions", False, True),
        ("transport/command", ["y"], False),
        ("attach/scope", "agent", False),
        ("namePrefix", "y", False),
        ("sandbox", {"network": "public"}, False),
        ("grants", ["sampling"], False),
        ("deadlines", {"totalSeconds": 9}, False),
    ],
)
def test_of_an_mcp_server_only_what_it_exposes_is_patched_and_by_operators_only(
    path: str, value: Any, by_operator: bool, own_name: str | None
) -> None:
    spec = spec_of("mcp", SERVER, own_name)
    assert allowed(spec, f"/extensions/0/config/{path}", value, operator=True) is by_operator
    assert not allowed(spec, f"/extensions/0/config/{path}", value, operator=False)
    whole = {**SERVER, "transport": {"type": "stdio", "command": ["y"]}}
    assert not allowed(spec, "/extensions/0/config", whole, operator=True)
