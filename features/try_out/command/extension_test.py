"""`gdn extension test [PATH|NAME]`: the checks of `gdn validate`, then each extension in an agent of its own.

The extension is loaded as an agent loads it. It gets the config of each agent that uses it, or the config of its own
document. Then one turn passes through it. The turn's model is a script, and its tool call is answered at once: no
server is asked, and the state of the bundle is not touched. Extensions run as the user, so the bundle must be trusted.

Exit status 0 when all is well, 1 when an extension failed, 2 when the bundle is wrong. With --json one document:
{valid, bundle, errors, warnings, trials: [{extension, agent?, status, code?, message?, …}], passed, failed}.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, Final

import click
import msgspec

from goondan.features.try_out.command.tool_test import is_path
from goondan.kernel.bundle.documents import BaseExtensions
from goondan.kernel.bundle.loader import Asking, Inspected, inspect_bundle, open_bundle
from goondan.kernel.bundle.rules import extensions, kinds
from goondan.kernel.bundle.rules.problems import counts, did_you_mean, problem_lines, short_path, shown
from goondan.kernel.cli import options
from goondan.kernel.cli.output import Style, emit, printable, style_of
from goondan.kernel.cli.state import BundleTarget, locate
from goondan.kernel.grants.powers import everything_trusted
from goondan.kernel.spawn import AGENT_ENVIRONMENT, environment, memory_file
from goondan.kernel.spawn import command as program
from goondan.schemas.bundle.launch import AgentSpec, CatalogItem, ExtensionSpec, KernelPlan, ModelSpec
from goondan.schemas.wire import errors, frames

#: How long a trial may take before its process is killed (seconds): `register` has 30 and the turn 70.
TRIAL_S: Final = 120.0
#: Exit status for a bundle that cannot be used.
INVALID: Final = 2
#: How many of the lines that an extension wrote are shown when it failed.
SHOWN_LINES: Final = 12
#: The agent of a trial of an extension that no agent uses.
ALONE: Final = "trial"


class Trial(msgspec.Struct):
    """One extension as one agent has it."""

    #: The extension.
    extension: ExtensionSpec
    #: The agent. "": no agent uses the extension.
    agent: str
    #: The extensions that it depends on.
    before: list[ExtensionSpec] = []


@click.command(name="test", epilog="NAME is an Extension of the bundle (guard), or a bundled one (logging).")
@click.argument("target", required=False, metavar="[PATH|NAME]")
@options.bundle
@options.trust
@options.json
def command(target: str | None, bundle: str | None, trust: bool) -> int:
    """Load extensions and let a turn pass through each: those of a bundle (PATH), or one (NAME).

    Without either, every extension of the bundle.
    """
    path, name = (target, None) if target is not None and is_path(target) else (bundle, target)
    if path is not bundle and bundle is not None:
        raise errors.fail("E_USAGE", "give a PATH or --bundle, not both")
    place = locate(path)
    inspected = look(place)
    report: dict[str, Any] = {
        "valid": not inspected.errors,
        "bundle": place.bundle,
        "errors": inspected.errors,
        "warnings": inspected.warnings,
        "trials": [],
        "passed": 0,
        "failed": 0,
    }
    if report["valid"]:
        wanted = list(trials(inspected, None if name is None else name.removeprefix("Extension/")))
        asking = Asking(everything=trust)
        plan = open_bundle(place.bundle, state_dir=place.state_dir, handlers=False, asking=asking, runs=False).plan
        if not trust:
            check_asked(wanted)
        report["trials"] = inspected.redact.all_of([run_one(trial, plan) for trial in wanted])
        report["passed"] = sum(result["status"] == "passed" for result in report["trials"])
        report["failed"] = len(report["trials"]) - report["passed"]
    emit(report, render(report, style_of(sys.stdout)))
    return INVALID if not report["valid"] else int(report["failed"] > 0)


def look(place: BundleTarget) -> Inspected:
    """The bundle, without a look into the modules of its tools."""
    return inspect_bundle(place.bundle, state_dir=place.state_dir, handlers=False)


def trials(inspected: Inspected, name: str | None) -> Iterator[Trial]:
    """One trial for each extension and each agent that uses it. Raises GoondanError E_CONFIG_MISSING_REF."""
    own, base = inspected.checked.extensions, BaseExtensions()
    if name is not None and name not in own and base.find(name) is None:
        hint = did_you_mean(name, [*own, *base.names()]) or "`gdn extension list` has them all."
        raise errors.fail("E_CONFIG_MISSING_REF", f"there is no extension {shown(name)}", suggestion=hint)
    used: set[str] = set()
    for agent in inspected.checked.agents.values():
        for index, spec in enumerate(agent.extensions):
            if spec.name == name or (name is None and spec.name in own):
                used.add(spec.name)
                wanted = _needed(spec.name, own)
                yield Trial(spec, agent.name, [one for one in agent.extensions[:index] if one.name in wanted])
    for extension in own.values() if name is None else [own.get(name) or base.find(name)]:
        if extension is not None and extension.name not in used and extension.missing is None:
            before = [
                extensions.extension_spec(found, None)
                for found in own.values()
                if found.name in _needed(extension.name, own)
            ]
            yield Trial(extensions.extension_spec(extension, None), "", before)


def check_asked(wanted: list[Trial]) -> None:
    """Check that the user was asked about the code that is to be run. Nobody is asked about extensions that no agent
    uses.

    Raises GoondanError E_BUNDLE_UNTRUSTED.
    """
    for trial in wanted:
        if not trial.agent and not trial.extension.bundled and not everything_trusted(os.environ):
            name = trial.extension.name
            message = f"no agent uses Extension/{name}, so you were not asked about its code, which runs as you"
            hint = "If you know the code, add --trust (or GOONDAN_TRUST=1), or name it in an Agent's spec.extensions."
            raise errors.fail("E_BUNDLE_UNTRUSTED", message, suggestion=hint)


def _needed(name: str, own: dict[str, Any]) -> set[str]:
    """The extensions that an extension depends on, directly or not. It is not among them."""
    needed: set[str] = set()
    waiting = [name]
    while waiting:
        extension = own.get(waiting.pop())
        for wanted in extension.depends_on if extension is not None else ():
            if wanted not in needed and wanted != name:
                needed.add(wanted)
                waiting.append(wanted)
    return needed


def run_one(trial: Trial, plan: KernelPlan) -> dict[str, Any]:
    """Run one trial in a process and a state of its own, and return its result."""
    row = {"extension": trial.extension.name, **({"agent": trial.agent} if trial.agent else {})}
    rules = kinds.server_rules_of(trial.extension.entry, trial.extension.bundled)
    if rules is not None and trial.extension.config:
        return {**row, **_of_server(rules, trial, plan)}
    with tempfile.TemporaryDirectory(prefix="gdn-extension-test-") as state:
        spec_fd = memory_file("spec", msgspec.msgpack.encode(spec_of(trial, plan, state)))
        try:
            done = subprocess.run(
                program("goondan.features.try_out.program", ["--spec-fd", str(spec_fd)]),
                env=environment(os.environ, AGENT_ENVIRONMENT),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                pass_fds=[spec_fd],
                timeout=TRIAL_S,
                check=False,
                cwd=state,
            )
        except subprocess.TimeoutExpired:
            message = f"it did not end within {TRIAL_S:g} s: something blocks the agent's loop"
            return {**row, "status": "failed", "code": "E_AGENT_TIMEOUT", "message": message}
        finally:
            os.close(spec_fd)
    written = done.stderr.decode("utf-8", "replace").splitlines()
    try:
        result: dict[str, Any] = {**row, **msgspec.json.decode(done.stdout, type=dict[str, Any])}
    except msgspec.DecodeError:
        message = f"its process ended with status {done.returncode}"
        result = {**row, "status": "failed", "code": "E_EXTENSION_FAILED", "message": message}
    if result["status"] != "passed":
        result["log"] = written[-SHOWN_LINES:]
    return result


def _of_server(rules: kinds.ServerRules, trial: Trial, plan: KernelPlan) -> dict[str, Any]:
    """The result of a server: it is started as it would be, in a kernel of its own, and asked what it offers."""
    prefix = rules.prefix(trial.extension.name, trial.extension.config)
    tool = next((tool for tool in plan.toolhost.tools if tool.name == prefix), None)
    if tool is None or tool.server is None or not trial.agent:
        message = "no agent names it, so its server is never started: name it in an Agent's spec.extensions"
        return {"status": "failed", "code": "E_CONFIG_MISSING_REF", "message": message}
    return rules.trial(tool, trial.agent)


def spec_of(trial: Trial, plan: KernelPlan, state: str) -> AgentSpec:
    """The agent of a trial: its model is a script, its only tool is the trial's, and its state is in another folder."""
    ping = CatalogItem(name="trial__ping", description="Answers pong.")
    return msgspec.structs.replace(
        plan.agents[trial.agent or frames.OPERATOR_AGENT],
        name=trial.agent or ALONE,
        model=ModelSpec(provider="embedded"),
        registry=[*plan.agents[frames.OPERATOR_AGENT].registry, ping],
        catalog=[*plan.agents[trial.agent].catalog, ping.name] if trial.agent else [ping.name],
        extensions=[*trial.before, trial.extension],
        state_dir=state,
    )


def render(report: dict[str, Any], style: Style) -> list[str]:
    """The report for a person: the problems with their places, one line for each trial, and the sums."""
    cwd = os.getcwd()
    lines = problem_lines(report["errors"], cwd) + problem_lines(report["warnings"], cwd, warning=True)
    if not report["valid"]:
        summary = counts(len(report["errors"]), len(report["warnings"]))
        return [*lines, f"{short_path(report['bundle'], cwd)}: {summary}"]
    for result in report["trials"]:
        good = result["status"] == "passed"
        paint = style.good if good else style.bad
        whose = f" as Agent/{result['agent']} has it" if "agent" in result else ""
        status = paint(f"{result['status']:<7}")
        lines.append(f"{status} {printable('Extension/' + result['extension'] + whose)}")
        if good:
            lines.append(f"        registers {printable(described(result))}")
            continue
        lines.append(f"        {result['code']}: {printable(result['message'])}")
        lines += [f"        {printable(line)}" for line in (result.get("suggestion"), *result.get("log", ())) if line]
    numbers = [(report["passed"], "passed"), (report["failed"], "failed")]
    return [*lines, ", ".join(f"{count} {what}" for count, what in numbers if count) or "no extensions to test"]


def described(result: dict[str, Any]) -> str:
    """The registrations of an extension, in words."""
    parts = [f"{count} {kind} middleware" for kind, count in result["middleware"].items()]
    parts += [f"{what} {', '.join(result[key])}" for what, key in (("at", "points"), ("tools", "tools")) if result[key]]
    return "; ".join(parts) or "nothing"
