"""A model server on loopback (chat completions, streaming) that allows so many requests at once and so many a minute.

Arguments: the most at once, the most a minute, the length of its minute (seconds), how long an answer takes (seconds).
It answers anything else with 429 and Retry-After, in fractions of a second because its minute may be short. The user's
text is `NAME STEPS`: the agent calls agents__catalog in each step but the last, which says "done NAME".

Prints its base URL first. GET /__seen gives {"log": [[seconds, "NAME.STEP", status, requests at once], …]}.
"""

import asyncio
import json
import sys
import time

AT_ONCE, A_MINUTE, MINUTE_S, ANSWER_S = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
LOG = []
ACCEPTED = []
RUNNING = 0


def refusal(now):
    """How long to wait when too much is asked; None when it is not."""
    while ACCEPTED and now - ACCEPTED[0] >= MINUTE_S:
        ACCEPTED.pop(0)
    if len(ACCEPTED) >= A_MINUTE:
        return ACCEPTED[0] + MINUTE_S - now
    return ANSWER_S if RUNNING >= AT_ONCE else None


async def stream(writer, name, step, steps):
    def event(finish=None, **delta):
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        data = json.dumps({"id": "c", "object": "chat.completion.chunk", "choices": [choice]})
        writer.write(f"data: {data}\n\n".encode())

    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
    await asyncio.sleep(ANSWER_S)
    if step < steps:
        function = {"name": "agents__catalog", "arguments": "{}"}
        event(
            role="assistant", tool_calls=[{"index": 0, "id": f"call_{step}", "type": "function", "function": function}]
        )
        event("tool_calls")
    else:
        event(role="assistant", content=f"done {name}")
        event("stop")
    writer.write(b"data: [DONE]\n\n")


async def answer(writer, body):
    global RUNNING
    messages = body["messages"]
    last = max(at for at, message in enumerate(messages) if message["role"] == "user")
    name, steps = messages[last]["content"].split()
    step = 1 + sum(message["role"] == "tool" for message in messages[last:])
    now = time.time()
    wait = refusal(now)
    LOG.append([now, f"{name}.{step}", 200 if wait is None else 429, RUNNING])
    if wait is not None:
        data = b'{"error": {"type": "rate_limit_error", "message": "too much"}}'
        head = f"HTTP/1.1 429 Too Many\r\nretry-after: {wait:.3f}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(data)}\r\nconnection: close\r\n\r\n".encode() + data)
        return
    ACCEPTED.append(now)
    RUNNING += 1
    try:
        await stream(writer, name, step, int(steps))
    finally:
        RUNNING -= 1


async def serve(reader, writer):
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1").split("\r\n")
        headers = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in head[1:])}
        if head[0].split()[1].startswith("/__"):
            data = json.dumps({"log": LOG}).encode()
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n".encode() + data)
        else:
            await answer(writer, json.loads(await reader.readexactly(int(headers["content-length"]))))
        await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


asyncio.run(main())
