"""Changes of a configuration by name: they lead where they were made for, and meet others without losing anything."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goondan.schemas.bundle.effective_config import (
    Applied,
    Change,
    ConfigChange,
    ListChange,
    ModelName,
    apply_changes,
    change_list,
    change_of,
    overlap,
    reference_name,
    touches,
)

NAMES = list("abcdef")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["x", "y"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("pq"), inner, max_size=2),
    max_leaves=4,
)
CONFIGS = st.dictionaries(st.sampled_from("klm"), VALUES, max_size=3)


def lists(among: list[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(among), unique=True, max_size=len(among))


@st.composite
def configurations(draw: Any) -> Applied:
    """Any configuration of an agent that has the extensions one, two and three."""
    names = ["one", "two", "three"]
    configs = {name: draw(CONFIGS) for name in names}
    extensions = draw(st.permutations(names))[: draw(st.integers(0, 3))]
    system = draw(st.none() | st.sampled_from("st"))
    model = ModelName("openai", draw(st.sampled_from(["small", "large"])))
    return Applied(draw(lists(NAMES)), extensions, configs, system, model, draw(st.integers(1, 3)))


def visible(applied: Applied) -> Any:
    """What an agent sees: the config of an extension that is in its list."""
    configs = {name: applied.configs[name] for name in applied.extensions}
    return applied.tools, applied.extensions, configs, applied.system, applied.model, applied.max_steps


@settings(max_examples=40)
@given(configurations(), configurations())
def test_a_change_leads_where_it_was_made_for_and_leaves_its_base_alone(before: Applied, after: Applied) -> None:
    kept = copy.deepcopy(before)
    assert visible(apply_changes(before, [change_of(before, after)])) == visible(after)
    assert before == kept
    assert change_of(before, before) == Change()


@settings(max_examples=40)
@given(configurations(), configurations(), configurations())
def test_what_does_not_meet_can_be_made_in_either_order_and_loses_nothing(
    base: Applied, one: Applied, other: Applied
) -> None:
    """The rule by which a patch of an older revision is accepted: neither touches what the other does."""
    first, second = change_of(base, one), change_of(base, other)
    if overlap(touches(first), touches(second)) is not None:
        return
    made = apply_changes(base, [first, second])
    turned = apply_changes(base, [second, first])
    for changed in (made, turned):
        # What each has added is there, what each has taken out is gone, and what each has set is set.
        for change, meant in ((first, one), (second, other)):
            for part, names in (("tools", changed.tools), ("extensions", changed.extensions)):
                of_list = getattr(change, part) or ListChange()
                assert set(of_list.added) <= set(names)
                assert not set(of_list.removed) & set(names)
                if of_list.order is not None:
                    wanted = [name for name in of_list.order if name in names]
                    assert [name for name in names if name in wanted] == wanted
            for edit in change.configs:
                assert at(changed.configs, edit) == at(meant.configs, edit)
            if change.prompt is not None:
                assert changed.system == change.prompt.system
            assert change.model in (None, changed.model)
            assert change.max_steps in (None, changed.max_steps)
    assert set(made.tools) == set(turned.tools)
    assert set(made.extensions) == set(turned.extensions)
    for part in ("configs", "system", "model", "max_steps"):
        assert getattr(made, part) == getattr(turned, part)


def at(configs: dict[str, dict[str, Any]], edit: ConfigChange) -> Any:
    """The value that an edit is about; "nothing" where there is none."""
    found: Any = configs[edit.extension]
    for key in edit.path:
        if not isinstance(found, dict) or key not in found:
            return "nothing"
        found = found[key]
    return found


@settings(max_examples=40)
@given(configurations(), configurations(), configurations())
def test_a_change_means_the_same_for_another_configuration(base: Applied, after: Applied, else_: Applied) -> None:
    change = change_of(base, after)
    once = apply_changes(else_, [change])
    assert apply_changes(once, [change]) == once, "what is done already is not done again"


@pytest.mark.parametrize(
    ("names", "change", "made"),
    [
        ("abc", ListChange(added=["d"]), "abcd"),
        ("abc", ListChange(added=["b"]), "abc"),
        ("abc", ListChange(removed=["b", "x"]), "ac"),
        ("abc", ListChange(order=["c", "b", "a"]), "cba"),
        ("abcx", ListChange(order=["c", "a"]), "cxab"),
        ("xa", ListChange(order=["a"]), "xa"),
    ],
)
def test_lists(names: str, change: ListChange, made: str) -> None:
    assert "".join(change_list(list(names), change)) == made


def test_true_is_not_one() -> None:
    model = ModelName("openai", "m")
    before = Applied([], ["one"], {"one": {"k": 1, "l": [1]}}, None, model, 1)
    after = Applied([], ["one"], {"one": {"k": True, "l": [True]}}, None, model, 1)
    assert {tuple(edit.path) for edit in change_of(before, after).configs} == {("k",), ("l",)}


def test_the_whole_meets_its_parts() -> None:
    assert overlap([("tools",)], [("tools", "a")]) == ("tools", "a")
    assert overlap([("tools", "a")], [("tools", "b")]) is None
    assert overlap([("extensions", "one")], [("extensions", "one", "config", "k")]) == (
        "extensions",
        "one",
        "config",
        "k",
    )


@pytest.mark.parametrize("given_", ["Tool/x", {"kind": "Tool", "name": "x"}, {"ref": "Tool/x"}])
def test_references(given_: Any) -> None:
    assert reference_name(given_, "Tool") == "x"
    with pytest.raises(ValueError, match="no reference to one Agent"):
        reference_name(given_, "Agent")
