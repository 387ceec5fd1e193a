"""`python -m goondan_client.certified`: the program that `gdn certify client` tries.

It reads what to do as lines of JSON on stdin, and writes what came of it as lines of JSON on stdout. GOONDAN_RUN_DIR
says where the kernel is.

Source: docs/certify.md.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from typing import Any, Final

import msgspec

from goondan_client.client import Client, Options, connect
from goondan_client.errors import GoondanError
from goondan_client.frames import Answer

#: How long the first welcome may take (seconds): the tried program waits for a kernel that comes late.
PATIENCE_S: Final = 120.0
#: The longest line (bytes).
MAX_LINE: Final = 4 << 20


def say(**said: Any) -> None:
    """Write one line."""
    sys.stdout.buffer.write(msgspec.json.encode(said) + b"\n")
    sys.stdout.buffer.flush()


async def act(gdn: Client, wish: dict[str, Any]) -> dict[str, Any]:
    """Do one thing. Returns what came of it."""
    deadline = wish["deadlineMs"] / 1000 if "deadlineMs" in wish else None
    if wish["do"] == "call":
        result = await gdn.call(wish["tool"], wish["args"], instance=wish.get("instance", "default"), deadline=deadline)
        return {"result": {"status": result.status, "output": result.output}}
    options: Options = {"instance": wish.get("instance", "default"), "deadline": deadline}
    if wish["do"] == "send":
        await gdn.send(wish["to"], wish["text"], **options)
        return {"accepted": True}
    if wish["do"] == "ask":
        return {"answer": shown(await gdn.ask(wish["to"], wish["text"], **options))}
    async for item in gdn.stream(wish["to"], wish["text"], **options):
        if isinstance(item, Answer):
            return {"answer": shown(item)}
        told = {name: value for name, value in msgspec.to_builtins(item).items() if value}
        say(ref=wish["ref"], event=told)
    raise GoondanError("E_INTERNAL", "the stream ended without an answer")


def shown(answer: Answer) -> dict[str, Any]:
    """What is said of an answer."""
    return {"status": answer.status, "response": answer.text}


async def serve(gdn: Client, wish: dict[str, Any]) -> None:
    """Do one thing and say what came of it: one line."""
    try:
        say(ref=wish["ref"], **await act(gdn, wish))
    except GoondanError as error:
        retry = None if error.retry_after is None else round(error.retry_after * 1000)
        say(ref=wish["ref"], error={"code": error.code, "message": error.message, "retryAfterMs": retry})


def told(task: asyncio.Task[None]) -> None:
    """Say that a thing was given up. It may not even have begun."""
    if task.cancelled():
        say(ref=task.get_name(), error={"code": "E_CANCELLED", "message": "it was given up"})


async def main() -> None:
    """Until `close`, or the end of stdin."""
    lines = asyncio.StreamReader(limit=MAX_LINE)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    say(ready=True)
    open_: dict[str, asyncio.Task[None]] = {}
    async with connect(run_dir=os.environ["GOONDAN_RUN_DIR"], timeout=PATIENCE_S) as gdn:
        while line := await lines.readline():
            wish = msgspec.json.decode(line, type=dict[str, Any])
            if wish["do"] == "close":
                break
            if wish["do"] == "cancel":
                if (task := open_.get(wish["ref"])) is not None:
                    task.cancel()
            else:
                task = open_[wish["ref"]] = asyncio.create_task(serve(gdn, wish), name=wish["ref"])
                task.add_done_callback(told)
                await asyncio.sleep(0)  # it begins: given up before that, it would say nothing


if __name__ == "__main__":
    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(main())
    except GoondanError as refused:
        sys.exit(f"{refused.code}: {refused.message}")
