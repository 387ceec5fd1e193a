"""Code mode: calls from a script, and the tokens of a task over 200 tools.

One script calls `json-query__count` a hundred times in sequence, then a hundred times with sixteen on their way, and
measures that by itself. Beside it, calls of an agent without a script (tool_call): they tell a slow hour from a slow
script.

The tokens are those of the requests that leave. The task is three calls among 200 tools. Without code mode the model
sees every schema and calls in its first answer. With it, the model looks for the tools in a first script, reads three
schemas, and calls in a second one.
"""

from __future__ import annotations

import json
import statistics
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from bench.compare import Benchmark, Goal, Metric
from bench.swarm import PATIENCE_S, Swarm, swarm
from bench.tool_call import warm
from bench.turn import model_server

#: Calls of one measurement, and how often it is made.
CALLS, TIMES = 100, 7
#: Tools of the task: so many Tools with so many exports each.
TOOLS, EXPORTS = 20, 10

HEAD = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: loopback}
spec: MODEL
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: main}
spec:
  modelConfig: {modelRef: Model/loopback}
  prompt: {system: Be brief.}
  tools: [NAMES]
  extensions: [EXTENSIONS]
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: bench}
spec:
  entryAgent: Agent/main
  agents: [{ref: Agent/main}]
  policy: {durability: process}
"""
SCRIPT = f"""\
import json, time
def once(): return tools.json_query__count(data="[1, 2, 3]")
once()
found = []
for _ in range({TIMES}):
    begun = time.monotonic()
    for _ in range({CALLS}): once()
    between = time.monotonic()
    tools.parallel(*[tools.json_query__count.later(data="[1, 2, 3]") for _ in range({CALLS})])
    found.append((between - begun, time.monotonic() - between))
print(json.dumps(found))
"""
WORDS = ("issue", "pull request", "branch", "release", "commit", "label", "milestone", "review", "workflow", "secret")
SEARCH = 'for tool in tools.search("list open issues of a repository", 3): print(tool)'
TASK = """\
wanted = [{"owner": "goondan", "repo": name, "state": "open"} for name in ("a", "b", "c")]
print(tools.map(tools.hub_00__list_issue, wanted))
"""


def parameters(word: str) -> dict[str, Any]:
    """The schema of one tool, as servers in the wild have them."""
    text = {"type": "string"}
    return {
        "type": "object",
        "properties": {
            "owner": {**text, "description": "The account that owns the repository, without a leading @"},
            "repo": {**text, "description": "The name of the repository, without the extension .git"},
            "state": {
                **text,
                "enum": ["open", "closed", "all"],
                "description": f"Which {word}s are wanted by their state",
            },
            "since": {**text, "description": "Only what was changed after this time, in the form of RFC 3339"},
            "page": {"type": "integer", "minimum": 1, "description": "Which page of the results, from 1"},
            "perPage": {"type": "integer", "minimum": 1, "maximum": 100, "description": "How many results a page has"},
        },
        "required": ["owner", "repo"],
    }


def many_tools(folder: Path) -> tuple[str, list[str]]:
    """The documents of 200 tools in `folder`, and their names."""
    documents, names = [], []
    code = folder / "hub.py"
    handlers = ", ".join(f'"list_{word.replace(" ", "_")}": same' for word in WORDS)
    code.write_text(f"def same(ctx, input):\n    return input\n\n\nhandlers = {{{handlers}}}\n")
    for number in range(TOOLS):
        exports = [
            {
                "name": f"list_{word.replace(' ', '_')}",
                "description": f"List the {word}s of a repository of hub {number}, the newest first. Use the filters "
                "for fewer of them, and ask for the next page when there are more than one page holds.",
                "parameters": parameters(word),
            }
            for word in WORDS
        ]
        name = f"hub-{number:02}"
        names.append(f"Tool/{name}")
        document = {"apiVersion": "goondan.ai/v1", "kind": "Tool", "metadata": {"name": name}}
        documents.append(json.dumps({**document, "spec": {"entry": "./hub.py", "exports": exports}}))
    return "\n---\n".join(documents), names


@contextmanager
def kernel(model: str, extensions: str, *, many: bool) -> Iterator[Swarm]:
    """A running kernel with an agent of this model; stopped at the end."""
    with swarm(bundle=HEAD) as made:
        documents, names = many_tools(made.bundle.parent) if many else ("", ["Tool/json-query"])
        head = HEAD.replace("MODEL", model).replace("NAMES", ", ".join(names)).replace("EXTENSIONS", extensions)
        made.bundle.write_text(head + (f"---\n{documents}\n" if documents else ""))
        made.start()
        yield made


async def ask(made: Swarm, text: str) -> str:
    """One turn that must succeed; what it answers."""
    async with made.client() as client:
        return (await client.ask("main", text, instance="k", deadline=PATIENCE_S)).text or ""


def tokens(extensions: str, message: str) -> float:
    """The tokens of all requests of the task, in thousands."""
    with model_server("--tokens") as base:
        model = f'{{provider: anthropic, model: bench, endpoint: "{base}", apiKey: {{value: bench-key}}}}'
        with kernel(model, extensions, many=True) as made:
            response = uvloop.run(ask(made, message))
        if not response.startswith("done after"):
            raise SystemExit(response)
        with urllib.request.urlopen(f"{base}/stats") as stats:
            return float(json.load(stats)["tokens"]) / 1000


def scripted(seconds: float) -> Mapping[str, float]:
    """Code mode."""
    with kernel("{provider: embedded}", "Extension/code-mode", many=False) as made:
        said = uvloop.run(ask(made, f"/code__run {json.dumps({'language': 'python', 'code': SCRIPT})}"))
    sequence, in_flight = zip(*json.loads(json.loads(said)["printed"]), strict=True)
    scripts = [["code__run", {"language": "python", "code": code}] for code in (SEARCH, TASK)]
    return {
        "in sequence": statistics.median(sequence) * 1000,
        "16 in flight": statistics.median(in_flight) * 1000,
        "tokens": tokens("Extension/code-mode", f"each {json.dumps(scripts)}"),
    }


def plain(seconds: float) -> Mapping[str, float]:
    """The same calls made by an agent itself, one after the other, and the task with every schema shown."""
    arguments = json.dumps({"owner": "goondan", "repo": "a", "state": "open"}, separators=(",", ":"))
    return {
        "in sequence": warm(seconds)["p50"] * CALLS / 1000,
        "tokens": tokens("", f"callN 3 hub-00__list_issue {arguments}"),
    }


PLAIN = "without scripts"

BENCHMARK = Benchmark(
    name="code_mode",
    what=f"{CALLS} calls of json-query from one script, and the tokens of a task over {TOOLS * EXPORTS} tools",
    sides={"code mode": scripted, PLAIN: plain},
    metrics=[
        Metric("in sequence", "ms", "lower", Goal(2, of=PLAIN)),
        Metric("16 in flight", "ms", "lower", Goal(60)),
        Metric("tokens", "k", "lower", Goal(0.05, PLAIN)),
    ],
    durability="process",
)
