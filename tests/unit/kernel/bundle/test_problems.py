"""Reports and how they are worded."""

from __future__ import annotations

from goondan.kernel.bundle.rules.problems import (
    MAX_PROBLEMS,
    WARNINGS,
    BundleError,
    Position,
    Report,
    counts,
    did_you_mean,
    problem_lines,
    short_path,
    shown,
    spell,
)
from goondan.schemas.wire.errors import CODES


def test_a_report_is_bounded_and_says_so() -> None:
    report = Report()
    for line in range(MAX_PROBLEMS + 50):
        report.error("E_CONFIG_SYNTAX", "x", Position("f", line + 1, 1))
    assert len(report.errors) == MAX_PROBLEMS
    assert report.dropped == 50


def test_the_same_problem_is_said_once() -> None:
    report = Report()
    for _ in range(3):
        report.error("E_CONFIG_SYNTAX", "x", Position("f", 1, 1))
    assert (len(report.errors), report.dropped) == (1, 0)


def test_reading_order() -> None:
    report = Report()
    for file, line, column in (("b", 1, 1), ("a", 2, 1), ("a", 1, 5), ("a", 1, 2), ("z", 1, 1)):
        report.error("E_CONFIG_SYNTAX", "x", Position(file, line, column))
    report.sort(["b", "a"])
    assert [(p.file, p.line, p.column) for p in report.errors] == [
        ("b", 1, 1), ("a", 1, 2), ("a", 1, 5), ("a", 2, 1), ("z", 1, 1),
    ]  # fmt: skip


def test_paths_are_spelt_as_a_person_writes_them() -> None:
    assert spell(("spec", "exports", 0, "name")) == "spec.exports[0].name"
    assert spell(("a-b", "c_d", "e f", "g.h", "")) == "a-b.c_d['e f']['g.h']['']"
    assert spell(()) == ""


def test_shown_text_is_short_and_printable() -> None:
    assert shown("a\nb") == "'a\\x0ab'"
    assert len(shown("x" * 1000)) == 82


def test_suggestions_are_only_made_when_close() -> None:
    assert did_you_mean("agnets", ["agents", "tools"]) == "Did you mean 'agents'?"
    assert did_you_mean("zzz", ["agents"]) is None
    assert did_you_mean("x" * 10_000, ["agents"]) is None


def test_the_text_for_a_person() -> None:
    report = Report()
    report.error("E_CONFIG_INVALID_VALUE", "bad", Position("/w/a.yaml", 3, 5, ("spec", "x"), "Tool/t"), "Fix it.")
    report.warn("W_CONFIG_UNUSED", "Tool/t is unused", Position("/elsewhere/b.yaml", 0, 0, (), "Tool/t"))
    assert problem_lines(report.errors, "/w") == [
        "a.yaml:3:5: E_CONFIG_INVALID_VALUE Tool/t: bad (spec.x)",
        "    Fix it.",
        "gdn explain E_CONFIG_INVALID_VALUE",
    ]
    assert problem_lines(report.warnings, "/w", warning=True) == [
        "/elsewhere/b.yaml: warning: W_CONFIG_UNUSED Tool/t is unused",
        f"    {WARNINGS['W_CONFIG_UNUSED']}",
    ]
    assert counts(1, 0) == "1 error, 0 warnings"
    assert counts(2, 1) == "2 errors, 1 warning"
    assert short_path("/w", "/w") == "/w"


def test_the_error_of_a_whole_bundle() -> None:
    report = Report()
    report.error("E_CONFIG_SYNTAX", "bad", Position("f.yaml", 3, 1))
    report.error("E_CONFIG_ENTRY", "worse", Position("f.yaml", 4, 1))
    error = BundleError(report.errors, 5)
    assert error.info.code == "E_CONFIG_SYNTAX"
    assert error.info.message == "f.yaml:3:1: bad (and 6 more)"
    assert error.info.suggestion == CODES["E_CONFIG_SYNTAX"]


def test_codes_of_warnings_are_no_codes_of_errors() -> None:
    assert not WARNINGS.keys() & CODES.keys()
    assert all(code.startswith("W_CONFIG_") for code in WARNINGS)
