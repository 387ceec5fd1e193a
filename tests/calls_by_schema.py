"""Tool calls made from JSON Schemas: mostly arguments that fit, and every way in which they may not.

Right: values of each type with their edges, optional parameters left out, aliases. Wrong: another type, null, missing,
unknown parameters, deep nesting, what no JSON number or text of ours can be (huge integers, lone surrogates). Where
the meaning matters and chance would not find it (commands, paths, JSON texts), values are drawn by the parameter's
name; a parameter that means waiting is kept short, and one that names a server names the recorded services
(tests/servers/mock_api.py), whose answers are good, errors, HTML, half of one, or none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from goondan.kernel.bundle.rules.checked import CheckedTool
from goondan.schemas.bundle.address import build_tool_name, parse_tool_name

Call = tuple[str, Any]

#: `wait__seconds` accepts up to WAITS_UP_TO_S; a call of ours waits at most MAX_WAIT_S.
WAITS_UP_TO_S = 300
MAX_WAIT_S = 0.01

#: Characters of every width, controls and direction marks among them.
TEXT = st.text(max_size=30) | st.sampled_from(
    ["", " ", "0", "null", "가나다 🚀", "\x00", "\u202e", "a\nb\r\n", "-1", "../.."]
)
LONG = st.builds(lambda text, times: text * times, st.sampled_from(["x", "한", '{"a":', "[", "\n"]), st.just(20_000))
NUMBER = (
    st.integers(-5, 100)
    | st.sampled_from([0.5, -0.5, 1e308, -1e308, 5e-324, 2**53, -(2**63), 2**64 - 1, 2**70, -0.0])
    | st.floats(allow_nan=False, allow_infinity=False)
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
#: Commands that print, fail, flood, fork and leave processes behind; none may outlive its call.
COMMANDS = st.sampled_from(
    [
        "echo $((6*7))",
        "printf '\\377\\000x'; exit 3",
        "kill -TERM $$",
        "head -c 3000000 /dev/zero",
        "(sleep 300 & setsid sleep 300 &) >/dev/null 2>&1; echo left",
        "cat",
        "echo hi > notes.txt; ls -la / . ..",
        "env; id; ulimit -a",
        "exec 3>&-; echo gone >&3",
        "cd /nowhere || exit 9",
        "mkdir -p a/b; ln -sf /etc/passwd a/link; chmod 000 a/b",
    ]
)
PATHS = TEXT | st.sampled_from(
    [
        ".",
        "notes.txt",
        "a/b/c.txt",
        "a/link",
        "/etc/passwd",
        "/dev/zero",
        "/proc/self/environ",
        "/root/.ssh",
        "x" * 5000,
    ]
)
TEXTS_OF_JSON = (
    TEXT
    | LONG
    | st.sampled_from(
        [
            "{}",
            "[]",
            "null",
            '{"a": {"b": [1, 2, {"c": "d"}]}}',
            "[1, [2, [3, [4]]]]",
            '"text"',
            "1e999",
            "NaN",
            "[" * 5000,
            '{"a":1,"a":2}',
        ]
    )
)
#: Stands for the address of the services until it is known.
SERVER = "http://services.invalid"
PAGES = st.sampled_from(
    [
        *(
            "json",
            "utf8",
            "utf8-chunked",
            "badutf8",
            "nul",
            "gzip",
            "empty",
            "no-type",
            "close",
            "short",
            "echo?a[]=1#b",
        ),
        *("bytes/600000", "chunked/70000", "status/204", "status/503", "multi-headers"),
        *("redirect/3", "redirect/30", "redirect-loop", "redirect-nolocation", "redirect-to?to=file:///etc/passwd"),
        *("redirect-to?to=http://10.0.0.1/", "redirect-to?to=http://127.0.0.1:1/", "redirect-to?to=//169.254.169.254/"),
        *("slack-files/image.png", "slack-files/chunked.bin", "slack-files/forbidden", "slack-files/login"),
    ]
).map(lambda page: f"{SERVER}/{page}")
ADDRESSES = PAGES | st.sampled_from(
    ["file:///etc/passwd", "http://127.0.0.1:1/", "http://[::1]/", "http://0x7f000001/", "http:", "data:,x", "\x00"]
)
TOKENS = st.sampled_from(["123:ABC", "xoxb-1", "bad:token", "한", "a b", "x\r\ny: z", ""])
CHATS = st.sampled_from(
    ["1", "@c", -100, "err400", "err200", "err429", "errlong", "nodesc", "html", "html200", "array", "ok500", "drop"]
)
CHANNELS = st.sampled_from(["C_OK", "C_NOTFOUND", "C_RATE", "C_NOERR", "C_HTML", "C_ARRAY", "C_NULL", "C_WEIRD", " "])
FILES = st.sampled_from(["photo", "nopath", "resulttrue", "unicode", "gone", "notype", "chunked", "drop", "../x", " "])
#: Parameter -> values that mean something there.
BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "url": ADDRESSES,
    "token": TOKENS,
    "chatId": CHATS,
    "channelId": CHANNELS,
    "fileId": FILES,
    "messageId": st.sampled_from([1, "7", 0, -1, 2**53, 1.5, "x"]),
    "messageTs": st.sampled_from(["1700000001.000100", "9.9", " "]),
    "emoji": st.sampled_from(["👍", ":wave:", "two words", " ", "already"]),
    "savePath": PATHS,
    "maxBytes": st.sampled_from([1, 10, 66, 100_000, 0, -1, 0.5, 20_000_001]),
    "command": COMMANDS | TEXT,
    "path": PATHS,
    "cwd": PATHS,
    "data": TEXTS_OF_JSON,
    "depth": NUMBER,
    "content": TEXT | LONG,
    "text": TEXT | LONG,
    "timeoutMs": st.sampled_from([1, 50, 2000, 2000, 2000, 0.5, 1e308]),
    "seconds": st.sampled_from([0, 0.001, 0.01, -1, 301, 1e308, -0.0]),
}


def calls(tools: Iterable[CheckedTool], server: str = SERVER) -> st.SearchStrategy[Call]:
    """One call of any export: its full name, and its arguments (nearly always an object).

    `server` is the address of the services that tools with a network are to ask.
    """
    made = [
        st.tuples(st.just(build_tool_name(tool.name, export.name)), arguments(export.parameters or {}, export.aliases))
        for tool in tools
        for export in tool.body.exports
    ]
    return st.one_of(made).map(brief).map(lambda call: aimed(call, server))


def aimed(call: Call, server: str) -> Call:
    """The call with the services' address, wherever it would have asked another server by default."""
    name, args = call
    if not isinstance(args, dict):
        return call
    args = {key: value.replace(SERVER, server) if isinstance(value, str) else value for key, value in args.items()}
    parsed = parse_tool_name(name)
    if parsed is not None and parsed.resource_name in ("telegram", "slack"):
        args["apiBaseUrl"] = server
    return name, args


def brief(call: Call) -> Call:
    """The call without a long wait, however its seconds came about."""
    name, args = call
    seconds = args.get("seconds") if isinstance(args, dict) else None
    if isinstance(seconds, int | float) and MAX_WAIT_S < seconds <= WAITS_UP_TO_S:
        return name, {**args, "seconds": MAX_WAIT_S}
    return call


def arguments(schema: dict[str, Any], aliases: dict[str, str]) -> st.SearchStrategy[Any]:
    """Arguments that fit in most cases, and are spoilt in the others."""
    fitting = objects(schema)
    return st.one_of(
        fitting,
        fitting,
        fitting,
        fitting.flatmap(lambda args: st.just({alias_of(key, aliases): value for key, value in args.items()})),
        fitting.flatmap(spoilt),
        JSON,
    )


def alias_of(name: str, aliases: dict[str, str]) -> str:
    """Another documented spelling of a parameter, if there is one."""
    return next((alias for alias, canonical in aliases.items() if canonical == name), name)


def objects(schema: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects that fit a schema of type object."""
    properties = schema.get("properties") or {}
    required = [name for name in schema.get("required", []) if name in properties]
    values_of = {name: BY_NAME[name] if name in BY_NAME else values(inner) for name, inner in properties.items()}
    return st.fixed_dictionaries(
        {name: values_of[name] for name in required},
        optional={name: value for name, value in values_of.items() if name not in required},
    )


def values(schema: Any) -> st.SearchStrategy[Any]:
    """Values that fit a property's schema, as far as the schemas of bundled tools go; any JSON for what is beyond."""
    if not isinstance(schema, dict):
        return JSON
    if isinstance(schema.get("enum"), list):
        return st.sampled_from(schema["enum"])
    unions = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(unions, list):
        return st.one_of([values(inner) for inner in unions])
    named = schema.get("type")
    kinds = named if isinstance(named, list) else [named]
    return st.one_of([_of_type(kind, schema) for kind in kinds])


def _of_type(kind: Any, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    match kind:
        case "string":
            return TEXT
        case "integer":
            return st.integers(schema.get("minimum", -5), schema.get("maximum", 100))
        case "number":
            return NUMBER
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            return st.lists(values(schema.get("items", {})), max_size=4)
        case "object" if schema.get("properties"):
            return objects(schema)
        case "object":
            return st.dictionaries(TEXT, st.none() | st.booleans() | NUMBER | TEXT, max_size=3)
        case _:
            return JSON


def deep(levels: int) -> Any:
    """Lists in lists."""
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def spoilt(args: dict[str, Any]) -> st.SearchStrategy[Any]:
    """The same arguments with one thing wrong."""
    names = st.sampled_from(sorted(args) or ["text"])
    wrong = JSON | st.sampled_from([None, deep(70), deep(400), "\ud800", {"\udfff": 1}, 2**70, "y" * 300_000])
    return st.one_of(
        st.builds(lambda name, value: {**args, name: value}, names, wrong),
        st.builds(lambda name: {key: value for key, value in args.items() if key != name}, names),
        st.builds(lambda name, value: {**args, name: value}, TEXT, JSON),
        st.builds(lambda count: {**args, **{f"extra{number}": number for number in range(count)}}, st.integers(1, 40)),
    )
