"""The powers of bundles, read from their documents."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from goondan.kernel.bundle.loader import inspect_bundle
from goondan.kernel.grants.powers import Endpoint, Folder, Module, OpenKey, OwnModel, Power, Reach, Setting, Variable
from goondan.kernel.trust.policy import hidden_folders
from goondan.schemas.wire.errors import GoondanError

AGENT = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: m}
spec: {MODEL}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: a}
spec: {modelConfig: {modelRef: Model/m}, AGENT}
"""
EMBEDDED = "provider: embedded"
VENDOR = "provider: openai, model: x"


def powers(folder: Path, model: str = EMBEDDED, agent: str = "", more: str = "", **env: str) -> list[Power]:
    text = AGENT.replace("MODEL", model).replace(", AGENT", f", {agent}" if agent else "")
    (folder / "goondan.yaml").write_text(text + more)
    found = inspect_bundle(str(folder / "goondan.yaml"), state_dir=None, env=env, handlers=False)
    return list(found.judgement.powers)


def tool(sandbox: str, name: str = "t") -> str:
    return (
        f"---\napiVersion: goondan.ai/v1\nkind: Tool\nmetadata: {{name: {name}}}\n"
        f"spec: {{entry: ./t.py, sandbox: {{{sandbox}}}, exports: [{{name: go}}]}}\n"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "t.py").write_text("handlers = {'go': None}\n")
    return tmp_path


def test_jails_are_no_power(folder: Path) -> None:
    assert powers(folder, more=tool("")) == []
    assert powers(folder, agent="tools: [Tool/bash, Tool/wait, Tool/t, Tool/tool-result]", more=tool("")) == []
    assert powers(folder, more=tool("limits: {memoryMb: 100}, filesystem: {read: [./data]}, isolation: call")) == []


@pytest.mark.parametrize(
    ("model", "env", "expected"),
    [
        (EMBEDDED, {"OPENAI_API_KEY": "k"}, []),
        ("provider: auto", {}, [OwnModel(asleep=True)]),
        ("provider: auto", {"OPENAI_API_KEY": "k"}, [OwnModel(asleep=False)]),
        (VENDOR, {"OPENAI_API_KEY": "k"}, [Endpoint("https://api.openai.com:443", "OPENAI_API_KEY")]),
        (f"{VENDOR}, endpoint: 'http://127.0.0.1:1/v1'", {}, [Endpoint("http://127.0.0.1:1", "")]),
        (f"{VENDOR}, endpoint: 'http://127.0.0.1:1/v1', apiKey: k", {}, [Endpoint("http://127.0.0.1:1", "")]),
        (
            f"{VENDOR}, endpoint: 'http://Evil.example/v1'",
            {"OPENAI_API_KEY": "k"},
            [
                OpenKey("http://evil.example:80", "OPENAI_API_KEY"),
                Endpoint("http://evil.example:80", "OPENAI_API_KEY"),
            ],
        ),
        (
            f"{VENDOR}, endpoint: 'https://user:x@evil.example:8/v1', apiKey: '${{A}}${{B}}'",
            {"A": "k", "B": "k"},
            [
                Variable("A", "key"),
                Variable("B", "key"),
                Endpoint("https://evil.example:8", "A"),
                Endpoint("https://evil.example:8", "B"),
            ],
        ),
        (
            f"{VENDOR}, endpoint: 'http://evil.example', apiKey: {{value: k}}",
            {},
            [OpenKey("http://evil.example:80", ""), Endpoint("http://evil.example:80", "")],
        ),
        (
            f"{VENDOR}, endpoint: 'https://h', headers: {{x-a: {{valueFrom: {{env: AWS}}}}, x-b: 'v${{B}}'}}",
            {"AWS": "k", "B": "k", "OPENAI_API_KEY": "k"},
            [
                Variable("AWS", "key"),
                Variable("B", "key"),
                Endpoint("https://h:443", "AWS"),
                Endpoint("https://h:443", "B"),
                Endpoint("https://h:443", "OPENAI_API_KEY"),
            ],
        ),
        (
            f"{VENDOR}, endpoint: 'http://evil.example', headers: {{x-a: b}}",
            {},
            [OpenKey("http://evil.example:80", ""), Endpoint("http://evil.example:80", "")],
        ),
        (
            f"{VENDOR}, endpoint: 'https://h', apiKey: {{valueFrom: {{env: AWS}}}}",
            {},
            [Variable("AWS", "key"), Endpoint("https://h:443", "AWS")],
        ),
    ],
)
def test_models(folder: Path, model: str, env: dict[str, str], expected: list[Power]) -> None:
    assert powers(folder, model, **env) == expected


def test_a_model_in_place_of_another_is_asked_for_too(folder: Path) -> None:
    other = "---\napiVersion: goondan.ai/v1\nkind: Model\nmetadata: {name: other}\n"
    other += "spec: {provider: openai, model: o, "
    other += "endpoint: 'https://evil.example', apiKey: {valueFrom: {env: AWS}}}"
    model = f"{VENDOR}, endpoint: 'http://127.0.0.1:1/v1', fallback: [Model/other]"
    asked = powers(folder, model, more=other, AWS="k")
    assert asked == [
        Variable("AWS", "key"),
        Endpoint("http://127.0.0.1:1", ""),
        Endpoint("https://evil.example:443", "AWS"),
    ]


@pytest.mark.parametrize(
    ("endpoint", "value", "origin"),
    [
        ("${URL}", "https://mine.example/v1", "${URL}"),
        ("${URL}/v1", "https://mine.example", "${URL}"),
        ("${URL}.evil.example", "https://mine", "https://mine.evil.example:443"),
        ("${URL}@evil.example", "https://mine", "https://evil.example:443"),
        ("${URL}//evil.example", "https:", "https://evil.example:443"),
        ("https://evil.example/${URL}", "x", "https://evil.example:443"),
        ("https://${URL}.example", "evil", "https://evil.example:443"),
    ],
)
def test_an_address_in_a_variable_is_the_users_only_as_a_whole(
    folder: Path, endpoint: str, value: str, origin: str
) -> None:
    found = powers(folder, f"{VENDOR}, endpoint: '{endpoint}', apiKey: k", URL=value)
    assert [power for power in found if isinstance(power, Endpoint)] == [Endpoint(origin, "")]


def test_variables_by_where_they_go(folder: Path) -> None:
    found = powers(folder, agent='prompt: {system: "${A} $${B}"}', more=tool('env: [C, "${D}"]'), A="a", D="E")
    # D holds the name of another one, which is what the tool gets.
    assert set(found) == {Variable("A", "Agent"), *(Variable(name, "tool t") for name in "CDE")}
    key = f"{VENDOR}, apiKey: {{valueFrom: {{env: '${{F}}'}}}}"
    assert {Variable("F", "key"), Variable("G", "key")} <= set(powers(folder, key, F="G", G="k"))


def test_what_tools_ask_for(folder: Path) -> None:
    home = os.path.expanduser("~")
    found = powers(
        folder,
        more=tool(
            "filesystem: {read: [/, ~/.ssh, ./inside], write: [./inside]}, permissions: [agents], minTier: reduced, "
            "network: {allow: ['*.h.example:443', '10.0.0.1:1']}, limits: {processes: 100}"
        ),
    )
    assert set(found) >= {
        Folder("t", "read", "/"),
        Folder("t", "read", f"{home}/.ssh"),
        Folder("t", "write", str(folder / "inside")),
        Reach("t", "*.h.example:443"),
        Reach("t", "10.0.0.1:1"),
        Setting("Tool/t", "minTier", "reduced"),
        Setting("Tool/t", "limits.processes", "100"),
    }
    assert Folder("t", "read", str(folder / "inside")) not in found


def test_bundled_tools_count_when_an_agent_can_call_them_and_as_it_narrows_them(folder: Path) -> None:
    assert powers(folder) == []
    assert powers(folder, agent="tools: [Tool/http-fetch]") == [Reach("http-fetch", "public")]
    narrowed = "tools: [{ref: Tool/http-fetch, sandbox: {network: {allow: ['h.example:443']}}}]"
    assert powers(folder, agent=narrowed) == [Reach("http-fetch", "h.example:443")]
    opened = powers(folder, agent="policy: {toolCalls: {allowRegistry: ['http-fetch__get']}}")
    assert opened == [Reach("http-fetch", "public"), Setting("Agent/a", "allowRegistry", "http-fetch__get")]


def test_modules_are_known_by_all_that_they_may_import(folder: Path) -> None:
    extension = "---\napiVersion: goondan.ai/v1\nkind: Extension\nmetadata: {name: e}\nspec: {entry: ./ext/e.py}\n"
    (folder / "ext").mkdir()
    (folder / "ext" / "e.py").write_text("def register(api): pass\n")
    agent = "extensions: [Extension/e]"
    (one,) = powers(folder, agent=agent, more=extension)
    assert isinstance(one, Module)
    assert (one.extension, one.entry) == ("e", "ext/e.py")
    (folder / "ext" / "beside.py").write_text("x = 1\n")
    (other,) = powers(folder, agent=agent, more=extension)
    assert isinstance(other, Module)
    assert other.digest != one.digest
    assert powers(folder, more=extension) == []  # nobody uses it


def test_a_hidden_folder_whose_name_no_plan_can_hold_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", os.fsdecode(b"/home/ann\xff"))
    with pytest.raises(GoondanError, match="name that is not UTF-8") as told:
        hidden_folders(None)
    assert told.value.info.code == "E_STATE"
