"""The entries of tests/mutations.yaml: what is wrong with one is said, before anything is changed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from scripts.mutations import Mutation, copy_files, load, marked, missing, problems_of

GOOD = load()[0]


def test_the_entries_fit_the_tree() -> None:
    assert problems_of(load()) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"file": "kernel/nowhere.py"}, "is no file of the product"),
        ({"file": "tests/conftest.py"}, "is no file of the product"),
        ({"code": "this stands nowhere"}, "stands 0 times"),
        ({"code": "\n"}, "times in"),
        ({"becomes": GOOD.code}, "changes nothing"),
        ({"test": "tests/unit/test_nowhere.py::test_x"}, "there is no tests/unit/test_nowhere.py"),
        ({"test": GOOD.test + "_not"}, "does not claim it"),
        ({"id": "NAME-99"}, "does not claim it"),
    ],
)
def test_an_entry_that_does_not_fit_is_told(change: dict[str, str], told: str) -> None:
    (problem,) = problems_of([Mutation(**{**msgspec.to_builtins(GOOD), **change})])
    assert told in problem


def test_the_ids_of_all_marks_of_a_function_count() -> None:
    source = (
        "import pytest\n@pytest.mark.requirement('A-1', 'A-2')\n@pytest.mark.requirement('B-1')\ndef test_x(): ...\n"
    )
    assert marked(source)["test_x"] == {"A-1", "A-2", "B-1"}


def test_a_covered_requirement_without_an_entry_is_a_problem() -> None:
    entry = Mutation(id="A-01", file="a.py", code="a", becomes="b", test="t.py::t")
    assert missing([entry], ["A-01", "A-02"]) == ["tests/mutations.yaml: A-02 is covered and has no entry"]


def test_a_copy_has_the_links_by_which_packages_are_found(tmp_path: Path) -> None:
    copy_files(tmp_path)
    assert (tmp_path / "goondan" / "kernel").is_symlink()
    assert (tmp_path / "goondan" / "kernel" / "paths.py").is_file()
