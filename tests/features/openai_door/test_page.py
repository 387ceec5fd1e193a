"""What docs/serve.md says of parameters, and what the doors do with them."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import pytest

from goondan.features.openai_door.door import TABLES

PAGE: Final = Path(__file__).resolve().parents[3] / "docs" / "serve.md"
#: What the page says in words.
WORDS: Final = {"penalties": "*_penalty", "and its kin": "max_*_tokens"}
#: Not whole parameters: a field, a value, a code; and one that is refused for some values alone.
VALUES: Final = {"json_object", "text.format", "unknown_parameter", "response_format"}


def rows() -> list[tuple[str, str]]:
    """What is done, and a pattern of names that it is done with; behind `in chat`, those of chat."""
    table = PAGE.read_text(encoding="utf-8").partition("| parameter | | why |\n")[2].partition("\n\n")[0]
    found = []
    for line in table.splitlines()[1:]:
        names, does, _ = (cell.strip() for cell in line.strip("|").split("|", 2))
        both, _, chat = names.partition("in chat ")
        for text, where in ((both, "*"), (chat, "chat")):
            told = [*re.findall(r"`([a-z_.*]+)`", text), *(form for word, form in WORDS.items() if word in text)]
            found += [(does, f"{where}.{name}") for name in told if name not in VALUES]
    return found


KNOWN: Final = {f"{door}.{name}": one.does for door, parameters in TABLES.items() for name, one in parameters.items()}


@pytest.mark.parametrize(("does", "name"), rows())
def test_the_doors_do_with_a_parameter_what_the_page_says(does: str, name: str) -> None:
    found = {known: what for known, what in KNOWN.items() if fnmatchcase(known, name)}
    assert found, "there is no such parameter"
    assert {*found.values()} == {does}, found


def test_the_page_has_each_parameter_that_is_not_used() -> None:
    told = rows()
    missing = [
        name
        for name, does in KNOWN.items()
        if does != "used" and not any(what == does and fnmatchcase(name, form) for what, form in told)
    ]
    assert not missing
