"""What counts as a claimed requirement, and what does not."""

from __future__ import annotations

from scripts.requirements import Requirement, claims_of, load, table


def claimed(source: str) -> list[str]:
    claims, problems = claims_of(source, "tests/test_x.py")
    assert problems == []
    return [claim.id for claim in claims]


def test_a_mark_on_a_test_a_class_a_module_or_a_case_counts() -> None:
    source = """
import pytest
pytestmark = pytest.mark.requirement("A-01")

@pytest.mark.requirement("A-02", "A-03")
async def test_one(): ...

@pytest.mark.requirement("A-04")
class TestMany:
    @pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.requirement("A-05"))])
    def test_two(self, x): ...
"""
    assert sorted(claimed(source)) == ["A-01", "A-02", "A-03", "A-04", "A-05"]


def test_other_marks_and_other_calls_do_not() -> None:
    assert claimed("import pytest\n@pytest.mark.timeout(5)\ndef test_x(): requirement('A-01')\n") == []


def test_a_mark_on_a_helper_proves_nothing() -> None:
    claims, problems = claims_of("@pytest.mark.requirement('A-01')\ndef helper(): ...\n", "tests/test_x.py")
    assert claims == []
    assert problems == ["tests/test_x.py:1: `helper` is no test, so it proves nothing"]


def test_ids_must_be_there_and_be_literal() -> None:
    _, problems = claims_of("pytestmark = [pytest.mark.requirement(), pytest.mark.requirement(ID)]\n", "t.py")
    assert problems == [
        "t.py:1: a requirement mark without an id",
        "t.py:1: write the id as a literal string, so that it can be found",
    ]


def test_table_counts_by_area_and_names_what_is_open() -> None:
    many = [Requirement(f"B-{n:02}", "second", "MUST") for n in range(9)]
    rows = table([Requirement("A-01", "first", "MUST"), *many], {"A-01", "B-00"}).splitlines()
    assert rows[1].split() == ["first", "1", "of", "1"]
    assert rows[2].startswith("second")
    assert rows[2].endswith("B-01, B-02, B-03, B-04, B-05, B-06 and 2 more")


def test_the_list_has_unique_ids_and_known_levels() -> None:
    requirements = load()
    assert len({requirement.id for requirement in requirements}) == len(requirements) == 399
    assert {requirement.level for requirement in requirements} == {"MUST", "SHOULD", "MAY"}
