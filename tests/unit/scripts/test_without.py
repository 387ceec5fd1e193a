"""What a tree loses with a feature: its rows, its tests, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml

from goondan.features import FEATURES, Feature
from scripts import without_edits as edits
from scripts.without import LEAST_FILES, RUN, SAMPLE, files_of_tests, starts_programs

ROOT = Path(__file__).resolve().parents[3]
ROWS = (Feature("notes", ("wire",)), Feature("rules", ("wire",), needs=("notes",)), Feature("clocks", ("broker",)))
SOURCE = '''\
"""Tests."""

import pytest

NOTE = 1


# About the next one.
@pytest.mark.feature("notes")
@pytest.mark.requirement("NAME-01")
def test_a_note() -> None:
    assert NOTE


@pytest.mark.parametrize(
    "word",
    [
        "plain",
        pytest.param("작은", marks=pytest.mark.feature("notes")),
        pytest.param("other", marks=[pytest.mark.feature("clocks")]),
    ],
)
def test_a_word(word: str) -> None:
    assert word
'''


def test_what_needs_a_feature_goes_with_it() -> None:
    assert edits.going(["clocks"], ROWS) == {"clocks"}
    assert edits.going(["notes"], ROWS) == {"notes", "rules"}
    assert edits.going(["all"], ROWS) == {"notes", "rules", "clocks"}
    with pytest.raises(ValueError, match="no such feature: tides; there are notes"):
        edits.going(["tides"], ROWS)


@pytest.mark.parametrize("gone", [["certify"], ["restart", "gates"], [row.name for row in FEATURES]])
def test_the_table_loses_rows_and_keeps_the_others(gone: list[str]) -> None:
    source = (ROOT / "features" / "__init__.py").read_text(encoding="utf-8")
    left = edits.table(source, gone)
    there = [row.name for row in FEATURES if row.name not in gone]
    rows = [node.args[0] for node in ast.walk(ast.parse(left)) if isinstance(node, ast.Call) and node.args]
    names = [row.value for row in rows if isinstance(row, ast.Constant)]
    assert [name for name in names if name in {row.name for row in FEATURES}] == there
    assert edits.table(source, []) == source


def test_a_benchmark_of_a_feature_is_known_by_its_imports() -> None:
    assert edits.imports("from goondan.features.notes.wire import Note\n", {"notes", "rules"})
    assert edits.imports("    import tests.features.notes.histories\n", {"notes"})
    assert edits.imports('PROGRAM = "features/notes/jail/start.py"\n', {"notes"})
    assert not edits.imports("from goondan.features import FEATURES\n# from goondan.features.notes\n", {"notes"})


def test_marked_tests_and_marked_cases_go() -> None:
    assert edits.marked(SOURCE, {"notes"}) and not edits.marked(SOURCE, {"rules"})
    left = edits.tests(SOURCE, {"notes"})
    assert "test_a_note" not in left and "About the next one" not in left and "작은" not in left
    assert '"plain",\n        pytest.param("other"' in left
    assert "NOTE = 1" in left
    assert edits.tests(SOURCE, {"rules"}) == SOURCE


def test_a_file_without_a_test_goes() -> None:
    assert edits.tests("import pytest\n\n@pytest.mark.feature('notes')\ndef test_x(): ...\n", {"notes"}) == ""
    whole = "import pytest\npytestmark = [pytest.mark.feature('clocks', 'notes')]\ndef test_x(): ...\n"
    assert edits.whole(whole, {"notes"}) and edits.tests(whole, {"notes"}) == ""
    assert not edits.whole(whole, {"rules"}) and edits.tests(whole, {"rules"}) == whole


def test_a_requirement_goes_with_its_owner_alone() -> None:
    listed = "- id: A-01\n  owner: notes\n- id: A-02\n- id: A-03\n  owner: clocks\n"
    assert edits.owned(listed, {"notes"}) == {"A-01"}
    assert edits.covered("A-01\nA-02\nA-03\n", {"A-01"}) == "A-02\nA-03\n"


def test_a_change_of_code_goes_with_its_requirement_its_code_or_its_test() -> None:
    def entry(id_: str, file: str, test: str) -> str:
        return f"- id: {id_}\n  file: {file}\n  code: a\n  becomes: b\n  test: {test}\n"

    there = edits.functions({"a.py": "", "t.py": "async def test_x(): ...\n"})
    kept = entry("A-02", "a.py", "t.py::test_x[1]")
    text = "# Head.\n" + entry("A-01", "a.py", "t.py::test_x") + kept
    text += entry("A-03", "gone.py", "t.py::test_x") + entry("A-04", "a.py", "t.py::test_gone")
    assert edits.mutations(text, {"A-01"}, there) == "# Head.\n" + kept


def test_a_rule_that_only_a_feature_shows_goes_with_it() -> None:
    there = edits.functions({"tests/t.py": "def test_x(): ...\n"})
    text = "# Head.\n\nC-A-1: {t.py: test_x}\nC-B-1: {t.py: test_x, gone.py: test_y}\nC-C-1: {gone.py: test_y}\n"
    left, lost = edits.rules(text, there)
    assert left == "# Head.\n\nC-A-1: {t.py: test_x}\nC-B-1: {t.py: test_x}\n"
    assert lost == ["C-C-1"]
    assert edits.without_rules("It waits [C-A-1]. It ends [C-C-1].", lost) == "It waits [C-A-1]. It ends."


def test_a_project_names_no_module_that_has_gone() -> None:
    text = 'pure = [\n    "goondan.features.notes.broker",\n    "goondan.features.notes_of_old",\n]\n'
    text += 'one = ["a", "goondan.features.notes.jail.*"]\n'
    assert edits.project(text, {"notes"}) == 'pure = [\n    "goondan.features.notes_of_old",\n]\none = ["a"]\n'


def test_a_page_keeps_the_words_of_a_link_that_would_lead_nowhere() -> None:
    text = "See [`x.py`](../features/notes/x.py), `features/notes/y.py` and `features/rules/z.py`."
    assert edits.page(text, {"notes"}) == "See `x.py`, features/notes/y.py and `features/rules/z.py`."


def test_the_pages_of_errors_lose_the_codes_of_the_feature() -> None:
    text = "# Errors\n\n## Notes\n\n### E_NOTE\nIt.\n\n### E_NOTES\nAll.\n\n## End\n"
    assert edits.error_page(text, {"E_NOTE"}) == "# Errors\n\n## Notes\n\n### E_NOTES\nAll.\n\n## End\n"
    links = "[E_NOTE](errors.md#e_note), [E_NOTES](docs/errors.md#e_notes)"
    assert edits.page(links, {"notes"}, {"E_NOTE"}) == "E_NOTE, [E_NOTES](docs/errors.md#e_notes)"


def test_the_table_of_commands_loses_those_of_the_feature() -> None:
    table = "| `gdn note` | Notes. |\n| `gdn run` | Runs. |\n| `gdn notes` | More. |\n"
    assert edits.commands(table, ["note", "tool note"]) == "| `gdn run` | Runs. |\n| `gdn notes` | More. |\n"
    assert edits.commands(table, []) == table


def test_owners_and_marks_name_features() -> None:
    words = yaml.safe_load((ROOT / "tests" / "features" / "names.yaml").read_text(encoding="utf-8"))["words"]
    requirements = yaml.safe_load((ROOT / "tests" / "requirements.yaml").read_text(encoding="utf-8"))
    assert {entry["owner"] for entry in requirements if "owner" in entry} <= words.keys()
    for path in files_of_tests(ROOT):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if "mark.feature" in source else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "feature":
                names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
                assert names and set(names) <= words.keys(), f"{path}: {names}"
                assert not path.is_relative_to(ROOT / "tests" / "features" / str(names[0])), path


def test_a_short_run_leaves_programs_out_but_for_a_sample() -> None:
    names = [path.relative_to(ROOT).as_posix() for path in files_of_tests(ROOT)]
    assert set(SAMPLE) <= set(names)
    assert all(starts_programs(name) for name in SAMPLE)
    assert sum(not starts_programs(name) for name in names) + len(SAMPLE) > LEAST_FILES
    assert all((ROOT / folder).is_dir() for folder in RUN)
