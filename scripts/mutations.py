"""Whether tests notice it when a line that a requirement needs is changed.

`tests/mutations.yaml` names for each requirement one piece of code, its changed form, and a test. This script makes the
change in a copy of the tree, and the test must fail there.

`--check` makes no change: it says which entries do not fit the tree any more, and which requirements have a test and no
entry; each needs one. Without it, a sample is tried (or the ids given, or `--all`); exits 1 when a change is not
noticed.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml

from scripts.requirements import COVERED, is_claim

ROOT = Path(__file__).resolve().parent.parent
ENTRIES = ROOT / "tests" / "mutations.yaml"
#: The older message form: the specification asks for it, and nothing of ours runs it (docs/design/wire.md section 9).
LEGACY = "tests/legacy/"
#: How many entries are tried by default. That takes a few minutes.
SAMPLE = 20
#: The time limit of a test (seconds). A changed program may hang; then the change counts as noticed.
TEST_S = 120.0
#: pytest's exit status when tests ran and some failed; every other one says that nothing was proved.
TESTS_FAILED = 1


@dataclass(frozen=True)
class Mutation:
    """One entry."""

    #: The requirement.
    id: str
    #: The file that is changed.
    file: str
    #: The code that is replaced. It occurs exactly once in `file`.
    code: str
    #: The code that replaces it.
    becomes: str
    #: The test that must fail: `path::function`.
    test: str


def load() -> list[Mutation]:
    """Every entry, in the order of the file. Raises TypeError for one that has other fields."""
    entries = yaml.load(ENTRIES.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader) or []
    return [Mutation(**entry) for entry in entries]


def marked(source: str) -> dict[str, set[str]]:
    """The ids that each test function of a file claims."""
    claims: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            ids = {
                argument.value
                for decorator in node.decorator_list
                if is_claim(decorator)
                for argument in decorator.args
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            }
            claims.setdefault(node.name, set()).update(ids)
    return claims


def problems_of(mutations: Iterable[Mutation]) -> list[str]:
    """The errors of entries that do not fit the tree."""
    problems: list[str] = []
    claims: dict[str, dict[str, set[str]]] = {}
    for mutation in mutations:
        where = f"tests/mutations.yaml: {mutation.id}"
        file = ROOT / mutation.file
        if not file.is_file() or (mutation.file.startswith("tests/") and not mutation.file.startswith(LEGACY)):
            problems.append(f"{where}: {mutation.file} is no file of the product")
            continue
        found = file.read_text(encoding="utf-8").count(mutation.code)
        if found != 1:
            problems.append(f"{where}: its code stands {found} times in {mutation.file}, not once")
        if mutation.code == mutation.becomes:
            problems.append(f"{where}: it changes nothing")
        path, _, function = mutation.test.partition("::")
        if not (ROOT / path).is_file():
            problems.append(f"{where}: there is no {path}")
            continue
        if path not in claims:
            claims[path] = marked((ROOT / path).read_text(encoding="utf-8"))
        if mutation.id not in claims[path].get(function.partition("[")[0], set()):
            problems.append(f"{where}: {mutation.test} does not claim it")
    return problems


def missing(mutations: Iterable[Mutation], covered: Iterable[str]) -> list[str]:
    """Covered requirements without an entry: their tests were never seen to fail."""
    named = {mutation.id for mutation in mutations}
    return [f"tests/mutations.yaml: {id_} is covered and has no entry" for id_ in covered if id_ not in named]


def copy_tree(target: Path, kind: str = "dev") -> None:
    """Copy what git knows, and new files, without what is ignored; then make its environment of `kind` ready."""
    copy_files(target)
    make_environment(target, kind)


def make_environment(target: Path, kind: str = "dev") -> None:
    """Make the environment of a copy from the one of this tree. What `kind` has beyond that one is installed."""
    ours, theirs = ROOT / ".venv", target / ".venv"
    if not theirs.exists():
        shutil.copytree(ours, theirs, symlinks=True, ignore=shutil.ignore_patterns(".ready-*"))
        places = [*theirs.glob("bin/*"), *theirs.glob("lib/*/site-packages/_goondan_*_source.py")]
        for path in (*places, theirs / "pyvenv.cfg", theirs / ".made-for"):  # files that name their environment
            if path.is_file() and not path.is_symlink():
                path.write_bytes(path.read_bytes().replace(os.fsencode(ROOT), os.fsencode(target)))
    subprocess.run([str(target / "scripts" / "setup"), kind], check=True, stdout=subprocess.DEVNULL)


def copy_files(target: Path) -> None:
    """Copy what git knows, and new files, without what is ignored. Links stay links: packages are found by them."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    for name in listed.stdout.decode().split("\0"):
        if name and ((ROOT / name).is_file() or (ROOT / name).is_symlink()):
            place = target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place, follow_symlinks=False)
    target.chmod(0o755)


def run_test(tree: Path, test: str) -> tuple[int, str]:
    """pytest's exit status and its last lines; TESTS_FAILED when it did not end in time."""
    command = [str(tree / ".venv/bin/python"), "-I", "-m", "pytest", "-q", "-x", test]
    try:
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=TEST_S, check=False)
    except subprocess.TimeoutExpired:
        return TESTS_FAILED, "no end in time"
    return done.returncode, "\n".join((done.stdout + done.stderr).splitlines()[-3:])


def write(file: Path, text: str) -> None:
    """Replace a file and give it a new modification time: compiled files are compared by whole seconds."""
    changed = max(file.stat().st_mtime, time.time()) + 2
    file.write_text(text, encoding="utf-8")
    os.utime(file, (changed, changed))


def noticed(tree: Path, mutation: Mutation) -> str | None:
    """None when the test fails with the change; otherwise a text about what happened instead."""
    file = tree / mutation.file
    original = file.read_text(encoding="utf-8")
    write(file, original.replace(mutation.code, mutation.becomes))
    try:
        if file.suffix == ".py":
            compile(file.read_text(encoding="utf-8"), mutation.file, "exec")  # what cannot be read fails every test
        status, said = run_test(tree, mutation.test)
    except SyntaxError as error:
        return f"the change is no Python: {error}"
    finally:
        write(file, original)
    if status == TESTS_FAILED:
        return None
    return "the test passes with the change" if status == 0 else f"pytest ended with {status}: {said}"


def main(arguments: list[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Whether tests notice changes of the lines that requirements need.")
    parser.add_argument("ids", nargs="*", metavar="ID", help="requirements to try")
    parser.add_argument("--all", action="store_true", help="try every entry")
    parser.add_argument("--sample", type=int, default=SAMPLE, help="how many to try by default")
    parser.add_argument("--seed", default=datetime.now(UTC).date().isoformat(), help="which sample; today's by default")
    parser.add_argument("--check", action="store_true", help="only see whether the entries fit the tree")
    options = parser.parse_args(arguments)

    mutations = load()
    problems = problems_of(mutations)
    problems += missing(mutations, COVERED.read_text(encoding="utf-8").split())
    if options.check or problems:
        print(f"{len(mutations)} entries")
        for problem in problems:
            print(problem, file=sys.stderr)
        return 1 if problems else 0

    chosen = [mutation for mutation in mutations if not options.ids or mutation.id in options.ids]
    if not options.ids and not options.all:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    failed = 0
    with tempfile.TemporaryDirectory(prefix="gdn-mutations-") as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        Path(folder).chmod(0o755)
        copy_tree(tree)
        for mutation in chosen:
            started = time.monotonic()
            wrong = noticed(tree, mutation)
            if wrong is not None:
                status, _ = run_test(tree, mutation.test)
                wrong += "" if status == 0 else " (and it does not pass without the change)"
                failed += 1
            took = time.monotonic() - started
            print(
                f"{mutation.id:<13} {took:5.1f} s  {'noticed' if wrong is None else 'NOT NOTICED: ' + wrong}",
                flush=True,
            )
    print(f"{len(chosen) - failed} of {len(chosen)} changes were noticed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
