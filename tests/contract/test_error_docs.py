"""docs/errors.md and its Korean twin have one anchor for each code, and none for a code that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from schemas.errors import CODES, error_payload, tool_error

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("errors.md", "errors.ko.md")


def sections(page: str) -> dict[str, str]:
    """Code -> text below its heading."""
    parts = re.split(r"^### (\S+)$", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(set(parts[1::2])) == len(parts[1::2]), "a heading stands twice"
    return {
        code: re.split(r"^## ", text, flags=re.MULTILINE)[0].strip()
        for code, text in zip(parts[1::2], parts[2::2], strict=True)
    }


@pytest.mark.parametrize("page", PAGES)
def test_every_code_has_its_anchor_and_every_anchor_its_code(page: str) -> None:
    assert set(sections(page)) == set(CODES)


@pytest.mark.parametrize(("page", "remedy"), [("errors.md", "**Do:**"), ("errors.ko.md", "**해결:**")])
def test_each_section_says_when_it_happens_and_what_to_do(page: str, remedy: str) -> None:
    for code, text in sections(page).items():
        happens, found, do = text.partition(remedy)
        assert found, f"{page}: {code} has no {remedy}"
        assert happens.strip() and do.strip(), f"{page}: {code} is incomplete"


def test_both_pages_keep_one_order() -> None:
    assert list(sections("errors.md")) == list(sections("errors.ko.md"))


def test_both_pages_explain_codes_of_the_operating_system() -> None:
    for page in PAGES:
        last = (DOCS / page).read_text(encoding="utf-8").rsplit("\n## ", 1)[1]
        assert "ENOENT" in last


@pytest.mark.requirement("ERROR-06", "ERROR-07")
@pytest.mark.parametrize("code", CODES)
def test_errors_of_every_code_carry_a_suggestion_and_a_page(code: str) -> None:
    assert re.fullmatch(r"E_[A-Z]+(_[A-Z]+)*", code)
    for error in (tool_error(code, "what happened", name="ToolError"), error_payload(code, "what happened")):
        assert error.suggestion
        assert error.suggestion.endswith(".")
        assert error.help_url == f"https://docs.goondan.ai/errors/{code}"


@pytest.mark.requirement("ERROR-06")
def test_a_better_suggestion_wins_over_the_stock_one() -> None:
    error = tool_error("E_TOOL", "no such table", name="DbError", suggestion="Create the table first.")
    assert error.suggestion == "Create the table first."
