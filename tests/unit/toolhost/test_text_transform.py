"""The bundled tool `text-transform` without a jail."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from goondan.toolhost.base.text_transform import text_transform as tool
from goondan.toolhost.inside import ToolError

CTX: Any = SimpleNamespace(output_limit=1 << 20)


@pytest.mark.requirement("TEXT-03", "TEXT-04")
@pytest.mark.parametrize(
    ("more", "result"),
    [({}, "a👍bc"), ({"start": 1}, "👍bc"), ({"start": 1, "end": 2}, "👍"), ({"start": -2}, "bc"),
     ({"end": -1.9}, "a👍b"), ({"start": 0.9}, "a👍bc"), ({"start": 1e308}, ""), ({"start": 3, "end": 1}, ""),
     ({"start": -1e308, "end": 1e308}, "a👍bc")],
)  # fmt: skip
def test_slices_count_characters(more: dict[str, Any], result: str) -> None:
    made = tool.slice_(CTX, {"text": "a👍bc", **more})
    expected = {"start": more.get("start", 0), "end": more.get("end", 4), "length": len(result)}
    assert made == {"original": "a👍bc", "result": result, **expected}


@pytest.mark.requirement("TEXT-05", "TEXT-06")
@pytest.mark.parametrize(
    ("most", "count"),
    [(None, 4), (-1, 4), (0, 0), (-0.5, 0), (1, 1), (2.9, 2), (4, 4), (99, 4), (2**32, 0), (2**32 + 1, 1), (1e308, 0)],
)
@pytest.mark.parametrize(("text", "delimiter"), [("a,b,c,d", ","), ("abcd", "")])
def test_parts(text: str, delimiter: str, most: float | None, count: int) -> None:
    more = {} if most is None else {"maxParts": most}
    made = tool.split(CTX, {"text": text, "delimiter": delimiter, **more})
    assert made == {"delimiter": delimiter, "count": count, "parts": list("abcd")[:count]}


@pytest.mark.requirement("TEXT-02")
def test_a_replacement_is_literal() -> None:
    made = tool.replace(CTX, {"text": "a.a\\1", "search": ".", "replacement": "$&\\g<0>"})
    assert (made["result"], made["replacements"]) == ("a$&\\g<0>a\\1", 1)
    assert tool.replace(CTX, {"text": "aaaa", "search": "aa", "all": True})["replacements"] == 2


def test_results_are_measured_before_they_are_made() -> None:
    text = "a" * 400_000
    calls: list[Callable[[], Any]] = [
        lambda: tool.replace(CTX, {"text": text, "search": "a", "replacement": text, "all": True}),  # 160 GB
        lambda: tool.replace(CTX, {"text": text, "search": "a", "replacement": "한", "all": True}),
        lambda: tool.join(CTX, {"parts": ["x"] * 100_000, "delimiter": text}),
    ]
    for call in calls:
        with pytest.raises(ToolError) as caught:
            call()
        assert caught.value.code == "E_TOOL_LIMIT"
        assert "limit 1048576" in str(caught.value)


@given(st.text(min_size=1, max_size=8), st.text(min_size=1, max_size=2), st.text(max_size=3), st.booleans())
def test_the_measure_is_right(text: str, search: str, replacement: str, everywhere: bool) -> None:
    given_ = {"text": text, "search": search, "replacement": replacement, "all": everywhere}
    result = tool.replace(CTX, given_)["result"]
    exact: Any = SimpleNamespace(output_limit=len(result.encode()))
    assert tool.replace(exact, given_)["result"] == result
    if result:
        smaller: Any = SimpleNamespace(output_limit=len(result.encode()) - 1)
        with pytest.raises(ToolError):
            tool.replace(smaller, given_)


@given(st.lists(st.text(alphabet="ab한", max_size=4), min_size=1), st.sampled_from([",", "--", "\n"]))
def test_what_was_joined_can_be_split(parts: list[str], delimiter: str) -> None:
    joined = tool.join(CTX, {"parts": parts, "delimiter": delimiter})["result"]
    assume(joined)  # no text at all has no parts
    assert tool.split(CTX, {"text": joined, "delimiter": delimiter})["parts"] == parts


@pytest.mark.requirement("TEXT-09", "TEXT-10")
def test_white_space_is_that_of_the_recording() -> None:
    white = "\t\n\v\f\r \u00a0\u1680\u2000\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
    kept = "\u0085\u200b\u180e\u001c\u001f"
    made = tool.trim(CTX, {"text": f"{white}{kept}x{kept}{white}"})
    assert (made["result"], made["trimmedLength"]) == (f"{kept}x{kept}", 2 * len(white))
    assert tool.trim(CTX, {"text": " x ", "mode": "start"})["result"] == "x "
    assert tool.trim(CTX, {"text": " x ", "mode": "end"})["result"] == " x"


@pytest.mark.parametrize(
    ("export", "given_", "message"),
    [
        ("case", {"text": "x", "to": "title"}, "Unsupported case transform 'title'. Use 'upper' or 'lower'."),
        ("join", {"parts": "ab"}, "'parts' must be an array"),
        ("join", {"parts": ["a", None]}, "'parts' must contain only string/number/boolean values"),
        ("split", {"text": "x", "maxParts": "2"}, "'maxParts' must be a valid number"),
    ],
)
def test_arguments_that_a_schema_would_have_refused(export: str, given_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        tool.handlers[export](CTX, given_)
    assert str(caught.value) == message
