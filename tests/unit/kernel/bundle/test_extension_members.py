"""What an extension's source names of `api` that does not exist."""

from __future__ import annotations

import ast
from textwrap import dedent
from typing import Any

import pytest

from goondan.agentproc.extensions import api as api_module
from goondan.agentproc.extensions.api import ConsoleLogger, ExtensionApi
from goondan.agentproc.extensions.state import InstanceApi, StoredState
from goondan.kernel.bundle.rules.extensions import unknown_members
from goondan.schemas.bundle.extensions import API_MEMBERS
from tests.unit.kernel.bundle.conftest import GOOD, Look, sound

CLASSES: dict[str, Any] = {
    "events": api_module.EventsApi,
    "instance": InstanceApi,
    "logger": ConsoleLogger,
    "pipeline": api_module.PipelineApi,
    "pipelines": api_module.PipelinesApi,
    "state": StoredState,
    "tools": api_module.ToolsApi,
}


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.requirement("EXT-09")
def test_the_list_is_what_the_agent_gives() -> None:
    # `api.server` is there for bundled extensions that have one alone.
    assert public(ExtensionApi) - {"server"} == set(API_MEMBERS)
    documented = {"extension", "pipelines", "tools", "events", "ext_state"}
    assert documented | {"instance", "logger"} <= set(API_MEMBERS)
    for member, kind in CLASSES.items():
        assert public(kind) == set(API_MEMBERS[member] or ()), member


def found(code: str) -> list[tuple[str, int]]:
    return [(unknown.name, unknown.line) for unknown in unknown_members(ast.parse(dedent(code)))]


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("def register(api): api.pipeline.register('turn', f)", []),
        ("def register(api):\n  api.piplines.mutate('x', f)", [("api.piplines", 2)]),
        ("async def register(api, config):\n  api.events.listen('x', f)", [("api.events.listen", 2)]),
        ("def register(host):\n  host.extState()", [("host.extState", 2)]),
        (
            "def register(api):\n  def inner(ctx):\n    api.secrets\n  async def other(ctx):\n    api.state.save()",
            [("api.secrets", 3), ("api.state.save", 5)],
        ),
        ("def register(api):\n  f = lambda ctx: api.nothing\n  g = lambda api: api.anything", [("api.nothing", 2)]),
        ("def register(api):\n  def inner(api):\n    api.anything", []),
        ("def register(api):\n  api = wrap(api)\n  api.anything", []),
        ("def register(api):\n  if True:\n    api.one\n  api.one\n  api.two", [("api.one", 3), ("api.two", 5)]),
        pytest.param("def register(api):\n  api.oauth.get_access_token({})", [], marks=pytest.mark.feature("oauth")),
        pytest.param(
            "def register(api):\n  api.oauth.getAccessToken({})",
            [("api.oauth.getAccessToken", 2)],
            marks=pytest.mark.feature("oauth"),
        ),
        ("def register(api):\n  api.__class__\n  api.extension.spec.anything\n  api.instance.shared['x']", []),
        ("def other(api):\n  api.anything\nregister = other", []),
        ("def register(): pass", []),
        ("def register(*given): given.anything", []),
    ],
)
def test_what_is_told(code: str, names: list[tuple[str, int]]) -> None:
    assert found(code) == names


def test_the_closest_member_is_suggested() -> None:
    told = {
        u.name: u.suggestion for u in unknown_members(ast.parse("def register(api): api.extState(); api.tools.add()"))
    }
    assert "ext_state" in str(told["api.extState"])
    assert told["api.tools.add"] is None


@pytest.mark.feature("changesets")
def test_validate_warns_and_names_the_line(look: Look) -> None:
    extension = "apiVersion: goondan.ai/v1\nkind: Extension\nmetadata: {name: log}\nspec: {entry: ext/log.py}\n---\n"
    uses = GOOD.replace("  tools:\n", "  extensions: [Extension/log]\n  tools:\n", 1)
    result = sound(look(extension + uses, files={"ext/log.py": "def register(api):\n    api.swarmBundle.open()\n"}))
    (warning,) = result.warnings
    assert (warning.code, warning.path) == ("W_CONFIG_API", "spec.entry")
    assert "api.swarmBundle does not exist" in warning.message
    assert "line 2" in warning.message
    assert "swarm_bundle" in str(warning.suggestion)
