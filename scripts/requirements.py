"""Which requirements of tests/requirements.yaml have a test, counted from the sources of the tests.

Prints a table per area with the ids still open. Exits 1 when a test claims an id that does not exist, when a claim
stands where pytest would not run it, or when an id of tests/requirements_covered.txt has lost its last test.
`--update` records what is covered now. `--quiet` prints only what is wrong and one line of totals.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import yaml

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
COVERED = TESTS / "requirements_covered.txt"
#: Longest list of open ids in one row of the table; the rest is a number.
MAX_OPEN_SHOWN = 6


@dataclass(frozen=True)
class Requirement:
    """One entry of requirements.yaml, with the fields that the table needs."""

    #: The id.
    id: str
    #: The area, a row of the table.
    area: str
    #: The level of the requirement.
    level: str


@dataclass(frozen=True)
class Claim:
    """One id in one `pytest.mark.requirement(…)`; `where` is `path:line`."""

    id: str
    where: str


def load() -> list[Requirement]:
    """Every requirement, in the order of the file."""
    entries = yaml.load((TESTS / "requirements.yaml").read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    return [Requirement(entry["id"], entry["area"], entry["level"]) for entry in entries]


def claims_of(source: str, path: str) -> tuple[list[Claim], list[str]]:
    """The claims that pytest would see in one test file, and what is wrong with the others."""
    tree = ast.parse(source, path)
    claims: list[Claim] = []
    problems: list[str] = []
    decorated = {
        id(decorator): node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for decorator in node.decorator_list
    }
    for node in ast.walk(tree):
        if not is_claim(node):
            continue
        where = f"{path}:{node.lineno}"
        owner = decorated.get(id(node))
        if owner is not None and not owner.name.startswith(("test", "Test")):
            problems.append(f"{where}: `{owner.name}` is no test, so it proves nothing")
            continue
        if not node.args:
            problems.append(f"{where}: a requirement mark without an id")
        for argument in node.args:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                claims.append(Claim(argument.value, where))
            else:
                problems.append(f"{where}: write the id as a literal string, so that it can be found")
    return claims, problems


def is_claim(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether `node` is a call `….mark.requirement(…)`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "requirement"
        and isinstance(node.func.value, ast.Attribute)
        and node.func.value.attr == "mark"
    )


def table(requirements: list[Requirement], covered: set[str]) -> str:
    """Area, how many of its requirements have a test, and the open ones."""
    areas: dict[str, list[Requirement]] = defaultdict(list)
    for requirement in requirements:
        areas[requirement.area].append(requirement)
    rows = []
    for area, members in areas.items():
        still_open = [requirement.id for requirement in members if requirement.id not in covered]
        shown = ", ".join(still_open[:MAX_OPEN_SHOWN])
        more = f" and {len(still_open) - MAX_OPEN_SHOWN} more" if len(still_open) > MAX_OPEN_SHOWN else ""
        rows.append(f"{area:<24} {len(members) - len(still_open):>3} of {len(members):>3}  {shown}{more}".rstrip())
    return "\n".join([f"{'area':<24} {'covered':>10}  open", *rows])


def main(arguments: list[str]) -> int:
    """Print the state; see the module's docstring for the exit status."""
    parser = argparse.ArgumentParser(description="Which requirements have a test.")
    parser.add_argument(
        "--update", action="store_true", help="record the covered ids in tests/requirements_covered.txt"
    )
    parser.add_argument("--quiet", action="store_true", help="print only problems and totals")
    options = parser.parse_args(arguments)

    requirements = load()
    known = {requirement.id for requirement in requirements}
    claims: list[Claim] = []
    problems: list[str] = []
    for path in sorted(TESTS.rglob("test_*.py")):
        found, wrong = claims_of(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
        claims += found
        problems += wrong
    problems += [f"{claim.where}: unknown requirement {claim.id}" for claim in claims if claim.id not in known]
    covered = {claim.id for claim in claims} & known

    if options.update:
        COVERED.write_text("".join(f"{id_}\n" for id_ in sorted(covered)), encoding="utf-8")
    recorded = set(COVERED.read_text(encoding="utf-8").split()) if COVERED.exists() else set()
    problems += [f"{id_} had a test and has none now" for id_ in sorted(recorded - covered)]

    if not options.quiet:
        print(table(requirements, covered))
    must = {requirement.id for requirement in requirements if requirement.level == "MUST"}
    print(f"{len(covered)} of {len(known)} requirements have a test; of the MUST: {len(covered & must)} of {len(must)}")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
