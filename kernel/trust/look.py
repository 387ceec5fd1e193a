"""A bundle that was read, as this user sees it: what was agreed to, who else can write there, where it comes from.

The bytes that are judged are those that were read: documents are in memory already, and modules of extensions are
compared with their digests again when they are loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from glob import escape, glob

from goondan.kernel.bundle.checked import Checked
from goondan.kernel.bundle.documents import Loaded
from goondan.kernel.grants.merge import requested
from goondan.kernel.paths import quickstart_folders
from goondan.kernel.trust import records
from goondan.kernel.trust.asking import Asking
from goondan.kernel.trust.clones import comes_from_elsewhere
from goondan.kernel.trust.gather import powers_of
from goondan.kernel.trust.judge import Consent, Judgement, everything_trusted, judge
from goondan.kernel.trust.owners import all_below, others_who_can_write
from goondan.kernel.trust.powers import Power


def look(
    bundle: str, loaded: Loaded, checked: Checked, state_root: str | None, env: Mapping[str, str], asking: Asking
) -> Judgement:
    """The judgement about the bundle at `bundle`. `state_root` None: there are no records. `env` is the user's."""
    powers: list[Power] = powers_of(checked, loaded.documents, loaded.root, env, os.path.realpath)
    powers += others_who_can_write(_files(loaded, checked))
    reason = "there is no state root" if state_root is None else records.why_not_believed(state_root, bundle)
    record = records.read(state_root, bundle) if state_root is not None and reason is None else None
    consent = Consent(
        agreed=[*(record.powers if record is not None else ()), *asking.agreed],
        known=record is not None or bool(asking.agreed),
        own=record is not None and record.own,
        # A command may have trusted everything at the start. That does not extend to files that a model may have
        # written since.
        everything=asking.running is None and (asking.everything or everything_trusted(os.environ)),
        shipped=is_shipped(bundle, loaded, checked),
        # From each module's own folder: it can be a clone inside a repository of one's own.
        elsewhere=any(comes_from_elsewhere(folder) for folder in {os.path.dirname(path) for path in _modules(checked)}),
        running=asking.running,
    )
    return judge(powers, consent, reason if record is None else None)


def is_shipped(bundle: str, loaded: Loaded, checked: Checked) -> bool:
    """Whether it is the quickstart of this installation, which nobody can change who cannot change the kernel too."""
    root = loaded.root
    if root not in {os.path.realpath(folder) for folder in quickstart_folders()} or not os.path.exists(bundle):
        return False
    kernel = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    who = set(others_who_can_write(_files(loaded, checked)))
    return who <= set(others_who_can_write([kernel, os.path.abspath(__file__)]))


def _files(loaded: Loaded, checked: Checked) -> Iterable[str]:
    """What is read or run of the bundle. For a tool: its entry and its folder. The rest of it runs in jails. For a tool
    that gets something there, for example a key: all of it. A user who can change one of its modules gets the same.
    """
    yield from (source.path for source in loaded.sources)
    yield loaded.root
    yield from checked.files
    yield from checked.extension_roots
    yield from _modules(checked)
    for tool in checked.runs_in_jails:
        if not tool.bundled and not tool.package:
            yield from (path for path in (tool.root, tool.entry) if path)
            if tool.root and requested(tool.sandbox):
                yield from all_below(tool.root)
            venv = tool.sandbox.python.venv
            if venv is not None:
                yield from (venv, *glob(f"{escape(venv)}/lib/*/site-packages"))


def _modules(checked: Checked) -> Iterable[str]:
    """The modules that run outside of jails: with links, and where those lead."""
    for agent in checked.agents.values():
        for extension in agent.extensions:
            folder = os.path.dirname(extension.entry)
            for name in extension.modules or ():
                path = os.path.join(folder, name)
                yield path
                if os.path.islink(path):
                    yield os.path.realpath(path)
