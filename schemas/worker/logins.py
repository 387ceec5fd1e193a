"""Logins of MCP servers that are reached over HTTP: what a tool host asks for their workers, and the answers.

The workers keep nothing. Another process keeps their documents, and sends people to pages (PROTOCOL-TOOLHOSTS.md).

Source: docs/oauth.md; docs/design/tools.md section 11.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import Final, Literal

from msgspec import Struct

#: Bytes of what the worker of one MCP server saves: two tokens and what a registration gave.
MAX_DOCUMENT: Final = 64 << 10


def is_redirect(uri: str) -> bool:
    """Whether the process that holds tokens can listen there: http to 127.0.0.1 or localhost, with nothing behind the
    path.
    """
    from goondan.schemas.models.origins import origin_of  # it needs ipaddress, and most processes ask for no redirect

    origin = origin_of(uri)
    if origin is None or not all("!" <= letter <= "~" for letter in uri) or any(sign in uri for sign in "?#@"):
        return False
    scheme, _, rest = origin.partition("://")
    host, _, port = rest.rpartition(":")
    return scheme == "http" and host in ("127.0.0.1", "localhost") and port != "0"


#: `load`, `save`: the document that a server's worker keeps between its lives. `redirect`: the address to which a
#: person's browser comes back. `authorize`: a person is to be sent to a page. `wait`: the browser has come back.
ServerOp = Literal["load", "save", "redirect", "authorize", "wait"]


class ServerWish(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """Payload of `oauth.server`, from a tool host for the worker of an MCP server that is reached over HTTP."""

    #: What is asked for.
    op: ServerOp
    #: The server's prefix.
    server: str
    #: The agent whose own config of the server counts. None: the server as the bundle has it.
    agent: str | None = None
    #: Of `save`: tokens and registrations, as the worker wrote them. A secret. None: forget them.
    document: str | None = None
    #: Of `authorize`: the page. Of `redirect`: the address that was used before.
    url: str | None = None

    def __repr__(self) -> str:
        """The text for logs and tracebacks: without the document, and without a page, which has a state in it."""
        return f"ServerWish(op={self.op!r}, server={self.server!r}, agent={self.agent!r})"


class ServerReply(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The `reply` to `oauth.server`."""

    #: Of `load`: what was saved. None: nothing.
    document: str | None = None
    #: Of `redirect`: the address.
    redirect_uri: str | None = None
    #: Of `authorize`: what agents and operators are told, without the page.
    message: str | None = None
    #: Of `authorize`: until when the person can agree: RFC 3339 in UTC.
    expires_at: str | None = None
    #: Of `wait`: the code that the browser brought. A secret.
    code: str | None = None
    #: Of `wait`: the state that came with the code. A secret.
    state: str | None = None
    #: Of `wait`: the issuer that the redirect names.
    issuer: str | None = None

    def __repr__(self) -> str:
        """The text for logs and tracebacks: without secrets."""
        return f"ServerReply(redirect_uri={self.redirect_uri!r}, expires_at={self.expires_at!r})"
