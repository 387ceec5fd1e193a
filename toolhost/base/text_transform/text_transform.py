"""The bundled tool `text-transform`: small changes to a text. Positions and lengths count Unicode code points.

Source: docs/design/tools.md section 9; requirements TEXT-01 to TEXT-12; recorded parity `text-transform__*`.
"""

from __future__ import annotations

from goondan_base.arguments import WHITE_SPACE, InvalidInput, as_text, non_empty, number, string
from goondan_tool import ToolContext, ToolError

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from typing import Any

#: The modulus of `maxParts`, as recorded: -1 means all parts.
PARTS_MODULUS = 1 << 32


def replace(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`text-transform__replace`: replace a literal string, once or everywhere."""
    text = non_empty(input, "text")
    search = non_empty(input, "search")
    replacement = string(input, "replacement", "")
    count = text.count(search) if input.get("all") is True else int(search in text)
    # Checked before the result is built: a megabyte of text can become a terabyte.
    check_size(ctx, size(text) + count * (size(replacement) - size(search)))
    return {"original": text, "result": text.replace(search, replacement, count), "replacements": count}


def slice_(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`text-transform__slice`: the text from one position to another. Fractions are cut off, but the result repeats the
    given numbers.
    """
    text = non_empty(input, "text")
    start = number(input, "start", 0)
    end = number(input, "end", len(text))
    result = text[int(start) : int(end)]
    return {"original": text, "result": result, "start": start, "end": end, "length": len(result)}


def split(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`text-transform__split`: split at a delimiter. Parts beyond maxParts are dropped (docs/design/tools.md section
    9).
    """
    text = non_empty(input, "text")
    delimiter = string(input, "delimiter", "\n")
    most = int(number(input, "maxParts", -1)) % PARTS_MODULUS
    # At most one split more than wanted, because the last part would hold the rest of the text.
    parts = text.split(delimiter, most)[:most] if delimiter else list(text[:most])
    return {"delimiter": delimiter, "count": len(parts), "parts": parts}


def join(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`text-transform__join`: join strings, numbers and booleans to one text."""
    parts = input.get("parts")
    if not isinstance(parts, list):
        raise InvalidInput("'parts' must be an array")
    if not all(isinstance(part, str | int | float) for part in parts):  # bool is an int
        raise InvalidInput("'parts' must contain only string/number/boolean values")
    delimiter = string(input, "delimiter", "\n")
    texts = [as_text(part) for part in parts]
    check_size(ctx, sum(map(size, texts)) + size(delimiter) * max(0, len(texts) - 1))
    return {"delimiter": delimiter, "count": len(texts), "result": delimiter.join(texts)}


def trim(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`text-transform__trim`: remove white space at the start, the end or both. The schema allows no other mode."""
    text = non_empty(input, "text")
    mode = string(input, "mode", "both")
    result = text if mode == "end" else text.lstrip(WHITE_SPACE)
    result = result if mode == "start" else result.rstrip(WHITE_SPACE)
    return {"original": text, "result": result, "mode": mode, "trimmedLength": len(text) - len(result)}


def case(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`text-transform__case`: to upper or lower case, by Unicode's full mappings."""
    text = non_empty(input, "text")
    to = non_empty(input, "to")
    if to not in ("upper", "lower"):
        raise InvalidInput(f"Unsupported case transform '{to}'. Use 'upper' or 'lower'.")
    return {"original": text, "result": text.upper() if to == "upper" else text.lower(), "to": to}


def size(text: str) -> int:
    """The size of a text on the wire (bytes)."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def check_size(ctx: ToolContext, result: int) -> None:
    """Raise ToolError E_TOOL_LIMIT when a result of so many bytes is too large for an output."""
    if result > ctx.output_limit:
        raise ToolError(
            f"the result would have {result} bytes, limit {ctx.output_limit}",
            code="E_TOOL_LIMIT",
            suggestion="Work on a part of the text, or in a file with the tool bash.",
        )


handlers = {"replace": replace, "slice": slice_, "split": split, "join": join, "trim": trim, "case": case}
