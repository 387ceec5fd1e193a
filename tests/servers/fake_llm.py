"""A tiny Anthropic-Messages, OpenAI-chat and OpenAI-Responses compatible server on loopback, so a real provider client can be driven without a model.

Behaviour: the last user text decides. "call NAME JSON" -> one tool call, then after its result the text "done: <result text>";
"callN K NAME JSON" -> K parallel calls of NAME; "steps K NAME JSON" -> K tool steps in a row; "script JSON" -> the steps of a list of lists of [NAME, args], one after
the other, then "done: <results of the last step>"; anything else -> "echo: <text>", with the request's files behind it. "cut TEXT" is any of these, cut off at the limit of tokens;
"form JSON" is answered with the JSON, "misform JSON" first with another one;
"think TEXT" is any of these with reasoning before it, and says at the end in how many of the turn's answers its reasoning came back. The model "blind" refuses files.
Streaming (stream: true) is answered as server-sent events. Prints its base URL first.
"""

import asyncio, base64, hashlib, json, sys, itertools

ids = itertools.count(1)


def last_user_text(messages):
    for m in reversed(messages):
        if m["role"] == "user":
            c = m.get("content")
            if isinstance(c, str):
                return c
            t = [b["text"] for b in c if b.get("type") == "text"]
            if t:
                return t[-1]
    return ""


def tool_results_since_user(messages):
    n = 0
    text = None
    for m in reversed(messages):
        c = m.get("content")
        if m["role"] == "tool":
            n += 1
            text = text or c
            continue
        if isinstance(c, list) and any(b.get("type") == "tool_result" for b in c):
            n += 1
            if text is None:
                r = [b for b in c if b.get("type") == "tool_result"][-1]["content"]
                text = r if isinstance(r, str) else "".join(b.get("text", "") for b in r)
            continue
        if m["role"] == "user":
            break
    return n, text


def script(messages, steps):
    """The next step of a script, or what the last one gave."""
    taken, results = 0, []
    for m in reversed(messages):
        c = m.get("content")
        if m["role"] == "tool":
            results = [c, *results] if not taken else results
        elif m["role"] == "assistant":
            taken += 1
        elif isinstance(c, list) and any(b.get("type") == "tool_result" for b in c):
            results = [b["content"] for b in c] if not taken else results
        else:
            break
    if taken < len(steps):
        return "tools", [(name, args) for name, args in steps[taken]]
    return "text", "done: " + " | ".join(results)


def thoughts_since_user(messages):
    """How many of the turn's answers came back with their reasoning."""
    found = 0
    for m in reversed(messages):
        c = m.get("content")
        if m["role"] == "user" and not (isinstance(c, list) and any(b.get("type") == "tool_result" for b in c)):
            break
        signed = isinstance(c, list) and any(b.get("type") == "thinking" and b.get("signature") == "signed" for b in c)
        found += bool(m.get("reasoning_content") or signed)
    return found


def answer(messages):
    """-> (kind and what, see decide; the reasoning; whether it is cut off)"""
    text = last_user_text(messages).strip()
    cut = text.startswith("cut ")
    text = text.removeprefix("cut ")
    thinks = text.startswith("think ")
    text = text.removeprefix("think ")
    kind, what = decide(messages, text)
    if thinks and kind == "text":
        what += f" | thoughts: {thoughts_since_user(messages)}"
    return kind, what, f"They say: {text}" if thinks else "", cut


def decide(messages, text):
    """-> ("text", str) or ("tools", [(name, args)])"""
    word, _, rest = text.partition(" ")
    if word == "script":
        return script(messages, json.loads(rest))
    done, result = tool_results_since_user(messages)
    if word == "call":
        name, _, args = rest.partition(" ")
        return ("tools", [(name, json.loads(args or "{}"))]) if done == 0 else ("text", f"done: {result}")
    if word in ("callN", "steps"):
        k, _, rest = rest.partition(" ")
        name, _, args = rest.partition(" ")
        k = int(k)
        a = json.loads(args or "{}")
        if word == "callN":
            return ("tools", [(name, a)] * k) if done == 0 else ("text", f"done: {result}")
        return ("tools", [(name, a)]) if done < k else ("text", f"done: {result}")
    shown = files(messages)
    return "text", f"echo: {text}" + (f" [files: {', '.join(shown)}]" if shown else "")


def files(value):
    """Media type, size and digest of every file in a request, in order, whatever the vendor's form."""
    if isinstance(value, list):
        return [f for v in value for f in files(v)]
    if isinstance(value, str):
        if not value.startswith("data:"):
            return []
        kind, _, data = value[5:].partition(";base64,")
        return [describe(kind, data)]
    if not isinstance(value, dict):
        return []
    if value.get("type") == "base64":
        return [describe(value["media_type"], value["data"])]
    return [f for v in value.values() for f in files(v)]


def describe(kind, data):
    content = base64.b64decode(data, validate=True)
    return f"{kind} {len(content)} {hashlib.sha256(content).hexdigest()[:8]}"


def formed(body):
    """The answer to "form JSON" and "misform JSON"; the latter gives another answer first. By the tool `answer` if it is offered."""
    told = [last_user_text(body["messages"][: n + 1]) for n, m in enumerate(body["messages"]) if m["role"] == "user"]
    asked = [text for text in told if text.startswith(("form ", "misform "))]
    if not asked or told[-1] not in (asked[-1],) and "does not have the form" not in told[-1]:
        return None
    word, _, value = asked[-1].partition(" ")
    value = '{"wrong": true}' if word == "misform" and told[-1] == asked[-1] else value
    names = [t.get("name") or t["function"]["name"] for t in body.get("tools", [])]
    if "answer" in names:
        assert body["tool_choice"] in ("required", {"type": "any"})
        return "tools", [("answer", json.loads(value))], "", False
    assert "response_format" in body or "output_config" in body
    return "text", value, "", False


def anthropic(body):
    kind, what, reasoning, cut = formed(body) or answer(body["messages"])
    if kind == "text":
        content = [{"type": "text", "text": what}]
        stop = "end_turn"
    else:
        content = [{"type": "tool_use", "id": f"toolu_{next(ids)}", "name": n, "input": a} for n, a in what]
        stop = "tool_use"
    if reasoning:
        content.insert(0, {"type": "thinking", "thinking": reasoning, "signature": "signed"})
    stop = "max_tokens" if cut else stop
    msg = {
        "id": f"msg_{next(ids)}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model", "m"),
        "content": content,
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": {"input_tokens": 10, "output_tokens": 5},
    }
    if not body.get("stream"):
        return "application/json", json.dumps(msg)
    ev = []

    def e(t, **d):
        ev.append(f"event: {t}\ndata: {json.dumps({'type': t, **d})}\n\n")

    e("message_start", message={**msg, "content": [], "stop_reason": None})
    for i, b in enumerate(content):
        if b["type"] == "text":
            e("content_block_start", index=i, content_block={"type": "text", "text": ""})
            for j in range(0, len(b["text"]), 8):
                e("content_block_delta", index=i, delta={"type": "text_delta", "text": b["text"][j : j + 8]})
        elif b["type"] == "thinking":
            e("content_block_start", index=i, content_block={"type": "thinking", "thinking": "", "signature": ""})
            e("content_block_delta", index=i, delta={"type": "thinking_delta", "thinking": b["thinking"]})
            e("content_block_delta", index=i, delta={"type": "signature_delta", "signature": b["signature"]})
        else:
            e("content_block_start", index=i, content_block={**b, "input": {}})
            e(
                "content_block_delta",
                index=i,
                delta={"type": "input_json_delta", "partial_json": json.dumps(b["input"])},
            )
        e("content_block_stop", index=i)
    e("message_delta", delta={"stop_reason": stop, "stop_sequence": None}, usage={"output_tokens": 5})
    e("message_stop")
    return "text/event-stream", "".join(ev)


def openai(body):
    kind, what, reasoning, cut = formed(body) or answer(body["messages"])
    m = {"role": "assistant", "content": what if kind == "text" else None}
    if kind == "tools":
        m["tool_calls"] = [
            {"id": f"call_{next(ids)}", "type": "function", "function": {"name": n, "arguments": json.dumps(a)}}
            for n, a in what
        ]
    fin = "length" if cut else "stop" if kind == "text" else "tool_calls"
    if reasoning:
        m["reasoning_content"] = reasoning
    base = {"id": f"chatcmpl-{next(ids)}", "created": 1, "model": body.get("model", "m")}
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    if not body.get("stream"):
        return "application/json", json.dumps(
            {
                **base,
                "object": "chat.completion",
                "choices": [{"index": 0, "message": m, "finish_reason": fin}],
                "usage": usage,
            }
        )
    out = []

    def c(delta, f=None):
        out.append(
            "data: "
            + json.dumps(
                {
                    **base,
                    "object": "chat.completion.chunk",
                    "choices": [{"index": 0, "delta": delta, "finish_reason": f}],
                }
            )
            + "\n\n"
        )

    c({"role": "assistant", "content": ""})
    for j in range(0, len(reasoning), 8):
        c({"reasoning_content": reasoning[j : j + 8]})
    if kind == "text":
        for j in range(0, len(what), 8):
            c({"content": what[j : j + 8]})
    else:
        for i, t in enumerate(m["tool_calls"]):
            c({"tool_calls": [{"index": i, **t}]})
    c({}, fin)
    out.append("data: [DONE]\n\n")
    return "text/event-stream", "".join(out)


def messages_of(items):
    """The items of a Responses request as messages of a chat."""
    messages, said = [], None
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    for item in items:
        kind = item.get("type", "message")
        if kind in ("reasoning", "function_call") or item.get("role") == "assistant":
            if said is None:
                said = {"role": "assistant", "content": ""}
                messages.append(said)
            if kind == "reasoning" and item.get("encrypted_content") == "sealed":
                said["reasoning_content"] = "sealed"
            continue
        said = None
        if kind == "function_call_output":
            messages.append({"role": "tool", "content": item["output"]})
        else:
            content = item["content"]
            if not isinstance(content, str):
                content = [{**part, "type": part["type"].removeprefix("input_")} for part in content]
            messages.append({"role": item["role"], "content": content})
    return messages


def responses(body):
    messages = messages_of(body["input"])
    shape = {"response_format": 1} if "format" in body.get("text", {}) else {}
    kind, what, reasoning, cut = formed({**body, **shape, "messages": messages}) or answer(messages)
    output = []
    if reasoning:
        summary = [{"type": "summary_text", "text": reasoning}]
        output.append({"id": "rs_1", "type": "reasoning", "summary": summary, "encrypted_content": "sealed"})
    if kind == "text":
        content = [{"type": "output_text", "text": what, "annotations": []}]
        output.append(
            {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content}
        )
    else:
        output += [
            {
                "id": f"fc_{i}",
                "type": "function_call",
                "call_id": f"call_{next(ids)}",
                "name": n,
                "arguments": json.dumps(a),
            }
            for i, (n, a) in enumerate(what)
        ]
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    whole = {
        "id": f"resp_{next(ids)}",
        "object": "response",
        "created_at": 1,
        "model": body.get("model", "m"),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "output": output,
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "usage": {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15, **details},
    }
    if not body.get("stream"):
        return "application/json", json.dumps(whole)
    ev = []

    def e(t, **d):
        ev.append(f"event: {t}\ndata: {json.dumps({'type': t, 'sequence_number': len(ev), **d})}\n\n")

    e("response.created", response={**whole, "status": "in_progress", "output": [], "usage": None})
    for i, item in enumerate(output):
        at = {"output_index": i, "item_id": item["id"]}
        if item["type"] == "message":
            part = item["content"][0]
            e("response.output_item.added", output_index=i, item={**item, "content": []})
            e("response.content_part.added", **at, content_index=0, part={**part, "text": ""})
            for j in range(0, len(part["text"]), 8):
                e("response.output_text.delta", **at, content_index=0, delta=part["text"][j : j + 8], logprobs=[])
            e("response.output_text.done", **at, content_index=0, text=part["text"], logprobs=[])
            e("response.content_part.done", **at, content_index=0, part=part)
        elif item["type"] == "reasoning":
            e("response.output_item.added", output_index=i, item={**item, "summary": [], "encrypted_content": "sea"})
            part = {"type": "summary_text", "text": reasoning}
            e("response.reasoning_summary_part.added", **at, summary_index=0, part={**part, "text": ""})
            for j in range(0, len(reasoning), 8):
                e("response.reasoning_summary_text.delta", **at, summary_index=0, delta=reasoning[j : j + 8])
            e("response.reasoning_summary_text.done", **at, summary_index=0, text=reasoning)
            e("response.reasoning_summary_part.done", **at, summary_index=0, part=part)
        else:
            e("response.output_item.added", output_index=i, item={**item, "arguments": ""})
            for piece in (item["arguments"][:5], item["arguments"][5:]):
                e("response.function_call_arguments.delta", **at, delta=piece)
            e("response.function_call_arguments.done", **at, arguments=item["arguments"], name=item["name"])
        e("response.output_item.done", output_index=i, item=item)
    e("response.incomplete" if cut else "response.completed", response=whole)
    return "text/event-stream", "".join(ev)


async def serve(r, w):
    try:
        while True:
            head = await r.readuntil(b"\r\n\r\n")
            lines = head.decode("latin1").split("\r\n")
            path = lines[0].split()[1]
            h = {k.lower(): v.strip() for k, _, v in (l.partition(":") for l in lines[1:])}
            body = json.loads(await r.readexactly(int(h.get("content-length", 0))) or b"{}")
            if body.get("model") == "blind" and files(body.get("messages") or body["input"]):
                b = b'{"error": {"message": "this model does not support image input"}}'
                w.write(
                    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(b)
                    + b
                )
                await w.drain()
                continue
            if path.endswith("/messages"):
                ct, out = anthropic(body)
            elif path.endswith("/chat/completions"):
                ct, out = openai(body)
            elif path.endswith("/responses"):
                ct, out = responses(body)
            else:
                ct, out = "application/json", json.dumps({"object": "list", "data": [{"id": "m"}]})
            b = out.encode()
            w.write(f"HTTP/1.1 200 OK\r\ncontent-type: {ct}\r\ncontent-length: {len(b)}\r\n\r\n".encode() + b)
            await w.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        w.close()


async def main():
    s = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    print(f"http://127.0.0.1:{s.sockets[0].getsockname()[1]}", flush=True)
    await s.serve_forever()


asyncio.run(main())
