"""`make without ARGS="NAME…"`: the tree without some features, or without all of them (`all`: the core alone).

In a copy of the tree: the folders of the features go, those of features that need one of them, their rows, their tests,
and the tests of the core that are marked with one of them. What is generated is made anew. Then

1. the marked tests are run once before they go, and each must fail: a mark that is not needed takes a proof away;
2. the checks of `make check` are run, and the tests that are left;
3. `make run` starts the quickstart, and a tool counts the lines of a file.

    python -m scripts.without NAME… [--short] [--keep FOLDER]

`--short`: of the tests that start programs only SAMPLE, and no marked ones among them. `--keep`: the copy is made there
and stays. Exits 1 when something fails.

Source: docs/design/features.md "Without a feature".
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Final

from goondan.features import FEATURES
from scripts import without_edits as edits
from scripts.check import PACKAGES
from scripts.mutations import ROOT, copy_files, make_environment

#: Tests that start programs, for `--short`: a swarm, its console, its tools in jails, what walls hold, an extension.
SAMPLE: Final = (
    "tests/containment/test_attempts.py",
    "tests/process/test_extensions.py",
    "tests/process/test_kernel_run.py",
    "tests/process/test_quickstart.py",
    "tests/process/test_toolhost_bash.py",
)
#: Folders with tests that start programs (scripts/test).
PROGRAMS: Final = ("tests/chaos/", "tests/process/", "tests/containment/")
#: Folders whose tests a whole run has (scripts/test).
RUN: Final = ("tests/unit/", "tests/contract/", "tests/features/", "clients/python/tests/", *PROGRAMS)
#: So many processes share the tests that start no programs, or the marked ones.
PARTS: Final = 2
#: So many files of tests at least are left when all features are gone: what is proved of the core alone.
LEAST_FILES: Final = 240
#: Prints the files of tests that cannot be imported.
IMPORT_EACH: Final = """\
import sys
from importlib import import_module
for name in sys.argv[1:]:
    try:
        import_module(name.removesuffix(".py").replace("/", "."))
    except Exception:
        print(name)
"""
#: Folders of `.cache` that the copy gets: what the type checker has kept, and packages of the Node client.
CACHES: Final = ("mypy", "node-client")
#: What writes generated files.
WRITERS: Final = (
    ("scripts.feature_walls", "--update"),
    ("scripts.export_schemas",),
    ("scripts.bundle_docs",),
    ("scripts.tool_docs",),
    ("scripts.error_docs",),
    ("scripts.typescript_types",),
    ("scripts.prepare_manifests",),
    ("tests.contract.vectors.generate",),
)


def take_out(tree: Path, gone: frozenset[str]) -> None:
    """Take the features out of a tree: their folders, rows and tests. The tests of the core stay, marked or not."""
    wires = [
        import_module(f"goondan.features.{row.name}.wire")
        for row in FEATURES
        if row.name in gone and "wire" in row.files
    ]
    codes = {code for wire in wires for code in getattr(wire, "ERRORS", ())}
    for name in gone:
        shutil.rmtree(tree / "features" / name)
        shutil.rmtree(tree / "tests" / "features" / name, ignore_errors=True)
    _change(tree / "features" / "__init__.py", lambda text: edits.table(text, gone))
    _change(tree / "pyproject.toml", lambda text: edits.project(text, gone))
    of_features = [command for row in FEATURES if row.name in gone for command in row.commands]
    _change(tree / "docs" / "commands.md", lambda text: edits.commands(text, of_features))
    for path in [*(tree / "bench").rglob("*.py"), *(tree / "scripts").glob("*.py")]:
        if edits.imports(path.read_text(encoding="utf-8"), gone):
            path.unlink()  # a benchmark of the feature
    for path in sorted(tree.rglob("*.md")):
        if ".venv" not in path.parts:
            _change(path, lambda text: edits.page(text, gone, codes))
    for page in (tree / "docs" / "errors.md", tree / "docs" / "errors.ko.md"):
        _change(page, lambda text: edits.error_page(text, codes))


def take_tests_out(tree: Path, gone: frozenset[str]) -> None:
    """Take out the tests of the core that need the features, and the rows that the features own in ledgers."""
    for path in files_of_tests(tree):
        source = path.read_text(encoding="utf-8")
        if edits.marked(source, gone):
            left = edits.tests(source, gone)
            if left == edits.NO_TEST:
                path.unlink()
            else:
                path.write_text(left, encoding="utf-8")
    sources = {
        path.relative_to(tree).as_posix(): path.read_text(encoding="utf-8", errors="replace")
        for folder in (*PACKAGES, "tests", "clients", "goondan")
        for path in (tree / folder).rglob("*")
        if path.suffix in (".py", ".json", ".yaml", ".md", ".toml", ".js", ".ts") and path.is_file()
    }
    there = edits.functions(sources)
    requirements = edits.owned((tree / "tests" / "requirements.yaml").read_text(encoding="utf-8"), gone)
    _change(tree / "tests" / "requirements_covered.txt", lambda text: edits.covered(text, requirements))
    _change(tree / "tests" / "mutations.yaml", lambda text: edits.mutations(text, requirements, there))
    rules, lost = edits.rules((tree / "tests" / "rules.yaml").read_text(encoding="utf-8"), there)
    (tree / "tests" / "rules.yaml").write_text(rules, encoding="utf-8")
    for path in (tree / "schemas").glob("*.md"):
        _change(path, lambda text: edits.without_rules(text, lost))


def files_of_tests(tree: Path) -> Iterator[Path]:
    """The files of tests that a whole run has."""
    return (path for folder in RUN for path in sorted((tree / folder).rglob("test_*.py")))


def starts_programs(path: str) -> bool:
    """Whether the tests of this file start programs."""
    return path.startswith(PROGRAMS) or bool(re.match(r"tests/features/\w+/process/", path))


def _change(path: Path, change: Callable[[str], str]) -> None:
    before = path.read_text(encoding="utf-8")
    after = change(before)
    if after != before:
        path.write_text(after, encoding="utf-8")


#: A step, and what does it: it gives what is wrong, or "".
Step = tuple[str, Callable[[], str]]


class Trial:
    """One copy without some features, and what is tried in it."""

    def __init__(self, tree: Path, gone: frozenset[str], *, short: bool) -> None:
        self._tree = tree
        self._gone = gone
        self._short = short
        #: What failed.
        self.failed: list[str] = []

    def run(self) -> None:
        """All of it. What fails stands in `failed`; the rest is tried all the same."""
        copy_files(self._tree)
        for name in CACHES:
            if (cache := ROOT / ".cache" / name).is_dir():
                shutil.copytree(cache, self._tree / ".cache" / name, symlinks=True)
        take_out(self._tree, self._gone)
        make_environment(self._tree)  # after pyproject.toml has changed, so that `make run` has nothing to do
        self._steps(("generated files", self._generate))  # a marked test may read one
        marked = self._marked()
        self._steps(*((f"marks, part {part + 1}", partial(self._marks, marked[part::PARTS])) for part in range(PARTS)))
        take_tests_out(self._tree, self._gone)
        self._steps(("imports", self._tidy))
        checks: list[Step] = [("checks", partial(self._ended, "-m", "scripts.check")), ("quickstart", self._quickstart)]
        names = [path.relative_to(self._tree).as_posix() for path in files_of_tests(self._tree)]
        if self._short:
            pure = [name for name in names if not starts_programs(name)]
            sample = [name for name in names if name in SAMPLE]
            self._steps(
                *checks,
                *((f"tests, part {part + 1}", partial(self._tests, pure[part::PARTS])) for part in range(PARTS)),
                ("tests that start programs", partial(self._tests, sample)),
            )
            names = [*pure, *sample]
        else:
            self._steps(*checks)
            self._steps(("tests", self._all_tests))
        if len(names) < LEAST_FILES:
            self.failed.append(f"only {len(names)} files of tests, where {LEAST_FILES} are left without any feature")
        print(f"{len(names)} files of tests", flush=True)

    def _steps(self, *steps: Step) -> None:
        """Do these steps, two at a time."""
        with ThreadPoolExecutor(max_workers=2) as pool:
            list(pool.map(self._step, *zip(*steps, strict=True)))

    def _step(self, name: str, step: Callable[[], str]) -> None:
        began = time.monotonic()
        wrong = step()
        line = f"{name}: {'FAILED' if wrong else 'ok'}, {time.monotonic() - began:.0f} s"
        if wrong:
            self.failed.append(name)
            line += "\n    " + wrong.strip().replace("\n", "\n    ")
        print(line, flush=True)

    def _python(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self._tree / ".venv/bin/python", "-I", *arguments],
            cwd=self._tree,
            env=os.environ | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def _ended(self, *arguments: str) -> str:
        return self._said(self._python(*arguments))

    @staticmethod
    def _said(done: subprocess.CompletedProcess[str]) -> str:
        return "" if done.returncode == 0 else done.stdout or f"exit status {done.returncode}"

    def _marked(self) -> list[str]:
        """The files with marked tests."""
        marked = []
        for path in files_of_tests(self._tree):
            name = path.relative_to(self._tree).as_posix()
            if not (self._short and starts_programs(name)) and edits.marked(
                path.read_text(encoding="utf-8"), self._gone
            ):
                marked.append(name)
        return marked

    def _marks(self, names: list[str]) -> str:
        """Each marked test of these files fails. A whole file may be marked because it cannot even be imported."""
        failed = self._python("-c", IMPORT_EACH, *names).stdout.splitlines()
        faults = [
            f"{name} cannot be imported without the feature: mark all of it, or import it in the tests"
            for name in failed
            if not edits.whole((self._tree / name).read_text(encoding="utf-8"), self._gone)
        ]
        if there := [name for name in names if name not in failed]:
            options = ("-q", "-rfE", "--tb=short", "-p", "scripts.marked_tests")
            done = self._python("-m", "pytest", *options, *there, GOONDAN_WITHOUT=" ".join(self._gone))
            if done.returncode:
                faults.append(done.stdout)
        return "\n".join(faults)

    def _generate(self) -> str:
        """Write generated files anew."""
        return "\n".join(filter(None, (self._ended("-m", *writer) for writer in WRITERS)))

    def _tidy(self) -> str:
        """Take imports out that nothing uses any more."""
        ruff = str(self._tree / ".venv" / "bin" / "ruff")
        said = []
        for command in (
            [ruff, "check", "--quiet", "--fix-only", "--select", "F401,I", "tests", "features"],
            [ruff, "format", "--quiet", "tests", "features"],
            ["git", "init", "--quiet"],  # what lists the files of a repository finds one
            ["git", "add", "--all"],
        ):
            done = subprocess.run(command, cwd=self._tree, capture_output=True, text=True, check=False)
            said.append("" if done.returncode == 0 else done.stdout + done.stderr)
        return "\n".join(filter(None, said))

    def _quickstart(self) -> str:
        """A person starts the quickstart by the README's command, and its embedded console calls a tool."""
        with tempfile.TemporaryDirectory(prefix="gd", dir="/tmp") as home:
            done = subprocess.run(
                ["make", "run", "ARGS=--json --workdir ."],
                cwd=self._tree,
                input="/text-file__count path=README.md\n",
                env={"PATH": os.environ["PATH"], "HOME": home, "GOONDAN_TRUST": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
        lines = len((self._tree / "README.md").read_text(encoding="utf-8").splitlines())
        try:
            counted = json.loads(json.loads(done.stdout)["answers"][0]["response"])["lines"]
        except (ValueError, LookupError, TypeError):
            counted = None
        return "" if counted == lines else f"README.md has {lines} lines; make run said:\n{done.stdout}{done.stderr}"

    def _tests(self, names: list[str]) -> str:
        """The tests of these files."""
        return self._ended("-m", "pytest", "-q", *names)

    def _all_tests(self) -> str:
        """All tests that are left; what they say is shown meanwhile."""
        done = subprocess.run(["scripts/test"], cwd=self._tree, check=False)
        return "" if done.returncode == 0 else f"scripts/test ended with {done.returncode}"


def main(arguments: list[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="make without", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", metavar="NAME", help="features that go; all: each of them")
    parser.add_argument("--short", action="store_true", help="of the tests that start programs a few only")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="make the copy there, and leave it")
    options = parser.parse_args(arguments)
    try:
        gone = edits.going(options.names, FEATURES)
    except ValueError as error:
        parser.error(str(error))
    print(f"without {', '.join(sorted(gone))}", flush=True)
    # Short, and open to other users: tests of them run in it.
    folder = options.keep or Path(tempfile.mkdtemp(prefix="gdn-without-", dir="/tmp"))
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():  # of an earlier copy; its environment can be used again
        if path.name != ".venv":
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    try:
        trial = Trial(folder, gone, short=options.short)
        trial.run()
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(
        f"without {', '.join(sorted(gone))}: " + (f"failed: {', '.join(trial.failed)}" if trial.failed else "all clean")
    )
    return 1 if trial.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
