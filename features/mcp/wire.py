"""The types of the frames about MCP servers, the codes of errors about them, and how a server is logged in to.

What is in these frames is in schemas/, because sessions of servers are of the core.

Source: docs/errors.md; docs/mcp.md.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from goondan.schemas.wire.errors import ASK, ErrorCode, add_codes
from goondan.schemas.worker.servers import ATTACH, DETACH, LIST, NEWS

#: The types of its frames.
FRAMES: Final = (ATTACH, LIST, DETACH, NEWS)
ERRORS: Final = add_codes(
    {
        "E_MCP_CONNECT": ErrorCode(
            "The message has the server's last words; `gdn mcp inspect` shows what it would need.",
            for_models=ASK,
            environment=True,
        ),
        "E_MCP_GONE": ErrorCode(
            "The next step starts the server anew; the message has its last words.", for_models=ASK, environment=True
        ),
        "E_MCP_INPUT": ErrorCode(
            "Answer what the server asks, or grant it; `gdn approve list` shows open questions.", for_models=ASK
        ),
        "E_MCP_PROTOCOL": ErrorCode(
            "Update the server, or report it to its authors: it does not keep to the protocol.",
            for_models=ASK,
            environment=True,
        ),
        "E_MCP_REFUSED": ErrorCode(
            "The message is the server's: correct the arguments, or look what the server needs."
        ),
        "E_MCP_INSTALL": ErrorCode(
            "Read what the installer says; gdn mcp add --help has the options.", environment=True
        ),
    }
)


class ServerLogin(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """How a server that is reached over HTTP is logged in to (ServerSpec.login). What is left out, the server and the
    person are asked.
    """

    #: False: no login is tried, and a refusal is the server's last word.
    enabled: bool = True
    #: The client, where one was registered before. None: it is registered when it is needed.
    client_id: str | None = None
    #: Its secret.
    client_secret: str | None = None
    #: The URL of a document about the client, for servers that take that instead of a registration.
    client_metadata_url: str | None = None
    #: The server that may see the client's secret. None: the one that the MCP server names.
    issuer: str | None = None
    #: The scopes to ask for. None: those that the server names.
    scopes: list[str] | None = None
    #: The address that the browser comes back to. None: a free port of this machine.
    redirect_uri: str | None = None
    #: `clientCredentials`: the token is the client's own, and nobody agrees.
    flow: Literal["authorizationCode", "clientCredentials"] = "authorizationCode"

    def __repr__(self) -> str:
        """As in a log or a traceback: without the secret."""
        return f"ServerLogin(enabled={self.enabled!r}, client_id={self.client_id!r}, flow={self.flow!r})"
