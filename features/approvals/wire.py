"""Approvals: the rules of the bundled extension `approval` (which tool calls a person decides about), and the messages
of agents, the broker and clients about items that wait for a person. Pure.

The kernel reads the rules from the bundle and the broker enforces them. The agent reads them as well, for calls that
run in its own process. Both use `decide`.

Rules.
- The first rule that fits decides. Without one, the policy's default decides.
- An agent with several policies (several Extension documents) gets the strictest of what they say.
- Every comparison takes time in proportion to the text. There are no regular expressions: a model writes the text, and
  a pattern that backtracks would stop the broker.
- Arguments that cannot be read count as fitting for `ask` and `deny`, and as not fitting for `allow`.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw, Struct, structs

from goondan.schemas.bundle.json_values import same_json
from goondan.schemas.wire import codec, frames
from goondan.schemas.wire.errors import ASK, ErrorCode, add_codes

#: The name of the feature, and of its part of an agent's specification: the policies of the agent.
FEATURE: Final = "approvals"
#: The types of its frames.
FRAMES: Final = ("approval.ask", "approval.news")

#: The codes with which the broker answers a call that does not run.
WAITS: Final = "E_APPROVAL_WAITS"
DENIED: Final = "E_APPROVAL_DENIED"
ERRORS: Final = add_codes(
    {
        WAITS: ErrorCode(
            "A person answers with `gdn approve`; the turn goes on by itself then.", for_models=ASK, waits=True
        ),
        DENIED: ErrorCode("Do without the call, or ask for something else.", refuser="rule"),
        "E_APPROVAL_MISMATCH": ErrorCode("Make the call anew: a person is asked about the new one.", refuser="person"),
        "E_APPROVAL_NOT_FOUND": ErrorCode("`gdn approve list` shows what waits, with --always what is agreed to."),
        "E_APPROVAL_DECIDED": ErrorCode("`gdn approve list --all` shows how it was decided."),
    }
)

Action = Literal["allow", "ask", "deny"]
ACTIONS: Final[tuple[Action, ...]] = ("allow", "ask", "deny")
#: The stricter of two actions has the higher number.
_STRICTNESS: Final[dict[str, int]] = {"allow": 0, "ask": 1, "deny": 2}

#: How long an item waits for an answer when its rule does not say (seconds): as long as ids of events are kept.
DEFAULT_EXPIRY_S: Final = 7 * 86_400
#: The longest that a rule may say (seconds).
MAX_EXPIRY_S: Final = 90 * 86_400
#: Rules of one policy, and patterns of one rule: each call looks at all of them.
MAX_RULES: Final = 200
MAX_PATTERNS: Final = 50
#: Conditions of one rule.
MAX_CONDITIONS: Final = 20
#: Text of a pattern, a path or a reason (characters).
MAX_TEXT: Final = 1000
#: Stars in one `matches`: each costs one search through the text.
MAX_STARS: Final = 16

#: What a condition may say of an argument.
OPERATORS: Final = ("equals", "in", "startsWith", "endsWith", "contains", "matches", "exists")
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_PREFIX: Final = "args."


class Condition(Struct, frozen=True, omit_defaults=True):
    """A condition on one argument."""

    #: The keys that lead to the argument.
    path: list[str]
    #: One of OPERATORS.
    operator: str
    #: The operand.
    value: Any = None


class Rule(Struct, frozen=True, rename="camel", omit_defaults=True):
    """One rule."""

    #: Patterns of full tool names.
    tools: list[str]
    #: What is done with a call that matches.
    action: Action
    #: The conditions. All of them must hold.
    when: list[Condition] = []
    #: How long an item waits (seconds).
    expires_s: float = DEFAULT_EXPIRY_S
    #: Why, in the rule's own words.
    reason: str | None = None


class Policy(Struct, frozen=True, omit_defaults=True):
    """The rules of one Extension document of that name."""

    #: The name of the Extension document.
    name: str
    #: Its rules. The first one that fits a call decides.
    rules: list[Rule] = []
    #: What happens to a call that no rule fits.
    default: Action = "allow"


class Decision(Struct, frozen=True, rename="camel", omit_defaults=True):
    """How a call is decided."""

    #: What is done with the call.
    action: Action
    #: The rule's own words, for the person and for the model.
    reason: str | None = None
    #: How long an item waits (seconds).
    expires_s: float = DEFAULT_EXPIRY_S
    #: Names the rule: its policy, and its number there or `default`. With spaces between: one of each policy that asks.
    #: "" when no rule has decided.
    rule: str = ""


class Problem(Struct, frozen=True):
    """A mistake in a policy, at this path below the extension's config."""

    #: Where it is, below the extension's config.
    path: tuple[str | int, ...]
    #: What is wrong.
    message: str


#: Arguments that nobody here can read.
UNREADABLE: Final = object()
_RUN: Final = Decision("allow")


def policies_of(parts: Mapping[str, Raw]) -> list[Policy]:
    """The policies among the parts of an agent's specification; [] without any. Raises GoondanError E_FRAME_INVALID."""
    found = parts.get(FEATURE)
    return [] if found is None else codec.from_raw(found, list[Policy])


# --- deciding -------------------------------------------------------------------------------------------------------


def concerns(policies: Iterable[Policy], tool: str) -> bool:
    """Whether any of these could say something else than `allow` of a call of this tool, whatever its arguments are."""
    for policy in policies:
        if policy.default != "allow":
            return True
        if any(rule.action != "allow" and _names(rule, tool) for rule in policy.rules):
            return True
    return False


def decide(policies: Iterable[Policy], tool: str, args: Any) -> Decision:
    """The decision about a call of `tool` with these arguments: a JSON object or UNREADABLE.
    `rule` names all that ask.
    """
    strictest = _RUN
    for policy in policies:
        found = _of_policy(policy, tool, args)
        if _STRICTNESS[found.action] > _STRICTNESS[strictest.action]:
            strictest = found
        elif found.action == strictest.action == "ask":
            strictest = structs.replace(strictest, rule=f"{strictest.rule} {found.rule}")
    return strictest


def asking(policies: Iterable[Policy]) -> dict[str, str]:
    """The rules that want a person to decide: by Decision.rule, a digest of what each says (SHA-256, hexadecimal)."""
    found = {f"{policy.name}/{at}": rule for policy in policies for at, rule in enumerate(policy.rules)}
    asks: dict[str, Any] = {name: rule for name, rule in found.items() if rule.action == "ask"}
    asks |= {f"{policy.name}/default": "ask" for policy in policies if policy.default == "ask"}
    named = {name: [name.rpartition("/")[0], rule] for name, rule in asks.items()}
    return {name: hashlib.sha256(msgspec.json.encode(rule)).hexdigest() for name, rule in named.items()}


def _of_policy(policy: Policy, tool: str, args: Any) -> Decision:
    for at, rule in enumerate(policy.rules):
        if _names(rule, tool) and _fits(rule, args):
            return Decision(rule.action, rule.reason, rule.expires_s, f"{policy.name}/{at}")
    return Decision(policy.default, rule=f"{policy.name}/default")


def _names(rule: Rule, tool: str) -> bool:
    return any(fnmatchcase(tool, pattern) for pattern in rule.tools)


def _fits(rule: Rule, args: Any) -> bool:
    if not rule.when:
        return True
    if args is UNREADABLE:
        return rule.action != "allow"
    return all(_holds(condition, args) for condition in rule.when)


_NOTHING: Final = object()


def _holds(condition: Condition, args: Any) -> bool:
    value: Any = args
    for key in condition.path:
        value = value.get(key, _NOTHING) if isinstance(value, dict) else _NOTHING
    operator, operand = condition.operator, condition.value
    if operator == "exists":
        return (value is not _NOTHING) is bool(operand)
    if value is _NOTHING:
        return False
    if operator == "equals":
        return same_json(value, operand)
    if operator == "in":
        return any(same_json(value, one) for one in operand)
    text = value if isinstance(value, str) else _text(value)
    if operator == "startsWith":
        return text.startswith(operand)
    if operator == "endsWith":
        return text.endswith(operand)
    if operator == "contains":
        return operand in text
    return matches(text, operand)


def _text(value: Any) -> str:
    return msgspec.json.encode(value, order="deterministic").decode()


def matches(text: str, pattern: str) -> bool:
    """Whether the whole text fits: `*` stands for any text, also for none and for line ends; all else for itself."""
    first, *rest = pattern.split("*")
    if not rest:
        return text == first
    last = rest.pop()
    if len(text) < len(first) + len(last) or not text.startswith(first) or not text.endswith(last):
        return False
    at, end = len(first), len(text) - len(last)
    for piece in rest:  # the earliest place of each leaves the most for the others
        found = text.find(piece, at, end)
        if found < 0:
            return False
        at = found + len(piece)
    return True


# --- reading --------------------------------------------------------------------------------------------------------


def read_policy(name: str, config: Mapping[str, Any]) -> tuple[Policy, list[Problem]]:
    """The policy that an extension's config describes, and every mistake in it. With mistakes, the policy is moot."""
    problems: list[Problem] = []
    unknown = [key for key in config if key not in ("rules", "default")]
    problems += [Problem((key,), f"{str(key)[:100]!r} is no field; there are rules and default") for key in unknown]
    default = config.get("default", "allow")
    if default not in ACTIONS:
        problems.append(Problem(("default",), f"default is one of {', '.join(ACTIONS)}"))
        default = "deny"
    written = config.get("rules", [])
    rules: list[Rule] = []
    if not isinstance(written, list) or len(written) > MAX_RULES:
        problems.append(Problem(("rules",), f"rules is a list of at most {MAX_RULES} rules"))
    else:
        for at, rule in enumerate(written):
            found = _read_rule(rule, ("rules", at), problems)
            if found is not None:
                rules.append(found)
    return Policy(name, rules, default), problems


def _read_rule(rule: Any, at: tuple[str | int, ...], problems: list[Problem]) -> Rule | None:
    before = len(problems)

    def wrong(message: str, *path: str | int) -> None:
        problems.append(Problem((*at, *path), message))

    if not isinstance(rule, dict):
        wrong("a rule is an object with tools and action")
        return None
    for key in rule:
        if key not in ("tools", "when", "action", "expiresAfter", "reason"):
            wrong(f"{str(key)[:100]!r} is no field of a rule", key)
    tools: Any = rule.get("tools")
    if not _is_texts(tools) or not 0 < len(tools) <= MAX_PATTERNS:
        wrong(f"tools is a list of 1 to {MAX_PATTERNS} patterns of tool names, such as bash__*", "tools")
    action: Any = rule.get("action")
    if action not in ACTIONS:
        wrong(f"action is one of {', '.join(ACTIONS)}", "action")
    reason = rule.get("reason")
    if reason is not None and not _is_text(reason):
        wrong(f"reason is a text of 1 to {MAX_TEXT} characters", "reason")
    expires = DEFAULT_EXPIRY_S if "expiresAfter" not in rule else _seconds(rule["expiresAfter"])
    if expires is None:
        wrong('expiresAfter is a time such as "90s", "15m", "12h" or "7d", up to 90d', "expiresAfter")
    if "expiresAfter" in rule and action in ("allow", "deny"):
        wrong("expiresAfter belongs to rules with the action ask", "expiresAfter")
    when = _read_when(rule.get("when", {}), (*at, "when"), problems)
    if len(problems) > before or expires is None:
        return None
    return Rule(tools, action, when, float(expires), reason)


def _read_when(when: Any, at: tuple[str | int, ...], problems: list[Problem]) -> list[Condition]:
    found: list[Condition] = []
    if not isinstance(when, dict) or len(when) > MAX_CONDITIONS:
        problems.append(Problem(at, f"when is an object of at most {MAX_CONDITIONS} conditions, by args.NAME"))
        return found
    for path, condition in when.items():
        keys = path.removeprefix(_PREFIX).split(".") if isinstance(path, str) else []
        if not isinstance(path, str) or not path.startswith(_PREFIX) or not all(keys) or len(path) > MAX_TEXT:
            problems.append(Problem((*at, str(path)), "a condition is about args.NAME, or args.NAME.NAME"))
            continue
        if not isinstance(condition, dict) or not condition:
            message = f"a condition is an object with one or more of {', '.join(OPERATORS)}"
            problems.append(Problem((*at, path), message))
            continue
        for operator, value in condition.items():
            fault = _fault(operator, value)
            if fault is not None:
                problems.append(Problem((*at, path, operator), fault))
            else:
                found.append(Condition(keys, operator, value))
    return found


def _fault(operator: Any, value: Any) -> str | None:
    """What is wrong with one comparison."""
    if operator not in OPERATORS:
        return f"{str(operator)[:100]!r} is no comparison; there are {', '.join(OPERATORS)}"
    if operator == "exists":
        return None if isinstance(value, bool) else "exists is true or false"
    if operator == "in":
        return (
            None
            if isinstance(value, list) and 0 < len(value) <= MAX_PATTERNS
            else (f"in is a list of 1 to {MAX_PATTERNS} values")
        )
    if operator == "equals":
        return None
    if not _is_text(value):
        return f"{operator} is a text of 1 to {MAX_TEXT} characters"
    if operator == "matches" and value.count("*") > MAX_STARS:
        return f"a pattern has at most {MAX_STARS} stars"
    return None


def _seconds(value: Any) -> float | None:
    if isinstance(value, str) and value[-1:] in _UNITS and value[:-1].isascii() and value[:-1].isdecimal():
        number = int(value[:-1]) if len(value) < 12 else 0
        seconds = float(number * _UNITS[value[-1]])
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    else:
        return None
    return seconds if 1 <= seconds <= MAX_EXPIRY_S else None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT


def _is_texts(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(_is_text(one) for one in value)


# --- messages ---------------------------------------------------------------------------------------------------------

#: `approval`: may this call run? `question`: what is the value that a schema describes?
Kind = Literal["approval", "question"]
#: Arguments that a person is shown, and answers that a person gives (bytes of msgpack). A person reads no more on a
#: screen, and every item lies in the journal.
MAX_ARGS_BYTES: Final = 256 << 10
MAX_ANSWER_BYTES: Final = 64 << 10
#: Text of a question, and reasons that people give (characters).
MAX_MESSAGE: Final = 4000
#: Digits of the short name of an item.
CODE_DIGITS: Final = 10


class ApprovalAsk(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """Payload of `approval.ask`. The frame names the call. Either the call is to run in the agent's own process, or
    such a call asks a question.
    """

    #: A call that waits for approval, or a question.
    kind: Kind = "approval"
    #: The arguments of the call: a JSON object.
    args: Raw = frames.NO_PAYLOAD
    #: Of a question: its text.
    message: str | None = None
    #: Of a question: the JSON Schema of its answer.
    schema: frames.OptionalRaw = None
    #: Of a question: how long it waits (seconds). None: as long as an approval waits.
    expires_s: float | None = None
    #: Of a question: nobody wants the answer any more, and the item is withdrawn.
    over: bool = False


class ApprovalState(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The `reply` to `approval.ask`."""

    #: `run`: the call may run now. `waits`: a person has not decided yet, and `approval.news` follows when one has.
    #: `denied`: the call may not run, or the question was declined. `answered`: the question has its answer.
    state: Literal["run", "waits", "denied", "answered"]
    #: With `run`: the same was said before.
    again: bool = False
    #: With `denied`: why.
    reason: str | None = None
    #: With `answered`: the answer.
    answer: frames.OptionalRaw = None
    #: With `denied`: no person has decided, because the time was over.
    expired: bool = False


class ApprovalItem(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One item as `gdn approve` and `gdn run` get it."""

    #: The callId.
    id: str
    #: A short name of the item, for people.
    code: str
    #: A call that waits for approval, or a question.
    kind: Kind
    #: The agent that asks.
    agent: str
    #: The instance that asks.
    instance_key: str
    #: The event whose turn asks.
    event_id: str
    #: Full name of the tool.
    tool: str
    #: SHA-256 of tool, working directory and arguments, in hexadecimal digits.
    digest: str
    #: When it was asked (milliseconds since 1970).
    asked_ms: int
    #: It waits, or how it was decided.
    state: Literal["waits", "approved", "denied", "answered", "started"]
    #: The event that all this work began with.
    root_event: str | None = None
    #: The instances that wait for this turn: each waits for the next one, and the last one waits for this turn.
    waited_for_by: list[str] = []
    #: The working directory of the call.
    workdir: str | None = None
    #: The final arguments. None when they are too large for a list.
    args: Any = None
    #: The size of the arguments, when they are too large for a list.
    args_bytes: int = 0
    #: Of a question: its text.
    message: str | None = None
    #: Of a question: the JSON Schema of its answer.
    schema: Any = None
    #: Why a rule wants a person to decide.
    reason: str | None = None
    #: When it ends without a decision (milliseconds since 1970).
    expires_ms: int | None = None
    #: The user whose token decided. -1: the token names no user. None: the kernel decided, because the time was over.
    uid: int | None = None
    #: When it was decided (milliseconds since 1970).
    decided_ms: int | None = None
    #: What the person said about the decision.
    decided_reason: str | None = None
    #: Of a call that a script of code mode makes: the script. None when it is too large for a list.
    script: str | None = None
    #: How many calls of this tool in the script a yes is for, this one included. 0: this call alone.
    covers: int = 0
    #: The code of the lasting yes that has answered it, or that came with its yes.
    always: str = ""


class ApprovalDecided(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One decision, as `gdn approve list --answered` gets it: who decided what, and when. An answer is not kept."""

    #: The short name of the item.
    code: str
    #: The callId.
    id: str
    #: A call that waited for approval, or a question.
    kind: Kind
    #: The agent that asked.
    agent: str
    #: The instance that asked.
    instance_key: str
    #: The event whose turn asked.
    event_id: str
    #: Full name of the tool.
    tool: str
    #: As in ApprovalItem.
    digest: str
    #: The beginning of the call's arguments as JSON, or of the question. Keys of models are taken out.
    what: str
    #: When it was asked (milliseconds since 1970).
    asked_ms: int
    #: When it was decided (milliseconds since 1970).
    decided_ms: int
    #: How it was decided.
    how: Literal["approved", "denied", "answered"]
    #: As in ApprovalItem.
    uid: int | None = None
    #: What the person said about the decision.
    reason: str | None = None
    #: The code of the lasting yes that came with it.
    always: str = ""


class ApprovalAlways(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """A lasting yes: later calls like one that a person has agreed to run without a person, until it is taken back."""

    #: Its short name.
    code: str
    #: The agent whose calls it is for, in all of its instances and working directories.
    agent: str
    #: Full name of the tool.
    tool: str
    #: The digest of the rule that asked (`asking`); of several, with spaces between. It answers no other rules.
    rule: str
    #: The digest of the arguments, without `argument`. They are the same in each call that it is for.
    rest: str
    #: The argument that may differ. "": none, so all arguments are the same.
    argument: str = ""
    #: What the text of this argument begins with.
    prefix: str = ""
    #: The beginning of the first call's arguments as JSON. Keys of models are taken out.
    what: str
    #: As in ApprovalItem.
    uid: int
    #: When a person agreed (milliseconds since 1970).
    at_ms: int
    #: True when the rule that asked was changed, or is gone. Then this answers nothing.
    stale: bool = False


class ApprovalDecision(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The operator's request `{op: "approve.answer"}`."""

    #: Always `approve.answer`.
    op: str
    #: The id or the code of an item; with `revoke` the code of a lasting yes.
    id: str
    #: What the person decided.
    decision: Literal["yes", "no", "answer", "revoke"]
    #: What the person says about it.
    reason: str | None = None
    #: With `answer`: a JSON value.
    answer: frames.OptionalRaw = None
    #: With `yes`: it is a lasting one. {}: for calls with the same arguments. {NAME: TEXT}: the argument NAME may be
    #: any text that begins with TEXT.
    always: dict[str, str] | None = None


def code_of(agent: str, instance_key: str, call_id: str) -> str:
    """The short name of an item."""
    name = f"{agent}\0{instance_key}\0{call_id}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(name).hexdigest()[:CODE_DIGITS]


#: The payloads of its frames, for the exported schema.
EXPORTED: Final = (ApprovalAsk, ApprovalState, ApprovalItem, ApprovalDecided, ApprovalDecision, ApprovalAlways)
