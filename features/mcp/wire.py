"""The codes of errors about MCP servers.

The frames and listings of servers are in schemas/, because sessions of servers are of the core.

Source: docs/errors.md.
"""

from __future__ import annotations

from typing import Final

from goondan.schemas.wire.errors import ASK, ErrorCode, add_codes

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
