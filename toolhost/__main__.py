"""`python -m goondan.toolhost`: one tool host, on its own or under a supervisor."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from contextlib import suppress

import msgspec
import uvloop

from goondan.schemas.system import secrecy, startup
from goondan.schemas.system.log_lines import begin_log
from goondan.schemas.text.visible import visible_line
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.toolhost.app import App, Settings
from goondan.toolhost.drop_privileges import Unprivileged, drop_privileges


def main(argv: list[str] | None = None) -> int:
    """Run until told to stop. 0: told to; 1: refused or broken, with one line on standard error; 2: usage."""
    secrecy.close_memory()
    arguments = _parser().parse_args(argv)
    inherited = startup.close_to_others()
    startup.die_with_parent(arguments.parent_pid)
    startup.keep_memory_steady()
    startup.set_process_name("gdn-toolhost")
    begin_log("toolhost")
    try:
        for descriptor in (arguments.token_fd, arguments.env_fd):
            if descriptor is not None:
                with suppress(OSError):  # whoever reads it says that it is none
                    os.set_inheritable(descriptor, False)  # neither helper nor launcher is to have what it holds
        # A file may be closed to the user that we become. A descriptor may say nothing until the bundle is opened.
        token = None if arguments.token_file is None else startup.read_token(None, arguments.token_file)
        # Ours is another one when root was given up.
        broker_uid = os.geteuid() if arguments.broker_uid is None else arguments.broker_uid
        umask = inherited if arguments.umask is None else arguments.umask
        unprivileged = drop_privileges(arguments.endpoint, broker_uid, umask=umask)
        startup.die_with_parent(arguments.parent_pid)  # a change of user has undone it
        settings = Settings(
            endpoint=arguments.endpoint,
            token=token or startup.read_token(arguments.token_fd, None),
            ready_fd=arguments.ready_fd,
            status_fd=arguments.status_fd,
            granted=read_granted(arguments.env_fd),
            broker_uid=broker_uid,
            survey_path=arguments.survey,
        )
        loop = uvloop.new_event_loop()
        asyncio.set_event_loop(loop)
        loop.run_until_complete(_run(settings, unprivileged))  # which the process's end takes apart
    except GoondanError as error:
        message = f"toolhost: {error.info.message} [{error.info.code}]; {error.info.suggestion}"
        print(visible_line(message), file=sys.stderr)
        return 1
    except OSError as error:
        print(f"toolhost: cannot give up root's powers: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


async def _run(settings: Settings, unprivileged: Unprivileged) -> None:
    await App(settings, *unprivileged).run()


def read_granted(env_fd: int | None) -> dict[str, str]:
    """The values that tools may be granted: a msgpack map on a descriptor, which is read to its end and closed.

    Without a descriptor the environment of this process stands in. Raises GoondanError E_USAGE.
    """
    if env_fd is None:
        return dict(os.environ)
    try:
        with open(env_fd, "rb") as source:
            return msgspec.msgpack.decode(source.read(), type=dict[str, str])
    except (OSError, msgspec.DecodeError):
        raise fail("E_USAGE", "--env-fd names no descriptor with a msgpack map of strings") from None


def _parser() -> argparse.ArgumentParser:
    parser = startup.option_parser("goondan.toolhost", "Run tool handlers in jails.")
    parser.add_argument(
        "--endpoint", required=True, help="the broker's socket for tool hosts, such as ipc:///…/tools.sock"
    )
    token = parser.add_mutually_exclusive_group(required=True)
    token.add_argument("--token-fd", type=int, help="descriptor to read the launch token from")
    token.add_argument("--token-file", help="file that holds the launch token")
    parser.add_argument("--ready-fd", type=int, help="descriptor that gets a newline when the host is ready")
    parser.add_argument(
        "--status-fd", type=int, help="descriptor that gets a JSON line for each worker's start and end"
    )
    parser.add_argument("--env-fd", type=int, help="descriptor with the values that sandbox.env can grant, as msgpack")
    parser.add_argument("--survey", help="file in its own folder of the state for what it finds out about this machine")
    parser.add_argument("--umask", type=_umask, help="octal: what jails write is made under it (default: ours)")
    parser.add_argument("--parent-pid", type=int, help="end when this process ends")
    parser.add_argument("--broker-uid", type=int, help="user of the broker (default: ours); no other one is obeyed")
    return parser


def _umask(text: str) -> int:
    value = int(text, 8)
    if not 0 <= value <= 0o777:
        raise ValueError
    return value


if __name__ == "__main__":
    sys.exit(main())
