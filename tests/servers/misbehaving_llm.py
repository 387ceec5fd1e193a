"""A model server on loopback that answers wrongly in the way its model's name says, to requests of all vendors.

The model is `HOW` (always so) or `HOW:N` (for the first N requests of that name, then well). HOW is a status (`401`,
`429`, `529`, …) or one of those in BEHAVIOURS below. Well means: the text "fine", or "told: <results>" right behind
tool results. `wait=S` in the model's name is sent as Retry-After with a status, `repeats=FORM` says how a refusal repeats
the key, `to=URL` where a redirect leads.

Prints its base URL first. GET /__seen gives what it saw, as JSON:
{"requests": [{path, headers, body}], "gone": [models whose client closed the connection before the answer's end]}.
"""

import asyncio
import base64
import json
import sys

SEEN = {"requests": [], "gone": []}
COUNTS = {}


class Answer:
    """Writes one HTTP answer, and events in the form of the vendor that was asked."""

    def __init__(self, writer, vendor):
        self.writer = writer
        self.vendor = vendor
        self.chunked = False

    async def head(self, status=200, kind="text/event-stream", length=None, extra=()):
        lines = [f"HTTP/1.1 {status} Said so", f"content-type: {kind}", *extra]
        self.chunked = length is None
        lines.append("transfer-encoding: chunked" if self.chunked else f"content-length: {length}")
        self.writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        await self.writer.drain()

    async def raw(self, data):
        if isinstance(data, str):
            data = data.encode()
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data) if self.chunked else data)
        await self.writer.drain()

    async def end(self):
        if self.chunked:
            self.writer.write(b"0\r\n\r\n")
            await self.writer.drain()

    async def event(self, **data):
        name = "" if self.vendor == "openai" else f"event: {data['type']}\n"
        await self.raw(f"{name}data: {json.dumps(data)}\n\n")

    async def delta(self, finish=None, **delta):
        await self.event(
            object="chat.completion.chunk", choices=[{"index": 0, "delta": delta, "finish_reason": finish}]
        )

    async def start(self):
        await self.head()
        if self.vendor == "anthropic":
            message = {"id": "m", "type": "message", "role": "assistant", "content": [], "usage": {"input_tokens": 3}}
            await self.event(type="message_start", message=message)
        elif self.vendor == "responses":
            await self.event(type="response.created", response={"status": "in_progress"})
        else:
            await self.delta(role="assistant", content="")

    async def text(self, text, index=0):
        if self.vendor == "anthropic":
            await self.event(type="content_block_start", index=index, content_block={"type": "text", "text": ""})
            await self.event(type="content_block_delta", index=index, delta={"type": "text_delta", "text": text})
            await self.event(type="content_block_stop", index=index)
        elif self.vendor == "responses":
            await self.event(type="response.output_item.added", output_index=index, item={"type": "message"})
            await self.event(type="response.output_text.delta", output_index=index, delta=text)
        else:
            await self.delta(content=text)

    async def call(self, index, call_id, name, arguments):
        if self.vendor == "anthropic":
            block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
            await self.event(type="content_block_start", index=index, content_block=block)
            for piece in (arguments[:3], arguments[3:]):
                delta = {"type": "input_json_delta", "partial_json": piece}
                await self.event(type="content_block_delta", index=index, delta=delta)
            await self.event(type="content_block_stop", index=index)
        elif self.vendor == "responses":
            item = {"type": "function_call", "call_id": call_id, "name": name}
            await self.event(type="response.output_item.added", output_index=index, item=item)
            for piece in (arguments[:3], arguments[3:]):
                await self.event(type="response.function_call_arguments.delta", output_index=index, delta=piece)
            await self.event(
                type="response.output_item.done", output_index=index, item={**item, "arguments": arguments}
            )
        else:
            function = {"name": name, "arguments": arguments[:3]}
            await self.delta(tool_calls=[{"index": index, "id": call_id, "type": "function", "function": function}])
            await self.delta(tool_calls=[{"index": index, "function": {"arguments": arguments[3:]}}])

    async def stop(self, calls=False):
        if self.vendor == "anthropic":
            reason = "tool_use" if calls else "end_turn"
            await self.event(type="message_delta", delta={"stop_reason": reason}, usage={"output_tokens": 2})
            await self.event(type="message_stop")
        elif self.vendor == "responses":
            usage = {"input_tokens": 3, "output_tokens": 2}
            await self.event(type="response.completed", response={"status": "completed", "usage": usage})
        else:
            await self.delta(finish="tool_calls" if calls else "stop")
            usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
            await self.event(object="chat.completion.chunk", choices=[], usage=usage)
            await self.raw("data: [DONE]\n\n")
        await self.end()


async def well(answer, body):
    told = results(body)
    await answer.start()
    await answer.text("told: " + " | ".join(told) if told else "fine")
    await answer.stop()


def results(body):
    """Texts of the tool results at the end of the conversation."""
    found = []
    for message in reversed(body["messages"] if "messages" in body else body["input"]):
        if message["type" if "input" in body else "role"] == "function_call_output":
            found.insert(0, message["output"])
        elif "input" in body:
            break
        elif message["role"] == "tool":
            found.insert(0, message["content"])
        elif isinstance(message["content"], list) and message["content"][0].get("type") == "tool_result":
            return [part["content"] for part in message["content"]]
        else:
            break
    return found


async def wants(answer, body, *calls):
    """Tool calls, unless their results are there already."""
    if results(body):
        return await well(answer, body)
    await answer.start()
    for index, call in enumerate(calls):
        await answer.call(index, *call)
    await answer.stop(calls=True)


async def garbage(answer, body):
    await answer.head()
    await answer.raw(bytes(range(256)) * 4)
    await answer.end()


async def html(answer, body):
    await answer.head(kind="text/html")
    await answer.raw("<html>\n<title>Sign in</title>")
    await answer.end()


async def bad_event(answer, body):
    await answer.start()
    await answer.raw('data: {"type": "ping", "choices": \n\n')
    await answer.end()


async def half(answer, body):
    await answer.start()
    await answer.text("so f")
    answer.writer.close()


async def drop(answer, body):
    answer.writer.close()


async def silent(answer, body):
    await asyncio.sleep(3600)


async def stall(answer, body):
    await answer.start()
    await answer.text("so f")
    await asyncio.sleep(3600)


async def keepalive(answer, body):
    """Half an answer, and then whatever keeps a connection alive without saying anything."""
    await answer.start()
    await answer.text("so f")
    while True:
        await answer.raw(": still here\n\n")
        if answer.vendor == "anthropic":
            await answer.event(type="ping")
        elif answer.vendor == "responses":
            await answer.event(type="response.in_progress", response={"status": "in_progress"})
        else:
            await answer.delta(content="")
        await asyncio.sleep(0.05)


async def dripping_refusal(answer, body):
    """A refusal whose body never ends."""
    await answer.head(status=400, kind="text/plain")
    while True:
        await answer.raw("x")
        await asyncio.sleep(0.05)


async def empty(answer, body):
    await answer.start()
    await answer.stop()


async def nothing(answer, body):
    await answer.head(length=0)


async def huge(answer, body):
    await answer.start()
    for _ in range(20):
        await answer.text("x" * (1 << 20))
    await answer.stop()


async def endless_event(answer, body):
    await answer.head()
    for _ in range(20):
        await answer.raw("data: " + "x" * (1 << 20))
    await answer.end()


async def stream_error(answer, body):
    await answer.start()
    await answer.event(type="error", error={"type": "overloaded_error", "message": "come back later"})
    await answer.end()


async def whole(answer, body):
    """A server that does not stream."""
    if answer.vendor == "anthropic":
        data = {"type": "message", "content": [{"type": "text", "text": "fine"}], "stop_reason": "end_turn"}
    elif answer.vendor == "responses":
        content = [{"type": "output_text", "text": "fine"}]
        data = {"object": "response", "status": "completed", "output": [{"type": "message", "content": content}]}
    else:
        message = {"role": "assistant", "content": "fine"}
        data = {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    text = json.dumps(data).encode()
    await answer.head(kind="application/json", length=len(text))
    await answer.raw(text)


async def strict(answer, body):
    """A server that refuses what only its wire's own vendor knows."""
    said = json.dumps(body)
    refused = ("cache_control", "reasoning_content", "include")
    named = next((name for name in refused if f'"{name}"' in said), None)
    if named is None:
        return await well(answer, body)
    error = {"type": "invalid_request_error", "message": f"messages.0.{named}: Extra inputs are not permitted"}
    data = json.dumps({"type": "error", "error": error}).encode()
    await answer.head(400, kind="application/json", length=len(data))
    await answer.raw(data)


async def moved(answer, body):
    await answer.head(302, length=0, extra=("location: https://elsewhere.example/v1",))


BEHAVIOURS = {
    "well": well,
    "garbage": garbage,
    "html": html,
    "bad-event": bad_event,
    "half": half,
    "drop": drop,
    "silent": silent,
    "stall": stall,
    "keepalive": keepalive,
    "dripping-refusal": dripping_refusal,
    "empty": empty,
    "nothing": nothing,
    "huge": huge,
    "endless-event": endless_event,
    "stream-error": stream_error,
    "whole": whole,
    "moved": moved,
    "strict": strict,
    "broken-args": lambda a, b: wants(a, b, ("c1", "bash__exec", '{"command": ')),
    "list-args": lambda a, b: wants(a, b, ("c1", "bash__exec", '["id"]')),
    "unknown-tool": lambda a, b: wants(a, b, ("c1", "no.such", "{}")),
    "same-id": lambda a, b: wants(
        a, b, ("c1", "bash__exec", '{"command": "echo 1"}'), ("c1", "bash__exec", '{"command": "echo 2"}')
    ),
}


#: Ways to repeat the key in a refusal (`401 repeats=upper`). `cut` puts it where a client cuts long messages.
REPEATED = {
    "upper": str.upper,
    "spaced": " ".join,
    "lines": "\n".join,
    "base64": lambda key: base64.b64encode(f"user:{key}".encode()).decode(),
    "hex": lambda key: key.encode().hex(":"),
    "url": lambda key: "".join(f"%{byte:02x}" for byte in key.encode()),
    "backwards": lambda key: key[::-1],
    "cut": lambda key: "." * (500 - len("that is a 401, with ") - len(key) + 3) + key + " and more",
    "location": lambda key: f"/elsewhere?key={key}",
}


async def respond(answer, path, headers, body):
    model = body.get("model", "")
    status, _, to = model.partition(" to=")
    if to:
        return await answer.head(int(status), length=0, extra=(f"location: {to}",))
    name, _, limit = model.partition(":")
    COUNTS[path, model] = COUNTS.get((path, model), 0) + 1
    if limit.isdigit() and COUNTS[path, model] > int(limit):
        return await well(answer, body)
    status, _, form = name.partition(" repeats=")
    status, _, wait = status.partition(" wait=")
    if not status.isdigit():
        return await BEHAVIOURS[name](answer, body)
    key = headers.get("x-api-key") or headers.get("authorization", "")
    if form:
        key = REPEATED[form](key.removeprefix("Bearer "))
    if form == "location":
        return await answer.head(307, length=0, extra=(f"location: {key}",))
    error = {"type": "refused", "message": f"that is a {status}, with {key}"}
    data = json.dumps({"type": "error", "error": error}).encode()
    extra = (f"retry-after: {wait}",) if wait else ()
    await answer.head(int(status), kind="application/json", length=len(data), extra=extra)
    await answer.raw(data)


async def models(answer, path, headers):
    """The list of models; `/none`, `/garbage` and `/503` before it: without one, no list, and a list at the second try."""
    SEEN["requests"].append({"path": path, "headers": headers, "body": None})
    COUNTS[path] = COUNTS.get(path, 0) + 1
    how = path.split("/")[1]
    names = [] if how == "none" else ["", "well", "401"]
    data = b"hello" if how == "garbage" else json.dumps({"data": [{"id": name} for name in names]}).encode()
    status = 503 if how == "503" and COUNTS[path] == 1 else 200
    await answer.head(status, kind="application/json", length=len(data))
    await answer.raw(data)


async def serve(reader, writer):
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1").split("\r\n")
            path = head[0].split()[1]
            headers = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in head[1:])}
            text = await reader.readexactly(int(headers.get("content-length", 0)))
            if path == "/__seen":
                data = json.dumps(SEEN).encode()
                writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
                await writer.drain()
                continue
            if path.endswith("/models"):
                await models(Answer(writer, "openai"), path, headers)
                continue
            body = json.loads(text)
            SEEN["requests"].append({"path": path, "headers": headers, "body": body})
            ends = {"/messages": "anthropic", "/responses": "responses"}
            vendor = next((vendor for end, vendor in ends.items() if path.endswith(end)), "openai")
            answering = asyncio.ensure_future(respond(Answer(writer, vendor), path, headers, body))
            leaving = asyncio.ensure_future(reader.read(1))
            await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                answering.cancel()
                SEEN["gone"].append(body.get("model"))
                return
            answering.result()
            # The next request of a connection that is kept begins with the byte that was waited for.
            first = await leaving
            if not first:
                return
            reader._buffer[:0] = first
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
