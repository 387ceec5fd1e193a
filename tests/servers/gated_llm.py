"""A model server on loopback (chat completions, streaming) that says its text in pieces and waits where it is told to.

The last user text says what to do, in parts separated by `|`: a part is said in one piece; `wait` holds the stream until
GET /__go, each of which opens one wait; `cut` closes the connection, once for each user text; `again N TEXT` says TEXT
N times, in N pieces; `think TEXT` reasons; `call NAME JSON` ends the step with a tool call, and what comes behind it is said in the next
step. Prints its base URL first. GET /__seen says how many waits have been reached.
"""

import asyncio
import json
import sys

GO = asyncio.Queue()
REACHED = 0
CUT = set()


def parts_of(messages):
    """The parts of this step: those behind as many calls as have results since the user spoke."""
    texts = [at for at, message in enumerate(messages) if message["role"] == "user"]
    steps = [[]]
    for part in str(messages[texts[-1]]["content"]).split("|"):
        steps[-1].append(part)
        if part.startswith("call "):
            steps.append([])
    results = sum(message["role"] == "tool" for message in messages[texts[-1] :])
    return steps[min(results, len(steps) - 1)]


async def stream(writer, body):
    global REACHED

    async def event(finish=None, **delta):
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        data = json.dumps({"id": "c", "object": "chat.completion.chunk", "choices": [choice]})
        writer.write(f"data: {data}\n\n".encode())
        await writer.drain()

    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
    await event(role="assistant", content="")
    finish = "stop"
    for number, part in enumerate(parts_of(body["messages"])):
        word, _, rest = part.partition(" ")
        if part == "wait":
            REACHED += 1
            await GO.get()
        elif part == "cut":
            if body["messages"][-1]["content"] not in CUT:
                CUT.add(body["messages"][-1]["content"])
                return
        elif word == "again":
            count, _, text = rest.partition(" ")
            for _ in range(int(count)):
                await event(content=text)
        elif word == "think":
            await event(reasoning_content=rest)
        elif word == "call":
            name, _, arguments = rest.partition(" ")
            function = {"name": name, "arguments": arguments}
            await event(tool_calls=[{"index": 0, "id": f"call_{number}", "type": "function", "function": function}])
            finish = "tool_calls"
        else:
            await event(content=part)
    await event(finish)
    writer.write(b"data: [DONE]\n\n")
    await writer.drain()


async def serve(reader, writer):
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1").split("\r\n")
        path = head[0].split()[1]
        headers = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in head[1:])}
        if path.startswith("/__"):
            if path == "/__go":
                GO.put_nowait(None)
            data = json.dumps({"reached": REACHED}).encode()
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n".encode() + data)
            await writer.drain()
        else:
            await stream(writer, json.loads(await reader.readexactly(int(headers["content-length"]))))
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


asyncio.run(main())
