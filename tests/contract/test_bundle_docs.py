"""docs/bundle.md, in both languages, and docs/old-spellings.md name every kind and field; links lead there."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from goondan.schemas.bundle.resources import DOCUMENTS
from scripts import bundle_docs

DOCS = Path(__file__).parents[2] / "docs"
PAGES = pytest.mark.parametrize("page", ["bundle.md", "bundle.ko.md"])


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def structs() -> dict[str, set[str]]:
    """Every struct that a document can hold, and the fields a person writes; found by walking the types."""
    found: dict[str, set[str]] = {}

    def walk(kind: msgspec.inspect.Type) -> None:
        if isinstance(kind, msgspec.inspect.StructType) and kind.cls.__name__ not in found:
            found[kind.cls.__name__] = {field.encode_name for field in kind.fields}
            for field in kind.fields:
                walk(field.type)
        for name in ("type", "item_type", "value_type"):
            inner = getattr(kind, name, None)
            if isinstance(inner, msgspec.inspect.Type):
                walk(inner)
        for inner in getattr(kind, "types", ()):
            walk(inner)

    for document in DOCUMENTS.values():
        walk(msgspec.inspect.type_info(document))
    return found


#: What only Connection has, which is refused: the page says so, and has no table of what nobody can use.
REFUSED = {"ConnectionBody", "Ingress", "IngressRule", "IngressMatch", "IngressRoute"}


@PAGES
def test_every_kind_and_field_has_a_row(page: str) -> None:
    sections = re.split(r"^##+ ", read(page) + read("old-spellings.md"), flags=re.MULTILINE)
    by_heading = {section.partition("\n")[0]: section for section in sections}
    kinds = {document.__name__ for document in DOCUMENTS.values()}
    for name, fields in structs().items():
        if name in kinds:
            continue  # its four fields are in the page's first paragraphs
        if name in REFUSED:
            assert name not in by_heading, "a kind that is refused has no tables"
            continue
        heading = name.removesuffix("Body").replace("V09", " (v0.9)")
        if f"[{heading.removesuffix('Part')}](#" in by_heading[heading] and "\n| `" not in by_heading[heading]:
            heading = heading.removesuffix("Part")  # it says that it has the same fields
        rows = set(re.findall(r"^\| `(\w+)` \|", by_heading[heading], flags=re.MULTILINE))
        assert rows == fields, name


@pytest.mark.parametrize("page", ["bundle.md", "bundle.ko.md", "old-spellings.md"])
def test_its_links_lead_somewhere(page: str) -> None:
    text = read(page)
    anchors = {heading.lower().replace(" ", "-") for heading in re.findall(r"^##+ ([\w ]+)$", text, flags=re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors


def test_both_languages_have_the_same_shape() -> None:
    english, korean = (read(page).splitlines() for page in ("bundle.md", "bundle.ko.md"))
    start_en, start_ko = english.index("## Model"), korean.index("## Model")
    assert len(english[start_en:]) == len(korean[start_ko:])
    for ours, theirs in zip(english[start_en:], korean[start_ko:], strict=True):
        assert ours.count("|") == theirs.count("|")
        assert ours.split("|")[1:2] == theirs.split("|")[1:2] or "Field" in ours


def test_a_text_without_its_translation_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bundle_docs.DEFINITIONS["ModelBody"]
    monkeypatch.setitem(model, "description", "Something new.")
    page = bundle_docs.Page(korean=True)
    page.text()
    assert page.problems() == [
        "no Korean for: Something new.",
        "nothing says any more: Which model, and how to reach it.",
    ]


def test_an_example_that_is_wrong_is_noticed() -> None:
    with pytest.raises(ValueError, match="an example is wrong"):
        bundle_docs.refused(["apiVersion: goondan.ai/v1\nkind: Model\nmetadata: {name: m}\nspec: {provider: none}\n"])
