"""The examples of a manifest: compares outputs with the promised ones. Pure.

An object of the example need not show every key. Other keys are not compared, so a duration or a path can be left out.
Lists and all other values must be equal. A number is equal to the same number of another type, but never to a boolean.

Source: docs/design/tools.md section 10.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final, Literal

from msgspec import Struct

from goondan.kernel.bundle.problems import Path, spell

#: The most differences of one example that are shown.
MAX_DIFFERENCES: Final = 5
#: The most of a value in a difference (characters).
MAX_VALUE: Final = 200


def differences(expected: Any, got: Any) -> list[str]:
    """The differences between `got` and the example, at most MAX_DIFFERENCES lines. Empty when there are none."""
    return list(islice(_differences(expected, got, ("output",)), MAX_DIFFERENCES))


def _differences(expected: Any, got: Any, at: Path) -> Iterator[str]:
    if isinstance(expected, dict) and isinstance(got, dict):
        for key, value in expected.items():
            if key in got:
                yield from _differences(value, got[key], (*at, key))
            else:
                yield f"{spell((*at, key))}: missing, expected {short(value)}"
    elif isinstance(expected, list) and isinstance(got, list):
        for index, (left, right) in enumerate(zip(expected, got, strict=False)):
            yield from _differences(left, right, (*at, index))
        if len(expected) != len(got):
            yield f"{spell(at)}: expected {len(expected)} items, got {len(got)}"
    elif expected != got or isinstance(expected, bool) != isinstance(got, bool):
        yield f"{spell(at)}: expected {short(expected)}, got {short(got)}"


def short(value: Any) -> str:
    """A value as JSON on one line, cut to MAX_VALUE characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 1] + "…"


class Outcome(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """How one example ended."""

    #: Full name of the tool.
    tool: str
    #: The number of the example, from 0.
    index: int
    #: The manifest that it stands in.
    file: str
    #: The line of its input there.
    line: int
    #: Whether it passed.
    status: Literal["passed", "failed", "skipped"]
    #: Its arguments.
    input: dict[str, Any]
    #: How long the call took (milliseconds).
    duration_ms: float = 0.0
    #: Why it failed.
    differences: list[str] = []
    #: The call's result.
    output: Any = None
    #: The call's error.
    error: Any = None
    #: Why no call was made.
    reason: str = ""


def judge(result: dict[str, Any], expected: Any, *, compares: bool) -> list[str]:
    """Why a ToolResult differs from the promise of the example. Empty when it does not. `compares`: the example shows
    an output.
    """
    if result["status"] == "error":
        error = result.get("error") or {}
        return [f"the call failed: {error.get('message', '')} [{error.get('code', 'E_TOOL')}]"]
    if compares and result["status"] != "ok":
        return [f"the result is {result['status']}, and the example shows an output"]
    return differences(expected, result.get("output")) if compares else []
