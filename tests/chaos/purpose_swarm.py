"""A swarm that does a real piece of work: planner, coder and reviewer in one folder, with a tool that has a
dependency of its own, an MCP server, a skill and two extensions; and a model server that plays the three over 40 steps.

The model reads as a model does: what it says next follows from the conversation that it is shown. Where it is told that
nobody knows what became of a call, it makes the call again. So every step leaves the same files however often it runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.bundles import documents
from tests.mcp_fixture import SERVER

#: How long a tool works at which something is killed (seconds).
PAUSE_S: Final = 0.5
#: Stands for that in the arguments of a call, as a text.
PAUSE: Final = "PAUSE"


class Step(NamedTuple):
    """One step of an agent: a call, or the text that ends its turn."""

    #: The tool; "" for a text.
    tool: str
    #: Its arguments, or the text.
    said: Any
    #: The code that the call has to end with; "" for a result.
    code: str = ""


def write(path: str, content: str) -> Step:
    return Step("file-system__write", {"path": path, "content": content})


def read(path: str) -> Step:
    return Step("file-system__read", {"path": path})


def shell(command: str, code: str = "") -> Step:
    return Step("bash__exec", {"command": command}, code)


def slow(name: str, command: str) -> Step:
    """A command during which something can be killed: it says that it has begun."""
    return shell(f"touch .at-{name}; sleep {PAUSE}; {command}")


def ask(agent: str, message: str) -> Step:
    return Step("agents__request", {"target": agent, "input": message})


def text(said: str) -> Step:
    return Step("", said)


#: What each agent does about each message.
STATS: Final = "def mean(values):\n    return sum(values) / len(values)\n"
MENDED: Final = 'def mean(values):\n    """The mean."""\n    return sum(values) / len(values)\n'
JOB: Final = "Build the statistics report."
LAST: Final = "The report is done."
SCRIPTS: Final[dict[tuple[str, str], list[Step]]] = {
    ("planner", JOB): [
        write("PLAN.md", "1. the library\n2. the report\n"),
        Step("skills__list", {}),
        Step("skills__open", {"name": "style"}),
        ask("coder", "Step 1: the library."),
        read("REVIEW.md"),
        ask("coder", "Step 2: the report."),
        slow("planner", "test -s REPORT.md"),
        write("DONE.md", "all of it\n"),
        text(LAST),
    ],
    ("coder", "Step 1: the library."): [
        slow("coder", "cat PLAN.md"),
        write("lib/stats.py", STATS),
        Step("table__render", {"rows": [[1, 2], [3, 4]], "file": "table.txt", "at": ".at-venv", "pause": PAUSE}),
        Step("numbers__add", {"a": 20, "b": 22, "at": ".at-mcp", "pause": PAUSE}),
        shell("echo 42 > numbers.txt"),
        Step(
            "skills__run",
            {"name": "style", "command": "./check.sh .at-skill", "args": ["lib/stats.py", "check.log", PAUSE]},
        ),
        shell("cd lib && python3 -Bc 'import stats; print(stats.mean([1, 3]))' > ../mean.txt"),
        ask("reviewer", "Review lib/stats.py."),
        write("lib/stats.py", MENDED),
        ask("reviewer", "Look at lib/stats.py again."),
        read("REVIEW.md"),
        text("The library is there."),
    ],
    ("reviewer", "Review lib/stats.py."): [
        read("lib/stats.py"),
        slow("reviewer", "grep -c def lib/stats.py > defs.txt"),
        shell("rm -rf lib", "E_FORBIDDEN"),  # the guard says no
        write("REVIEW.md", "mean has no docstring\n"),
        text("One finding."),
    ],
    ("reviewer", "Look at lib/stats.py again."): [
        shell("grep -q 'The mean' lib/stats.py && echo mended > mended.txt"),
        write("REVIEW.md", "mean had no docstring\n"),
        text("No finding."),
    ],
    ("coder", "Step 2: the report."): [
        read("numbers.txt"),
        Step("numbers__add", {"a": 1, "b": 1, "at": ".at-again", "pause": "0"}),
        Step("table__render", {"rows": [["mean", 2.0]], "file": "report.txt", "at": ".at-again", "pause": "0"}),
        shell("cat report.txt numbers.txt mean.txt > REPORT.md"),
        ask("reviewer", "Review REPORT.md."),
        shell("test -s SECOND.md"),
        text("The report is there."),
    ],
    ("reviewer", "Review REPORT.md."): [
        read("REPORT.md"),
        write("SECOND.md", "fine\n"),
        read("SECOND.md"),
        text("Nothing to say."),
    ],
}
STEPS: Final = sum(map(len, SCRIPTS.values()))
#: What a call may end with whose process was killed; the model then makes it again.
UNKNOWN: Final = {"E_TOOL_OUTCOME_UNKNOWN", "E_TOOL_CRASHED", "E_MCP_GONE", "E_TOOL_NOT_IN_CATALOG", "E_OVERLOADED"}
#: So many calls more than steps a turn may have.
TRIES: Final = 60
#: An agent that is told this shows its conversation.
AUDIT: Final = "Show it all."
#: The files in the folder at the end, besides the marks of those that have begun.
FILES: Final = {
    "PLAN.md": "1. the library\n2. the report\n",
    "lib/stats.py": MENDED,
    "table.txt": "1 | 2\n3 | 4\n",
    "numbers.txt": "42\n",
    "check.log": "1\n",
    "mean.txt": "2.0\n",
    "defs.txt": "1\n",
    "mended.txt": "mended\n",
    "report.txt": "mean | 2.0\n",
    "REPORT.md": "mean | 2.0\n42\n2.0\n",
    "REVIEW.md": "mean had no docstring\n",
    "SECOND.md": "fine\n",
    "DONE.md": "all of it\n",
}


class Model:
    """`asked`: how often each step of each conversation was asked for. `faults`: what should not have been seen."""

    def __init__(self) -> None:
        self.base = ""
        self.asked: Counter[tuple[str, str, int]] = Counter()
        self.faults: list[str] = []
        #: What agents showed when they were told AUDIT, by their names.
        self.shown: dict[str, list[dict[str, Any]]] = {}
        #: The marks of the calls that work for PAUSE_S; others are done at once.
        self.pauses: set[str] = set()
        #: Called with (agent, message, step) before it is answered.
        self.before: Callable[[str, str, int], None] = lambda agent, message, step: None

    def answer(self, body: dict[str, Any]) -> tuple[str, Step]:
        """The id of the next call, and the step."""
        messages = body["messages"]
        agent = next(name for name in ("planner", "coder", "reviewer") if f"You are the {name}." in str(messages[0]))
        if any(one["role"] == "user" and _text(one) == AUDIT for one in messages):
            self.shown[agent] = messages
            return "x", text("shown")
        users = [(at, _text(message)) for at, message in enumerate(messages) if message["role"] == "user"]
        at, message = [(at, said) for at, said in users if (agent, said) in SCRIPTS][-1]
        script = SCRIPTS[agent, message]
        results = {one["tool_call_id"]: _text(one) for one in messages[at:] if one["role"] == "tool"}
        calls = [call for one in messages[at:] for call in one.get("tool_calls") or ()]
        step = 0
        for call in calls:
            if call["function"]["name"] != script[step].tool:
                continue  # it waited for its server
            if (code := _code(results.get(call["id"], ""))) == script[step].code:
                step += 1
            elif code not in UNKNOWN or script[step].tool == "agents__request":
                self.faults.append(f"{agent}: {message}: step {step}: {results.get(call['id'])}")
        if len(calls) > len(script) + TRIES:
            self.faults.append(f"{agent}: {message}: step {step} does not come through")
            return "x", text("I give up.")
        self.before(agent, message, step)
        self.asked[agent, message, step] += 1
        call_id, found = f"c{len(calls)}", script[step]
        if found.tool and found.tool not in {tool["function"]["name"] for tool in body["tools"]}:
            return call_id, shell("sleep 0.2")  # its server is being started again
        return call_id, found


def turns_of(messages: list[dict[str, Any]]) -> list[tuple[str, list[str], list[str]]]:
    """A conversation as (message, texts of the agent, answers of agents that it asked), for each turn."""
    turns: list[tuple[str, list[str], list[str]]] = []
    asked: set[str] = set()
    for one in messages:
        if one["role"] == "user" and any(_text(one) == said for _, said in SCRIPTS):
            turns.append((_text(one), [], []))
        elif one["role"] == "assistant" and turns:
            calls = one.get("tool_calls") or ()
            asked |= {call["id"] for call in calls if call["function"]["name"] == "agents__request"}
            turns[-1][1].extend([] if calls else [_text(one)])
        elif one["role"] == "tool" and one["tool_call_id"] in asked:
            turns[-1][2].append(json.loads(_text(one))["response"])
    return turns


def expected_turns(agent: str) -> list[tuple[str, list[str], list[str]]]:
    """What `turns_of` says of an agent that had each message once and gave each one answer."""
    found = []
    for (name, message), script in SCRIPTS.items():
        if name == agent:
            asked = [(step.said["target"], step.said["input"]) for step in script if step.tool == "agents__request"]
            found.append((message, [script[-1].said], [SCRIPTS[one][-1].said + SEAL for one in asked]))
    return found


def _text(message: dict[str, Any]) -> str:
    content = message["content"]
    return str(content if isinstance(content, str) else content[0]["text"])


def _code(result: str) -> str:
    """The code of a failed call; "" for one that has a result."""
    try:
        said = json.loads(result)
    except json.JSONDecodeError:
        return ""
    failed = isinstance(said, dict) and said.get("status") == "error"
    return str(said["error"]["code"]) if failed else ""


def serve(model: Model) -> ThreadingHTTPServer:
    """The model's server on loopback. Its thread ends with `shutdown`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            call_id, step = model.answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            delta: dict[str, Any] = {"role": "assistant"}
            if step.tool:
                said = json.dumps(step.said)
                pause = PAUSE_S if any(mark in said for mark in model.pauses) else 0
                function = {"name": step.tool, "arguments": said.replace(PAUSE, str(pause))}
                delta["tool_calls"] = [{"index": 0, "id": call_id, "type": "function", "function": function}]
            else:
                delta["content"] = step.said
            head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
            finish = "tool_calls" if step.tool else "stop"
            events = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
                      {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}]  # fmt: skip
            data = ("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n").encode()
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            with suppress(OSError):  # who asked was killed
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    model.base = f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, args=(0.05,)).start()
    return server


# --- the bundle

#: A package as it comes from an index: one module.
DEPENDENCY: Final = "def lines(rows):\n    return [' | '.join(map(str, row)) for row in rows]\n"
TABLE: Final = """\
import pathlib
import time

from plaintable import lines


def render(ctx, input):
    pathlib.Path(input["at"]).touch()
    time.sleep(float(input["pause"]))
    pathlib.Path(input["file"]).write_text("\\n".join(lines(input["rows"])) + "\\n")
    return "rendered"


handlers = {"render": render}
"""
NUMBERS: Final = """\
def add(args, ask):
    open(f"{sys.argv[1]}/{args['at']}", "w").close()
    time.sleep(float(args["pause"]))
    return args["a"] + args["b"]

tools["add"] = add
serve()
"""
CHECK: Final = """\
#!/bin/sh
cd "$WORKDIR" && touch "$1" && sleep "$4" && grep -c return "$2" > "$3"
"""
GUARD: Final = """\
def register(api):
    async def guard(ctx):
        if ctx.args.get("command", "").startswith("rm -rf"):
            raise Refused("nothing is removed here")
        return await ctx.next()

    api.pipeline.register("toolCall", guard)


class Refused(Exception):
    code = "E_FORBIDDEN"
"""
#: What whoever asked is told of each answer.
SEAL: Final = " [sealed]"
SEALS: Final = f"""\
def register(api):
    async def seal(ctx):
        result = await ctx.next()
        result.response += "{SEAL}"
        return result

    api.pipeline.register("turn", seal)
"""
AGENT: Final = "---\n" + documents(
    "Agent NAME {modelConfig: {modelRef: Model/scripted}, prompt: {system: You are the NAME.}, tools: [Tool/agents, "
    "Tool/bash, Tool/file-systemTOOLS], extensions: [Extension/guard, Extension/seal, Extension/skillsEXTENSIONS]}",
)
BUNDLE: Final = documents(
    "Model scripted {provider: openai, model: m, endpoint: BASE, apiKey: {value: k}}",
    "Tool table {entry: ./tools/table/table.py, sandbox: {python: {venv: ./tools/venv}}, exports: [{name: render, "
    "parameters: {type: object, properties: {rows: {type: array}, file: {type: string}, at: {type: string}, "
    "pause: {type: string}}, required: [rows, file, at, pause]}}]}",
    "Extension guard {entry: ./extensions/guard/guard.py}",
    "Extension seal {entry: ./extensions/seal/seal.py}",
    'Extension skills {entry: "@goondan/base/skills", config: {discovery: {skillDirs: [skills]}}}',
    'Extension mcp-numbers {entry: "@goondan/base/mcp", config: {transport: {type: stdio, command: [PYTHON, "-I", '
    './servers/numbers.py, "${WORKDIR}"]}, attach: {mode: stateful, scope: agent}, expose: {tools: true}}}',
)
SWARM: Final = "---\n" + documents(
    "Swarm purpose {entryAgent: Agent/planner, workdir: shared, policy: {agentIdleSeconds: 60}}",
)


def make_bundle(folder: Path, base: str) -> None:
    """Write the bundle's files. Nothing is fetched."""
    files = {
        "tools/table/table.py": TABLE,
        "servers/numbers.py": f"{SERVER}\n{NUMBERS}",
        "skills/style/SKILL.md": "---\nname: style\ndescription: Checks the style of a file.\n---\n\nRun ./check.sh.\n",
        "skills/style/check.sh": CHECK,
        "extensions/guard/guard.py": GUARD,
        "extensions/seal/seal.py": SEALS,
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    (folder / "skills/style/check.sh").chmod(0o755)
    _install(folder / "tools" / "venv")
    agents = ""
    for name, tools, extensions in (
        ("planner", "", ""), ("coder", ", Tool/table", ", Extension/mcp-numbers"), ("reviewer", "", ""),
    ):  # fmt: skip
        agents += AGENT.replace("NAME", name).replace("TOOLS", tools).replace("EXTENSIONS", extensions)
    text_ = BUNDLE.replace("BASE", base).replace("PYTHON", f"{sys.base_prefix}/bin/python3")
    (folder / "goondan.yaml").write_text(text_ + agents + SWARM)


def _install(venv: Path) -> None:
    """A virtual environment with the dependency."""
    subprocess.run([f"{sys.base_prefix}/bin/python3", "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = venv.glob("lib/python3*/site-packages")
    (packages / "plaintable.py").write_text(DEPENDENCY)
