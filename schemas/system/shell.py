"""Words for a shell, in lines that tell a person what to type."""

from __future__ import annotations


def quoted(word: str) -> str:
    """`word` as one word of a POSIX shell, whatever is in it."""
    from shlex import quote  # every program checks folders when it starts; only one that refuses a folder needs this

    return quote(word)
