"""What a client sends: lines of JSON-RPC, and the blocks of a prompt."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from goondan.features.acp.command.rules.prompts import INVALID_REQUEST, PARSE_ERROR, BadLine, read_message, read_prompt
from tests.checks import refuses

WORKDIR = "/srv/shop"


def read(line: bytes) -> dict[str, Any]:
    return read_message(line, len(line), 1 << 20)


PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n....").decode()


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"what?", PARSE_ERROR),
        (b"\xff\xfe", PARSE_ERROR),
        (b'"\xed\xa0\x80"', PARSE_ERROR),
        (b"[" * 100_000, PARSE_ERROR),
        (b"[]", INVALID_REQUEST),
        (b'[{"jsonrpc":"2.0","id":1,"method":"initialize"}]', INVALID_REQUEST),
        (b"3", INVALID_REQUEST),
        (b'{"id": 7, "method": "initialize"}', INVALID_REQUEST),
        (b'{"jsonrpc": "2.0", "id": 7, "method": 5}', INVALID_REQUEST),
        (b'{"jsonrpc": "2.0", "id": [7], "method": "initialize"}', INVALID_REQUEST),
        (b'{"jsonrpc": "2.0", "id": {}, "result": {}}', INVALID_REQUEST),
        (b'{"jsonrpc": "2.0", "id": true, "result": {}}', INVALID_REQUEST),
        (b'{"jsonrpc": "2.0", "id": 1.5, "result": {}}', INVALID_REQUEST),
    ],
)
def test_rubbish_is_refused_in_words(line: bytes, code: int) -> None:
    with pytest.raises(BadLine) as caught:
        read(line)
    assert caught.value.args[0]["code"] == code


def test_a_line_that_was_too_long_is_refused() -> None:
    with pytest.raises(BadLine, match="9 bytes"):
        read_message(None, 9, 8)


def test_what_is_a_message_is_passed_on() -> None:
    line = b'{"jsonrpc":"2.0","id":"a","method":"session/new","params":{"cwd":"/x"}}'
    assert read(line)["params"] == {"cwd": "/x"}


def link(uri: str, name: str = "") -> dict[str, Any]:
    return {"type": "resource_link", "uri": uri, "name": name}


@pytest.mark.parametrize(
    ("uri", "place", "path"),
    [
        ("file:///srv/shop/src/a%20b.py", "src/a b.py", "/srv/shop/src/a b.py"),
        ("file:///srv/shop/a.py#L12-20", "a.py:12", "/srv/shop/a.py"),
        ("file:///srv/shop/../secret", "/srv/secret (not in the folder where tools work)", None),
        ("file:///srv/shop/%2e%2e/secret", "/srv/secret (not in the folder where tools work)", None),
        ("file:///etc/passwd", "/etc/passwd (not in the folder where tools work)", None),
        ("file://elsewhere/srv/shop/a", "file://elsewhere/srv/shop/a", None),
        ("file:///srv/shop/a%00b", "file:///srv/shop/a%00b", None),
        ("https://example.com/a", "https://example.com/a", None),
    ],
)
def test_the_place_of_a_resource(uri: str, place: str, path: str | None) -> None:
    [said] = read_prompt([link(uri)], WORKDIR)
    assert (said.text, said.path) == (place, path)


def test_a_prompt_is_text_and_files() -> None:
    blocks = [
        {"type": "text", "text": "Look:"},
        link("file:///srv/shop/a.png", "the picture"),
        {"type": "image", "data": PNG, "mimeType": "image/png"},
        {"type": "resource", "resource": {"uri": "file:///srv/shop/b.md", "text": "```\nx"}},
        {"type": "resource", "resource": {"uri": "file:///srv/shop/c.png", "blob": PNG}},
    ]
    said = read_prompt(blocks, WORKDIR)
    assert [block.text for block in said] == ["Look:", "a.png", "", "b.md\n````\n```\nx\n````", ""]
    assert [block.path for block in said if block.path] == ["/srv/shop/a.png"]
    assert [block.name for block in said if block.data] == ["picture", "c.png"]


@pytest.mark.parametrize(
    ("block", "code"),
    [
        ({"type": "text", "text": "  "}, "E_USAGE"),
        ({"type": "audio", "data": PNG, "mimeType": "audio/wav"}, "E_USAGE"),
        ({"type": "image", "data": "?", "mimeType": "image/png"}, "E_FILE_INVALID"),
        ({"type": "image", "data": "é", "mimeType": "image/png"}, "E_FILE_INVALID"),
    ],
)
def test_what_an_agent_cannot_be_told_is_refused(block: dict[str, Any], code: str) -> None:
    with refuses(code):
        read_prompt([block], WORKDIR)
