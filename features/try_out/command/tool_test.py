"""`gdn tool test [PATH|NAME]`: the manifest's checks, then every example as a real call in the sandbox.

The checks are those of `gdn validate`: schema, entry file, handlers, a handler for each export, names, parameters. An
example is one call as `gdn call` makes it, through agent, broker and jail, in a workdir of its own. The workdir has the
files of the folder `examples` beside the tool's entry, and no others. Tools that ask for the network are called only
with --network: their examples reach real services.

Exit status 0 when all is well, 1 when an example failed, 2 when the manifest is wrong. With --json one document:
{valid, errors, warnings, passed, failed, skipped, examples, withoutExamples}.

Source: docs/design/commands.md section 6; docs/design/tools.md section 10; requirement VALIDATE-04.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from goondan.kernel.bundle import handlers, loader
from goondan.kernel.bundle.rules.checked import CheckedTool
from goondan.kernel.bundle.rules.problems import Problem, counts, problem_lines, short_path
from goondan.kernel.bundle.rules.problems import Report as Problems
from goondan.kernel.bundle.rules.tool_pages import Outcome, short, unkept_promises
from goondan.kernel.cli import attach, options
from goondan.kernel.cli.commands.bundles import find
from goondan.kernel.cli.commands.call import check_grant, perform
from goondan.kernel.cli.output import Style, emit, printable, style_of
from goondan.kernel.cli.rules.batch import ToolCall
from goondan.kernel.cli.state import BundleTarget, locate
from goondan.schemas.bundle.address import build_tool_name
from goondan.schemas.bundle.resources import BASE_PACKAGE, Example, ToolExport
from goondan.schemas.system.directories import remove_tree
from goondan.schemas.wire.errors import fail

if TYPE_CHECKING:
    from goondan.kernel.cli.session import Session

#: The folder beside a tool's entry. The workdir of every example gets its files.
FILES: Final = "examples"
#: The instance of the operator's agent that makes the calls.
INSTANCE: Final = "tool-test"
#: Exit status for a manifest that cannot be used.
INVALID: Final = 2


class Subject(msgspec.Struct):
    """The Tools to test, and the exports of each."""

    #: The Tool.
    tool: CheckedTool
    #: Its exports that are tested.
    exports: list[ToolExport]


class Report(msgspec.Struct, rename="camel", omit_defaults=False):
    """The document of --json."""

    #: The bundle has no error.
    valid: bool
    #: Where it is.
    bundle: str
    #: Its errors.
    errors: list[Problem]
    #: Its warnings.
    warnings: list[Problem]
    #: How each example ended.
    examples: list[Outcome] = []
    #: Tools without examples.
    without_examples: list[str] = []
    #: How many examples passed.
    passed: int = 0
    #: How many examples failed.
    failed: int = 0
    #: How many examples were not run.
    skipped: int = 0


@click.command(name="test", epilog="NAME is a Tool (words), one of its functions (words__count), or @goondan/base.")
@click.argument("target", required=False, metavar="[PATH|NAME]", shell_complete=options.completed("tools"))
@options.bundle
@click.option("--network", is_flag=True, help="Also run examples of tools that ask for the network.")
@click.option("--allow-net", metavar="HOST:PORT", multiple=True, help="Let tools reach this address. Repeatable.")
@options.json
def command(target: str | None, bundle: str | None, network: bool, allow_net: tuple[str, ...]) -> int:
    """Check tools and run their examples: of a manifest or bundle (PATH), or of one tool (NAME).

    Without either, every tool of the bundle.
    """
    for grant in allow_net:
        check_grant(grant)
    path, name = (target, None) if target is not None and is_path(target) else (bundle, target)
    if path is not bundle and bundle is not None:
        raise fail("E_USAGE", "give a PATH or --bundle, not both")
    place = locate(path)
    inspected, subjects = examine(place, name)
    report = Report(not inspected.errors, place.bundle, inspected.errors, inspected.warnings)
    if report.valid:
        plan = list(planned(subjects, network or bool(allow_net)))
        report.examples = [hidden(outcome, inspected) for outcome in run_all(place, plan, allow_net)]
        report.passed, report.failed, report.skipped = (
            sum(outcome.status == status for outcome in report.examples) for status in ("passed", "failed", "skipped")
        )
        report.without_examples = [full for full, export in _exports(subjects) if not export.examples]
    emit(report, render(report, style_of(sys.stdout)))
    return INVALID if not report.valid else int(report.failed > 0)


def hidden(outcome: Outcome, inspected: loader.Inspected) -> Outcome:
    """An outcome without secrets: the answer of a tool can contain values of the environment that it was given."""
    hide = inspected.redact.all_of
    texts = ("input", "output", "error", "differences", "reason")
    return msgspec.structs.replace(outcome, **{name: hide(getattr(outcome, name)) for name in texts})


def is_path(target: str) -> bool:
    """Whether a target is a path: it looks like one, and is not the name of a Tool or of the package."""
    if target == BASE_PACKAGE or target.startswith("Tool/"):
        return False
    return "/" in target or target in (".", "..") or target.endswith((".yaml", ".yml"))


def examine(place: BundleTarget, name: str | None) -> tuple[loader.Inspected, list[Subject]]:
    """Check the whole bundle, and the modules of the named bundled tools. Returns what is to be tested.

    `name` None: every Tool of the bundle. Raises GoondanError E_TOOL_NOT_FOUND.
    """
    inspected = loader.inspect_bundle(place.bundle, state_dir=place.state_dir)
    tools = inspected.checked.tools
    if name is None:
        subjects = [
            Subject(tool, tool.body.exports) for tool in tools.values() if not tool.bundled and not tool.package
        ]
    elif name == BASE_PACKAGE:
        subjects = [Subject(tool, tool.body.exports) for tool in tools.values() if tool.bundled]
    elif inspected.errors:
        subjects = []  # a Tool may be missing because its document is wrong
    else:
        tool, export = find(tools, name)
        subjects = [Subject(tool, tool.body.exports if export is None else [export])]
    bundled = [subject.tool for subject in subjects if subject.tool.bundled and not subject.tool.in_agent]
    if bundled:  # the bundle's own tools were checked above
        problems = Problems()
        with handlers.Inspector(place.state_dir) as inspector:
            check = handlers.Check(inspector, [], inspected.redact, os.environ)
            findings = handlers.inspect(bundled, check)
        for tool in bundled:
            if tool.name in findings:
                handlers.judge(tool, findings[tool.name], check, problems)
        inspected.errors += problems.errors
        inspected.warnings += problems.warnings
    return inspected, subjects


#: The reason why examples of a bundled tool like `agents` are not run.
_IN_AGENT: Final = "it asks other agents, and there is no swarm here"


class Run(msgspec.Struct):
    """One example."""

    #: Full name of the tool.
    full_name: str
    #: Its number.
    index: int
    #: The tool.
    subject: CheckedTool
    #: The example.
    example: Example
    #: The result is compared with the one that the example has.
    compares: bool
    #: Why it is not run. "": it is run.
    reason: str = ""


def planned(subjects: list[Subject], network: bool) -> Iterator[Run]:
    """Every example, in the order of the manifest."""
    for subject in subjects:
        tool = subject.tool
        closed = tool.body.sandbox.network != "none" and not network
        for export in subject.exports:
            at = ("spec", "exports", tool.body.exports.index(export), "examples")
            for index, example in enumerate(export.examples):
                yield Run(
                    build_tool_name(tool.name, export.name),
                    index,
                    tool,
                    example,
                    compares=tool.document.has(*at, index, "output"),
                    reason=_IN_AGENT if tool.in_agent else "it needs the network: give --network" if closed else "",
                )


def run_all(place: BundleTarget, plan: list[Run], allow_net: tuple[str, ...]) -> list[Outcome]:
    """Run the examples that may be run, one after the other. The bundle's kernel runs them, or one that ends with this
    command.
    """
    from goondan.kernel.cli.session import over_session

    if not any(not run.reason for run in plan):
        return [outcome_of(run, "skipped", reason=run.reason) for run in plan]

    async def run_each(session: Session) -> list[Outcome]:
        return [await run_one(session, run) for run in plan]

    with attach.attach_or_start(place, allow_net) as kernel:
        return over_session(kernel, run_each)


async def run_one(session: Session, run: Run) -> Outcome:
    """Run one example: a real call in a workdir of its own. Raises GoondanError when there is no result at all."""
    if run.reason:
        return outcome_of(run, "skipped", reason=run.reason)
    with workdir(run.subject) as folder:
        began = time.monotonic()
        call = ToolCall(tool=run.full_name, args=run.example.input, instance=INSTANCE, workdir=folder)
        result = await perform(session, call)
        took = round((time.monotonic() - began) * 1000, 1)
    found = unkept_promises(result, run.example.output, compares=run.compares)
    answered = {key: result[key] for key in ("output", "error") if key in result}
    return outcome_of(run, "failed" if found else "passed", duration_ms=took, differences=found, **answered)


def outcome_of(run: Run, status: str, **known: Any) -> Outcome:
    """The outcome of an example, with its place in the manifest."""
    names = [export.name for export in run.subject.body.exports]
    export = names.index(run.full_name.partition("__")[2])
    place = run.subject.document.key("spec", "exports", export, "examples", run.index, "input")
    known |= {"tool": run.full_name, "index": run.index, "file": place.file, "line": place.line}
    return Outcome(status=status, input=run.example.input, **known)  # type: ignore[arg-type]  # one of its three


@contextmanager
def workdir(tool: CheckedTool) -> Iterator[str]:
    """A new folder with the files that the tool's examples expect. It is removed afterwards."""
    folder = tempfile.mkdtemp(prefix="gdn-tool-test-")
    try:
        files = os.path.join(os.path.dirname(tool.entry), FILES)
        if os.path.isdir(files):
            compiled = shutil.ignore_patterns("__pycache__")
            shutil.copytree(files, folder, symlinks=True, ignore=compiled, dirs_exist_ok=True)
        yield folder
    except shutil.Error as error:
        raise fail("E_STATE", f"the files of the examples cannot be copied: {error}"[:400]) from None
    finally:
        remove_tree(folder)  # the tool may have put anything there


def _exports(subjects: list[Subject]) -> Iterator[tuple[str, ToolExport]]:
    for subject in subjects:
        for export in subject.exports:
            yield build_tool_name(subject.tool.name, export.name), export


def render(report: Report, style: Style) -> list[str]:
    """The report for a person: the problems with their places, one line for each example, and the sums."""
    cwd = os.getcwd()
    lines = problem_lines(report.errors, cwd) + problem_lines(report.warnings, cwd, warning=True)
    if not report.valid:
        return [*lines, f"{short_path(report.bundle, cwd)}: {counts(len(report.errors), len(report.warnings))}"]
    lines.append("manifest: schema, entry, handlers, exports, names and parameters are in order")
    paint: Mapping[str, Any] = {"passed": style.good, "failed": style.bad, "skipped": style.warning}
    for outcome in report.examples:
        words = f"{outcome.tool} {short(outcome.input)}"
        lines.append(f"{paint[outcome.status](f'{outcome.status:<7}')} {printable(words)}")
        if outcome.status == "failed":
            lines.append(f"        {printable(short_path(outcome.file, cwd))}:{outcome.line}")
        lines += [f"        {printable(text)}" for text in [*outcome.differences, outcome.reason] if text]
    lines += [f"{style.dim('none   ')} {name} has no examples" for name in report.without_examples]
    numbers = [(report.passed, "passed"), (report.failed, "failed"), (report.skipped, "skipped")]
    return [*lines, ", ".join(f"{count} {what}" for count, what in numbers if count) or "no examples to run"]
