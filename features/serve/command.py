"""`gdn serve`: a swarm as an HTTP service, for whoever has a token.

It is an ordinary client of the kernel. It uses the kernel that runs, or starts one, as `gdn call` does. When the kernel
stops, the door stays, answers that there is none, and finds the next one. Started beside a kernel (`gdn run --serve`),
it ends with it.

Source: docs/commands.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

import click

from goondan.features.serve.wire import LOOPBACK, PORT
from goondan.kernel.cli import options
from goondan.kernel.cli.output import wants_json, write, write_json
from goondan.kernel.cli.state import locate
from goondan.schemas.wire.errors import fail


@click.command(epilog='Example: curl -H "Authorization: Bearer $(cat FILE)" http://127.0.0.1:7117/api/v1/openapi.json')
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0: any port.")
@click.option("--address", metavar="ADDRESS", default=LOOPBACK, show_default=True, help="Needs --token-file.")
@click.option("--host", "hosts", metavar="NAME", multiple=True, help="Another name that clients use. Repeatable.")
@click.option(
    "--token-file",
    metavar="FILE",
    shell_complete=options.completed_path("file"),
    help="A line for each token: NAME look|talk|operate TOKEN AGENT...  [default: one token is made]",
)
@click.option("--log", is_flag=True, help="Write a line of JSON for each request to stderr.")
@click.option("--beside", "is_beside", is_flag=True, hidden=True)
@options.bundle
@options.policy
@options.trust
@options.json
def serve(
    port: int,
    address: str,
    hosts: tuple[str, ...],
    token_file: str | None,
    log: bool,
    is_beside: bool,
    bundle: str | None,
    policy: str | None,
    trust: bool,
) -> None:
    """Serve a swarm over HTTP, to whoever has a token."""
    if address not in (LOOPBACK, "::1", "localhost") and token_file is None:
        message = f"{address[:100]!r} can be reached from other machines, so the tokens have to be yours"
        raise fail("E_USAGE", message, suggestion="Give --token-file as well, or leave out --address.")
    target = locate(bundle, policy, trust=trust)
    from goondan.features.serve.api.serving import Door

    Door(target, port, _say, address, hosts, token_file, log).serve(is_beside)


def _say(url: str, token_path: str) -> None:
    text = f"{url}   token: {token_path}"
    if wants_json():
        write_json({"url": url, "tokenFile": token_path, "pid": os.getpid(), "text": text})
    else:
        write(text, stream=sys.stderr)


def _beside(value: str) -> Sequence[str]:
    """The words behind `gdn serve` for `gdn run --serve[=PORT]`. Raises GoondanError E_USAGE."""
    if value and not (value.isascii() and value.isdigit() and int(value) < 65536):
        raise fail("E_USAGE", f"--serve={value[:100]}: a port is a number below 65536")
    return ("--beside", "--port", value or str(PORT))


COMMANDS: Final[Mapping[str, click.Command]] = {"serve": serve}
#: What `gdn run` starts beside its kernel.
BESIDE: Final = {"serve": _beside}
