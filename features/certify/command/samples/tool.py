"""The tool that a worker is certified with, in Python. docs/certify.md says what each export does."""

import os
import time

from goondan_tool import Pending


def fail(ctx, input):
    error = ValueError(input["message"])
    error.code, error.suggestion = "E_SAMPLE", "try another one"
    raise error


def bad(ctx, input):
    loop = []
    loop.append(loop)
    return {"function": fail, "cycle": loop, "nan": float("nan"), "bytes": b"x", "lone": "\ud800"}[input["kind"]]


def log(ctx, input):
    for _ in range(input["times"]):
        ctx.logger.info(input["text"])


def context(ctx, input):
    names = {"agentName": ctx.agent_name, "instanceKey": ctx.instance_key, "turnId": ctx.turn_id}
    return names | {"toolCallId": ctx.tool_call_id, "workdir": ctx.workdir, "runtime": ctx.runtime is not None}


def stopped(ctx, input):
    while not ctx.cancelled:
        time.sleep(0.01)
    return "stopped"


handlers = {
    "echo": lambda ctx, given: given.get("value"),
    "repeat": lambda ctx, given: given["text"] * given["times"],
    "size": lambda ctx, given: len(given["text"]),
    "wait": lambda ctx, given: time.sleep(given["ms"] / 1000) or "waited",
    "fail": fail,
    "bad": bad,
    "log": log,
    "say": lambda ctx, given: print(given["text"]),
    "progress": lambda ctx, given: ctx.progress(1, 2, "half"),
    "message": lambda ctx, given: ctx.message and {"id": ctx.message.id, "data": ctx.message.data},
    "context": context,
    "variable": lambda ctx, given: os.environ.get(given["name"]),
    "ask": lambda ctx, given: ctx.runtime.request(given["target"], "hi")["response"],
    "stopped": stopped,
    "pending": lambda ctx, given: Pending("a-handle", lambda: time.sleep(given["ms"] / 1000) or "done"),
}
