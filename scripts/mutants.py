"""`make mutants`: how many changes of a pure module do its own tests notice?

mutmut makes the changes: an operator, a condition, a number, an argument, one at a time, in a copy of the tree. Texts
are not changed, since a message may have another wording and still be right. Each module has its own tests (GROUPS), so
a change counts as noticed only when the tests beside the module notice it, not when some test far away does.

`tests/mutations.yaml` is the other half: changes that a person chose, one for each requirement (mutations.py, from
which the copy of the tree comes). Changes that no test notices are listed in tests/survivors.txt; `--update` writes the
file. Exits 1 when a group has less than KILLED_AT_LEAST.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.mutations import ROOT, copy_tree

SURVIVORS = ROOT / "tests" / "survivors.txt"
#: The share of changes that the tests of a module have to notice, in percent.
KILLED_AT_LEAST = 85.0
#: The time limit of a group (seconds). All groups together have an hour on two processors.
GROUP_S = 1800.0
#: Our packages, which tests import from `goondan`: in the repository, links to the folders at the top.
PACKAGES = ("schemas", "kernel", "agentproc", "toolhost", "features")
#: The files that the copy needs besides the modules of `goondan` and the tests.
ALSO_COPIED = (
    *PACKAGES,
    "goondan/__init__.py",
    "scripts",
    "examples",
    "docs",
    "bench",
    "README.md",
    "README.ko.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
)
HEAD = """\
# Changes of pure modules that no test of theirs notices. `make mutants UPDATE=1` writes this file.
"""


@dataclass(frozen=True)
class Group:
    """Modules, and the tests that have to notice their changes."""

    modules: Sequence[str]
    tests: Sequence[str]


#: Tests of what happens to events, and of who serves them.
MAILBOX = ("mailbox", "entities", "contents", "due", "quotas", "roots", "idle", "repeats", "cancels", "wiring")
GROUPS = {
    "turn": Group(
        ["agentproc/machine/turn.py"],
        [
            f"tests/unit/agentproc/test_{name}.py"
            for name in ("turn", "turn_stored", "operator_asks", "parts", "structured", "late_answers")
        ],
    ),
    "catalog": Group(
        ["agentproc/machine/catalog.py"],
        [
            "tests/unit/agentproc/test_catalog.py",
            "tests/unit/agentproc/test_denied_calls.py",
            "tests/unit/agentproc/extensions/test_bundled_tools.py",
            "tests/unit/agentproc/extensions/test_dynamic_tools.py",
            "tests/contract/test_parity_refusals.py",
        ],
    ),
    "mailbox": Group(
        ["kernel/broker/state/mailbox.py", "kernel/broker/state/entities.py"],
        [f"tests/unit/kernel/broker/test_{name}.py" for name in MAILBOX],
    ),
    "lifecycle": Group(
        ["kernel/supervisor/lifecycle.py"],
        [f"tests/unit/kernel/supervisor/test_{name}.py" for name in ("lifecycle", "roster")],
    ),
    "policy": Group(
        [f"toolhost/policy/{name}.py" for name in ("launch_plan", "plan", "subject")], ["tests/unit/toolhost"]
    ),
    "codec": Group(["schemas/wire/codec.py"], ["tests/unit/schemas/test_codec.py", "tests/contract/test_vectors.py"]),
}


@dataclass(frozen=True)
class Survivor:
    """A change that no test noticed."""

    #: `module: function`.
    where: str
    #: The lines before the change.
    before: str
    #: The lines after the change.
    after: str


@dataclass(frozen=True)
class Outcome:
    """The result of a group's changes."""

    #: How many changes the tests noticed.
    killed: int
    #: The changes that no test noticed.
    survivors: list[Survivor]
    #: How long the group took (seconds).
    seconds: float

    @property
    def made(self) -> int:
        """How many changes were made."""
        return self.killed + len(self.survivors)

    @property
    def percent(self) -> float:
        """How many of them were noticed, of a hundred."""
        return 100.0 * self.killed / self.made if self.made else 0.0


def configuration(group: Group) -> str:
    """The configuration of mutmut in the copy's pyproject.toml."""
    return "\n".join(
        [
            "\n[tool.mutmut]",
            f"source_paths = {json.dumps([f'goondan/{name}' for name in PACKAGES])}",
            f"only_mutate = {json.dumps([f'goondan/{module}' for module in group.modules])}",
            f"also_copy = {json.dumps(ALSO_COPIED)}",
            f"pytest_add_cli_args_test_selection = {json.dumps(list(group.tests))}",
            "use_setproctitle = false",
            "timeout_multiplier = 4.0",
            "",
        ]
    )


def try_out(tree: Path, group: Group) -> Outcome:
    """Make every change of a group in the copy. Raises RuntimeError when the tests do not pass without one."""
    project = tree / "pyproject.toml"
    project.write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8") + configuration(group), encoding="utf-8")
    subprocess.run(["rm", "-rf", str(tree / "mutants")], check=True)
    started = time.monotonic()
    # The same examples of hypothesis in every run: CI sets this as well.
    environment = {**os.environ, "CI": "1"}
    command = [str(tree / ".venv/bin/python"), "-m", "scripts.mutate"]
    with (tree / "mutants.log").open("w") as log:
        done = subprocess.run(
            command, cwd=tree, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=GROUP_S, check=False
        )
    results = tree / "mutants" / "results.json"
    if done.returncode != 0 or not results.is_file():
        raise RuntimeError((tree / "mutants.log").read_text()[-2000:])
    told = json.loads(results.read_text(encoding="utf-8"))
    survivors = [Survivor(**entry) for entry in told["survivors"]]
    return Outcome(told["killed"], survivors, time.monotonic() - started)


def listing(outcomes: dict[str, Outcome]) -> str:
    """tests/survivors.txt."""
    lines = [HEAD]
    for name, outcome in outcomes.items():
        lines.append(f"\n## {name}: {outcome.killed} of {outcome.made} noticed, {outcome.percent:.1f} %\n")
        lines += sorted(f"{s.where}\n    - {s.before}\n    + {s.after}\n" for s in outcome.survivors)
    return "".join(lines)


def main(arguments: Iterable[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="How many changes of the pure modules their tests notice.")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"some of: {', '.join(GROUPS)}")
    parser.add_argument("--update", action="store_true", help="write tests/survivors.txt (with all groups)")
    parser.add_argument("--show", action="store_true", help="print what nobody noticed")
    options = parser.parse_args(list(arguments))
    unknown = set(options.groups) - set(GROUPS)
    if unknown or (options.update and options.groups):
        parser.error(f"no such group: {', '.join(unknown)}" if unknown else "--update needs all groups")
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="gdn-mutants-") as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        Path(folder).chmod(0o755)
        copy_tree(tree, "mutants")
        for name in options.groups or GROUPS:
            outcome = outcomes[name] = try_out(tree, GROUPS[name])
            print(
                f"{name:<10} {outcome.percent:5.1f} %  {outcome.killed} of {outcome.made}  {outcome.seconds:5.0f} s",
                flush=True,
            )
            if options.show:
                print(listing({name: outcome}), flush=True)
    if options.update:
        SURVIVORS.write_text(listing(outcomes), encoding="utf-8")
    return 1 if any(outcome.percent < KILLED_AT_LEAST for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
