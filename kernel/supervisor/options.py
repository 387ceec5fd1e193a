"""The options of a supervisor's command line, and the plan that they lead to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from goondan.kernel import paths
from goondan.schemas.wire.errors import fail

if TYPE_CHECKING:
    from goondan.kernel.bundle.handlers import Start
    from goondan.kernel.bundle.loader import OpenedBundle
    from goondan.kernel.grants.powers import Power
    from goondan.schemas.bundle.launch import KernelPlan


class Options(msgspec.Struct, kw_only=True):
    """The supervisor's options. Paths are absolute."""

    #: The bundle.
    bundle: str
    #: The state of the workspace.
    state_dir: str
    #: A runtime directory that was named by hand.
    run_dir: str | None = None
    #: The descriptor on which it says that it is ready.
    ready_fd: int | None = None
    #: The descriptor that ends when the process that started it is gone.
    parent_fd: int | None = None
    #: Whether other commands may use the kernel.
    shared: bool = False
    #: Hosts that tools may reach in addition.
    allow_net: list[str] = []
    #: A file of grants.
    policy: str | None = None
    #: Whether the bundle is trusted for this run.
    trust: bool = False
    #: The descriptor with the powers that a person has just agreed to.
    agreed_fd: int | None = None
    #: The umask of the process that started it. Its jails have the same.
    umask: int = 0o022
    #: Whether a damaged journal is given up.
    accept_loss: bool = False
    #: The descriptor with the environment of whoever started it (spawn.environment_file).
    environment_fd: int | None = None
    #: Of a kernel that restarts in place: the descriptor with the handover of the program before.
    resume_fd: int | None = None
    #: Whether it follows changes of the bundle.
    watch: bool = False


def parse(arguments: list[str] | None) -> Options:
    """Read the options of a command line (None: that of this process). Bad usage ends the process. Raises GoondanError
    E_CONFIG_NOT_FOUND and E_STATE.
    """
    from goondan.schemas.system.startup import option_parser  # the command that starts a supervisor has no use for it

    parser = option_parser("goondan.kernel.supervisor", "The Goondan supervisor.")
    parser.add_argument("--bundle", required=True, help="the bundle to run")
    parser.add_argument("--run-dir", help="where sockets are made (default: by the bundle's path)")
    parser.add_argument(
        "--ready-fd", type=descriptor, help="descriptor that is told when the kernel is ready, or why not"
    )
    parser.add_argument("--parent-fd", type=descriptor, help="stop when the other end of this descriptor is closed")
    parser.add_argument("--shared", action="store_true", help="stop when no command holds the kernel any more")
    parser.add_argument("--allow-net", action="append", default=[], metavar="HOST:PORT", help="grant to every tool")
    parser.add_argument("--policy", metavar="FILE", help="what the operator grants, besides the policy.yaml")
    parser.add_argument("--trust", action="store_true", help="trust the bundle for this time, whatever it asks for")
    parser.add_argument(
        "--agreed-fd", type=descriptor, help="descriptor of the powers that the user has just agreed to"
    )
    parser.add_argument("--environment-fd", type=descriptor, help="descriptor of the environment (default: its own)")
    parser.add_argument("--accept-loss", action="store_true", help="go on with what is whole of a damaged journal")
    parser.add_argument("--resume-fd", type=descriptor, help="descriptor of what a restart in place hands over")
    parser.add_argument("--watch", action="store_true", help="follow changes of the bundle")
    given = vars(parser.parse_args(arguments))
    given["bundle"] = paths.find_bundle(given["bundle"])
    for name in ("run_dir", "policy"):
        given[name] = os.path.abspath(given[name]) if given[name] else None
    return Options(**given, state_dir=paths.state_dir(given["bundle"]))


def descriptor(word: str) -> int:
    """The number of a descriptor. ValueError for what no descriptor has."""
    if not 0 <= (number := int(word)) < 1 << 31:
        raise ValueError(word)
    return number


def command_line(options: Options) -> list[str]:
    """The command line of a supervisor with these options."""
    named = {
        "--bundle": options.bundle,
        "--run-dir": options.run_dir,
        "--ready-fd": options.ready_fd,
        "--parent-fd": options.parent_fd,
        "--policy": options.policy,
        "--agreed-fd": options.agreed_fd,
        "--environment-fd": options.environment_fd,
    }
    flags = {
        "--shared": options.shared,
        "--trust": options.trust,
        "--accept-loss": options.accept_loss,
        "--watch": options.watch,
    }
    given = [word for name, value in named.items() if value is not None for word in (name, str(value))]
    given += [name for name, is_set in flags.items() if is_set]
    return [*given, *(word for grant in options.allow_net for word in ("--allow-net", grant))]


def resuming(options: Options) -> list[str]:
    """The command line of the program that takes the place of this one, without `--resume-fd`. The handover has the
    powers that the user has agreed to.
    """
    return command_line(replace(options, ready_fd=None, agreed_fd=None, trust=False, accept_loss=False))


def watched_besides(root: str, bundle: str, policy: str | None) -> list[str]:
    """The files that count for a bundle besides its own: agreements and grants. `root` is the state root."""
    from goondan.kernel.trust.policy import POLICY_FILE
    from goondan.kernel.trust.records import record_path

    return [record_path(root, bundle), os.path.join(root, POLICY_FILE), *([policy] if policy is not None else [])]


def load_bundle(options: Options, running: Sequence[Power] | None = None, start: Start | None = None) -> OpenedBundle:
    """Open the bundle, with the grants of the command line. `running` are the powers of the running revision: then only
    those, and recorded agreements, count as agreed to. `start` starts the program that inspects modules. Raises
    BundleError, and other GoondanErrors.
    """
    from goondan.kernel.bundle.loader import Asking, open_bundle, read_agreed

    agreed = [] if options.agreed_fd is None else read_agreed(options.agreed_fd)
    options.agreed_fd = None
    asking = Asking(everything=options.trust, agreed=agreed, running=running)
    opened = open_bundle(options.bundle, state_dir=options.state_dir, policy=options.policy, asking=asking, start=start)
    from goondan.kernel.bundle.rules.plan import replanned  # opening has a use for the time of this import

    opened = replace(opened, plan=replanned(opened.plan, os.environ))
    if not options.allow_net:
        return opened
    return replace(opened, plan=with_network(opened.plan, options.allow_net))


def with_network(plan: KernelPlan, grants: list[str]) -> KernelPlan:
    """The plan with `grants` (HOST:PORT, *.DOMAIN:PORT) added to the network of every tool. Raises E_USAGE."""
    from goondan.schemas.worker.hosts import BadHost, join, network, parse_rule, read_network, write_network

    try:
        added = network(map(parse_rule, grants))
    except BadHost as error:
        raise fail("E_USAGE", f"--allow-net: {error}") from None
    tools = []
    for tool in plan.toolhost.tools:
        wide = write_network(join(read_network(tool.sandbox.network), added))
        tools.append(replace(tool, sandbox=replace(tool.sandbox, network=wide)))
    return replace(plan, toolhost=replace(plan.toolhost, tools=tools))
