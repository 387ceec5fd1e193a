"""A bundle from its path to its plan: the order of the steps, and the one place that calls them.

`inspect_bundle` never raises for anything in the bundle and says everything that is wrong with it (`gdn validate`);
`open_bundle` gives the plan or raises BundleError with the same problems (everything that starts a kernel).

Source: docs/design/bundle.md section 1.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from goondan.kernel.bundle.files import list_documents, read_file, tree_digest
from goondan.kernel.bundle.handlers import Check, Inspector, Start, check_handlers
from goondan.kernel.bundle.rules.lookup import MAX_FILE_BYTES, MAX_PROMPT_BYTES, Unreadable
from goondan.kernel.bundle.rules.problems import BundleError, Position, Problem, Report
from goondan.kernel.paths import root_of
from goondan.kernel.start import yaml_alone
from goondan.schemas.bundle.launch import KernelPlan, entry_kind
from goondan.schemas.wire.errors import fail

if TYPE_CHECKING:
    from goondan.kernel.bundle.documents import Loaded
    from goondan.kernel.bundle.rules.checked import Checked, Package
    from goondan.kernel.bundle.rules.variables import EnvironmentRedactor
    from goondan.kernel.grants.granting import GrantContext
    from goondan.kernel.grants.powers import Judgement, Power
    from goondan.kernel.trust.written import Written

#: Where packages lie below the state root.
PACKAGES: Final = "packages"
#: `kind: Tool` as people write it, in block and flow style.
_TOOL_KIND: Final = re.compile(rb"""\bkind["']?\s*:\s*["']?Tool\b""")
#: Hexadecimal digits of a revision.
REVISION_CHARS: Final = 32


class Asking(Struct, frozen=True, kw_only=True):
    """What a command knows about the user's agreement."""

    #: The command was given --trust.
    everything: bool = False
    #: Powers that a person has just agreed to on its screen.
    agreed: Sequence[Power] = ()
    #: See goondan.kernel.grants.powers.Consent.
    running: Sequence[Power] | None = None


def read_agreed(fd: int) -> list[Power]:
    """The powers that a command passes on a descriptor, which is closed. Raises GoondanError E_USAGE."""
    from goondan.kernel.grants.powers import Power

    try:
        with open(fd, "rb") as source:
            return msgspec.json.decode(source.read(), type=list[Power])
    except (OSError, msgspec.DecodeError) as error:
        raise fail("E_USAGE", f"the powers that were agreed to cannot be read: {error}") from None


class Inspected(Struct):
    """A bundle that was inspected."""

    #: Where it is.
    path: str
    #: Its documents.
    loaded: Loaded
    #: What the documents describe. It is complete only without errors.
    checked: Checked
    #: Its errors. Values of the environment are taken out.
    errors: list[Problem]
    #: Its warnings. Values of the environment are taken out.
    warnings: list[Problem]
    #: What its grants were decided by.
    grant_context: GrantContext
    #: Its packages.
    packages: list[Package]
    #: What the bundle asks for, and whether the user has agreed to it. `judgement.trusted`: it was reviewed.
    judgement: Judgement
    #: Takes values of the environment out of what is printed.
    redact: EnvironmentRedactor
    #: How many problems more there are.
    dropped: int = 0
    #: The files that a tool may have written and that nobody has accepted.
    written: list[Written] = []


def inspect_bundle(
    path: str,
    *,
    state_dir: str | None,
    env: Mapping[str, str] | None = None,
    handlers: bool = True,
    policy: str | None = None,
    asking: Asking | None = None,
    to_run: bool = False,
    instead: Mapping[str, bytes | None] | None = None,
    start: Start | None = None,
) -> Inspected:
    """Validate the bundle at `path` (absolute, from goondan.kernel.paths.find_bundle).

    The reports on handlers are kept in `state_dir`. None: they are not kept. `env` defaults to the process's.
    `handlers` False: modules are not inspected. `policy` is a file beside the state root's own policy.yaml. `asking`
    says what the command itself trusts. `to_run`: modules of a bundle that may not run are not inspected. `instead`:
    the content that documents and prompts are taken to have, by their paths (kernel/bundle/files.py). `start` starts
    the program that inspects. Raises BundleError only when a manifest of the bundled package is broken.
    """
    report = Report()
    with Inspector(state_dir, start) as inspector:
        if handlers and _may_hold_tools(path):
            inspector.start_early()
        # The rest is imported and done while that program starts: on two processors the time of one.
        yaml_alone()
        from goondan.kernel.bundle.rules.kinds import before_reading

        if state_dir is not None:
            before_reading(state_dir)
        from goondan.kernel.bundle.documents import BaseExtensions, PackageFolders, base_tools, load_documents
        from goondan.kernel.bundle.files import BundleFiles
        from goondan.kernel.bundle.rules.check import Checker
        from goondan.kernel.bundle.rules.kinds import local_models
        from goondan.kernel.bundle.rules.models import without_key
        from goondan.kernel.bundle.rules.variables import EnvironmentRedactor, wanted_variables
        from goondan.kernel.grants.granting import grant
        from goondan.kernel.trust.judgement import judgement_of
        from goondan.kernel.trust.policy import POLICY_FILE, gather

        loaded = load_documents(path, report, instead or {})
        sources = [source.path for source in loaded.sources]
        files, variables = BundleFiles(loaded.root, instead or {}), os.environ if env is None else env
        root = None if state_dir is None else root_of(state_dir)
        packages = PackageFolders(None if root is None else os.path.join(root, PACKAGES), report)
        checker = Checker(
            loaded.documents,
            base_tools(),
            files,
            variables,
            report,
            complete=loaded.complete,
            packages=packages,
            base_extensions=BaseExtensions(),
            chosen_server=None if root is None else local_models().chosen(root, path),
        )
        checked = checker.check()
        sources += [document for package in packages.found() for document in package.documents]
        policies = ([os.path.join(root, POLICY_FILE)] if root else ["/nonexistent"]) + ([policy] if policy else [])
        grant_context = gather(path, checked, packages.found(), policies, root, report)
        grant(checked, grant_context, files, report)
        _find_javascript(checked, loaded.root, variables)
        written = _written(loaded, checked, root, policy, report, instead or {})
        told = asking or Asking()
        judgement = judgement_of(
            path, loaded, checked, root, variables, trusted=told.everything, agreed=told.agreed, running=told.running
        )
        if not judgement.trusted:
            for agent in checked.agents.values():
                agent.model = None if agent.model is None else without_key(agent.model)
                for fallback in agent.fallback:
                    fallback.model = without_key(fallback.model)
            checked.parts = {}  # they may have secrets
        redact = EnvironmentRedactor(
            variables, wanted_variables(loaded.documents), [source.data for source in loaded.sources]
        )
        if handlers and not written and (judgement.trusted or not to_run):
            check = Check(inspector, sources, redact, variables, reviewed=judgement.trusted)
            check_handlers(checked.tools.values(), check, report)
    report.hide(redact)
    report.sort(sources)
    return Inspected(
        path,
        loaded,
        checked,
        report.errors,
        report.warnings,
        grant_context,
        packages.found(),
        judgement,
        redact,
        report.dropped,
        written,
    )


def _find_javascript(checked: Checked, root: str, env: Mapping[str, str]) -> None:
    """Fill in what loads the entries in JavaScript and TypeScript. Nothing is looked for in a bundle without one."""
    tools = [tool for tool in checked.runs_in_jails if tool.entry and entry_kind(tool.entry) == "javascript"]
    if not tools:
        return
    from goondan.kernel.bundle.javascript import choose, fix_for, look

    found = look(root, env, every=False)
    for tool in tools:
        wanted = tool.body.sandbox.javascript
        chosen = choose(wanted, found)
        if isinstance(chosen, str):
            tool.lack, tool.lack_fix = chosen, fix_for(wanted)
        else:
            tool.javascript = chosen


def _written(
    loaded: Loaded,
    checked: Checked,
    root: str | None,
    policy: str | None,
    report: Report,
    instead: Mapping[str, bytes | None],
) -> list[Written]:
    """The files of the bundle that a tool may have written. Each is reported. Content that replaces a file's is no
    tool's.
    """
    if root is None:
        return []
    from goondan.kernel.bundle.rules.plan import runtimes_of
    from goondan.kernel.trust.written import find_written

    own_tools = (tool.root for tool in checked.runs_in_jails if tool.root and not tool.bundled and not tool.package)
    read = {source.path: source.data for source in loaded.sources}
    paths = [*read, *checked.files, *_modules(checked), *checked.extension_roots, *own_tools, *runtimes_of(checked)]
    if policy:
        paths.append(policy)
    found = find_written([path for path in paths if path not in instead], root, read=read)
    for file in found:
        message = f"a tool may have written this file: tools could write to {file.folder} when it was changed last"
        report.error("E_CONFIG_WRITTEN", message, Position(file.path))
    return found


def _may_hold_tools(path: str) -> bool:
    try:
        files = list_documents(path) if os.path.isdir(path) else [path]
        return any(may_declare_tools(read_file(file, MAX_FILE_BYTES)) for file in files)
    except Unreadable:
        return False


def may_declare_tools(source: bytes) -> bool:
    """A guess, without reading YAML, whether a bundle has Tools of its own, or of a package.

    A wrong guess costs only time: the inspection is started in vain, or too late.
    """
    return _TOOL_KIND.search(source) is not None


class OpenedBundle(Struct, frozen=True):
    """A bundle that may run."""

    #: Its plan.
    plan: KernelPlan
    #: What it asks for beyond its jails. All of it was agreed to.
    powers: list[Power]
    #: The files that it was read from. A change of another file cannot concern it.
    files: list[str] = []
    #: The folders of its tools' code. A change in another folder cannot concern it.
    trees: list[str] = []


def open_bundle(
    path: str,
    *,
    state_dir: str,
    env: Mapping[str, str] | None = None,
    handlers: bool = True,
    policy: str | None = None,
    asking: Asking | None = None,
    runs: bool = True,
    start: Start | None = None,
) -> OpenedBundle:
    """The bundle at `path`: every door to running it goes through here.

    When others can write to the bundle, its code is copied, and the plan names the copy. `runs` False: the caller only
    wants to know what is in it. `start` starts the program that inspects modules.

    Raises BundleError with every problem when it cannot run, and GoondanError E_BUNDLE_UNTRUSTED when the user has not
    agreed to what it asks for.
    """
    inspected = inspect_bundle(
        path, state_dir=state_dir, env=env, handlers=handlers, policy=policy, asking=asking, to_run=True, start=start
    )
    if inspected.errors:
        raise BundleError(inspected.errors, inspected.dropped)
    if not inspected.judgement.trusted:
        from goondan.kernel.grants.powers import untrusted

        raise untrusted(inspected.judgement, path, running=asking is not None and asking.running is not None)
    from goondan.kernel.bundle.rules.plan import build_plan
    from goondan.kernel.trust.policy import key_folders

    loaded, checked = inspected.loaded, inspected.checked
    digests = {tool.root: tree_digest(tool.root)[0] for tool in checked.runs_in_jails if tool.root}
    plan = build_plan(
        checked,
        bundle=path,
        state_dir=state_dir,
        revision=revision(loaded, checked, digests),
        documents=[
            *(source.path for source in loaded.sources),
            *(document for package in inspected.packages for document in package.documents),
            *([policy] if policy is not None else []),
        ],
        spawn_workdirs=inspected.grant_context.spawn_workdirs,
        digests=digests,
        hidden=key_folders(),
    )
    from goondan.kernel.grants.powers import others

    powers = inspected.judgement.powers
    if runs and others(powers):
        from goondan.kernel.trust.private_copy import with_private_copy

        plan = with_private_copy(plan, loaded.root)
    documents = (document for package in inspected.packages for document in package.documents)
    files = [*(source.path for source in loaded.sources), *checked.files, *_modules(checked), *documents]
    if policy is not None:
        files.append(policy)
    return OpenedBundle(
        plan, powers, files, [tool.root for tool in checked.runs_in_jails if tool.root and not tool.bundled]
    )


def _modules(checked: Checked) -> Iterator[str]:
    """The paths of the modules of extensions."""
    for agent in checked.agents.values():
        for extension in agent.extensions:
            yield from (os.path.join(os.path.dirname(extension.entry), name) for name in extension.modules or ())


def revision(loaded: Loaded, checked: Checked, digests: Mapping[str, str]) -> str:
    """Names the content of a bundle: its documents, the files they point at, and the code of tools and extensions.
    `digests` are those of the tools' folders.

    It is made from the text of the files, so it says nothing about the environment's values.
    """
    total = hashlib.sha256()

    def add(name: str, data: bytes) -> None:
        total.update(f"{name}\0{len(data)}\0".encode("utf-8", "surrogateescape"))
        total.update(data)

    for source in loaded.sources:
        add(os.path.relpath(source.path, loaded.root), source.data)
    for path in sorted(set(checked.files)):
        try:
            data = read_file(path, MAX_PROMPT_BYTES)
        except Unreadable:
            data = b""  # a connector's entry can be larger; none is run yet
        add(os.path.relpath(path, loaded.root), data)
    for root in sorted({*(tool.root for tool in checked.runs_in_jails if tool.root), *checked.extension_roots}):
        add(root, (digests.get(root) or tree_digest(root)[0]).encode())
    return total.hexdigest()[:REVISION_CHARS]
