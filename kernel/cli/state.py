"""What a command works with: the bundle that it means, the state of its workspace, a new instance, and the directory of
`--workdir`.

The state is checked and mended first, with a line for each mending. The lines go to standard error, so that the output
of the command does not change.

With `--workdir` an operator gives a directory to tools in place of the instance's own. Every tool that is called there
can write to it. The tool host refuses folders of the system, and folders of code that runs outside of jails
(toolhost/policy/subject.py). The kernel's own folders are refused here, before anything is started.

Source: docs/design/sandbox.md section 1.
"""

from __future__ import annotations

import os
import sys
import time

import msgspec

from goondan.kernel import paths, state_root
from goondan.schemas.bundle.address import is_path
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.worker.grantable import within, workspace_of


class BundleTarget(msgspec.Struct, frozen=True):
    """A bundle and the state of its workspace. The workspace's record leads to the kernel."""

    #: The bundle.
    bundle: str
    #: The state of the workspace.
    state_dir: str
    #: A file of grants that a kernel is started with.
    policy: str | None = None
    #: A kernel that is started trusts the bundle for this time.
    trust: bool = False
    #: A kernel that is started gives a damaged journal up.
    accept_loss: bool = False
    #: A kernel that is started follows changes of the bundle.
    watch: bool = False


def locate(
    bundle: str | None,
    policy: str | None = None,
    *,
    trust: bool = False,
    accept_loss: bool = False,
    watch: bool = False,
) -> BundleTarget:
    """The bundle that a command means, and the state of its workspace.

    Raises GoondanError E_CONFIG_NOT_FOUND, E_STATE.
    """
    path = paths.find_bundle(bundle)
    grants = None if policy is None else os.path.abspath(os.path.expanduser(policy))
    return BundleTarget(path, state_of(path), grants, trust, accept_loss, watch)


def state_of(bundle: str, *, make: bool = False) -> str:
    """The state directory of the bundle at `bundle` (from paths.find_bundle). With `make` a missing one is made.

    Raises GoondanError E_STATE for a state root that must not be used.
    """
    path = paths.state_dir(bundle)
    prepare(paths.root_of(path), path, make=make)
    return path


def checked_root() -> str:
    """The state root, checked and mended. Raises GoondanError E_STATE."""
    root = paths.state_root()
    prepare(root)
    return root


def prepare(root: str, workspace: str | None = None, *, make: bool = False) -> state_root.StateRoot:
    """Check a state root and mend it. Each mending is printed. Raises GoondanError E_STATE."""
    from goondan.kernel.cli.output import write

    found = state_root.open_state_root(root, workspace=workspace, make=make)
    for line in found.mended:
        write(f"gdn: {line}", stream=sys.stderr)
    if make and paths.is_homeless(root):
        line = f"gdn: there is no home directory to write to; the state goes to GOONDAN_STATE_ROOT={root}"
        write(line, stream=sys.stderr)
    return found


def new_instance() -> str:
    """A key that no instance has: the day, and four digits at random."""
    return f"{time.strftime('%Y-%m-%d', time.gmtime())}-{os.urandom(2).hex()}"


def absolute_workdir(text: str, place: BundleTarget) -> str:
    """The absolute path of an existing directory. Links in it are not resolved.

    Raises GoondanError E_USAGE when it is not a directory, E_SANDBOX_DENIED when it holds state or sockets of the
    kernel.
    """
    path = os.path.abspath(os.path.expanduser(text)) if text and "\0" not in text else ""
    if not os.path.isdir(path):
        raise fail("E_USAGE", f"the work directory {text[:200]!r} is no directory", suggestion="Make it first.")
    if not is_path(path):
        hint = "Name a directory whose path is UTF-8."
        raise fail("E_USAGE", f"the path of the work directory {text[:200]!r} cannot be sent", suggestion=hint)
    real = os.path.realpath(path)
    state = os.path.realpath(paths.state_root())
    if within(real, state) and workspace_of(real, state) is None:
        raise _denied(path, state, "the state of agents")
    for sockets in _socket_folders(place):
        if within(real, sockets):
            raise _denied(path, sockets, "the sockets of kernels")
    return path


def _socket_folders(place: BundleTarget) -> list[str]:
    """The folders of runtime directories: the usual ones, and that of the running kernel."""
    from goondan.kernel import lock

    usual = [os.path.dirname(os.path.realpath(run_dir)) for run_dir in paths.run_dirs(place.bundle)]
    record = lock.read_record(place.state_dir)
    if record is None:
        return usual
    above = os.path.dirname(record.run_dir)
    return [*usual, above if os.path.basename(above).startswith("goondan") else record.run_dir]


def _denied(path: str, folder: str, what: str) -> GoondanError:
    message = f"the work directory {path[:200]} lies in {folder}, which holds {what}"
    return fail("E_SANDBOX_DENIED", message, suggestion="Name a directory of your own.")
