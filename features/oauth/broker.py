"""OAuth tokens: passes questions of agents and operators to the process that holds the tokens, as orders. Pure.

Rules.
- An agent asks within a turn. It gets tokens of the turn's subject, whom the event names in `auth`; the agent cannot
  change the subject. A turn without `auth` acts for LOCAL_SUBJECT if its root is a client's message. It acts for nobody
  if an agent began the work by itself. Tokens of an app itself need no turn.
- Only agents with extensions get tokens, only of apps that the bundle declares, and with scopes that the agent names.
- Each order has one answer. The order is kept until the answer is there. It is sent again to a new process that holds
  tokens. The asker is told after ORDER_S in any case. The answer goes only to the connection that asked.
- The process is started with the first order. Its payloads pass through the broker unopened.

Source: docs/decisions/068; requirements OAUTH-01, OAUTH-02, EVENTS-09.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeGuard

from msgspec import Raw, Struct

from goondan.features.oauth import wire
from goondan.kernel.broker.state.bus import MAX_ID, RETURN_S, Bus, Core, overloaded
from goondan.kernel.broker.state.entities import AGENTS, CONTROL, TOOLS, Connection, Event
from goondan.kernel.broker.state.parts import LISTS_BYTES, Op, Part, Take
from goondan.kernel.broker.state.presence import agent_address
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.wire.codec import DECODE_ERRORS, check_depth, from_raw, to_raw
from goondan.schemas.wire.control import ProgramWanted
from goondan.schemas.wire.errors import GoondanError, error_payload, fail
from goondan.schemas.wire.frames import Frame, Hello
from goondan.schemas.worker.logins import MAX_DOCUMENT, ServerWish

#: How long an order may take (seconds): longer than the two requests of 20 s each that it can need, and than a restart
#: of the process in between.
ORDER_S: Final = 60.0
#: The same for an order that waits for a person (seconds): longer than any authorization lasts.
WAIT_S: Final = 1900.0
#: Orders that have no answer, of all and of one asker; more are refused. Each is a request to somebody's server.
MAX_OPEN: Final = 256
MAX_OPEN_EACH: Final = 16
#: The same of a tool host, which asks for all of its MCP servers.
MAX_OPEN_HOST: Final = 128
#: The ops of operators.
OPS: Final = ("auth.login", "auth.wait", "auth.list", "auth.revoke")


class _Open(Struct):
    """An order that has no answer yet."""

    #: What is ordered.
    order: wire.Order
    #: The sender and the frame that asked.
    asker: tuple[str, str, str]
    #: The connection over which that frame came last.
    connection: Connection
    #: When the asker is told that no answer came (seconds on the broker's clock).
    until: float
    #: The id of the frame with the order; "": it was not sent yet.
    id: str = ""


def parts(core: Core) -> Sequence[Part]:
    """See parts.MakeParts."""
    return (TokenOrders(core.bus),)


def apps_of(plan: KernelPlan) -> dict[str, wire.OAuthAppSpec]:
    """The OAuthApps of a plan, by their names."""
    apps = plan.parts.get("oauth")
    return {} if apps is None else from_raw(apps, dict[str, wire.OAuthAppSpec])


class TokenOrders(Part):
    """All open orders."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._apps = apps_of(bus.plan)
        #: The process that holds tokens, if it is connected.
        self._holder: Connection | None = None
        #: By the sender and the frame that asked.
        self._open: dict[tuple[str, str, str], _Open] = {}
        self.takes = (
            Take((AGENTS,), "oauth.token", self.ask, LISTS_BYTES, confined="no"),
            Take((TOOLS,), "oauth.server", self.ask_for_server, MAX_DOCUMENT + LISTS_BYTES),
            Take((wire.OAUTH,), "reply", self.answered),
            Take((wire.OAUTH,), "error", self.answered),
            Take((wire.OAUTH,), "oauth.granted", self.granted),
        )
        self.ops = tuple(Op(name, self.administer) for name in OPS)

    # --- who asks

    def ask(self, connection: Connection, frame: Frame, now: float) -> None:
        """`oauth.token` from an agent."""
        instance = connection.instance
        if instance is None or not self._has_extensions(instance.agent):
            raise fail("E_FORBIDDEN", "only agents with extensions may ask for OAuth tokens")
        wish = from_raw(frame.payload, wire.TokenRequest)
        app = self._apps.get(wish.app)
        if app is None:
            raise fail("E_OAUTH_APP", f"the bundle has no OAuthApp {wish.app[:100]!r}")
        scopes = _checked_scopes(wish.scopes)
        if app.flow == "clientCredentials":
            subject = wire.APP_SUBJECT
        elif instance.leased is None:
            raise fail("E_OAUTH_SUBJECT", "only a turn acts for somebody; between turns there is no token of a person")
        else:
            subject = subject_of(instance.leased)
        if wish.subject is not None and wish.subject != subject:
            message = f"this turn acts for {subject!r}, and may ask for no token of somebody else"
            raise fail("E_OAUTH_SUBJECT", message)
        order = wire.TokenOrder(wish.app, subject, instance.agent, instance.key, scopes)
        self._order(connection, frame, order, now + ORDER_S, now)

    def ask_for_server(self, connection: Connection, frame: Frame, now: float) -> None:
        """`oauth.server` from a tool host. Only for MCP servers of the bundle that are reached over HTTP."""
        wish = from_raw(frame.payload, ServerWish)
        tool = next((tool for tool in self._bus.plan.toolhost.tools if tool.name == wish.server), None)
        server = None if tool is None else tool.servers.get(wish.agent or "", tool.server)
        if server is None or server.endpoint is None:
            raise fail("E_OAUTH_APP", f"the bundle has no MCP server {wish.server[:100]!r} that is reached over HTTP")
        order = wire.ServerOrder(
            op=wish.op, server=wish.server, endpoint=server.endpoint, document=wish.document, url=wish.url
        )
        self._order(connection, frame, order, now + (WAIT_S if wish.op == "wait" else ORDER_S), now)

    def administer(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`admin` with one of OPS, from an operator."""
        op = asked.get("op")
        if op == "auth.list":
            self._order(connection, frame, wire.ListOrder(), now + ORDER_S, now)
            return
        app, subject = asked.get("app"), asked.get("subject")
        if not isinstance(app, str) or not 0 < len(app) <= MAX_ID:
            raise fail("E_FRAME_INVALID", f"{op} names an app")
        if subject is None:
            known = self._apps.get(app)
            subject = (
                wire.APP_SUBJECT if known is not None and known.flow == "clientCredentials" else wire.LOCAL_SUBJECT
            )
        if not isinstance(subject, str) or not wire.is_subject(subject):
            raise fail("E_FRAME_INVALID", f"the subject of {op} is a text of 1 to 256 characters")
        if op == "auth.login":
            scopes = asked.get("scopes")
            if scopes is not None and not _is_texts(scopes):
                raise fail("E_FRAME_INVALID", "scopes are texts")
            order: wire.Order = wire.LoginOrder(app, subject, asked.get("device") is True, _checked_scopes(scopes))
            self._order(connection, frame, order, now + ORDER_S, now)
        elif op == "auth.wait":
            self._order(connection, frame, wire.WaitOrder(app, subject), now + WAIT_S, now)
        else:
            self._order(connection, frame, wire.RevokeOrder(app, subject), now + ORDER_S, now)

    # --- who answers

    def welcome(self, peer: Connection) -> dict[str, Any]:
        """The apps of the plan, for the process that holds tokens."""
        holds = peer.cls == CONTROL and peer.claims.agent == wire.OAUTH
        return {"spec": to_raw(wire.TokensSpec(self._apps))} if holds else {}

    def here(self, peer: Connection, hello: Hello, now: float) -> None:
        """The process that holds tokens was welcomed: send it all open orders. A supervisor has connected: ask it again
        for the process, because it may have missed the question.
        """
        if peer.cls == CONTROL and peer.claims.agent == wire.OAUTH:
            self._holder = peer
            for item in self._open.values():
                self._send(peer, item)
        elif peer is self._bus.control and self._open and self._holder is None:
            self._bus.tell_supervisor(ProgramWanted(wire.OAUTH))

    def gone(self, peer: Connection, now: float) -> None:
        """The process that holds tokens may be gone."""
        if peer is self._holder:
            self._holder = None
            if self._open:
                self._bus.tell_supervisor(ProgramWanted(wire.OAUTH))

    def revise(self, plan: KernelPlan) -> None:
        """The plan has changed: the process says hello again and gets the apps of the new plan."""
        self._apps = apps_of(plan)
        if self._holder is not None:
            info = error_payload("E_HELLO_REQUIRED", "there is a new revision")
            self._bus.error(self._holder.cls, self._holder.ident, info, None)

    def answered(self, connection: Connection, frame: Frame, now: float) -> None:
        """`reply` or `error` from that process."""
        if connection is not self._holder:
            raise fail("E_FORBIDDEN", "only the process that holds tokens answers orders")
        item = next((item for item in self._open.values() if item.id == frame.in_reply_to), None)
        if item is not None:
            self._settle(item, frame.type, frame.payload)

    def granted(self, connection: Connection, frame: Frame, now: float) -> None:
        """`oauth.granted` from that process: tell the instances that have asked and that still have a process."""
        if connection is not self._holder:
            raise fail("E_FORBIDDEN", "only the process that holds tokens tells of agreements")
        news = from_raw(frame.payload, wire.GrantedNews)
        payload = to_raw(wire.Granted(wire.REF_PREFIX + news.app, news.subject, news.scopes))
        for agent, key in news.instances:
            told = self._bus.presence.principals.get(agent_address(agent, key))
            if told is not None and self._has_extensions(agent):
                self._bus.send(told, Frame("oauth.granted", payload=payload))

    def tick(self, now: float) -> None:
        """Answer orders whose time is over with an error."""
        for item in [item for item in self._open.values() if item.until <= now]:
            message = "the process that holds tokens did not answer in time"
            self._settle(item, "error", to_raw(error_payload("E_OAUTH_UNAVAILABLE", message)))

    # --- inside

    def _has_extensions(self, agent: str) -> bool:
        spec = self._bus.plan.agents.get(agent)
        return spec is not None and bool(spec.extensions)

    def _order(self, connection: Connection, frame: Frame, order: wire.Order, until: float, now: float) -> None:
        asker = (connection.sender, connection.incarnation, frame.id)
        known = self._open.get(asker)
        if known is not None:  # the same frame again, perhaps over another connection
            known.connection = connection
            return
        mine = sum(item.asker[:2] == asker[:2] for item in self._open.values())
        if len(self._open) >= MAX_OPEN or mine >= (MAX_OPEN_HOST if connection.cls == TOOLS else MAX_OPEN_EACH):
            raise overloaded(f"{mine} of {len(self._open)} orders for OAuth tokens that have no answer yet are yours")
        if self._holder is None:
            self._start(now)
        item = self._open[asker] = _Open(order, asker, connection, until)
        if self._holder is not None:
            self._send(self._holder, item)

    def _start(self, now: float) -> None:
        if self._bus.control is not None:
            self._bus.tell_supervisor(ProgramWanted(wire.OAUTH))
        elif now - self._bus.started_ms / 1000 < RETURN_S:
            raise overloaded("the broker has just started and waits for its supervisor")
        else:
            suggestion = "Start `python -m goondan.features.oauth.process`, or the kernel with `gdn run`."
            raise fail("E_OAUTH_UNAVAILABLE", "no process holds tokens here", suggestion=suggestion)

    def _send(self, holder: Connection, item: _Open) -> None:
        frame = Frame("oauth.order", payload=to_raw(item.order))
        self._bus.send(holder, frame)
        item.id = frame.id

    def _settle(self, item: _Open, kind: str, payload: Raw) -> None:
        del self._open[item.asker]
        self._bus.send(item.connection, Frame(kind, in_reply_to=item.asker[2], payload=payload))


def subject_of(event: Event) -> str:
    """The subject on whose behalf the turn of an event acts. Raises GoondanError E_OAUTH_SUBJECT when there is none."""
    auth = event.content.auth
    if auth is None:
        if event.session.startswith("client/"):
            return wire.LOCAL_SUBJECT
        raise fail("E_OAUTH_SUBJECT", "nobody is named on whose behalf this turn acts (auth)")
    named = _named(auth)
    if named is None:
        message = (
            "the auth of this turn's event names nobody: auth.subject or auth.actor.id is a text of 1 to 256 characters"
        )
        raise fail("E_OAUTH_SUBJECT", message)
    return named


def _named(auth: Raw) -> str | None:
    try:
        check_depth(bytes(auth))
        told = from_raw(auth, dict)
    except (*DECODE_ERRORS, GoondanError):
        return None
    actor = told.get("actor")
    for text in (told.get("subject"), actor.get("id") if isinstance(actor, dict) else None):
        if text is not None:
            return text if isinstance(text, str) and wire.is_subject(text) else None
    return None


def _checked_scopes(scopes: list[str] | None) -> list[str] | None:
    if scopes is not None and (len(scopes) > wire.MAX_SCOPES or not all(wire.is_scope(scope) for scope in scopes)):
        raise fail("E_OAUTH_SCOPE", f"scopes are at most {wire.MAX_SCOPES} texts of visible ASCII without blanks")
    return scopes


def _is_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
