"""A swarm that has done something already, for tests of the page as a whole.

`lead` asks `coder` and fetches pages, `coder` calls a shell, and `guard` asks a person before each of its calls. The
first two have a model with prices. What is there: a run with a slow step, a connection that was denied, a call that
waits for a person, and a turn that goes on.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from tests.features.page.browser import Chromium, Site, site
from tests.kernel_fixture import wait_until
from tests.process.model_servers import server

BUNDLE: Final = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: priced}
spec:
  provider: anthropic
  model: large
  endpoint: "ENDPOINT"
  apiKey: k
  pricing: {inputPerMillion: 30000, outputPerMillion: 90000}
---
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: console}
spec: {provider: embedded}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: lead}
spec:
  modelConfig: {modelRef: Model/priced}
  prompt: {system: You lead.}
  tools: [Tool/agents, Tool/http-fetch]
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: coder}
spec:
  modelConfig: {modelRef: Model/priced}
  tools: [Tool/bash]
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: guard}
spec:
  modelConfig: {modelRef: Model/console}
  tools: [Tool/bash]
  extensions:
    - ref: Extension/approval
      config: {rules: [{tools: ["bash__*"], action: ask, reason: pushes are looked at}]}
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: swarm}
spec:
  entryAgent: Agent/lead
  agents: [{ref: Agent/lead}, {ref: Agent/coder}, {ref: Agent/guard}]
"""
#: How long the slow step of the first run takes (seconds): longer than all else in it.
SLOW_S: Final = 1.5
#: The call that waits for a person, and the one that is denied a connection.
PUSH, DENIED = "echo git push --force", "http://10.1.2.3/prices"


def tell(page: Site, agent: str, text: str, instance: str = "default") -> str:
    """Send a message without waiting for its answer; the event's id."""
    body = json.dumps({"text": text, "agent": agent, "instance": instance}).encode()
    said = {"Authorization": f"Bearer {page.token}", "Content-Type": "application/json", "Prefer": "respond-async"}
    request = urllib.request.Request(f"{page.address}/api/v1/messages", body, said)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        assert answer.status == 202
        return str(json.load(answer)["eventId"])


def call(tool: str, **args: Any) -> str:
    """The message that lets the priced model call a tool."""
    return f"call {tool} {json.dumps(args)}"


def asked(page: Site, agent: str, text: str, instance: str = "default") -> str:
    """Send a message and wait for its answer: the text."""
    return str(page.ask("/api/v1/messages", {"text": text, "agent": agent, "instance": instance})["response"])


@contextmanager
def lived(chromium: Chromium) -> Iterator[Site]:
    """The swarm, with its page."""
    with server("fake_llm") as base, site(chromium, BUNDLE.replace("ENDPOINT", base)) as page:
        slow = call("bash__exec", command=f"sleep {SLOW_S}; echo built")
        request = call("agents__request", target="coder", instanceKey="default", input=slow)
        assert "built" in asked(page, "lead", request, "release")
        assert "E_SANDBOX_DENIED" in asked(page, "lead", call("http-fetch__get", url=DENIED))
        tell(page, "guard", f"/bash__exec command='{PUSH}'")
        tell(page, "coder", call("bash__exec", command="sleep 600", timeoutMs=0), "nightly")
        wait_until(lambda: page.ask("/api/v1/approvals")["items"])
        wait_until(lambda: any(turn["agent"] == "coder" for turn in page.ask("/api/v1/waits")["turns"]))
        yield page
