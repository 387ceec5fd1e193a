"""Bundles of strangers: nothing of one runs, and nothing of the user's leaves, before the user has agreed to it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.bundles import documents
from tests.kernel_fixture import BUNDLE, ROOT, Sandbox, sandbox
from tests.process.terminal import Terminal

#: `gdn trust` has no other user's files to name when nobody else can be.
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
STRANGER = 4711
EXTENSION = documents(
    "Model console {provider: embedded}",
    "Extension spy {entry: ./ext/spy.py}",
    "Agent main {modelConfig: {modelRef: Model/console}, tools: [Tool/bash], extensions: [Extension/spy]}",
)
#: Leaves a trace wherever it runs.
MODULE = "def register(api):\n    with open({marker!r}, 'a') as out: out.write({word!r})\n"
ASKS = "Do you trust it?"


@contextmanager
def stranger(text: str = EXTENSION, **env: str) -> Iterator[Sandbox]:
    """A bundle that nobody has agreed to, in a command line that trusts nothing by itself."""
    with sandbox(text, {"GOONDAN_TRUST": "", **env}) as kernel:
        # Beside the state root: a state root in the bundle's folder would come along with it.
        move(kernel, kernel.home / "work")
        (folder(kernel) / "ext").mkdir()
        write_module(kernel, "1")
        yield kernel


def move(kernel: Sandbox, there: Path) -> None:
    """The bundle, and where commands are run."""
    there.mkdir()
    kernel.bundle = kernel.bundle.rename(there / "goondan.yaml")
    kernel.here = there


def folder(kernel: Sandbox) -> Path:
    """Of the bundle."""
    return kernel.bundle.parent


def write_module(kernel: Sandbox, word: str) -> None:
    (folder(kernel) / "ext" / "spy.py").write_text(MODULE.format(marker=str(kernel.home / "ran"), word=word))


def ran(kernel: Sandbox) -> str:
    """What extensions have left."""
    path = kernel.home / "ran"
    return path.read_text() if path.exists() else ""


def code(result: Any) -> tuple[int, str]:
    return result.status, result.json["error"]["code"]


REFUSED = (1, "E_BUNDLE_UNTRUSTED")


def say(kernel: Sandbox) -> Any:
    """One message to the entry agent, so that its extensions are loaded."""
    return kernel.gdn("run", "--json", input="hello\n")


# --- without a terminal


def test_nothing_runs_before_the_user_has_agreed() -> None:
    with stranger() as kernel:
        for command in (["run"], ["run", "--detach"], ["call", "bash__exec", "{}"]):
            assert code(kernel.gdn(*command, "--json")) == REFUSED
        result = kernel.gdn("run", input="hello\n")
        assert result.status == 1
        assert f"gdn trust {kernel.bundle}" in result.err
        for program in ("goondan.kernel.supervisor", "goondan.kernel.broker"):  # doors as well
            started = [sys.executable, "-P", "-m", program, "--bundle", str(kernel.bundle)]
            done = subprocess.run(
                started, env={**kernel.env, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=20
            )
            assert done.returncode != 0
            assert "E_BUNDLE_UNTRUSTED" in done.stderr
        assert ran(kernel) == ""


def test_agreeing_listing_and_revoking() -> None:
    with stranger() as kernel:
        shown = kernel.gdn("trust", "--show", "--json").json
        assert (shown["trusted"], [power["type"] for power in shown["new"]]) == (False, ["module"])
        assert kernel.gdn("trust", "--list", "--json").json == []
        assert "ext/spy.py (Extension/spy)" in kernel.gdn("trust").out
        shown = kernel.gdn("trust", "--show").out
        assert "ext/spy.py (Extension/spy)" in shown
        assert "trusted: yes" in shown
        (listed,) = kernel.gdn("trust", "--list", "--json").json
        assert (listed["bundle"], listed["how"]) == (str(folder(kernel)), "command")
        write_module(kernel, "2")  # in a folder of one's own edits are one's own
        assert say(kernel).status == 0
        assert ran(kernel) == "2"
        assert kernel.gdn("trust", "--revoke", "--json").json == {"bundle": str(kernel.bundle), "revoked": True}
        assert code(say(kernel)) == REFUSED
        assert kernel.gdn("trust", "--revoke", "--json").json["revoked"] is False


def test_for_one_command() -> None:
    with stranger() as kernel:
        assert kernel.gdn("run", "--trust", input="hello\n").status == 0
        assert ran(kernel) == "1"
        assert code(say(kernel)) == REFUSED
        kernel.env["GOONDAN_TRUST"] = "1"
        assert say(kernel).status == 0
        kernel.env["GOONDAN_TRUST"] = "yes"
        assert code(say(kernel)) == REFUSED


def test_what_stays_in_jails_needs_no_answer() -> None:
    with sandbox(BUNDLE, {"GOONDAN_TRUST": ""}) as kernel:
        assert kernel.call("echo hello")["output"]["stdout"] == "hello\n"
        assert "without a question" in kernel.gdn("trust").out


def test_what_init_writes_needs_no_answer_with_any_model() -> None:
    with sandbox(BUNDLE, {"GOONDAN_TRUST": ""}) as kernel:
        for template in ("agent", "two-agents", "team", "tool"):
            assert kernel.gdn("init", template, "--template", template).status == 0
            kernel.env["OPENAI_BASE_URL"] = "http://127.0.0.1:1/v1"
            assert kernel.gdn("trust", "--show", template, "--json").json["trusted"]
            del kernel.env["OPENAI_BASE_URL"]
        kernel.env["OPENAI_BASE_URL"] = "http://127.0.0.1:1/v1"
        (kernel.home / "open").mkdir()
        (kernel.home / "open").chmod(0o777)  # others can write something else there
        assert kernel.gdn("init", "open").status == 0
        assert not kernel.gdn("trust", "--show", "open", "--json").json["trusted"]
        (kernel.home / "own").mkdir()
        shutil.copy(kernel.home / "agent" / "goondan.yaml", kernel.home / "own")
        assert not kernel.gdn("trust", "--show", "own", "--json").json["trusted"]


def test_the_quickstart_needs_no_answer_and_one_that_asks_for_more_does() -> None:
    quickstart = str(ROOT / "examples" / "quickstart")
    with sandbox(BUNDLE, {"GOONDAN_TRUST": "", "OPENAI_BASE_URL": "http://127.0.0.1:1/v1"}) as kernel:
        assert kernel.gdn("trust", "--show", quickstart, "--json").json["trusted"]
        shutil.copytree(quickstart, kernel.home / "copy")
        assert not kernel.gdn("trust", "--show", "copy", "--json").json["trusted"]


# --- what a bundle can ask for

GREEDY = documents(
    'Model m {provider: anthropic, model: x, endpoint: "http://192.0.2.7:8080", '
    "apiKey: {valueFrom: {env: AWS_SECRET}}}",
    "Tool greedy {entry: ./tools/greedy.py, sandbox: {network: public, filesystem: {read: [/, ~/.ssh], "
    "write: [/srv/data]}, permissions: [agents], env: [GH_TOKEN], minTier: reduced, limits: {memoryMb: 4096}}, "
    "exports: [{name: go}]}",
    'Agent main {modelConfig: {modelRef: Model/m}, prompt: {system: "Say ${DB_PASSWORD} to everybody."}, '
    'tools: [Tool/greedy, Tool/http-fetch], policy: {toolCalls: {allowRegistry: ["slack__*"]}}}',
)
SECRETS = {"AWS_SECRET": "s3cret-aws", "GH_TOKEN": "s3cret-gh", "DB_PASSWORD": "s3cret-db"}


def test_every_power_is_named_and_no_value_is_shown() -> None:
    with sandbox(GREEDY, {"GOONDAN_TRUST": "", **SECRETS}) as kernel:
        move(kernel, kernel.home / "work")
        (folder(kernel) / "tools").mkdir()
        (folder(kernel) / "tools" / "greedy.py").write_text("handlers = {'go': lambda ctx, input: None}\n")
        home = os.path.expanduser("~")
        powers = {tuple(power.values()) for power in kernel.gdn("trust", "--show", "--json").json["new"]}
        assert powers == {
            ("openKey", "http://192.0.2.7:8080", "AWS_SECRET"),
            ("variable", "AWS_SECRET", "key"),
            ("variable", "GH_TOKEN", "tool greedy"),
            ("variable", "DB_PASSWORD", "Agent"),
            ("variable", "SLACK_BOT_TOKEN", "tool slack"),
            ("variable", "SLACK_TOKEN", "tool slack"),
            ("variable", "BRAIN_SLACK_BOT_TOKEN", "tool slack"),
            ("folder", "greedy", "read", "/"),
            ("folder", "greedy", "read", f"{home}/.ssh"),
            ("folder", "greedy", "write", "/srv/data"),
            ("network", "greedy", "public"),
            ("network", "http-fetch", "public"),
            ("network", "slack", "slack.com:443"),
            ("network", "slack", "*.slack.com:443"),
            ("endpoint", "http://192.0.2.7:8080", "AWS_SECRET"),
            ("permission", "greedy", "agents"),
            ("setting", "Tool/greedy", "minTier", "reduced"),
            ("setting", "Tool/greedy", "limits.memoryMb", "4096"),
            ("setting", "Agent/main", "allowRegistry", "slack__*"),
        }
        for command in (["trust", "--show"], ["trust"], ["trust", "--list"], ["run", "--json"]):
            result = kernel.gdn(*command)
            assert len(result.out.splitlines()) <= 40
            assert not [value for value in SECRETS.values() if value in result.out + result.err], command


def test_a_key_of_the_environment_is_sent_nowhere_unasked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://localhost:{server.getsockname()[1]}"
        text = BUNDLE.replace("{provider: embedded}", f'{{provider: anthropic, model: x, endpoint: "{url}"}}')
        with sandbox(text, {"GOONDAN_TRUST": "", "ANTHROPIC_API_KEY": "s3cret"}) as kernel:
            move(kernel, kernel.home / "work")
            assert code(say(kernel)) == REFUSED
            (power,) = kernel.gdn("trust", "--show", "--json").json["new"]
            assert power == {"type": "endpoint", "origin": url, "key": "ANTHROPIC_API_KEY"}
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_package_gets_nothing_by_a_yes_to_the_bundle() -> None:
    text = EXTENSION.replace("Tool/bash", "{ref: {kind: Tool, name: forecast, package: acme}}")
    with stranger(text) as kernel:
        package = kernel.home / "state" / "packages" / "acme"
        package.mkdir(parents=True)
        for folder in (kernel.home / "state", kernel.home / "state" / "packages"):
            folder.chmod(0o700)
        (package / "weather.py").write_text("handlers = {'get': lambda ctx, input: None}\n")
        (package / "package.yaml").write_text(
            "apiVersion: goondan.ai/v1\nkind: Package\nmetadata: {name: acme}\nspec: {}\n---\n"
            "apiVersion: goondan.ai/v1\nkind: Tool\nmetadata: {name: forecast}\n"
            "spec: {entry: ./weather.py, sandbox: {network: public, env: [KEY]}, exports: [{name: get}]}\n"
        )
        assert {power["type"] for power in kernel.gdn("trust", "--json").json["powers"]} == {"module"}
        (row,) = [row for row in kernel.gdn("grant", "list", "--json").json if row["tool"] == "acme/forecast"]
        assert (row["status"], row["granted"]) == ("pending", [])


# --- at a terminal


def test_a_person_is_asked_once() -> None:
    with stranger() as kernel:
        for answer in ("maybe\n", "\x04"):
            with Terminal(kernel, "run") as terminal:
                shown = terminal.read_until(ASKS)
                assert "ext/spy.py (Extension/spy)" in shown
                terminal.type(answer)
                assert terminal.wait() == 1
        assert ran(kernel) == ""
        with Terminal(kernel, "run", term="dumb") as terminal:
            terminal.read_until(ASKS)
            terminal.type("o\n")
            terminal.read_until("ready")
            terminal.type("\x04")
            assert terminal.wait() == 0
        for times in range(2):
            with Terminal(kernel, "call", "bash__exec", '{"command": "echo $((6*7))"}') as terminal:
                if not times:
                    terminal.read_until(ASKS)
                    terminal.type("y\n")
                assert terminal.wait() == 0
                assert ASKS not in terminal.rest()
                assert b"42" in terminal.shown


def test_what_has_grown_is_shown_and_nothing_else() -> None:
    with stranger() as kernel:
        kernel.gdn("trust")
        kernel.bundle.write_text(EXTENSION.replace("Tool/bash", "Tool/bash, Tool/http-fetch"))
        assert code(say(kernel)) == REFUSED
        with Terminal(kernel, "run", term="dumb") as terminal:
            shown = terminal.read_until(ASKS)
            assert "every public address (Tool/http-fetch)" in shown
            assert "spy" not in shown
            terminal.type("y\n")
            terminal.read_until("ready")
            terminal.type("\x04")
            assert terminal.wait() == 0
        for tools in ("Tool/bash", "Tool/bash, Tool/http-fetch"):  # less is no question, and neither is going back
            kernel.bundle.write_text(EXTENSION.replace("Tool/bash", tools))
            assert kernel.gdn("trust", "--show", "--json").json["trusted"]


def test_what_changes_between_question_and_start_is_asked_about() -> None:
    with stranger() as kernel, Terminal(kernel, "run") as terminal:
        terminal.read_until(ASKS)
        kernel.bundle.write_text(EXTENSION.replace("Tool/bash", "Tool/bash, Tool/http-fetch"))
        terminal.type("y\n")
        assert "Tool/http-fetch" in terminal.read_until(ASKS)
        terminal.type("n\n")
        assert terminal.wait() == 1
        assert ran(kernel) == ""


def test_what_was_typed_before_the_question_is_no_answer() -> None:
    with stranger() as kernel, Terminal(kernel, "run") as terminal:
        terminal.type("y\ny\ny\n")
        terminal.read_until(ASKS)
        terminal.type("\n")
        assert terminal.wait() == 1
        assert ran(kernel) == ""


# --- changed code


def test_new_code_of_a_clone_is_asked_about_and_other_edits_are_not() -> None:
    with stranger() as kernel:
        git = ["git", "-C", str(folder(kernel))]
        subprocess.run([*git, "init", "-q"], check=True)
        subprocess.run([*git, "remote", "add", "origin", "https://example.com/x"], check=True)
        kernel.gdn("trust")
        kernel.bundle.write_text(EXTENSION + "  # an edit\n")
        assert kernel.gdn("trust", "--show", "--json").json["trusted"]
        write_module(kernel, "2")
        assert code(say(kernel)) == REFUSED
        with Terminal(kernel, "run") as terminal:
            assert "it has changed in what is a clone" in terminal.read_until(ASKS)
            terminal.type("n\n")
            terminal.wait()
        assert ran(kernel) == ""
        assert kernel.gdn("trust", "--own").status == 0
        write_module(kernel, "3")
        assert say(kernel).status == 0
        assert ran(kernel) == "3"


def test_records_that_come_along_are_not_read() -> None:
    with stranger() as kernel:
        kernel.gdn("trust")
        shutil.copytree(kernel.home / "state", kernel.home / "x")
        for folder in (kernel.home / "x", kernel.home / "x" / "trust"):
            folder.chmod(0o777)
        kernel.env["GOONDAN_STATE_ROOT"] = str(kernel.home / "x")
        assert code(say(kernel)) == REFUSED


# --- files of others


@needs_root
def test_one_that_was_planted_in_a_shared_folder_does_not_run_as_root() -> None:
    with stranger() as kernel:
        shared = kernel.home / "shared"
        shared.mkdir()
        shared.chmod(0o1777)
        for path in folder(kernel).iterdir():
            path.rename(shared / path.name)
        for path in shared.rglob("*"):
            os.chown(path, STRANGER, STRANGER)
        kernel.here = shared
        result = kernel.gdn("run", input="hello\n")
        assert result.status == 1
        assert "E_BUNDLE_UNTRUSTED" in result.err
        with Terminal(kernel, "run") as terminal:
            assert f"uid {STRANGER}, who owns files" in terminal.read_until(ASKS)
            terminal.type("\n")
            assert terminal.wait() == 1
        assert ran(kernel) == ""


@needs_root
def test_roots_container_meets_files_of_the_hosts_user() -> None:
    """One question; then they run from a copy, and changed code is asked about."""
    with stranger() as kernel:
        for path in (folder(kernel), *folder(kernel).rglob("*")):
            os.chown(path, STRANGER, STRANGER)
        with Terminal(kernel, "run", "--detach") as terminal:
            assert f"uid {STRANGER}" in terminal.read_until(ASKS)
            terminal.type("y\n")
            assert terminal.wait() == 0
        try:
            assert "runs from the copy" in kernel.gdn("ps").out
            write_module(kernel, "2")  # by now it runs, and takes no other code
            assert kernel.gdn("send", "/bash__exec command=true").status == 0
            assert ran(kernel) == "1"
        finally:
            kernel.gdn("stop")
        assert code(say(kernel)) == REFUSED


def test_a_mount_that_shows_everything_as_writable_runs_from_a_copy() -> None:
    text = EXTENSION.replace("Tool/bash", "Tool/bash, Tool/here") + (
        "---\napiVersion: goondan.ai/v1\nkind: Tool\nmetadata: {name: here}\n"
        "spec: {entry: ./tools/here.py, exports: [{name: file}]}\n"
    )
    with stranger(text) as kernel:
        (folder(kernel) / "tools").mkdir()
        (folder(kernel) / "tools" / "here.py").write_text("handlers = {'file': lambda ctx, input: __file__}\n")
        for path in (folder(kernel), *folder(kernel).rglob("*")):
            path.chmod(0o777)
        (folder(kernel) / "ext" / "spy.py").write_text(
            f"def register(api):\n    with open({str(kernel.home / 'ran')!r}, 'w') as out: out.write(__file__)\n"
        )
        assert "everybody on this machine" in kernel.gdn("trust").out
        answer = kernel.gdn("run", input="/here__file\n")
        copies = kernel.env["GOONDAN_STATE_ROOT"] + "/workspaces/"
        assert (answer.status, answer.out.startswith(copies)) == (0, True), answer
        assert ran(kernel).startswith(copies)
        assert not list(Path(copies).glob("*/private/*"))  # gone with the kernel
        # What was agreed to is what runs: other code under the same name is another question, as often as it changes.
        write_module(kernel, "changed")
        assert code(say(kernel)) == REFUSED
        with Terminal(kernel, "run") as terminal:
            terminal.read_until(ASKS)
            write_module(kernel, "changed again")
            terminal.type("y\n")
            terminal.read_until(ASKS)
            terminal.type("n\n")
            assert terminal.wait() == 1
        assert "changed" not in ran(kernel)


# --- hostile names


def test_the_screen_stays_one_screen_and_harmless() -> None:
    evil = "\u202egnp.sh\u2066 \x9b31m\x85"
    paths = ", ".join(f'"/data/{evil}{number}"' for number in range(1500))
    names = ", ".join(f"A{'x' * 300}{number}" for number in range(1500))
    text = EXTENSION.replace("Tool/bash", "Tool/bash, Tool/big") + (
        "---\napiVersion: goondan.ai/v1\nkind: Tool\nmetadata: {name: big}\n"
        f"spec: {{entry: ./t.py, sandbox: {{filesystem: {{read: [{paths}]}}, env: [{names}]}}, "
        "exports: [{name: a}]}\n"
    ).replace("\x9b", "\\x9b").replace("\x85", "\\x85")
    with stranger(text) as kernel:
        place = kernel.home / "a\x1b]0;title\x07\u202eb\nDo you trust it? yes"
        folder(kernel).rename(place)
        kernel.here = place
        (place / "t.py").write_text("handlers = {'a': lambda ctx, input: None}\n")
        with Terminal(kernel, "run", "--bundle", str(place)) as terminal:
            terminal.read_until("[y = yes")
            terminal.type("\n")
            assert terminal.wait() == 1
            shown = terminal.shown.decode()
        screen = shown[: shown.index("[y = yes")]
        assert len(screen.splitlines()) <= 40
        assert not set(screen) & set("\x07\x9b\x85\u202e\u2066")
        assert "\x1b]" not in screen
        assert "ext/spy.py (Extension/spy)" in screen  # the worst is not pushed out
        assert max(map(len, screen.splitlines())) < 130
        assert json.loads(kernel.gdn("trust", "--show", str(place), "--json").out)["trusted"] is False
