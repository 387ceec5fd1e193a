"""Random calls of every bundled tool through the whole of it: client, broker, agent, tool host, jail.

No failure without a structure, no process left, memory flat. Tools with a network ask the recorded services on
loopback, which also misbehave, granted as an operator grants them. Some of them in the test suite; as many as
wished by hand, with the figures: `GOONDAN_RANDOM_CALLS=10000 make test ARGS="tests/chaos/test_random_calls.py -s"`.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import Counter
from contextlib import suppress
from queue import Empty, SimpleQueue
from subprocess import PIPE
from threading import Thread
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from goondan.kernel.bundle.documents import base_tools
from goondan.schemas.wire.errors import CODES, HELP_BASE, is_os_error_code
from goondan.toolhost.calls.call_inputs import CACHE_BYTES
from tests.calls_by_schema import Call, calls
from tests.kernel_fixture import Sandbox
from tests.service_fixture import MockApi, mock_api

CALLS = int(os.environ.get("GOONDAN_RANDOM_CALLS", "120"))
#: Calls between two looks at the memory.
CHUNK = min(100, CALLS // 3)
#: How long an answer may take (seconds): a random command can last until its default timeout of 30 s.
ANSWER_S = 60.0
#: Each has an agent of its own, and a jail for every tool; more jails than the tool host keeps would all start cold.
INSTANCES = 2
#: What a process may grow by behind the first fifth of the calls (MiB): arenas and caches that still fill up.
GROWTH_MIB = 8.0
#: With so many calls everything has filled up by then, and this share is all that it may grow by; in the broker the
#: answers that are kept are sometimes longer, sometimes shorter (MiB).
MANY_CALLS, GROWTH_OF_MANY = 10_000, 0.02
KEPT_ANSWERS_VARY_MIB = 1.0
#: What is kept on purpose, and at most: the journal's pages, and the messages that calls belong to (bytes). No more of
#: it can be there than was said, and an event's own fields take some more.
KEPT = {"broker": 8 << 20, "toolhost": CACHE_BYTES}
PER_CALL = 2048
#: Calls that fail are the tools' business; these codes would be ours.
OURS = {"E_INTERNAL", "E_TOOL_CRASHED", "E_TOOL_OUTCOME_UNKNOWN", "E_AGENT_FAILED", "E_KERNEL_LOST", "E_LEASE_LOST"}
#: Longer than any error message may be, whatever the tool's limit.
MAX_MESSAGE = max(tool.body.error_message_limit for tool in base_tools().values())


def grant(kernel: Sandbox, api: MockApi) -> None:
    """Let every bundled tool with a network reach the services, with a token of each."""
    kernel.env |= {"TELEGRAM_BOT_TOKEN": "123:ABC", "SLACK_BOT_TOKEN": "xoxb-1"}
    network = {"network": {"allow": [api.host]}}
    tools = [tool.name for tool in base_tools().values() if tool.body.sandbox.network != "none"]
    policy = kernel.home / "state" / "policy.yaml"
    policy.parent.mkdir(exist_ok=True)
    policy.write_text(json.dumps({"widen": [{"tool": name, "sandbox": network} for name in tools]}), encoding="utf-8")
    policy.chmod(0o600)


def drawn(number: int, count: int, server: str) -> list[Call]:
    """`count` calls, the same in every run; others for every `number`. Small draws are quicker."""
    found: list[Call] = []

    @seed(20261122 + number)
    @settings(
        max_examples=count,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(calls(base_tools().values(), server))
    def draw(call: Call) -> None:
        found.append(call)

    draw()
    return found


def memory_mib(pid: int) -> float:
    """What a process has in memory."""
    with open(f"/proc/{pid}/statm") as source:
        return int(source.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def wrong(tool: str, result: Any) -> str | None:
    """Why this is no proper ToolResult."""
    if not isinstance(result, dict) or result.get("status") not in ("ok", "error"):
        return "no ToolResult"
    if result["status"] == "ok":
        return None if "output" in result else "no output"
    error = result.get("error", {})
    code, message = error.get("code"), error.get("message")
    lost = OURS - {"E_TOOL_OUTCOME_UNKNOWN"} if tool == "tool-result__get" else OURS  # no such handle
    if code in lost or not (code in CODES or is_os_error_code(str(code))):
        return "a code that no call may end with"
    if not message or not error.get("suggestion") or error.get("helpUrl") != HELP_BASE + code:
        return "incomplete"
    return None if len(message) <= MAX_MESSAGE or code == "E_USAGE" else "too long"


@pytest.mark.timeout(3600 if CALLS > 1000 else 120)
@pytest.mark.requirement("ERROR-01", "HANDLER-06", "HANDLER-07", "RESULT-05")
def test_random_calls_end_in_structured_results_and_leave_nothing(kernel: Sandbox) -> None:
    with mock_api() as api:
        check_calls(kernel, api)
        assert api.requests(), "no tool has asked the services"


def check_calls(kernel: Sandbox, api: MockApi) -> None:
    """CALLS calls against these services."""
    made = [call for number in range(0, CALLS, CHUNK) for call in drawn(number, CHUNK, api.url)]
    assert len(made) >= CALLS * 0.9
    assert {name.partition("__")[0] for name, _ in made} == set(base_tools())
    grant(kernel, api)
    kernel.detach()
    batch = kernel.popen("call", "--batch", "-", stdin=PIPE)
    assert batch.stdin is not None and batch.stdout is not None
    answers: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        for line in batch.stdout or ():
            answers.put(line)

    reading = Thread(target=read, daemon=True)
    reading.start()  # results of megabytes come while lines are still written
    codes: Counter[str] = Counter()
    memory: list[dict[str, float]] = []
    began = time.monotonic()
    said: list[int] = []
    for start in range(0, len(made), CHUNK):
        said.append(0)
        chunk = made[start : start + CHUNK]
        for number, (tool, args) in enumerate(chunk, start):
            line = {"id": number, "tool": tool, "args": args, "instance": f"i{number % INSTANCES}"}
            data = json.dumps(line).encode() + b"\n"
            said[-1] += len(data) + PER_CALL
            batch.stdin.write(data)
        batch.stdin.flush()
        answered: set[int] = set()
        for _ in chunk:
            try:
                line_out = answers.get(timeout=ANSWER_S)
                answer = json.loads(line_out)
            except Empty:
                left = [made[number] for number in range(start, start + len(chunk)) if number not in answered]
                pytest.fail(f"no answer within {ANSWER_S} s: {left}"[:4000])
            said[-1] += len(line_out)
            problem = wrong(made[answer["id"]][0], answer["result"])
            assert problem is None, (problem, made[answer["id"]], answer["result"])
            answered.add(answer["id"])
            codes[answer["result"].get("error", {}).get("code", "ok")] += 1
        assert answered == set(range(start, start + len(chunk)))
        memory.append(held(kernel))
    took = time.monotonic() - began
    batch.stdin.close()
    assert batch.wait(timeout=30) == 0
    assert not [command for command in kernel.processes().values() if command.startswith("sleep 300")]
    fifth = max(1, len(memory) // 5)
    # What is on its way at one moment is no growth: medians of the second fifth and of the last.
    settled, last = middle(memory[fifth : 2 * fifth]), middle(memory[-fifth:])
    heard = sum(said[fifth:])
    allowed = {name: GROWTH_MIB + min(KEPT.get(name.split()[0], 0), heard) / (1 << 20) for name in last}
    if CALLS >= MANY_CALLS:
        allowed = {name: GROWTH_OF_MANY * mib for name, mib in settled.items()}
        allowed = {name: mib + KEPT_ANSWERS_VARY_MIB * name.startswith("broker") for name, mib in allowed.items()}
    grown = {name: mib - settled.get(name, mib) for name, mib in last.items()}
    print(f"\n{len(made)} calls in {took:.0f} s: {dict(codes.most_common())}")
    print(f"MiB after a fifth {rounded(settled)}, in the last one {rounded(last)}")
    print(f"said since then: {heard / (1 << 20):.1f} MiB")
    assert [name for name in grown if grown[name] > allowed[name]] == [], (rounded(grown), rounded(allowed))
    assert codes["ok"] > len(made) / 8
    assert codes["E_TOOL_INVALID_ARGS"] > 0


def held(kernel: Sandbox) -> dict[str, float]:
    """The memory of every process that lives as long as the kernel, by role and name (MiB)."""
    roles = ("broker", "toolhost", "agent", "supervisor")
    rows = [row for row in kernel.ps() if row["role"] in roles and row["pid"]]
    found = {}
    for row in rows:
        with suppress(FileNotFoundError):  # an agent may have retired since
            found[f"{row['role']} {row.get('name', '')} {row.get('instanceKey', '')}".strip()] = memory_mib(row["pid"])
    return found


def middle(samples: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure that is in all samples."""
    return {name: statistics.median(sample[name] for sample in samples if name in sample) for name in samples[-1]}


def rounded(figures: dict[str, float]) -> dict[str, float]:
    """For people."""
    return {name: round(mib, 1) for name, mib in figures.items()}
