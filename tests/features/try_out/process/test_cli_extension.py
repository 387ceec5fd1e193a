"""`gdn extension new|test`: what it makes, and what a trial finds, with real processes and without a kernel."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.kernel_fixture import BUNDLE, Sandbox, sandbox
from tests.process.test_cli_tool import EXTENSIONS

FIRST = "def register(api):\n    api.instance.shared['first'] = True\n"
GOOD = """\
def register(api, config):
    assert api.instance.shared["first"] and config["size"] in (1, 2)
    print("what an extension prints is no part of the result")

    async def layer(ctx):
        result = await ctx.next()
        assert ctx.tool_name == "trial__ping" and result.status == "ok", result
        return result

    api.pipeline.register("toolCall", layer)
    api.pipelines.mutate("turn.pre", lambda ctx: ctx)
    api.pipelines.mutate("step.blocks", lambda ctx: ctx)
    api.tools.register({"name": "good.one", "description": "x"}, lambda ctx, given: 1)
"""
#: What an extension does wrong, and what is told of it.
WRONG = {
    "raises": (
        "def register(api):\n    raise ValueError('not today')\n",
        "E_EXTENSION_FAILED",
        "ValueError: not today",
    ),
    "leaves": ("import os\ndef register(api):\n    os._exit(7)\n", "E_EXTENSION_FAILED", "ended with status 7"),
    "fails": (
        "def register(api):\n    async def layer(ctx):\n        return None\n"
        "    api.pipeline.register('step', layer)\n",
        "E_MIDDLEWARE",
        "extension fails failed",
    ),
}


@pytest.fixture(scope="module")
def home() -> Iterator[Sandbox]:
    used = "  extensions: [Extension/first, {ref: Extension/good, config: {size: 2}}]\n"
    text = EXTENSIONS + BUNDLE.replace("  tools:", f"{used}  tools:", 1)
    with sandbox(text) as made:
        (made.home / "ext").mkdir()
        for name, source in {"first": FIRST, "good": GOOD}.items():
            (made.home / "ext" / f"{name}.py").write_text(source)
        yield made


def test_a_trial_loads_what_is_needed_and_lets_a_turn_pass(home: Sandbox) -> None:
    report = home.gdn("extension", "test", "good", "--json")
    assert report.status == 0, report.out
    (trial,) = report.json["trials"]
    assert (trial["extension"], trial["status"]) == ("good", "passed")
    assert trial["middleware"] == {"toolCall": 1}
    assert trial["points"] == ["turn.pre", "step.blocks"]
    assert trial["tools"] == ["good__one"]
    told = home.gdn("extension", "test", "message-window").out
    assert "passed  Extension/message-window" in told
    assert "registers 1 step middleware" in told
    unknown = home.gdn("extension", "test", "godo")
    assert unknown.status != 0
    assert "Did you mean 'good'?" in unknown.err + unknown.out


def test_what_is_wrong_is_told_with_its_name_and_nothing_else_is_hurt() -> None:
    head = "apiVersion: goondan.ai/v1\nkind: Extension\n"
    specs = [f"metadata: {{name: {name}}}\nspec: {{entry: ./ext/{name}.py}}\n---\n" for name in WRONG]
    documents = "".join(head + spec for spec in specs)
    with sandbox(documents + BUNDLE) as made:
        (made.home / "ext").mkdir()
        for name, (source, _, _) in WRONG.items():
            (made.home / "ext" / f"{name}.py").write_text(source)
        report = made.gdn("extension", "test", "--json")
        assert report.status == 1
        told = {trial["extension"]: (trial["code"], trial["message"]) for trial in report.json["trials"]}
        for name, (_, code, message) in WRONG.items():
            assert told[name][0] == code
            assert message in told[name][1]


@pytest.mark.parametrize("used", [True, False])
def test_no_code_runs_that_its_user_was_not_asked_about(used: bool) -> None:
    text = EXTENSIONS + (BUNDLE.replace("  tools:", "  extensions: [Extension/first]\n  tools:", 1) if used else BUNDLE)
    with sandbox(text) as made:
        (made.home / "ext").mkdir()
        (made.home / "ext" / "good.py").write_text(GOOD)
        (made.home / "ext" / "first.py").write_text(f"open({str(made.home / 'ran')!r}, 'w')\n{FIRST}")
        made.env["GOONDAN_TRUST"] = ""
        refused = made.gdn("extension", "test", "first", "--json")
        assert refused.json["error"]["code"] == "E_BUNDLE_UNTRUSTED"
        assert not (made.home / "ran").exists()
        if used:
            assert made.gdn("extension", "test", "first", "--trust").status == 0
            assert (made.home / "ran").exists()


def test_a_new_extension_passes_its_trial_its_test_and_validation() -> None:
    with sandbox(BUNDLE) as made:
        made_now = made.gdn("extension", "new", "word-guard", "--dir", str(made.home), "--json").json
        assert made_now["files"] == ["extensions/word_guard.py", "tests/test_word_guard.py"]
        report = made.gdn("extension", "test", "word-guard", "--json")
        assert report.json["trials"][0]["status"] == "passed", report.out
        own = subprocess.run(
            [sys.executable, "-m", "unittest", "discover", "-s", "tests"], cwd=made.home, capture_output=True, text=True
        )
        assert own.returncode == 0, own.stderr
        again = made.gdn("extension", "new", "word-guard", "--dir", str(made.home), "--json")
        assert again.json["error"]["code"] == "E_INIT"
        taken = made.gdn("extension", "new", "logging", "--dir", str(made.home), "--json")
        assert taken.json["error"]["code"] == "E_INIT"
        nowhere = made.gdn("extension", "new", "other", "--dir", str(made.home / "nowhere"), "--json")
        assert nowhere.json["error"]["code"] == "E_INIT"
