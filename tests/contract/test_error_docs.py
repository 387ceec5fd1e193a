"""docs/errors.md and its Korean twin have one anchor for each code, and none for a code that does not exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from goondan.kernel.cli import execute
from goondan.kernel.cli.commands.reference import page as explained
from goondan.kernel.cli.output import error_lines
from goondan.schemas.wire.errors import CODES, ENVIRONMENT, error_payload, tool_error
from scripts import error_docs

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


def test_every_page_is_explained_as_it_stands_in_the_document() -> None:
    for code, text in sections("errors.md").items():
        assert explained(code) == f"{code}\n{text}"
    assert explained("ENOENT") == explained("EACCES").replace("EACCES\n", "ENOENT\n", 1)
    assert "operating system" in explained("ENOENT")


def test_the_pages_are_in_an_installed_package() -> None:
    build = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert "error_pages.txt" in build["tool"]["setuptools"]["package-data"]["goondan.kernel"]
    assert (DOCS.parent / "kernel" / "error_pages.txt").samefile(DOCS / "errors.md")


@pytest.mark.parametrize("said", ["E_INIT", "e_init", "[E_INIT]", "https://docs.goondan.ai/errors/E_INIT"])
def test_explain_takes_a_code_as_it_is_shown(said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["explain", said]) == 0
    assert capsys.readouterr().out == explained("E_INIT") + "\n"


def test_explain_names_the_code_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["explain", "E_TOOL_LIMT"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: no error has the code 'E_TOOL_LIMT' [E_USAGE]",
        "  Did you mean 'E_TOOL_LIMIT'?",
        "  gdn explain E_USAGE",
    ]


def test_each_message_for_a_person_names_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for code in CODES:
        assert error_lines(error_payload(code, "what happened"))[-1] == f"  gdn explain {code}"
    (tmp_path / "goondan.yaml").write_text("kind: Agnt\n")
    assert execute(["validate", str(tmp_path)]) == 2
    assert "gdn explain E_CONFIG_UNKNOWN_KIND" in capsys.readouterr().out.splitlines()


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


def test_the_page_of_causes_has_the_codes_of_the_environment() -> None:
    page = error_docs.Page()
    text = page.path.read_text(encoding="utf-8")
    assert text == page.text(), "run scripts/error_docs.py"
    assert set(re.findall(r"^- \[(E_\w+)\]", text, flags=re.MULTILINE)) == ENVIRONMENT
    assert page.problems() == []
