"""`gdn ui`: the page of a swarm, in a browser.

It uses the door of this swarm that runs, or is one itself, as `gdn serve` is. The door's token stays in its file: what
the browser gets is a code, for one session. `--act` prints a code that acts, for the page's own question.

Source: docs/decisions/176; docs/commands.md.
"""

from __future__ import annotations

import http.client
import os
import threading
import webbrowser
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import click
import msgspec

from goondan.features.serve.wire import PORT
from goondan.kernel.cli import options
from goondan.kernel.cli.output import emit
from goondan.kernel.cli.state import locate
from goondan.schemas.wire.errors import GoondanError, fail

#: How long a door may take to answer (seconds): one on the same machine needs milliseconds.
ANSWER_S: Final = 10.0


class _Code(msgspec.Struct):
    """What a door answers."""

    #: The code.
    code: str
    #: How long it is good.
    seconds: int


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="Of a door; 0: any.")
@click.option("--no-browser", is_flag=True, help="Only print the address.")
@click.option("--act", is_flag=True, help="Print a code with which the page may act.")
@click.option("--beside", "is_beside", is_flag=True, hidden=True)
@options.bundle
@options.policy
@options.trust
@options.json
def ui(
    port: int, no_browser: bool, act: bool, is_beside: bool, bundle: str | None, policy: str | None, trust: bool
) -> None:
    """Look at a swarm in a browser.

    The address that is printed is good for two minutes, for one browser.
    """
    target = locate(bundle, policy, trust=trust)
    from goondan.features.serve.api.serving import Door, found

    def show(url: str, token_path: str) -> bool:
        try:
            made = msgspec.json.decode(_asks(url, "/page/api/codes", token_path, "act" if act else "look"), type=_Code)
        except msgspec.DecodeError:
            return False  # it has refused, or is no door
        if act:
            emit(made, [made.code])
            return True
        address = f"{url}/page/#code={made.code}"
        emit({"url": address, "seconds": made.seconds, "text": address}, [address])
        if not no_browser and any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))):
            with suppress(webbrowser.Error, OSError):
                webbrowser.open(address)
        return True

    def say(url: str, token_path: str) -> None:  # it serves when this has returned
        threading.Thread(target=show, args=(url, token_path), daemon=True).start()

    if any(show(*door) for door in found(target.state_dir)):
        return
    page = f"127.0.0.1:{port}"
    if port and _asks(page, "/page/"):
        hint = f"If it is, open http://{page}/page/ and paste a token of its file. Else give another --port."
        raise fail("E_USAGE", f"at {page} is a door; if it is this swarm's, it has a --token-file", suggestion=hint)
    if act:
        raise fail("E_USAGE", "no door of this swarm runs", suggestion="Run gdn ui first, in another terminal.")
    Door(target, port, say).serve(is_beside)


def _asks(url: str, path: str, token_path: str | None = None, kind: str = "") -> bytes:
    """The answer of a door, for a code of a kind if there is a token. Empty: it has refused, or is not there."""
    from goondan.features.serve.api.token_files import read_private

    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=ANSWER_S)
    with suppress(OSError, http.client.HTTPException, GoondanError):
        if token_path is None:
            connection.request("GET", path)
        else:
            head = {"authorization": f"Bearer {read_private(token_path).strip()}", "content-type": "application/json"}
            connection.request("POST", path, msgspec.json.encode({"kind": kind}), head)
        answer = connection.getresponse()
        return answer.read(1 << 16) if answer.status == http.client.OK else b""
    return b""


COMMANDS: Final[Mapping[str, click.Command]] = {"ui": ui}
#: What `gdn run` starts beside its kernel.
BESIDE: Final = {"ui": lambda value: ("--beside", "--port", value or str(PORT))}
