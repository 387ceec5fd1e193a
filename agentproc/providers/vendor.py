"""What the requests of all vendors have in common: the interface of a vendor's module, the tools of a request, the form
of the answer, and a body in which files stand as base64. Pure; goondan.agentproc.http sends it.

**The form of the answer.** A vendor has a way of its own for a schema, or the model is offered a tool `answer`, which
it has to call. Its arguments are the answer. A call of `answer` beside other calls is dropped, because the model has to
read their results first.

**Files.** A vendor's module writes a mark where the base64 of a file is to stand. The body is then cut at its marks:
what is between them is sent as it is, and a file is read, encoded and sent piece by piece. So a request with a picture
of some megabytes needs no buffer of that size, and nothing copies, searches or encodes it again.

Source: docs/design/turns.md section 6; docs/design/structured-answers.md sections 1, 2 and 3; docs/design/files.md
section 4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, ClassVar, Final, Generic

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from goondan.agentproc.providers import faults, history
from goondan.agentproc.providers.base import FilesPlace, JsonItems, ModelAnswer, ModelRequest, encode_json
from goondan.agentproc.providers.reader import AnswerReader, decode_json
from goondan.schemas.bundle.launch import CatalogItem, ForcedTool, ModelSpec, OutputSpec, ToolChoice, key_headers
from goondan.schemas.models.model_providers import BY_NAME

#: What stands around a conversation is kept up to this size (bytes), with its tools. More is rare, and would take as
#: much memory again.
MAX_KEPT: Final = 4 << 20
#: The name of the tool. No tool of a catalog can have it: theirs have two underscores.
ANSWER_TOOL: Final = "answer"
#: The keywords that vendors take in a schema that their models are held to.
_KEYWORDS: Final = frozenset(
    (
        "type", "properties", "required", "additionalProperties", "items", "enum", "const", "description", "title",
        "anyOf", "$ref", "$defs",
    )
)  # fmt: skip
#: The most subschemas of such a schema.
_MAX_NODES: Final = 5000
#: What a server names that refuses the vendor's way.
_NAMES_FORMAT: Final = re.compile(
    r"response_format|json_schema|output_config|output_format|text\.format|structured output"
)


class WireRequest(Struct, frozen=True):
    """One HTTP request."""

    #: The URL.
    url: str
    #: The headers. They contain the key.
    headers: dict[str, str]
    #: The body in pieces. A mark stands for the base64 of each file; it is within one piece.
    body: Sequence[bytes]


class Vendor(Generic[history.W]):
    """One vendor's interface. Each module of a provider has a class of this kind.

    `writer` makes what writes a conversation, `offer` gives a tool in the vendor's form, and `has_own` tells whether
    the vendor's own way takes a schema.
    """

    name: ClassVar[str]

    def __init__(
        self,
        writer: Callable[[], history.W],
        offer: Callable[[CatalogItem], object],
        has_own: Callable[[dict[str, Any]], bool] = lambda schema: True,
    ) -> None:
        #: Base URL when the model names none.
        self.server = BY_NAME[self.name].server
        self._written = history.Written(self.name, writer)
        self._offer = offer
        self._output = OutputWay(has_own)
        self._frame: Frame | None = None
        self._framed: tuple[object, ...] = ()  # what it was made of
        self._system: str | None = None  # the same

    def request(self, request: ModelRequest) -> WireRequest:
        """The request to send. The written conversation is kept for the next request, until `forget`."""
        raise NotImplementedError

    def frame(self, request: ModelRequest, *also: object) -> Frame:
        """What stands around the request's conversation. It is made anew where the request has another model, tools,
        system prompt or form of its answer, or where other things matter `also`: their objects are compared, because
        equal numbers may be written in different ways.
        """
        frame, system = self._frame, request.system
        of = (request.model, request.tools, request.output, request.tool_choice, *also)
        if frame is None or system != self._system or not all(map(is_, of, self._framed)):
            frame = self._make_frame(request, *also)
            self._system, self._framed = system, of
            self._frame = frame if len(frame.opening) <= MAX_KEPT else None
        return frame

    def _make_frame(self, request: ModelRequest, *also: Any) -> Frame:
        raise NotImplementedError

    def reader(self, request: ModelRequest) -> AnswerReader:
        """A reader for one answer to the request."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drop the conversation."""
        self._written.forget()
        self._frame = None

    def _tools(self, request: ModelRequest) -> Raw | None:
        """The tools that the request offers, as a list in JSON; None: it offers none."""
        offered = self._output.tools(request)
        return Raw(encode_json(list(map(self._offer, offered)))) if offered else None

    def gives_up(self, request: ModelRequest, words: str) -> bool:
        """The server has refused the request with these words. Whether requests are without what they name from now on,
        so that this one may be sent again.
        """
        self._frame = None
        return self._output.gives_up(request, words) or self._does_without(request, words)

    def _does_without(self, request: ModelRequest, words: str) -> bool:
        """The same for what is the vendor's own."""
        return False

    def listing(self, request: ModelRequest) -> WireRequest:
        """The GET request for the names of the server's models; `first_model` reads the answer."""
        return WireRequest(f"{self._base(request.model)}/models", headers_of(request.model), ())

    def _base(self, model: ModelSpec) -> str:
        return (model.endpoint or self.server).rstrip("/")


def headers_of(model: ModelSpec, **vendors: str) -> dict[str, str]:
    """The headers of a request: those that the Model adds, the vendor's own, and the key."""
    return {**model.headers, **vendors, **key_headers(model)}


class Frame(Struct, frozen=True):
    """What stands around the conversation in a request: mostly the same as in the request before."""

    #: The URL.
    url: str
    #: The headers. They contain the key.
    headers: dict[str, str]
    #: The body up to the first item of the conversation, which has one at least.
    opening: bytes
    #: The body behind its last item.
    closing: bytes

    def around(self, written: JsonItems, *last: bytes | bytearray | memoryview) -> WireRequest:
        """The request with what is written of its conversation, and the items that are only in this request."""
        return WireRequest(self.url, self.headers, [self.opening, *written.closed(last, self.closing)])


def frame_of(url: str, headers: dict[str, str], body: dict[str, Any], name: str, last: dict[str, Any]) -> Frame:
    """The frame of a body with these fields, then a list of this name, then the `last` fields."""
    for field in (name, *last):
        body.pop(field, None)
    opening = b'%s,"%s":[' % (encode_json(body)[:-1], name.encode())
    return Frame(url, headers, opening, b"],%s" % encode_json(last)[1:] if last else b"]}")


def put_last(body: dict[str, Any], name: str, value: Any) -> None:
    """Make a field the last one of a request's body. A server's cache knows how a request begins, so what changes from
    request to request stands last.
    """
    body.pop(name, None)
    body[name] = value


def first_model(body: bytes) -> str:
    """The first name in a server's list of models, `{"data": [{"id": NAME}, …]}`. Raises Fault when there is none."""
    listed = decode_json(_decode_listing, body).data
    name = next((model.id for model in listed or [] if model.id.strip()), None)
    if name is None:
        raise faults.Fault("final", "a list without a model")
    return name


class _Listed(Struct, frozen=True):
    #: The name of the model.
    id: str = ""


class _Listing(Struct, frozen=True):
    #: The models.
    data: list[_Listed] | None = None


_decode_listing: Final = msgspec.json.Decoder(_Listing)


# --- the form of the answer -------------------------------------------------------------------------------------------


class OutputWay:
    """The way of one vendor's requests. `has_own` tells whether the vendor's own way takes a schema."""

    def __init__(self, has_own: Callable[[dict[str, Any]], bool]) -> None:
        self._has_own = has_own
        self._refused = False
        self._spec: OutputSpec | None = None
        self._own = False
        self._tool: CatalogItem | None = None

    def own_schema(self, request: ModelRequest) -> dict[str, Any] | None:
        """The schema for the vendor's own way; None when the request has none, or offers the tool."""
        return request.output.schema if request.output is not None and not self._by_tool(request.output) else None

    def tools(self, request: ModelRequest) -> list[CatalogItem]:
        """The tools of the request, `answer` last."""
        if request.output is None or not self._by_tool(request.output):
            return request.tools
        if self._tool is None:
            self._tool = CatalogItem(
                name=ANSWER_TOOL,
                description="Give your final answer: call this alone, once, when nothing else is left to do.",
                parameters=request.output.schema,
            )
        return [*request.tools, self._tool]

    def choice(self, request: ModelRequest) -> ToolChoice | None:
        """Which tools the model has to call. None: the request does not say."""
        wanted = request.tool_choice
        if request.output is None or not self._by_tool(request.output):
            return wanted if request.tools else None
        if wanted == "none":
            return ForcedTool(ANSWER_TOOL)
        return wanted if isinstance(wanted, ForcedTool) else "required"

    def gives_up(self, request: ModelRequest, words: str) -> bool:
        """A server has refused the request with these words. Whether it refuses the vendor's own way: from now on the
        tool is offered.
        """
        refused = self.own_schema(request) is not None and _NAMES_FORMAT.search(words.lower()) is not None
        self._refused = self._refused or refused
        return refused

    def _by_tool(self, spec: OutputSpec) -> bool:
        if spec is not self._spec:
            self._spec, self._tool = spec, None
            self._own = spec.via == "auto" and self._has_own(spec.schema)
        return self._refused or not self._own


def answered(answer: ModelAnswer) -> ModelAnswer:
    """The answer of a model that may have called `answer`."""
    others = [call for call in answer.calls if call.name != ANSWER_TOOL]
    if len(others) == len(answer.calls):
        return answer
    text = answer.text
    if not others:
        last = answer.calls[-1]
        text = encode_json(last.args).decode() if last.broken is None else f"(unreadable arguments: {last.broken})"
    return replace(answer, calls=others, text=text, metadata=None)


def is_closed(schema: dict[str, Any], *, all_required: bool) -> bool:
    """Whether vendors hold a model to this schema: only the usual keywords, and objects without further properties.
    `all_required`: every property is required, and a type may be a list.
    """
    todo: list[Any] = [schema]
    for _ in range(_MAX_NODES):
        if not todo:
            return True
        node = todo.pop()
        if not isinstance(node, dict) or node.keys() - _KEYWORDS:
            return False
        kind, properties = node.get("type"), node.get("properties", {})
        if not isinstance(properties, dict) or (isinstance(kind, list) and not all_required):
            return False
        if (kind == "object" or properties) and node.get("additionalProperties") is not False:
            return False
        if all_required and set(node.get("required", [])) != set(properties):
            return False
        todo += [*properties.values(), *node.get("anyOf", []), *node.get("$defs", {}).values()]
        todo += [node["items"]] if "items" in node else []
    return False


# --- files ------------------------------------------------------------------------------------------------------------


class FileText(Struct, frozen=True):
    """The base64 of a file."""

    #: Where the file lies.
    path: str
    #: Its size (bytes).
    size: int

    def __len__(self) -> int:
        """The length of the base64 (bytes)."""
        return 4 * ((self.size + 2) // 3)


#: A body in pieces.
Body = Sequence[bytes | FileText]


def with_files(body: Sequence[bytes], files: FilesPlace) -> Body:
    """The body with the files in the places of the marks."""
    mark, pieces = files.mark.encode(), list[bytes | FileText]()
    for piece in body:
        for index, part in enumerate(piece.split(mark)):
            if index % 2 == 0:
                pieces.append(part)
            else:
                name = part.decode()
                pieces.append(FileText(f"{files.folder}/{name[:32]}", int(name[32:])))
    return pieces
