"""What the policy must know about one jail, looked up: its tool's folder, its workdir and its grants, without links.

Nothing is decided here but what cannot be asked for at all. A missing workdir below the state directory is made.

Source: docs/design/sandbox.md sections 1 and 2.
"""

from __future__ import annotations

import os
import stat
import sys
from typing import Final

import msgspec

from goondan.schemas.bundle.address import is_path
from goondan.schemas.bundle.launch import JavaScriptRuntime, SandboxSpec, ToolHostSpec, ToolSpec
from goondan.schemas.system.directories import quoted
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.worker.grantable import within, workspace_of
from goondan.toolhost.lookup import hiding, this_host
from goondan.toolhost.lookup.folders import MADE_NAMES, dotfiles, existing, folder_beneath, refuse_links, repositories
from goondan.toolhost.policy import launch_plan, plan, subject
from goondan.toolhost.privileges.powers import Powers

#: Folders that a grant to read `/` also leaves out: those that a jail has itself, and the system's, which are no
#: person's.
_NOT_EVERYTHING: Final = ("/boot", "/dev", "/etc", "/proc", "/run", "/sys", "/tmp", "/usr", "/lost+found")
#: A folder with one of these files is a bundle's root, which can hold keys: no jail sees all of it.
BUNDLE_FILES: Final = ("goondan.yaml", "goondan.yml")
#: Where the bundled tools are that are no feature's, with what all of them share.
_SHARED: Final = f"{this_host.PACKAGE}/base"
#: What `goondan_base/redaction.py` is a link to: bundled tools see this file of `schemas`, and no other.
_REDACTION: Final = f"{os.path.dirname(this_host.PACKAGE)}/schemas/text/redaction.py"


def look_up(
    tool: ToolSpec,
    workdir: str | None,
    spec: ToolHostSpec,
    host: subject.HostFacts,
    powers: Powers,
    *,
    base: str | None = None,
    call_folder: subject.CallFolder | None = None,
) -> subject.Request:
    """Find out what the policy must know for one jail.

    A missing workdir below the state directory is made. `base`: the workdir is or lies in this folder, no link is
    followed beneath it, and only the base is made. `call_folder`: its calls work there. Raises GoondanError
    E_SANDBOX_DENIED for paths that do not exist or are of the wrong kind.
    """
    sandbox = tool.sandbox
    runtime = launch_plan.runtime_of(tool)
    root, entry = (os.path.realpath(path) if path else "" for path in (tool.root, tool.entry))
    if tool.bundled and within(root, _SHARED):
        root = _SHARED
    if (root, entry) != (tool.root, tool.entry):
        tool = msgspec.structs.replace(tool, root=root, entry=entry)
    shared = tool.server is None and sandbox.isolation == "shared"  # whose workdir a server sees, its scope says
    real = None if workdir is None or shared else _workdir(workdir, base, spec.state_dir, powers)
    if real is not None:
        subject.check_workdir(real, host)  # before anything is made in it
    workspace = None if real is None else workspace_of(real, os.path.realpath(spec.state_dir))
    read = [subject.HostPath(_REDACTION, "file")] if tool.bundled else []
    for path in sandbox.filesystem.read:
        read += _everything(host) if path == "/" else [_grant(path, root, powers, tool)]
    write = [_grant(path, root, powers, tool) for path in sandbox.filesystem.write]
    venv, site = _venv(sandbox, root, powers)
    writable = [*([real] if real else []), *(place.path for place in write)]
    for path in [*([root] if root else []), *writable, *(place.path for place in read), *([venv] if venv else [])]:
        if (folder := hiding.unknown_place(path, host.hidden)) is not None:
            raise subject.hidden_in_it(path, folder)
    guarded: list[subject.HostPath] = []
    made: list[str] = []
    protected = [os.path.realpath(path) for path in spec.protected]
    protected += [place for other in spec.tools if (place := _environment(other)) is not None]
    for folder in writable:
        candidates = subject.guard_candidates(folder, tool, protected, host)
        if workspace is None or folder != real:
            refuse_links(folder)
            candidates += repositories(folder)
            if folder == real and plan.has_namespaces(host.tier) and any(within(path, folder) for path in protected):
                if base is not None and real != os.path.realpath(base):
                    raise _holds_documents(folder)
                made = powers.make_placeholders(folder, MADE_NAMES)
        guarded += existing(candidates)
    entry_only = os.path.isfile(root) or (bool(root) and any(os.path.exists(f"{root}/{name}") for name in BUNDLE_FILES))
    return subject.Request(
        tool=tool,
        workdir=None if real is None or workdir is None else os.path.normpath(workdir),
        workdir_real=real,
        guarded=guarded,
        # Our own folder has neither (tests/unit/toolhost/test_facts.py); a look costs 0.3 ms.
        masked=[] if entry_only or tool.bundled or not root else dotfiles(root, spec.protected),
        read=read,
        write=write,
        entry_only=entry_only,
        venv=venv,
        venv_site=site,
        workspace=workspace,
        made=made,
        private=None if plan.has_namespaces(host.tier) else _private_folder(),
        home=launch_plan.JAIL_TOOL if runtime is not None and plan.has_namespaces(host.tier) else None,
        runtime=[] if runtime is None else _runtime_places(runtime, host),
        shared=_SHARED if tool.bundled and root != _SHARED else None,
        folder=None if call_folder is None or workdir is None else _in_workdir(call_folder, os.path.normpath(workdir)),
    )


def _runtime_places(runtime: JavaScriptRuntime, host: subject.HostFacts) -> list[subject.HostPath]:
    """What a jail has to be shown of its runtime."""
    missing = [path for path in (runtime.program, *runtime.libraries) if not os.path.exists(path)]
    if missing:
        text = f"the JavaScript runtime is not there any more: {missing[0]}"
        raise fail("E_SANDBOX_UNAVAILABLE", text, suggestion="Put it back, or start the kernel anew to find another.")
    found = [subject.HostPath(runtime.program, "file"), *(subject.HostPath(path, "dir") for path in runtime.libraries)]
    return [place for place in found if not any(within(place.path, folder) for folder in host.programs)]


def _in_workdir(folder: subject.CallFolder, workdir: str) -> subject.HostPath | None:
    """The folder of the calls when it stands in the workdir, which is writable around it."""
    return subject.HostPath(folder.source, "dir", folder.path) if within(folder.path, workdir) else None


def _private_folder() -> str:
    """A name for the folder of a jail that has no mounts of its own."""
    import tempfile  # only such hosts need it

    return f"{os.path.realpath(tempfile.gettempdir())}/gdn-jail-{os.urandom(8).hex()}"


def _workdir(path: str, base: str | None, state_dir: str, powers: Powers) -> str:
    if not is_path(path):
        raise fail("E_SANDBOX_DENIED", f"the workdir {path[:200]!r} is no absolute path that the system takes")
    top = os.path.normpath(path if base is None else base)
    if workspace_of(top, state_dir) is not None and not os.path.islink(top):  # a link is judged by where it leads
        powers.make_workdir(top, state_dir)
    real = os.path.realpath(path) if base is None else folder_beneath(top, os.path.normpath(path))
    if not os.path.isdir(real):
        raise fail("E_SANDBOX_DENIED", f"the workdir {path} is no folder", suggestion="Name an existing folder.")
    _check_entered(real, powers)
    return real


def _check_entered(folder: str, powers: Powers) -> None:
    """Raise GoondanError E_SANDBOX_DENIED for a workdir that its jails could not enter, because of its mode."""
    found = os.stat(folder)
    mine = powers.shares_user  # elsewhere the jail's user is shown as the owner
    if os.access(folder, os.X_OK) if mine else found.st_mode & stat.S_IXUSR:
        return
    message = f"the workdir {folder} cannot be entered: its mode is {stat.S_IMODE(found.st_mode):04o}"
    who = f"Its owner, user {found.st_uid}," if found.st_uid != powers.operator else "You, its owner,"
    raise fail("E_SANDBOX_DENIED", message, suggestion=f"{who} can mend it: `chmod u+rwx {quoted(folder)}`.")


def _holds_documents(folder: str) -> GoondanError:
    """The error for a workdir beneath a base that would need placeholders: a jail could exchange the folder
    meanwhile.
    """
    message = f"the workdir {folder} holds documents of the bundle, and other jails can exchange it"
    return fail("E_SANDBOX_DENIED", message, suggestion="Spawn the agent in the folder above, or in one without them.")


def _everything(host: subject.HostFacts) -> list[subject.HostPath]:
    """The folders of a grant to read `/`: those at the top that no jail has itself and that are not hidden."""
    own = {*this_host.BESIDE_USR, *_NOT_EVERYTHING, *host.hidden, *host.absent}
    folders = [f"/{name}" for name in sorted(os.listdir("/")) if f"/{name}" not in own]
    return [
        subject.HostPath(folder, "dir") for folder in folders if os.path.isdir(folder) and not os.path.islink(folder)
    ]


def _grant(path: str, root: str, powers: Powers, tool: ToolSpec | None = None) -> subject.HostPath:
    """A granted path; a relative one counts from the tool's folder.

    A link on the way is refused where a jail or another user could have put it: whoever can write beside a granted
    place could otherwise send the next jail elsewhere. For the same reason a place that an agent's narrowing of `tool`
    cut out of a granted folder must lie there without links: a tool that can write to the folder could plant one.
    """
    folder = os.path.dirname(root) if os.path.isfile(root) else root
    if not is_path(os.path.join(folder, path)):
        raise fail("E_SANDBOX_DENIED", f"the granted path {path[:200]!r} is none that the system takes")
    name = "/" + os.path.normpath(os.path.join(folder, os.path.expanduser(path))).lstrip("/")  # it leaves `//` as it is
    real = os.path.realpath(name)
    if (link := _replaceable_link(name, powers)) is not None:
        text = (
            f"the granted path {path} leads through the link {link}, which a tool or another user could have put there"
        )
        raise fail("E_SANDBOX_DENIED", text, suggestion="Name the place itself, without links.")
    for outer in _cut_from(name, tool):
        if real != os.path.realpath(outer).rstrip("/") + name[len(outer.rstrip("/")) :]:
            raise fail("E_SANDBOX_DENIED", f"{path} leads out of {outer}, which was granted, through a link")
    if os.path.isdir(real):
        return subject.HostPath(real, "dir", name)
    if os.path.isfile(real):
        return subject.HostPath(real, "file", name)
    raise fail("E_SANDBOX_DENIED", f"the granted path {path} does not exist", suggestion="Create it, or correct it.")


def _replaceable_link(path: str, powers: Powers) -> str | None:
    """The first link on the way to `path` that a jail, or a user other than this one and root, could have put there."""
    here = "/"
    for name in path.split("/")[1:]:
        above, here = here, os.path.join(here, name)
        if os.path.islink(here):
            closed = above in subject.TOP or any(within(above, folder) for folder in subject.SYSTEM)
            # A jail that is our user can do no more than we.
            if not closed and (not powers.shares_user or os.access(above, os.W_OK) or _is_others(above, here)):
                return here
    return None


def _is_others(folder: str, link: str) -> bool:
    """Whether another user can replace the link in `folder`, or has made it."""
    state = os.stat(folder)
    owners = {state.st_uid, os.lstat(link).st_uid}
    return not owners <= {0, os.geteuid()} or bool(state.st_mode & 0o022)


def _cut_from(name: str, tool: ToolSpec | None) -> list[str]:
    """The granted folder that a narrowed path was cut out of; nothing for a path that was itself granted."""
    whole = None if tool is None else tool.cut_from
    if whole is None or name in (*whole.read, *whole.write):
        return []
    return [outer for outer in (*whole.write, *whole.read) if within(name, outer)][:1]


def _environment(tool: ToolSpec) -> str | None:
    """Where the declared environment of a tool is: code in it runs in jails with that tool's grants."""
    if tool.sandbox.python.venv is None:
        return None
    folder = os.path.dirname(tool.root) if os.path.isfile(tool.root) else tool.root
    if not is_path(os.path.join(folder, tool.sandbox.python.venv)):
        return None  # that tool has no jail, and harms no other's
    return os.path.realpath(os.path.join(folder, os.path.expanduser(tool.sandbox.python.venv)))


def _venv(sandbox: SandboxSpec, root: str, powers: Powers) -> tuple[str | None, str | None]:
    if sandbox.python.venv is None:
        return None, None
    place = _grant(sandbox.python.venv, root, powers)
    site = f"{place.path}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    if not os.path.isdir(site):
        message = f"python.venv {sandbox.python.venv} has no {site}"
        anew = f"Make it anew: {sys.executable} -m venv --clear {quoted(place.path)}."
        raise fail("E_SANDBOX_DENIED", message, suggestion=anew)
    return place.path, site
