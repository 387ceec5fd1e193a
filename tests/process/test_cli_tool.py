"""What `gdn tool list`, `gdn tool show` and `gdn extension list` say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from goondan.kernel.bundle.documents import BaseExtensions, base_tools
from goondan.kernel.cli import execute
from goondan.schemas.bundle.address import build_tool_name
from tests.bundles import documents
from tests.kernel_fixture import BUNDLE, Sandbox, sandbox

#: A tool whose examples are right, wrong, and unable to be right; and one that nobody can test without the network.
TOOLS = (
    documents(
        "Tool words {entry: ./tools/words.py, exports: [{name: count, "
        "description: Count the words of a text. Then stop., parameters: {type: object, "
        "properties: {text: {type: string}}, required: [text]}, aliases: {txt: text}, examples: [{input: {text: a b}, "
        'output: {words: 2}}, {input: {txt: ""}, output: {words: 1}}, {input: {text: boom}}, {input: {text: a}, '
        "output: null}]}, {name: keep, examples: [{input: {}, output: {found: [given.txt]}}, {input: {}, "
        "output: {found: [given.txt]}}]}, {name: bare}]}",
        "Tool far {entry: ./tools/far.py, sandbox: {network: public}, exports: [{name: get, examples: [{input: {}}]}]}",
    )
    + "---\n"
)
WORDS = """\
import os

def count(ctx, input):
    if input["text"] == "boom":
        raise ValueError("no")
    return {"words": len(input["text"].split())}

def keep(ctx, input):
    found = sorted(os.listdir(ctx.workdir))
    open(os.path.join(ctx.workdir, "made"), "w").close()
    return {"found": found}

handlers = {"count": count, "keep": keep, "bare": lambda ctx, input: 1}
"""


@pytest.fixture
def home() -> Any:
    with sandbox(TOOLS + BUNDLE) as made:
        tools = made.home / "tools"
        (tools / "examples").mkdir(parents=True)
        (tools / "examples" / "given.txt").write_text("x")
        (tools / "words.py").write_text(WORDS)
        (tools / "far.py").write_text("handlers = {'get': lambda ctx, input: 1}\n")
        yield made


@pytest.mark.requirement("BASE-01", "NAME-01", "NAME-06")
def test_list_has_every_tool_and_its_source(home: Sandbox) -> None:
    listed = home.gdn("tool", "list", "--json").json["tools"]
    bundled = [
        build_tool_name(tool.name, export.name) for tool in base_tools().values() for export in tool.body.exports
    ]
    assert [row["name"] for row in listed] == ["words__count", "words__keep", "words__bare", "far__get", *bundled]
    assert {row["source"] for row in listed[4:]} == {"@goondan/base"}
    assert listed[0] == {
        "name": "words__count",
        "tool": "Tool/words",
        "source": "bundle",
        "description": "Count the words of a text. Then stop.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
        "idempotent": False,
    }
    assert "words__count " in home.gdn("tool", "list").out
    # What is listed is what can be called.
    called = home.gdn("call", "words__bare", "--json").json
    assert (called["status"], called["output"]) == ("ok", 1)


def test_show_explains_a_tool_or_one_of_its_functions(home: Sandbox) -> None:
    whole = home.gdn("tool", "show", "Tool/words", "--json").json
    assert [export["name"] for export in whole["exports"]] == ["words__count", "words__keep", "words__bare"]
    assert (whole["line"], whole["errorMessageLimit"]) == (3, 1000)
    assert whole["sandbox"]["limits"]["wallSeconds"] == 120
    page = home.gdn("tool", "show", "words__count").out
    for words in (
        "text       string  required",
        "also called txt: text",
        '{"text": "a b"}  → {"words": 2}',
        "isolation",
    ):
        assert words in page
    assert "words__keep" not in page


PACKAGE = documents(
    'Package "@acme/weather" {version: "1.0.0"}',
    'Tool forecast {entry: ./forecast.py, sandbox: {network: {allow: ["api.weather.example:443"]}}, '
    "exports: [{name: get, examples: [{input: {}}]}]}",
)


def test_a_packages_tool_is_listed_under_its_package_and_shows_that_it_gets_less_than_it_requests(
    kernel: Sandbox,
) -> None:
    folder = kernel.home / "state" / "packages" / "@acme" / "weather"
    folder.mkdir(parents=True)
    (folder / "goondan.yaml").write_text(PACKAGE)
    (folder / "forecast.py").write_text("handlers = {'get': lambda ctx, input: 'sun'}\n")
    use = '{kind: Tool, name: forecast, package: "@acme/weather"}'
    kernel.bundle.write_text(BUNDLE.replace("[Tool/bash]", f"[{use}]"))
    printed = kernel.gdn("tool", "list", "--json").json
    assert "tools" in printed, printed
    listed = {row["name"]: row["source"] for row in printed["tools"]}
    assert listed["forecast__get"] == "@acme/weather"
    validated = kernel.gdn("validate", "--json").json["tools"]
    assert {row["name"]: row["source"] for row in validated} == listed
    assert "tools: forecast (@acme/weather), and" in kernel.gdn("validate").out
    shown = kernel.gdn("tool", "show", "forecast", "--json").json
    assert shown["sandbox"]["network"] == {"allow": ["api.weather.example:443"]}
    assert shown["granted"]["network"] == "none"
    assert "gdn grant list" in kernel.gdn("tool", "show", "forecast").out


@pytest.mark.parametrize("what", ["show", pytest.param("test", marks=pytest.mark.feature("try_out"))])
@pytest.mark.parametrize(
    ("wrong", "hint"),
    [("bash__excc", "Did you mean 'bash__exec'?"), ("Tool/bsh", "Did you mean 'bash'?"), ("qq__qq", "`gdn tool list`")],
)
def test_a_name_that_is_no_tool_gets_the_closest_one(
    capsys: pytest.CaptureFixture[str], what: str, wrong: str, hint: str
) -> None:
    assert execute(["tool", what, wrong, "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "E_TOOL_NOT_FOUND"
    assert error["suggestion"].startswith(hint)


EXTENSIONS = (
    documents(
        "Extension good {entry: ./ext/good.py, config: {size: 1}, dependsOn: [Extension/first]}",
        "Extension first {entry: ./ext/first.py}",
    )
    + "---\n"
)


def test_the_list_of_extensions_has_the_bundles_own_first_and_who_uses_them() -> None:
    used = "  extensions: [Extension/first, {ref: Extension/good, config: {size: 2}}]\n"
    with sandbox(EXTENSIONS + BUNDLE.replace("  tools:", f"{used}  tools:", 1)) as home:
        (home.home / "ext").mkdir()
        for name in ("first", "good"):
            (home.home / "ext" / f"{name}.py").write_text("def register(api): ...\n")
        shown = home.gdn("extension", "list", "--json").json["extensions"]
        page = home.gdn("extension", "list").out
    names = [row["name"] for row in shown]
    assert names == ["good", "first", *BaseExtensions().names()]
    good = shown[0]
    assert (good["source"], good["entry"]) == ("bundle", "./ext/good.py")
    assert len(good["agents"]) == 1
    logging = shown[names.index("logging")]
    assert (logging["source"], logging["agents"]) == ("@goondan/base", [])
    assert "maxChars" in logging["configSchema"]["properties"]
    assert "config: of, level, arguments, maxChars" in page
