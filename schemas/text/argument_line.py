"""The arguments of a call as one short line for a person. Pure.

Source: docs/design/wire.md section 8; docs/design/commands.md section 9.
"""

from __future__ import annotations

import json
from itertools import islice
from typing import Any, Final

#: The longest line (characters).
MAX_LINE: Final = 100


def argument_line(args: Any) -> str:
    """`name=value` for each argument, at most MAX_LINE characters in all. Short words stand as they are, other texts as
    JSON, lists and objects as their brackets. "" for what is no object.
    """
    if not isinstance(args, dict):
        return ""
    line = " ".join(f"{_value(str(name))}={_value(value)}" for name, value in islice(args.items(), MAX_LINE))
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 1]}…"


def _value(value: Any) -> str:
    if isinstance(value, str):
        text = value[:MAX_LINE]
        return text if text and " " not in text and text.isprintable() else json.dumps(text, ensure_ascii=False)
    if isinstance(value, dict):
        return "{…}" if value else "{}"
    if isinstance(value, list):
        return "[…]" if value else "[]"
    return json.dumps(value, default=str)[:MAX_LINE]
