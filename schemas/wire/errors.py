"""Error codes, their suggestions and help pages, and the exception that carries one.

One shape for a peer, a log line and a person: a stable code, a message with the numbers, a suggestion, a page.
`docs/errors.md` has an anchor for every code of `CODES`; a test keeps the two in step. The codes of a feature are rows
of its `wire.py`, and are known where that is loaded (`add_codes`).

Source: docs/design/tools.md section 5; requirements ERROR-06, ERROR-07, RESULT-05.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Final, NamedTuple, TypeVar

from msgspec.structs import replace

from goondan.schemas.wire.frames import ErrorPayload, ToolError

#: An error in either shape.
Told = TypeVar("Told", ToolError, ErrorPayload)

HELP_BASE: Final = "https://docs.goondan.ai/errors/"

#: code -> the suggestion shown when the place that raises it has no better one.
CODES: Final[dict[str, str]] = {
    # tools
    "E_TOOL": "Read the message, correct the arguments or the environment, and call the tool again.",
    "E_TOOL_NOT_IN_CATALOG": "Add the tool to the Agent's spec.tools, or register it dynamically in step middleware.",
    "E_TOOL_NOT_FOUND": "Check the tool's name; `gdn tool list` has every tool.",
    "E_TOOL_INVALID_ARGS": "Check the input schema and write the arguments again.",
    "E_TOOL_TIMEOUT": "Give the call more time, or split the work into smaller calls.",
    "E_TOOL_CRASHED": "The tool's process ended during the call; check its code, then call it again.",
    "E_TOOL_LIMIT": "The call went over a limit; make its output or its work smaller.",
    "E_TOOL_BAD_OUTPUT": "A handler must return JSON values: strings, finite numbers, booleans, null, lists, objects.",
    "E_TOOL_OUTCOME_UNKNOWN": "The call may or may not have taken effect; check before repeating it.",
    "E_TOOL_NAME_CONFLICT": "Give one of the two tools another name.",
    "E_TOKEN_MISSING": "Set the token the tool documents, by argument or environment variable.",
    "E_CALL_ENDED": "Wait for what you ask through ctx.runtime before the handler returns.",
    "E_CANCELLED": "It was cancelled; call or send it again if it is still wanted.",
    # sandbox
    "E_SANDBOX_UNAVAILABLE": "Install bubblewrap 0.11 or newer and allow user namespaces; docs/sandbox.md says more.",
    "E_SANDBOX_DENIED": "Grant what the message names in the Tool's spec.sandbox, or use a path in the workdir.",
    # bus
    "E_OVERLOADED": "Wait as long as retryAfterMs says, then send again with the same id.",
    "E_HELLO_REQUIRED": "Say hello with a token first.",
    "E_TOKEN_INVALID": "Ask the kernel that is running for a new token; tokens end with the kernel that made them.",
    "E_CLASS_MISMATCH": "Connect to the socket of the token's class.",
    "E_PRINCIPAL_BUSY": "Another live process already speaks for this principal; end it first.",
    "E_VERSION": "Use a protocol version that both sides speak.",
    "E_FRAME_TOO_LARGE": "Write the content to a file in the workdir and send its path.",
    "E_FRAME_INVALID": "Send one msgpack map with the header fields of PROTOCOL.md.",
    "E_FRAME_TYPE": "Use a frame type of PROTOCOL.md that this socket accepts.",
    "E_BLOB_INVALID": "Refer to a large payload as PROTOCOL.md says: blob {file, digest, size}, and no payload.",
    "E_BLOB_MISSING": "Send it again; a large payload must lie in the blobs folder until the receiver has read it.",
    "E_BLOB_MISMATCH": "Send it again; the file must be written completely before the frame that refers to it.",
    "E_BLOB_UNAVAILABLE": "Run on the kernel's machine, as its user, or send less than 1 MiB at a time.",
    "E_FILE_INVALID": "Send a png, jpeg, gif, webp or PDF within the limits of docs/files.md.",
    "E_FORBIDDEN": "The token does not allow this; use a principal that may do it.",
    "E_LEASE_LOST": "Another incarnation holds the event now; stop working on it.",
    "E_LINK_CLOSED": "Connect again; nothing that was accepted is lost.",
    # agents
    "E_AGENT_NOT_FOUND": "Check the agent's name; `gdn validate` lists the agents of the bundle.",
    "E_EVENT_NOT_FOUND": "`gdn trace EVENT_ID` shows how it ended, if a turn was begun for it.",
    "E_INSTANCE_NOT_FOUND": "`gdn instance list` shows those that there are.",
    "E_INSTANCE_BUSY": "Wait until it has nothing to do, or give --force, which cancels its work.",
    "E_INSTANCE_DELETED": "Send it again if it is still wanted: that starts a new instance without history.",
    "E_AGENT_TIMEOUT": "Give it more time.",
    "E_ANSWER_GONE": "`gdn trace EVENT_ID` shows what its turn did; ask anew with another event id.",
    "E_AGENT_CYCLE": "Let one agent of the cycle answer without asking the others.",
    "E_AGENT_FAILED": "Look at the agent's log, then send the event again.",
    "E_AGENT_SPAWN_FAILED": "Look at the agent's log for the reason it could not start.",
    "E_EXTENSION_DENIED": "Do without it, or ask for something else; the message has the extension's reason.",
    "E_EXTENSION_FAILED": "Correct the extension, then restart the agent; its traceback is in the agent's log.",
    "E_MIDDLEWARE": "Correct the extension that the message names; its traceback is in the agent's log.",
    "E_MODEL_FAILED": "Check the model's endpoint, key and name.",
    "E_CONTEXT_OVERFLOW": "Send less at a time, or use a model with a larger context; docs/context.md says more.",
    "E_MODEL_QUOTA": "Raise the limit of the account or pay for more, or name another Model in `fallback`.",
    "E_OUTPUT_INVALID": "Make the schema simpler, say in the prompt what is wanted, or use a model that keeps to it.",
    "E_MODEL_CANNOT_SEE": "Ask a model that sees it, or describe it in words. Model.spec.sees says what a model sees.",
    "E_TURN_STALLED": "Send it again. For a model that is silent for longer, raise the Agent's policy.stallTimeoutS.",
    "E_MAX_STEPS": "Raise policy.maxStepsPerTurn, or make the task smaller.",
    # kernel
    "E_KERNEL_NOT_RUNNING": "Start it with `gdn run` or `gdn run --detach`.",
    "E_KERNEL_RUNNING": "Another kernel already runs this bundle; stop it with `gdn stop`.",
    "E_KERNEL_SLOW": "The machine may be too busy: start it again. If it stays so, its logs say what it waits for.",
    "E_KERNEL_LOST": "The kernel ended unexpectedly; its logs say why. Start it again, nothing accepted is lost.",
    "E_KERNEL_STOPPED": "Send it again when the kernel runs; what it had accepted goes on at its next start.",
    "E_RESTART_REFUSED": "Wait until the kernel is ready (`gdn ps`), then ask again.",
    "E_RESTART_FAILED": "The kernel goes on as it was; `gdn logs` says more.",
    "E_DISK_FULL": "Free space on the disk of the state directory.",
    "E_STORE_FULL": "Raise the Agent's policy.conversationMb, or go on in a new instance (`--instance`).",
    "E_FEATURE_MISSING": "Install Goondan anew, whole; then send the message again: `gdn dead requeue`.",
    "E_JOURNAL_CORRUPT": "Restore the journal, or start with --accept-loss.",
    "E_BROKER_UNTRUSTED": "See whose the socket and the directories above it are; --broker-uid names another user.",
    "E_RUN_DIR": "Use a shorter path, owned by you and closed to others, for the runtime directory.",
    "E_STATE_CONFLICT": "Read the state again, make the change anew, and set it with the revision that was read.",
    "E_STATE": "Check that the state directory is on a working disk and belongs to you.",
    "E_TURN_NOT_FOUND": "`gdn trace` without an id shows the last turn; `gdn send --json` prints ids.",
    "E_INIT": "Name another directory, or give --force to replace what is there.",
    "E_USAGE": "See --help.",
    "E_INTERNAL": "This is a bug in the kernel; please report it with the log.",
    # bundles
    "E_BUNDLE_UNTRUSTED": "Run `gdn trust` to see what the bundle asks for and to trust it, or add --trust for once.",
    "E_CONFIG_NOT_FOUND": "Name a goondan.yaml or a directory with one.",
    "E_CONFIG_SYNTAX": "Correct the YAML at the position.",
    "E_CONFIG_UNKNOWN_KIND": "Use one of the kinds that the documentation lists.",
    "E_CONFIG_UNKNOWN_FIELD": "Remove the field, or correct its spelling.",
    "E_CONFIG_MISSING_FIELD": "Add the field.",
    "E_CONFIG_INVALID_VALUE": "Correct the value.",
    "E_CONFIG_INVALID_NAME": "Use lowercase letters, digits, - and _, starting with a letter or digit.",
    "E_CONFIG_DUPLICATE": "Give one of the two another name.",
    "E_CONFIG_MISSING_REF": "Declare the resource, or correct the reference.",
    "E_CONFIG_MISSING_ENV": "Set the environment variable.",
    "E_CONFIG_ENTRY": "Point spec.entry at a module that exports `handlers` with one callable for each export.",
    "E_CONFIG_SCHEMA": "Correct the JSON Schema of the parameters.",
    "E_CONFIG_WIDENING": "An agent can only narrow; the operator widens in $GOONDAN_STATE_ROOT/policy.yaml.",
    "E_CONFIG_DANGEROUS": "Ask for a folder that holds only what the tool needs.",
    "E_CONFIG_WRITTEN": "Look at the file, then run `gdn grant files --accept`, or put back what was there.",
    "E_CONFIG_UNSUPPORTED": "Leave the resource out; it is not implemented yet.",
}

#: Codes whose cause is outside of the message that failed by them: sent again unchanged, it may succeed when that is
#: mended. So a message whose turn ends with one is kept as a dead letter. docs/error-causes.md has them.
ENVIRONMENT: Final = set(
    """
    E_TOOL_CRASHED E_TOOL_OUTCOME_UNKNOWN E_TOOL_NAME_CONFLICT E_TOKEN_MISSING E_SANDBOX_UNAVAILABLE E_OVERLOADED
    E_TOKEN_INVALID E_PRINCIPAL_BUSY E_VERSION E_BLOB_UNAVAILABLE E_LEASE_LOST E_LINK_CLOSED E_AGENT_FAILED
    E_AGENT_SPAWN_FAILED E_EXTENSION_FAILED E_MIDDLEWARE E_MODEL_FAILED E_MODEL_QUOTA E_TURN_STALLED
    E_KERNEL_NOT_RUNNING E_KERNEL_RUNNING E_KERNEL_SLOW E_KERNEL_LOST E_KERNEL_STOPPED E_RESTART_REFUSED
    E_RESTART_FAILED E_DISK_FULL E_STORE_FULL E_JOURNAL_CORRUPT E_BROKER_UNTRUSTED E_RUN_DIR E_STATE E_INTERNAL
    E_BUNDLE_UNTRUSTED E_CONFIG_NOT_FOUND E_CONFIG_SYNTAX E_CONFIG_UNKNOWN_KIND E_CONFIG_UNKNOWN_FIELD
    E_CONFIG_MISSING_FIELD E_CONFIG_INVALID_VALUE E_CONFIG_INVALID_NAME E_CONFIG_DUPLICATE E_CONFIG_MISSING_REF
    E_CONFIG_MISSING_ENV E_CONFIG_ENTRY E_CONFIG_SCHEMA E_CONFIG_WIDENING E_CONFIG_DANGEROUS E_CONFIG_WRITTEN
    E_CONFIG_UNSUPPORTED E_FEATURE_MISSING
    """.split()  # noqa: SIM905
)

#: What a model is told instead, where the suggestion is for the person who runs the swarm. No model can take it, and a
#: model that knows how to widen its sandbox may talk a person into it. `gdn trace` and `gdn call` show the suggestion.
ASK: Final = "Go on without it, or end your turn and say what the message says: a person has to change something."
_ASK_CODES: Final = """
E_TOKEN_MISSING E_SANDBOX_UNAVAILABLE E_EXTENSION_FAILED E_MIDDLEWARE E_MODEL_FAILED E_MODEL_QUOTA E_MODEL_CANNOT_SEE
E_CONTEXT_OVERFLOW E_OUTPUT_INVALID E_TURN_STALLED E_MAX_STEPS E_AGENT_FAILED E_AGENT_SPAWN_FAILED E_INSTANCE_BUSY
E_INSTANCE_NOT_FOUND E_EVENT_NOT_FOUND E_ANSWER_GONE E_DISK_FULL E_STORE_FULL E_STATE E_INTERNAL E_CONFIG_WIDENING
E_RESTART_REFUSED E_RESTART_FAILED E_FEATURE_MISSING
"""
#: How advice begins that names what was probably meant. It is for both readers.
NEAR_NAME: Final = "Did you mean"
FOR_MODELS: Final[dict[str, str]] = {
    **dict.fromkeys(_ASK_CODES.split(), ASK),
    "E_SANDBOX_DENIED": "Use a path in the workdir, or what was granted. If you need this, end your turn and say so.",
    **dict.fromkeys(("E_TOOL_NOT_IN_CATALOG", "E_TOOL_NOT_FOUND"), "Call one of the tools that you were given."),
    "E_AGENT_NOT_FOUND": "Ask one of the agents that `agents__catalog` lists.",
}


class ErrorCode(NamedTuple):
    """A code of a feature."""

    #: What to do about it, for a person.
    suggestion: str
    #: What a model is told instead (`FOR_MODELS`); None: the same.
    for_models: str | None = None
    #: Whether its cause is outside of the message that failed by it (`ENVIRONMENT`).
    environment: bool = False
    #: The `finishReason` of a turn that fails by it.
    finish_reason: str = "error"
    #: Who refuses a call with it, for `gdn denied`. "": the call was not refused, it failed.
    refuser: str = ""
    #: Whether an agent is told this code when one that it has asked fails by it. Else it is told E_AGENT_FAILED.
    passed_on: bool = False
    #: Whether bundled tools may say it of their own calls.
    of_tools: bool = False
    #: Whether the broker answers a call with it that waits. The call is made again when the broker says so.
    waits: bool = False


_UNKNOWN: Final = ErrorCode("")
_OF_FEATURES: Final[dict[str, ErrorCode]] = {}


def add_codes(rows: Mapping[str, ErrorCode]) -> Mapping[str, ErrorCode]:
    """Know the codes of a feature from now on. The same rows are returned."""
    for code, row in rows.items():
        _OF_FEATURES[code] = row
        CODES[code] = row.suggestion
        if row.for_models is not None:
            FOR_MODELS[code] = row.for_models
        if row.environment:
            ENVIRONMENT.add(code)
    return rows


def row_of(code: str) -> ErrorCode:
    """The row of a feature's code; an empty one for every other code."""
    return _OF_FEATURES.get(code, _UNKNOWN)


def refusers() -> list[str]:
    """Who refuses calls with the codes of features."""
    return list(dict.fromkeys(row.refuser for row in _OF_FEATURES.values() if row.refuser))


def for_model(error: Told) -> Told:
    """The error as a model reads it: advice that only a person can take is not in it (pure).

    Source: docs/design/tools.md section 5.
    """
    advice = (
        FOR_MODELS.get(error.code or "") if error.suggestion and not error.suggestion.startswith(NEAR_NAME) else None
    )
    return error if advice is None else replace(error, suggestion=advice)


def for_people(error: ToolError) -> str:
    """The message, with the advice that the model was not told (pure)."""
    advice = error.suggestion if for_model(error) is not error else None
    return f"{error.message}\n{advice}" if advice else error.message


def help_url(code: str) -> str:
    """The help page of a code (ERROR-07)."""
    return HELP_BASE + code


def is_os_error_code(code: str) -> bool:
    """Whether `code` is an operating system's errno name such as ENOENT."""
    return code in errno.errorcode.values()


def error_payload(
    code: str, message: str, *, suggestion: str | None = None, retry_after_ms: int | None = None
) -> ErrorPayload:
    """A complete ErrorPayload for `code`, with its stock suggestion unless a better one is given.

    Lone surrogates, which no frame and no JSON can hold, are written as `\\udcNN`: a message may name a file.
    """
    return ErrorPayload(
        code=code,
        message=_encodable(message),
        suggestion=_encodable(suggestion or CODES.get(code) or "") or None,
        help_url=help_url(code),
        retry_after_ms=retry_after_ms,
    )


def _encodable(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def tool_error(code: str, message: str, *, name: str, suggestion: str | None = None) -> ToolError:
    """A complete ToolError for `code`. `name` is the exception's class name (RESULT-05)."""
    return ToolError(
        message=message, name=name, code=code, suggestion=suggestion or CODES.get(code), help_url=help_url(code)
    )


class GoondanError(Exception):
    """Root of every error that this system raises on purpose; carries what a person or a peer is shown."""

    def __init__(self, info: ErrorPayload) -> None:
        super().__init__(f"{info.message} [{info.code}]")
        self.info = info

    @property
    def code(self) -> str:
        """The stable code, as an extension reads it from what it catches."""
        return self.info.code


def fail(code: str, message: str, *, suggestion: str | None = None) -> GoondanError:
    """Build (not raise) the error for `code`."""
    return GoondanError(error_payload(code, message, suggestion=suggestion))


# --- the error message in a tool's result -----------------------------------------------------------------------------

#: Ends a cut message and counts towards its limit (ERROR-05).
CUT_MARK: Final = "... (truncated)"


def cut_message(text: str, limit: int) -> str:
    """`text` in at most `limit` Unicode code points; a cut one ends in the mark, if there is room for more than it.

    A limit of at most 15 cuts without the mark; a negative one takes that many characters off the end, as recorded.
    """
    if len(text) <= limit:
        return text
    room = limit - len(CUT_MARK)
    return text[:room] + CUT_MARK if room > 0 else text[:limit]
