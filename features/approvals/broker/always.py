"""Lasting yeses: a person agrees to a call, and to later calls like it. Pure.

Rules.
- One is for one agent and one tool. The arguments are the same as in the first call, but one of them may be any text
  with a beginning that the person has chosen.
- It answers only the rules that asked, as they are written: one of each policy that wants a person. A rule that denies
  comes before it, as every rule does.
- It answers no question.
- It ends when a person takes it back. The journal keeps it until then.

Source: docs/approvals.md, "Always"; docs/decisions/177.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct, structs

from goondan.features.approvals import wire
from goondan.features.approvals.broker import decisions
from goondan.kernel.broker.state.bus import Bus
from goondan.kernel.broker.state.parts import fitting
from goondan.kernel.broker.state.records import Item, Put, Retire, encode
from goondan.schemas.wire.codec import encode_value, from_raw
from goondan.schemas.wire.errors import fail

#: Lasting yeses in all: a person reads the list, and each asked call looks through it.
MAX_ALWAYS: Final = 100
#: The subjects of their records.
_ALWAYS: Final = "approval-always:"


class ApprovalLasts(Struct, frozen=True, array_like=True, tag="approvals/always", kw_only=True):
    """A lasting yes. The record stays until the yes is taken back."""

    #: Nothing: no event needs it.
    concerns: str = ""
    #: The yes.
    yes: wire.ApprovalAlways


class Always:
    """All lasting yeses."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        #: By code, the oldest first.
        self.all: dict[str, wire.ApprovalAlways] = {}

    def restore(self, subject: str, record: ApprovalLasts) -> None:
        """Take over a record of an earlier broker."""
        self.all[record.yes.code] = record.yes

    def look(self, wanted: decisions.Wanted) -> wire.ApprovalAlways | None:
        """The yes that such a call has already. None: a person has to be asked."""
        agent = wanted.event.instance.agent
        found = [yes for yes in self.all.values() if (yes.agent, yes.tool) == (agent, wanted.tool)]
        if not found:
            return None
        # A question has no rule, so nothing here fits it.
        rule, args = self._digests(agent, wanted.decision), msgspec.msgpack.decode(wanted.args)
        rests = {name: _rest(wanted.tool, args, name) for name in {yes.argument for yes in found}}
        for yes in found:
            if yes.rule == rule and rests[yes.argument] == yes.rest and _begins(args, yes.argument, yes.prefix):
                return yes
        return None

    def made(
        self, item: decisions.Item, asked: decisions.ApprovalAsked, pattern: Mapping[str, str], uid: int, now_ms: int
    ) -> wire.ApprovalAlways:
        """The one that a person makes with a yes to this call. Raises GoondanError E_USAGE, E_STATE_CONFLICT,
        E_TOOL_LIMIT.
        """
        agent, args = asked.agent, from_raw(asked.args, dict)
        argument, prefix = next(iter(pattern.items()), ("", ""))
        if pattern and not (len(pattern) == 1 and argument and prefix and _begins(args, argument, prefix)):
            raise fail("E_USAGE", "a pattern names one text argument of the call, and what that text begins with")
        if max(len(argument), len(prefix)) > wire.MAX_TEXT:
            raise fail("E_USAGE", f"a pattern has at most {wire.MAX_TEXT} characters")
        rule = self._digests(agent, wire.decide(self._policies(agent), item.tool, args))
        if not rule:
            raise fail("E_STATE_CONFLICT", "the rules have changed: they would not ask about this call any more")
        rest = _rest(item.tool, args, argument)
        code = wire.code_of(agent, item.tool, f"{rule}\0{rest}\0{argument}\0{prefix}")
        if code in self.all:
            return self.all[code]
        if len(self.all) >= MAX_ALWAYS:
            raise fail("E_TOOL_LIMIT", f"there are {MAX_ALWAYS} lasting yeses", suggestion="Revoke one (gdn approve).")
        return wire.ApprovalAlways(
            code=code,
            agent=agent,
            tool=item.tool,
            rule=rule,
            rest=rest,
            argument=argument,
            prefix=prefix,
            what=decisions.beginning(asked, decisions.redactor(self._bus)),
            uid=uid,
            at_ms=now_ms,
        )

    def keep(self, yes: wire.ApprovalAlways) -> Sequence[Put]:
        """It holds from now on. Returns what the journal is to write together with the decision."""
        if yes.code in self.all:
            return ()
        self.all[yes.code] = yes
        return (Put(f"{_ALWAYS}{yes.code}", encode(ApprovalLasts(yes=yes))),)

    def take_back(self, code: str, then: Callable[[bool], None]) -> wire.ApprovalAlways:
        """End one at once; `then` is called when the journal has it. Raises GoondanError E_APPROVAL_NOT_FOUND."""
        yes = self.all.pop(code, None)
        if yes is None:
            raise fail("E_APPROVAL_NOT_FOUND", f"no lasting yes has the code {code[:100]!r}")
        self._bus.stage(Item((Retire(f"{_ALWAYS}{code}"),)), then)
        return yes

    def listed(self) -> dict[str, Any]:
        """All of them, the oldest first."""
        listed = fitting(self.shown(yes) for yes in self.all.values())
        return {"always": listed, "more": len(self.all) - len(listed)}

    def shown(self, yes: wire.ApprovalAlways) -> wire.ApprovalAlways:
        """One as an operator gets it."""
        return structs.replace(yes, stale=not {*yes.rule.split()} <= {*self._rules(yes.agent).values()})

    def _policies(self, agent: str) -> list[wire.Policy]:
        spec = self._bus.plan.agents.get(agent)
        return [] if spec is None else wire.policies_of(spec.parts)

    def _rules(self, agent: str) -> dict[str, str]:
        return wire.asking(self._policies(agent))

    def _digests(self, agent: str, decision: wire.Decision) -> str:
        """Of the rules that ask, as a yes has them. "": none does."""
        rules = self._rules(agent)
        return " ".join(rules[name] for name in decision.rule.split() if name in rules)


def _begins(args: dict[str, Any], argument: str, prefix: str) -> bool:
    value = args.get(argument)
    return not argument or (isinstance(value, str) and value.startswith(prefix))


def _rest(tool: str, args: dict[str, Any], argument: str) -> str:
    """The digest of the arguments of a call without this one."""
    return decisions.digest_of(tool, argument, encode_value({k: v for k, v in args.items() if k != argument}))
