"""The tool that a worker is certified with, in Python. docs/certify.md says what each export does."""

import os
import time

from goondan_tool import Pending


def echo(ctx, input):
    return input.get("value")


def repeat(ctx, input):
    return input["text"] * input["times"]


def size(ctx, input):
    return len(input["text"])


def wait(ctx, input):
    time.sleep(input["ms"] / 1000)
    return "waited"


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


def say(ctx, input):
    print(input["text"])


def progress(ctx, input):
    ctx.progress(1, 2, "half")


def message(ctx, input):
    return None if ctx.message is None else {"id": ctx.message.id, "data": ctx.message.data}


def context(ctx, input):
    return {
        "agentName": ctx.agent_name,
        "instanceKey": ctx.instance_key,
        "turnId": ctx.turn_id,
        "toolCallId": ctx.tool_call_id,
        "workdir": ctx.workdir,
        "runtime": ctx.runtime is not None,
    }


def variable(ctx, input):
    return os.environ.get(input["name"])


def ask(ctx, input):
    return ctx.runtime.request(input["target"], "hi")["response"]


def stopped(ctx, input):
    while not ctx.cancelled:
        time.sleep(0.01)
    return "stopped"


def pending(ctx, input):
    def work():
        time.sleep(input["ms"] / 1000)
        return "done"

    return Pending("a-handle", work)


handlers = {
    one.__name__: one
    for one in (
        echo,
        repeat,
        size,
        wait,
        fail,
        bad,
        log,
        say,
        progress,
        message,
        context,
        variable,
        ask,
        stopped,
        pending,
    )
}
