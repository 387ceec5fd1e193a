"""What counts as a citation, and which ones lead nowhere."""

from __future__ import annotations

import pytest

from scripts.citations import Tree, anchor, ids, numbers, problems_of

PAGES = {
    "docs/design/wire.md": "# The wire\n## 1. One part\n## 2. Checks\n### 2.1 Size\n```\n## 9. no heading\n```\n",
    "docs/design/README.md": "# The design\n",
    "docs/notes.md": "# Notes\n## Same\n## Same\n## `gdn` and *you*\n",
    "schemas/PROTOCOL.md": "# The bus\n## Hello\n### Asking [again](x.md)\n",
    "kernel/broker/loop.py": "",
}
TREE = Tree(PAGES.__contains__, PAGES.__getitem__, ("IPC-01", "IPC-02", "IPC-04"), "001-one.md 020-two.md", ("loop",))


def problems(text: str, path: str = "kernel/x.py") -> list[str]:
    return [f"{line}: {problem}" for line, problem in problems_of(path, text, TREE)]


@pytest.mark.parametrize(
    "text",
    [
        "Source: docs/design/wire.md section 2.",
        "Source: docs/design/wire.md sections 1 and 2; docs/design/wire.md section 2.1.",
        'Source: PROTOCOL.md "Hello"; requirements IPC-01, IPC-02 and IPC-04; decision 020.',
        "Source: docs/decisions/001 and 020; requirements IPC-01 to IPC-02.",
        "# see docs/design/wire.md\n# section 1, and kernel/broker/loop.py",
        "Source: RFC 9112 sections 3, 6, 7; a design section of ours; 3 issues; issue of a token; sandbox.md",
    ],
)
def test_what_is_there_may_be_cited(text: str) -> None:
    assert problems(text) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Source: docs/design/wire.md section 3.", "1: docs/design/wire.md has no section 3"),
        ("\nSource: docs/design/wire.md sections 1 to 3.", "2: docs/design/wire.md has no section 3"),
        ("docs/design/wire.md section 9", "1: docs/design/wire.md has no section 9"),
        ("#: docs/design/wire.md\n#: section 4", "1: docs/design/wire.md has no section 4"),
        ("Source: sandbox.md section 4.", "1: sandbox.md: no such document; name it by its path"),
        ("Source: wire.md section 1.", "1: wire.md: no such document; name it by its path"),
        ("Source: docs/design/gone.md.", "1: docs/design/gone.md: no such document"),
        ('Source: PROTOCOL.md "Hello" and "Goodbye".', '1: schemas/PROTOCOL.md has no section "Goodbye"'),
        ("Source: decision 021.", "1: there is no decision 021"),
        ("Source: docs/decisions/001 and 002.", "1: there is no decision 002"),
        ("Source: requirements IPC-01 to IPC-04.", "1: there is no requirement IPC-03"),
        ("(kernel/broker/gone.py)", "1: kernel/broker/gone.py: no such module"),
        ("loop.py, a user's json.py and gone.py", "1: gone.py: no module has this name"),
        ("Source: design section 8.", "1: 'design section 8': that document is not in the repository"),
        ("Source: design sections 8 and 9.", "1: 'design sections 8': that document is not in the repository"),
        ("(pitfalls 4)", "1: 'pitfalls 4': that document is not in the repository"),
        ('Source: requirements_summary "x".', "1: 'requirements_summary': that document is not in the repository"),
        ("Source: issue 4.", "1: 'issue 4': that document is not in the repository"),
    ],
)
def test_what_is_not_there_may_not(text: str, problem: str) -> None:
    assert problems(text) == [problem]


def test_links_of_pages_are_followed_with_their_anchors() -> None:
    page = "[a](wire.md) [b](wire.md#2-checks) [c](../notes.md#same-1) [d](https://x.example) [e](#here)\n# Here\n"
    tree = Tree({**PAGES, "docs/design/new.md": page}.__contains__, {**PAGES, "docs/design/new.md": page}.get, ())  # type: ignore[arg-type]
    assert list(problems_of("docs/design/new.md", page, tree)) == []
    bad = "[a](gone.md)\n[b](wire.md#3-more) [c](../notes.md#same-2)\n`kernel/gone/`\n```\n[d](gone.md)\n```\n"
    assert list(problems_of("docs/design/new.md", bad, tree)) == [
        (1, "gone.md: the link leads nowhere"),
        (2, "wire.md#3-more: docs/design/wire.md has no such heading"),
        (2, "../notes.md#same-2: docs/notes.md has no such heading"),
        (3, "kernel/gone/: no such file"),
    ]


def test_a_page_may_cite_the_page_beside_it() -> None:
    assert problems("see wire.md section 2", "docs/design/README.md") == []
    assert problems("see [the wire](wire.md), section 7", "docs/design/README.md") == [
        "1: docs/design/wire.md has no section 7"
    ]


def test_lists_and_ranges() -> None:
    assert numbers("1, 3.1 to 3.3 and 7") == ["1", "3.1", "3.2", "3.3", "7"]
    assert ids("A-01 to A-03, and B-09") == ["A-01", "A-02", "A-03", "B-09"]


def test_anchors_are_those_of_the_page() -> None:
    assert anchor("`gdn` and *you*: [a link](x.md), 2.1") == "gdn-and-you-a-link-21"
