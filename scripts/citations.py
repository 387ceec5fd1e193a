"""Follows the citations in code and documents: documents with their sections, decisions, requirements, modules, links.

A citation is one of these.

- `docs/design/wire.md section 2`, `sections 2 and 3`, `sections 3.1 to 3.7`: the page, and a heading with each number.
- `PROTOCOL.md "Hello"`: the page, and a heading with that title. PROTOCOL.md, its parts and WORKER.md are cited by
  their names alone, every other page by its path from the root of the repository.
- `decision 020`, `decisions 018 and 059`, `docs/decisions/020`: a page of docs/decisions.
- `requirement IPC-07`, `requirements EXT-01 to EXT-03, COMPAT-01`: ids of tests/requirements.yaml.
- in Markdown: a link to a file, with its anchor.
- a module by its path from the root, in product code and scripts: `kernel/broker/loop.py`.
- in product code, a module by its name alone, `loop.py`: some module or package of the repository has it, or it is
  one of the files that a feature may have (features/__init__.py).
- in docs/design, docs/decisions, CONTRIBUTING.md and docs/architecture.md, between backticks: any path below one of the
  packages; NAME in it stands for a name.

Documents that are not in the repository cannot be cited: `section 4` of a page without a path is refused, and so are
the forms in FOREIGN. Exits 1 when a citation leads nowhere.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

import yaml

ROOT: Final = Path(__file__).resolve().parent.parent
#: Documents that are cited by their names alone, and where they are.
BY_NAME: Final = {
    name: f"schemas/{name}"
    for name in (
        "PROTOCOL.md",
        "PROTOCOL-AGENTS.md",
        "PROTOCOL-KERNEL.md",
        "PROTOCOL-OPERATORS.md",
        "PROTOCOL-TOOLHOSTS.md",
        "WORKER.md",
    )
}
#: The endings of files that are checked.
SUFFIXES: Final = (".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".mjs")
#: Left out: texts that are kept as they were written, recorded cases, and this check with its test, which name bad
#: citations on purpose.
LEFT_OUT: Final = (
    "LICENSE",
    "tests/requirements.yaml",
    "tests/contract/parity/",
    "tests/contract/spec_documents/",
    "scripts/citations.py",
    "tests/unit/scripts/test_citations.py",
)
#: Names of documents that only their author has.
FOREIGN: Final = (
    re.compile(r"(?<![/\w.-])design,? sections? \d"),
    re.compile(r"(?<![\w-])pitfalls? \d"),
    re.compile(r"(?<![\w-])requirements_summary\b"),
    re.compile(r"(?<![\w-])spec 00\d\b"),
    re.compile(r"(?<![\w#-])[Ii]ssues? (?:\d+\b|\")"),
)

_NUMBERS: Final = r"\d+(?:\.\d+)*[a-z]?"
_LIST: Final = rf"{_NUMBERS}(?:(?:,\s+and\s+|,\s+|\s+and\s+|\s+to\s+){_NUMBERS})*"
_PAGE: Final = r"(?<![\w/.-])((?:[\w.-]+/)*[\w-]+\.md)"
_SECTIONS: Final = re.compile(rf"{_PAGE}\)?,?\s+(?:sections?|§)\s+({_LIST})")
_TITLES: Final = re.compile(rf'{_PAGE},?\s+("[^"\n]+"(?:(?:,\s+|\s+and\s+|,\s+and\s+)"[^"\n]+")*)')
_DOCS: Final = re.compile(r"(?<![\w/.-])(docs/[\w./-]*\w\.md)")
_DECISIONS: Final = re.compile(r"\bdecisions?(?:/|\s+)(\d{3}(?!\d)(?:(?:,\s+|\s+and\s+)\d{3}(?!\d))*)")
_ID: Final = r"[A-Z][A-Z0-9]*-\d\d"
_REQUIREMENTS: Final = re.compile(rf"\brequirements?\s+({_ID}(?:(?:,\s+and\s+|,\s+|\s+and\s+|\s+to\s+){_ID})*)")
_LINK: Final = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")
_FENCE: Final = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_PATHS: Final = re.compile(r"`((?:schemas|kernel|agentproc|toolhost|features|scripts|tests|bench|examples)/[\w./-]*)`")
_MODULES: Final = re.compile(r"(?<![\w/.-])((?:schemas|kernel|agentproc|toolhost|features|scripts|bench)/[\w/]+\.py)\b")
_NAMES: Final = re.compile(r"(?<![\w/.-])([a-z]\w*)\.py\b")
_PRODUCT: Final = ("schemas/", "kernel/", "agentproc/", "toolhost/", "features/")
_HEADING: Final = re.compile(r"^#{1,6} +(.*?) *$", re.MULTILINE)


class Tree:
    """A repository, as the check sees it. `exists` and `read` take paths from its root."""

    def __init__(
        self,
        exists: Callable[[str], bool],
        read: Callable[[str], str],
        requirements: Iterable[str],
        decisions: str = "",
        modules: Iterable[str] = (),
    ) -> None:
        """`modules` are the names of modules and packages."""
        self.exists = exists
        self.modules = sys.stdlib_module_names.union(modules)
        self.requirements = frozenset(requirements)
        self.decisions = frozenset(re.findall(r"(?<!\d)\d{3}(?=-)", decisions))
        self.headings: Callable[[str], list[str]] = cache(lambda page: _headings(read(page)))


def _headings(text: str) -> list[str]:
    return [str(found) for found in _HEADING.findall(_FENCE.sub("", text))]


def anchor(heading: str) -> str:
    """The anchor that a Markdown page has for a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return "".join(c for c in plain if c.isalnum() or c in " -_").replace(" ", "-")


def numbers(text: str) -> list[str]:
    """`3, 4 and 7` -> 3, 4, 7. For `3.1 to 3.7` and `2 to 5`, every number in between is included."""
    result: list[str] = []
    for part in re.split(r",\s+and\s+|,\s+|\s+and\s+", text):
        ends = re.split(r"\s+to\s+", part)
        first, last = ends[0].rpartition("."), ends[-1].rpartition(".")
        if len(ends) == 1 or first[0] != last[0] or not (first[2].isdigit() and last[2].isdigit()):
            result += ends
        else:
            result += [f"{first[0]}{first[1]}{number}" for number in range(int(first[2]), int(last[2]) + 1)]
    return result


def ids(text: str) -> list[str]:
    """The requirements that a list names: `EXT-01 to EXT-03, COMPAT-01` has four."""
    result: list[str] = []
    for part in re.split(r",\s+and\s+|,\s+|\s+and\s+", text):
        ends = re.split(r"\s+to\s+", part)
        area = ends[0][:-2]
        if len(ends) == 1 or not ends[-1].startswith(area):
            result += ends
        else:
            result += [f"{area}{number:02}" for number in range(int(ends[0][-2:]), int(ends[-1][-2:]) + 1)]
    return result


def problems_of(path: str, text: str, tree: Tree) -> Iterator[tuple[int, str]]:
    """The citations in the text of one file that lead nowhere: (line, what is wrong)."""
    # A citation may go on in the next line of a comment.
    joined = re.sub(r"\n *#:? ", lambda found: "\n" + " " * (len(found[0]) - 1), text)

    def line(position: int) -> int:
        return text.count("\n", 0, position) + 1

    for form in FOREIGN:
        for found in form.finditer(joined):
            yield line(found.start()), f"{found[0]!r}: that document is not in the repository"
    for found in _SECTIONS.finditer(joined):
        page = _page(found[1], path, tree)
        if page is None:
            yield line(found.start()), f"{found[1]}: no such document; name it by its path"
            continue
        there = tree.headings(page)
        for number in numbers(found[2]):
            if not any(re.match(rf"{re.escape(number)}\.? ", heading) for heading in there):
                yield line(found.start()), f"{page} has no section {number}"
    for found in _TITLES.finditer(joined):
        page = _page(found[1], path, tree)
        if page is not None:
            for title in re.findall(r'"([^"]+)"', found[2]):
                if not any(re.sub(r"^[\d.]+ ", "", heading).strip("`") == title for heading in tree.headings(page)):
                    yield line(found.start()), f'{page} has no section "{title}"'
    for found in _DOCS.finditer(joined):
        if not tree.exists(found[1]):
            yield line(found.start()), f"{found[1]}: no such document"
    for found in _DECISIONS.finditer(joined):
        for number in re.findall(r"\d{3}", found[1]):
            if number not in tree.decisions:
                yield line(found.start()), f"there is no decision {number}"
    for found in _REQUIREMENTS.finditer(joined):
        for name in ids(found[1]):
            if name not in tree.requirements:
                yield line(found.start()), f"there is no requirement {name}"
    if path.endswith(".py") and not path.startswith("tests/"):
        for found in _MODULES.finditer(joined):
            if not tree.exists(found[1]):
                yield line(found.start()), f"{found[1]}: no such module"
    if path.endswith(".py") and path.startswith(_PRODUCT):
        for found in _NAMES.finditer(joined):
            if found[1] not in tree.modules:
                yield line(found.start()), f"{found[0]}: no module has this name"
    if path.endswith(".md"):
        yield from _links(path, text, tree, line)


def _page(name: str, path: str, tree: Tree) -> str | None:
    """The document that a citation names; in Markdown also the one beside the page."""
    beside = str(Path(path).parent / name) if path.endswith(".md") else ""
    for candidate in (BY_NAME.get(name, name if "/" in name else ""), beside):
        if candidate and tree.exists(candidate):
            return candidate
    return None


def _links(path: str, text: str, tree: Tree, line: Callable[[int], int]) -> Iterator[tuple[int, str]]:
    prose = _FENCE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    for found in _LINK.finditer(prose):
        target, _, fragment = found[1].partition("#")
        if ":" in target:
            continue
        page = _join(path, target) if target else path
        if not tree.exists(page):
            yield line(found.start()), f"{found[1]}: the link leads nowhere"
        elif fragment and page.endswith(".md") and fragment not in _anchors(tree.headings(page)):
            yield line(found.start()), f"{found[1]}: {page} has no such heading"
    if path.startswith(("docs/design/", "docs/decisions/")) or path in ("CONTRIBUTING.md", "docs/architecture.md"):
        for found in _PATHS.finditer(prose):
            if "NAME" not in found[1] and not tree.exists(found[1]):
                yield line(found.start()), f"{found[1]}: no such file"


def _anchors(headings: list[str]) -> set[str]:
    """The anchors of the headings. Of equal ones the second gets `-1` at its end, the third `-2`."""
    result: set[str] = set()
    seen: dict[str, int] = {}
    for heading in headings:
        name = anchor(heading)
        count = seen.get(name, 0)
        seen[name] = count + 1
        result.add(f"{name}-{count}" if count else name)
    return result


def _join(path: str, target: str) -> str:
    parts = list(Path(path).parent.parts)
    for part in target.split("/"):
        if part == ".." and parts:
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


def repository() -> Tree:
    """This one."""
    entries = yaml.load((ROOT / "tests" / "requirements.yaml").read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    scheme, _, _ = (ROOT / "features" / "__init__.py").read_text(encoding="utf-8").partition("`FEATURES`")
    return Tree(
        lambda path: (ROOT / path).exists(),
        lambda path: (ROOT / path).read_text(encoding="utf-8"),
        (entry["id"] for entry in entries),
        " ".join(page.name for page in (ROOT / "docs" / "decisions").glob("[0-9]*.md")),
        {
            part
            for folder in _PRODUCT
            for path in (ROOT / folder).rglob("*.py")
            for part in (path.stem, path.parent.name)
        }.union(_NAMES.findall(scheme)),
    )


def files() -> Iterator[str]:
    """The files to check: those that git knows, and new ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--deduplicate"]
    listing = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    for name in listing.stdout.split("\0"):
        if name.endswith(SUFFIXES) and not name.startswith(LEFT_OUT) and (ROOT / name).is_file():
            yield name


def main() -> int:
    """Print the citations that lead nowhere. Returns 1 when there are any."""
    tree = repository()
    status = 0
    for name in files():
        for number, problem in sorted(problems_of(name, (ROOT / name).read_text(encoding="utf-8"), tree)):
            print(f"{name}:{number}: {problem}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
