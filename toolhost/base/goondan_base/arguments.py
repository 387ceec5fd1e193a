"""Checks of arguments in the bundled tools, beyond their JSON Schemas, with the same wording in all of them.

Schemas are checked before a handler runs. So most faults get here only when a tool's parameters are not known. Empty
strings, null bytes and non-finite numbers always get here.

Source: recorded parity (`open-*`, `empty-*`); requirements HANDLER-06, FS-05, TEXT-08.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from typing import Any

_INFINITY = float("inf")
#: The largest integer up to which integers and doubles are the same.
EXACT = 1 << 53
#: The characters that `trim` removes: white space and line ends of ECMAScript. Python's own set also has U+0085 and
#: U+001C to U+001F, and lacks U+FEFF.
WHITE_SPACE = (
    "\t\n\v\f\r \u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000\ufeff"
)


class InvalidInput(ValueError):
    """An argument that the schema lets through but that cannot be used."""


def non_empty(input: dict[str, Any], name: str) -> str:
    """A required string."""
    value = input.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"'{name}' must be a non-empty string")
    return value


def string(input: dict[str, Any], name: str, default: str) -> str:
    """A string that may be left out."""
    value = input.get(name, default)
    if not isinstance(value, str):
        raise InvalidInput(f"'{name}' must be a string")
    return value


def strings(input: dict[str, Any], name: str) -> list[str]:
    """A required list of strings."""
    value = input.get(name)
    if not isinstance(value, list):
        raise InvalidInput(f"'{name}' must be an array of strings")
    if not all(isinstance(item, str) for item in value):
        raise InvalidInput(f"'{name}' must contain only strings")
    return value


def mapping(input: dict[str, Any], name: str) -> dict[str, Any]:
    """An object that may be left out."""
    value = input.get(name, {})
    if not isinstance(value, dict):
        raise InvalidInput(f"'{name}' must be a JSON object")
    return value


def flag(input: dict[str, Any], name: str, default: bool) -> bool:
    """A boolean that may be left out."""
    value = input.get(name, default)
    if not isinstance(value, bool):
        raise InvalidInput(f"'{name}' must be a boolean")
    return value


def number(input: dict[str, Any], name: str, default: float | None = None) -> float:
    """A finite number. With the default None it is required. An integer stays an int, with the precision of a
    double.
    """
    value = input.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_INFINITY < value < _INFINITY:
        raise InvalidInput(f"'{name}' must be a valid number")
    return value if -EXACT <= value <= EXACT or isinstance(value, float) else int(float(value))


def path(input: dict[str, Any], name: str, workdir: str, default: str | None = None) -> str:
    """A path, absolute (see `absolute`). Without a default it is required and not empty."""
    value = non_empty(input, name) if default is None else string(input, name, default)
    if "\0" in value:
        raise InvalidInput(f"'{name}' must not contain null bytes")
    return absolute(workdir, value)


def absolute(workdir: str, given: str) -> str:
    """An absolute path, unchanged. A relative path is joined to the workdir and normalised (FS-05)."""
    return given if given.startswith("/") else normalised(f"{workdir}/{given}" if given else workdir)


def normalised(given: str) -> str:
    """An absolute path without `.`, `..` and doubled slashes. A slash at the end stays."""
    names: list[str] = []
    for name in given.split("/"):
        if name == "..":
            del names[-1:]
        elif name not in ("", "."):
            names.append(name)
    return "/" + "/".join(names) + ("/" if given.endswith("/") and names else "")


def as_text(value: str | float) -> str:
    """A value as JavaScript prints it: 1.0 is 1, -0.0 is 0, 1e21 is 1e+21, and integers are doubles."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    real = float(value)
    if real == 0:
        return "0"
    sign, digits, point = _split_number(real)
    if 0 < point <= 21:
        text = digits.ljust(point, "0") if len(digits) <= point else f"{digits[:point]}.{digits[point:]}"
    elif -6 < point <= 0:
        text = "0." + "0" * -point + digits
    else:
        mantissa = digits[0] + ("." + digits[1:] if len(digits) > 1 else "")
        text = f"{mantissa}e{'+' if point > 0 else '-'}{abs(point - 1)}"
    return sign + text


def _split_number(real: float) -> tuple[str, str, int]:
    """The sign, the shortest digits, and the position of the decimal point: 1.5 is ("", "15", 1)."""
    mantissa, _, exponent = f"{abs(real)!r}".partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    point = len(whole) + int(exponent or 0) - (len(whole + fraction) - len(digits))
    return ("-" if real < 0 else ""), digits.rstrip("0") or "0", point
