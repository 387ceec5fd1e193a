"""Which parts of a server's variables and headers may not be shown."""

from __future__ import annotations

import pytest

from goondan.schemas.text.secret_values import secret_parts


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ("hunter2", ["hunter2"]),
        ("Bearer tok-4711", ["Bearer tok-4711", "tok-4711"]),
        ("Basic dXNlcjpodW50ZXIy", ["Basic dXNlcjpodW50ZXIy", "dXNlcjpodW50ZXIy", "user:hunter2", "hunter2"]),
        ("postgres://me:p%40ss@db/x", ["postgres://me:p%40ss@db/x", "p%40ss", "p@ss"]),
        (
            '{"Authorization": "Bearer ntn_4711abcDEF4711abcDEF"}',
            ['{"Authorization": "Bearer ntn_4711abcDEF4711abcDEF"}', "ntn_4711abcDEF4711abcDEF"],
        ),
        ("https://api.example.com/v4", []),
        ("https://api.example.com/?key=1", ["https://api.example.com/?key=1"]),
        ("/srv/data", []),
        ("info", []),
        ("3600", []),
        ("true", []),
        ("", []),
    ],
)
def test_what_is_secret_of_a_value(value: str, parts: list[str]) -> None:
    assert secret_parts([value]) == parts
