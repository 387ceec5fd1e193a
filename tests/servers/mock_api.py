#!/usr/bin/env python3
"""Mock HTTP API for replaying the parity cases (standard library only, loopback only).

Prints its base URL on the first line of stdout and serves until terminated.
  GET  /__requests   JSON list of the requests recorded since the last reset
  POST /__reset      forget the recorded requests
Everything else is a fixture: plain HTTP fixtures for http-fetch, Telegram Bot API shapes under
/bot<token>/<method> and /file/bot<token>/<path>, Slack Web API shapes under .../<slack.method> and
/slack-files/<name>.  A path prefix before /bot, /file/bot or the Slack method name is accepted.
Responses carry no Date and no Server header, so they are byte-identical between runs.
"""

import gzip
import json
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

LOCK = threading.Lock()
REQUESTS = []

UTF8_TEXT = "안녕하세요 👍 café e\u0301 끝"
JPEG = bytes([0xFF, 0xD8, 0xFF, 0xE0]) + bytes(range(0, 60)) + bytes([0xFF, 0xD9])
PNG = bytes([0x89, 0x50, 0x4E, 0x47, 0x0D, 0x0A, 0x1A, 0x0A]) + bytes(range(200, 256))
REASONS = {
    200: "OK",
    201: "Created",
    202: "Accepted",
    204: "No Content",
    301: "Moved Permanently",
    302: "Found",
    303: "See Other",
    304: "Not Modified",
    307: "Temporary Redirect",
    308: "Permanent Redirect",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    409: "Conflict",
    418: "I'm a teapot",
    429: "Too Many Requests",
    500: "Internal Server Error",
    502: "Bad Gateway",
    503: "Service Unavailable",
}
SLACK_METHODS = (
    "chat.postMessage",
    "chat.update",
    "chat.delete",
    "reactions.add",
    "conversations.history",
    "conversations.replies",
)
HISTORY = [
    {"type": "message", "user": "U1", "text": "message %d" % n, "ts": "170000000%d.000100" % n} for n in (5, 4, 3, 2, 1)
]
THREAD = [
    {
        "type": "message",
        "user": "U1",
        "text": "root",
        "ts": "1700000001.000100",
        "thread_ts": "1700000001.000100",
        "reply_count": 2,
    },
    {"type": "message", "user": "U2", "text": "reply 1", "ts": "1700000001.000200", "thread_ts": "1700000001.000100"},
    {
        "type": "message",
        "user": "U3",
        "text": "reply 2 👍",
        "ts": "1700000001.000300",
        "thread_ts": "1700000001.000100",
    },
]


def keep_header(name, value):
    if name in ("authorization", "content-type", "accept-language", "cookie") or name.startswith("x-"):
        return True
    return name in ("user-agent", "accept") and "parity" in value


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    # ---- plumbing -------------------------------------------------------------------------
    def log_message(self, *args):
        pass

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except (ConnectionError, TimeoutError, ValueError, OSError):
            self.close_connection = True

    def read_body(self):
        if "chunked" in (self.headers.get("transfer-encoding") or "").lower():
            out = b""
            while True:
                size = int(self.rfile.readline().split(b";")[0].strip() or b"0", 16)
                if size == 0:
                    while self.rfile.readline().strip():
                        pass
                    return out
                out += self.rfile.read(size)
                self.rfile.readline()
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def reply(
        self, status=200, body=b"", ctype=None, headers=(), reason=None, chunked=None, length=True, delay_body=0.0
    ):
        if isinstance(body, str):
            body = body.encode("utf-8", "surrogatepass")
        self.send_response_only(status, REASONS.get(status, "Status") if reason is None else reason)
        if ctype:
            self.send_header("Content-Type", ctype)
        for key, value in headers:
            self.send_header(key, value)
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif length is True:
            if status not in (204, 304):
                self.send_header("Content-Length", str(len(body)))
        elif length is not False:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.flush()
        if delay_body:
            time.sleep(delay_body)
        if chunked:
            for start in range(0, len(body), chunked):
                part = body[start : start + chunked]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")
        elif status not in (204, 304):
            self.wfile.write(body)
        self.wfile.flush()

    def reply_json(self, value, status=200, **kwargs):
        self.reply(status, json.dumps(value, ensure_ascii=False), "application/json; charset=utf-8", **kwargs)

    def handle_any(self):
        raw = self.read_body()
        if self.path == "/__requests":
            with LOCK:
                return self.reply_json(list(REQUESTS))
        if self.path == "/__reset":
            with LOCK:
                REQUESTS.clear()
            return self.reply_json({"ok": True})
        headers = {}
        for name, value in self.headers.items():
            if keep_header(name.lower(), value):
                key = name.lower()
                headers[key] = headers[key] + ", " + value if key in headers else value
        text = raw.decode("utf-8", "replace")
        body = text if text else None
        if text and "json" in headers.get("content-type", ""):
            try:
                body = json.loads(text)
            except ValueError:
                pass
        with LOCK:
            REQUESTS.append({"method": self.command, "path": self.path, "headers": headers, "body": body})
        parts = urlsplit(self.path)
        query = {k: v[0] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}
        path = unquote(parts.path)
        payload = body if isinstance(body, dict) else {}
        match = re.search(r"/file/bot([^/]*)/(.+)$", path)
        if match:
            return self.telegram_file(match.group(2))
        match = re.search(r"/bot([^/]*)/([A-Za-z]+)$", path)
        if match:
            return self.telegram(match.group(1), match.group(2), payload)
        tail = path.rsplit("/", 1)[-1]
        if tail in SLACK_METHODS:
            return self.slack(tail, headers.get("authorization", ""), payload)
        if "/slack-files/" in path:
            return self.slack_file(tail, headers.get("authorization"))
        return self.plain(path, query, headers, text)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = do_OPTIONS = handle_any

    # ---- plain HTTP fixtures --------------------------------------------------------------
    def plain(self, path, query, headers, text):
        ms = float(query.get("ms", "0")) / 1000.0
        if path in ("/", "/json"):
            return self.reply(200, '{"key": "value", "n": 1}', "application/json")
        if path == "/echo":
            return self.reply_json({"method": self.command, "path": self.path, "headers": headers, "body": text})
        if path == "/utf8":
            return self.reply(200, UTF8_TEXT, "text/plain; charset=utf-8")
        if path == "/utf8-chunked":
            return self.reply(200, UTF8_TEXT, "text/plain; charset=utf-8", chunked=5)
        if path.startswith("/bytes/"):
            return self.reply(200, "a" * int(path[7:]), "text/plain")
        if path.startswith("/chunked/"):
            return self.reply(200, "a" * int(path[9:]), "text/plain", chunked=4096)
        if path.startswith("/status/"):
            status = int(path[8:])
            return self.reply(status, "status %d" % status, "text/plain", reason=query.get("reason"))
        if path.startswith("/redirect/"):
            left = int(path[10:])
            target = "/json" if left <= 1 else "/redirect/%d" % (left - 1)
            return self.reply(302, "moved", "text/plain", [("Location", target)])
        if path == "/redirect-to":
            return self.reply(int(query.get("code", "302")), "moved", "text/plain", [("Location", query["to"])])
        if path == "/redirect-loop":
            return self.reply(302, "", None, [("Location", "/redirect-loop")])
        if path == "/redirect-nolocation":
            return self.reply(302, "no location", "text/plain")
        if path == "/slow":
            time.sleep(ms)
            return self.reply(200, "slow", "text/plain")
        if path == "/slow-body":
            return self.reply(200, "slow body", "text/plain", delay_body=ms)
        if path == "/multi-headers":
            return self.reply(
                200,
                "ok",
                "text/plain",
                [
                    ("Set-Cookie", "a=1; Path=/"),
                    ("Set-Cookie", "b=2; Path=/"),
                    ("X-Multi", "one"),
                    ("X-Multi", "two"),
                    ("X-Mixed-CASE", "Kept Value"),
                    ("X-Empty", ""),
                ],
            )
        if path == "/latin1":
            return self.reply(200, "caf\u00e9 \u00fc".encode("latin-1"), "text/plain; charset=iso-8859-1")
        if path == "/bom":
            return self.reply(200, b"\xef\xbb\xbfwith bom", "text/plain; charset=utf-8")
        if path == "/badutf8":
            return self.reply(200, b"ok \xff\xfe \xed\x95 \xf0\x9f\x91 end", "text/plain; charset=utf-8")
        if path == "/nul":
            return self.reply(200, b"a\x00b\x1b[0m", "application/octet-stream")
        if path == "/gzip":
            return self.reply(200, gzip.compress(b"z" * 2000, mtime=0), "text/plain", [("Content-Encoding", "gzip")])
        if path == "/empty":
            return self.reply(200, b"", "text/plain")
        if path == "/no-type":
            return self.reply(200, b"untyped")
        if path == "/close":
            self.close_connection = True
            return None
        if path == "/short":
            self.close_connection = True
            return self.reply(200, b"only ten b", "text/plain", length=50)
        return self.reply_json({"error": "no such fixture", "path": self.path}, 404)

    # ---- Telegram Bot API -----------------------------------------------------------------
    def telegram(self, token, method, payload):
        if token == "bad:token":
            return self.reply_json({"ok": False, "error_code": 401, "description": "Unauthorized"}, 401)
        key = str(payload.get("chat_id", payload.get("file_id", "")))
        if key == "err400":
            return self.reply_json({"ok": False, "error_code": 400, "description": "Bad Request: chat not found"}, 400)
        if key == "err200":
            return self.reply_json(
                {"ok": False, "error_code": 403, "description": "Forbidden: bot was blocked by the user"}
            )
        if key == "err429":
            return self.reply_json(
                {
                    "ok": False,
                    "error_code": 429,
                    "description": "Too Many Requests: retry after 5",
                    "parameters": {"retry_after": 5},
                },
                429,
            )
        if key == "errlong":
            return self.reply_json({"ok": False, "error_code": 400, "description": "x" * 1500}, 400)
        if key == "nodesc":
            return self.reply_json({"ok": False}, 403)
        if key == "strcode":
            return self.reply_json({"ok": False, "error_code": "400", "description": "  padded description  "}, 400)
        if key == "html":
            return self.reply(502, "<html>bad gateway</html>", "text/html")
        if key == "html200":
            return self.reply(200, "<html>hello</html>", "text/html")
        if key == "array":
            return self.reply_json([1, 2, 3])
        if key == "ok500":
            return self.reply_json({"ok": True, "result": True}, 500)
        if key == "okstring":
            return self.reply_json({"ok": "true", "result": True})
        if key == "noreason":
            return self.reply(500, "oops", "text/plain", reason="")
        if key == "drop":
            self.close_connection = True
            return None
        if key == "slow":
            time.sleep(1.0)
        delay = 0.5 if key == "slowbody" else 0.0
        if method == "getFile":
            return self.telegram_get_file(key, delay)
        if method in ("deleteMessage", "setMessageReaction", "sendChatAction") or key == "true":
            return self.reply_json({"ok": True, "result": True}, delay_body=delay)
        if key == "emptyresult":
            return self.reply_json({"ok": True})
        if method in ("sendMessage", "editMessageText"):
            chat = int(key) if re.fullmatch(r"-?\d{1,15}", key) else key
            result = {
                "message_id": payload.get("message_id", 42),
                "date": 1700000000,
                "text": payload.get("text"),
                "chat": {"id": chat, "type": "private"},
                "from": {"id": 999, "is_bot": True, "first_name": "parity"},
            }
            if key == "strid":
                result.update({"message_id": "77", "date": 1.5, "text": "  padded  "})
            if key == "weird":
                result.update({"message_id": -5, "date": "soon", "text": "   "})
            return self.reply_json({"ok": True, "result": result}, delay_body=delay)
        return self.reply_json({"ok": False, "error_code": 404, "description": "Not Found"}, 404)

    def telegram_get_file(self, file_id, delay):
        result = {
            "file_id": file_id,
            "file_unique_id": "U-" + file_id,
            "file_size": len(JPEG),
            "file_path": "photos/%s.jpg" % file_id,
        }
        if file_id == "nopath":
            del result["file_path"]
        if file_id == "sparse":
            result = {"file_id": "sparse", "file_path": "photos/sparse.jpg"}
        if file_id == "floatsize":
            result["file_size"] = 12.9
        if file_id == "otherid":
            result["file_id"] = " canonical-id "
        if file_id == "resulttrue":
            result = True
        if file_id == "unicode":
            result["file_path"] = "documents/한글 파일.bin"
        return self.reply_json({"ok": True, "result": result}, delay_body=delay)

    def telegram_file(self, path):
        name = path.rsplit("/", 1)[-1]
        if name.startswith("gone"):
            return self.reply_json({"ok": False, "error_code": 404, "description": "Not Found"}, 404)
        if name.startswith("noreasonfile"):
            return self.reply(500, "x", "text/plain", reason="")
        if name.startswith("empty"):
            return self.reply(200, b"", "application/octet-stream")
        if name.startswith("notype"):
            return self.reply(200, JPEG)
        if name.startswith("chunked"):
            return self.reply(200, JPEG, "image/jpeg", chunked=16)
        if name.startswith("params"):
            return self.reply(200, "héllo", "text/plain; charset=utf-8")
        return self.reply(200, JPEG, "image/jpeg")

    # ---- Slack Web API --------------------------------------------------------------------
    def slack(self, method, authorization, payload):
        if authorization != "" and not authorization.startswith("Bearer xoxb-"):
            return self.reply_json({"ok": False, "error": "invalid_auth"})
        channel = str(payload.get("channel", ""))
        if channel == "C_NOTFOUND":
            return self.reply_json({"ok": False, "error": "channel_not_found"})
        if channel == "C_RATE":
            return self.reply_json({"ok": False, "error": "ratelimited"}, 429, headers=[("Retry-After", "30")])
        if channel == "C_NOERR":
            return self.reply_json({"ok": False})
        if channel == "C_PADERR":
            return self.reply_json({"ok": False, "error": "  padded_error  "}, 400)
        if channel == "C_HTML":
            return self.reply(502, "<html>bad gateway</html>", "text/html")
        if channel == "C_OK500":
            return self.reply_json({"ok": True, "ts": "1.2"}, 500)
        if channel == "C_ARRAY":
            return self.reply_json(["ok"])
        if channel == "C_NULL":
            return self.reply_json(None)
        if channel == "C_MINIMAL":
            return self.reply_json({"ok": True})
        if channel == "C_SLOW":
            time.sleep(1.0)
        delay = 0.5 if channel == "C_SLOWBODY" else 0.0
        if method == "chat.postMessage":
            ts = "1700000000.000100"
            message = {"type": "message", "text": payload.get("text"), "ts": ts, "bot_id": "B1"}
            if channel == "C_WEIRD":
                return self.reply_json({"ok": True, "channel": 7, "ts": 1700000000.0001, "message": "nope"})
            if channel == "C_PADTEXT":
                message["text"] = "  server text  "
            out = "C_NEW" if channel == "C_RENAMED" else channel
            return self.reply_json({"ok": True, "channel": out, "ts": ts, "message": message}, delay_body=delay)
        if method == "chat.update":
            out = "C_NEW" if channel == "C_RENAMED" else channel
            ts = "1700000009.000900" if channel == "C_RENAMED" else payload.get("ts")
            return self.reply_json(
                {"ok": True, "channel": out, "ts": ts, "text": payload.get("text")}, delay_body=delay
            )
        if method == "chat.delete":
            return self.reply_json({"ok": True, "channel": channel, "ts": payload.get("ts")})
        if method == "reactions.add":
            if payload.get("name") == "already":
                return self.reply_json({"ok": False, "error": "already_reacted"})
            return self.reply_json({"ok": True})
        return self.slack_messages(method, channel, payload)

    def slack_messages(self, method, channel, payload):
        if channel == "C_WEIRD":
            return self.reply_json(
                {
                    "ok": True,
                    "messages": [{"ts": " 5.5 ", "text": "a"}, "str", None, 3, ["x"]],
                    "has_more": "yes",
                    "response_metadata": {"next_cursor": "  "},
                }
            )
        if channel == "C_NOTLIST":
            return self.reply_json({"ok": True, "messages": {"0": {"ts": "1"}}, "response_metadata": None})
        rows = list(HISTORY) if method == "conversations.history" else list(THREAD)
        if method == "conversations.replies" and payload.get("ts") != THREAD[0]["ts"]:
            return self.reply_json({"ok": False, "error": "thread_not_found"})
        inclusive = payload.get("inclusive") is True
        latest, oldest = payload.get("latest"), payload.get("oldest")
        if latest:
            rows = [m for m in rows if float(m["ts"]) < float(latest) or (inclusive and m["ts"] == latest)]
        if oldest:
            rows = [m for m in rows if float(m["ts"]) > float(oldest) or (inclusive and m["ts"] == oldest)]
        start = 2 if payload.get("cursor") == "page2" else 0
        limit = payload.get("limit") or 100
        page = rows[start : start + limit]
        more = len(rows) > start + limit
        out = {"ok": True, "messages": page, "has_more": more}
        if more:
            out["response_metadata"] = {"next_cursor": "page2"}
        return self.reply_json(out)

    def slack_file(self, name, authorization):
        if not authorization:
            return self.reply(401, "no auth", "text/plain")
        if name == "image.png":
            return self.reply(
                200,
                PNG,
                "image/png",
                [("ETag", '"abc123"'), ("Content-Disposition", 'attachment; filename="image.png"')],
            )
        if name == "chunked.bin":
            return self.reply(200, PNG, "application/octet-stream", chunked=10)
        if name == "empty.txt":
            return self.reply(200, b"", "text/plain")
        if name == "notype":
            return self.reply(200, PNG)
        if name == "note.txt":
            return self.reply(200, "héllo 👍", "text/plain; charset=utf-8")
        if name == "moved.png":
            return self.reply(302, b"", None, [("Location", "/slack-files/image.png")])
        if name == "slow.bin":
            time.sleep(1.0)
            return self.reply(200, PNG, "application/octet-stream")
        if name == "forbidden":
            return self.reply(403, "no", "text/plain")
        if name == "noreason":
            return self.reply(500, "no", "text/plain", reason="")
        if name == "login":
            return self.reply(200, "<html>sign in</html>", "text/html")
        return self.reply(404, "file_not_found", "text/plain")


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        pass


def main():
    server = Server(("127.0.0.1", 0), Handler)
    sys.stdout.write("http://127.0.0.1:%d\n" % server.server_address[1])
    sys.stdout.flush()
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
