"""Pictures and PDFs of a conversation: on the instance's shelf, in outputs of tools, in bodies, and as words."""

from __future__ import annotations

import os
import time
from base64 import b64decode, b64encode
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from goondan.agentproc.conversation.files import InstanceFiles
from goondan.agentproc.http.connection import PART_BYTES, parts_of
from goondan.agentproc.machine.messages import (
    AssistantData,
    Message,
    MessageSource,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    UserData,
    result_message,
)
from goondan.agentproc.providers.anthropic import Anthropic
from goondan.agentproc.providers.base import FilesPlace, ModelRequest
from goondan.agentproc.providers.faults import Fault
from goondan.agentproc.providers.history import Seeing
from goondan.agentproc.providers.openai import OpenAI
from goondan.agentproc.providers.responses import Responses
from goondan.agentproc.providers.vendor import FileText, Vendor, with_files
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.wire.blobs import MAX_FILES, MAX_SHOWN, check_files, describe, media_type_of
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import Blob, FilePart, ToolResult

PNG = b"\x89PNG\r\n\x1a\n" + b"pixels" * 9
PDF = b"%PDF-1.7\n" + b"page" * 9
AT = "2026-01-01T00:00:00.000Z"
MARK = "@mark@"
MOST = 4 << 20


def part(number: int, media_type: str = "image/png", size: int = 100) -> FilePart:
    return FilePart(Blob(f"{number:032x}", "a" * 64, size), media_type, f"{number}.bin")


def user(message_id: str, *files: FilePart) -> Message:
    return Message(message_id, UserData("look", list(files)), AT, MessageSource("user"))


def asked(messages: Iterable[Message], **changes: Any) -> ModelRequest:
    spec = changes.pop("model", ModelSpec(provider="openai", model="m"))
    place = FilesPlace("/shelf", MARK)
    return ModelRequest(
        agent="a", model=spec, messages=list(messages), tools=[], step=1, turn_id="t2", files=place, **changes
    )


def refusal(words: str, status: int = 400) -> tuple[int, str]:
    return status, f"{status} {words}"


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (PNG, "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a...", "image/gif"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "image/webp"),
        (b"RIFF\0\0\0\0WAVEfmt ", None),
        (PDF, "application/pdf"),
        (b"<svg/>", None),
        (b"", None),
    ],
)
def test_a_file_is_what_its_first_bytes_say(head: bytes, kind: str | None) -> None:
    assert media_type_of(head) == kind


def test_a_message_has_a_limited_number_of_files_of_limited_size() -> None:
    check_files([part(number) for number in range(MAX_FILES)])
    for wrong in (
        [part(number) for number in range(MAX_FILES + 1)],
        [part(1, size=(16 << 20) + 1)],
        [part(1, size=11 << 20), part(2, size=11 << 20)],
        [part(1, "text/plain")],
        [FilePart(Blob("../../etc/passwd", "a" * 64, 1), "image/png")],
        [FilePart(Blob("0" * 32, "a" * 64, 1), "image/png", "n" * 300)],
    ):
        with pytest.raises(GoondanError, match="E_FILE_INVALID"):
            check_files(wrong)


# --- the shelf of an instance


class Shelf:
    """A shelf, and a folder of large payloads beside it."""

    def __init__(self, tmp_path: Path) -> None:
        self.blobs = tmp_path / "blobs"
        self.blobs.mkdir()
        self.files = InstanceFiles(str(tmp_path / "instance"), durable=True, max_bytes=MOST)
        self.folder = tmp_path / "instance" / "files"

    def sent(self, content: bytes, media_type: str) -> FilePart:
        blob = describe(content, os.urandom(16).hex())
        (self.blobs / blob.file).write_bytes(content)
        return FilePart(blob, media_type, "x")


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def test_a_file_stays_when_the_broker_deletes_its_own_name_of_it(shelf: Shelf) -> None:
    assert shelf.files.place is None
    file = shelf.sent(PNG, "image/png")
    shelf.files.take(str(shelf.blobs), [file])
    (shelf.blobs / file.blob.file).unlink()
    shelf.files.take(str(shelf.blobs), [file])  # the event was handed over again
    assert (shelf.folder / file.blob.file).read_bytes() == PNG
    assert shelf.files.place is not None
    shelf.files.sweep({file.blob.file})
    assert len(os.listdir(shelf.folder)) == 1
    shelf.files.sweep(set())
    assert os.listdir(shelf.folder) == []


def test_a_file_that_is_not_what_it_is_said_to_be_is_refused_and_leaves_nothing(shelf: Shelf) -> None:
    gone = part(7)
    short = shelf.sent(PNG, "image/png")
    (shelf.blobs / short.blob.file).write_bytes(PNG[:20])
    disguised = shelf.sent(PDF, "image/png")
    link = shelf.sent(PNG, "image/png")
    (shelf.blobs / link.blob.file).unlink()
    (shelf.blobs / link.blob.file).symlink_to("/etc/hostname")
    for file, code in (
        (gone, "E_BLOB_MISSING"),
        (short, "E_BLOB_MISMATCH"),
        (disguised, "E_FILE_INVALID"),
        (link, "E_"),
    ):
        with pytest.raises(GoondanError, match=code):
            shelf.files.take(str(shelf.blobs), [file])
    assert os.listdir(shelf.folder) == []


def test_an_instance_has_a_limit_for_its_files(shelf: Shelf) -> None:
    large = PNG + bytes(MOST // 2)
    shelf.files.take(str(shelf.blobs), [shelf.sent(large, "image/png")])
    with pytest.raises(GoondanError, match="E_STORE_FULL"):
        shelf.files.take(str(shelf.blobs), [shelf.sent(large, "image/png")])
    result = ok({"type": "file", "data": b64encode(large).decode()})
    assert shelf.files.lift(result) == (result, [])
    assert len(os.listdir(shelf.folder)) == 1


def test_an_output_of_many_values_is_looked_at_in_bounded_time(shelf: Shelf) -> None:
    result = ok([{"data": [[]] * 200_000}, {"type": "file", "data": b64encode(PNG).decode()}, {"x": [{}] * 200_000}])
    began = time.process_time()
    assert len(shelf.files.lift(result)[1]) == 1
    assert time.process_time() - began < 5


def ok(output: Any) -> ToolResult:
    return ToolResult(status="ok", output=to_raw(output))


def output(result: ToolResult) -> Any:
    assert result.output is not None
    return msgspec.msgpack.decode(result.output)


def test_the_files_of_an_output_are_kept_and_numbered_in_their_places(shelf: Shelf) -> None:
    png, pdf = b64encode(PNG).decode(), b64encode(PDF).decode()
    given = {
        "content": [
            {"type": "text", "text": "two"},
            {"type": "image", "mimeType": "image/png", "data": png},
            {"type": "resource", "resource": {"uri": "file:///a.pdf", "mimeType": "application/pdf", "blob": pdf}},
            {"type": "audio", "mimeType": "audio/wav", "data": png},
            {"type": "image", "mimeType": "image/png", "data": b64encode(b"no picture at all").decode()},
            {"type": "file", "mediaType": "image/png", "data": "not base64 at all!"},
        ]
    }
    result, files = shelf.files.lift(ok(given))
    assert [(file.media_type, file.name) for file in files] == [
        ("image/png", None),
        ("application/pdf", "file:///a.pdf"),
    ]
    assert [(shelf.folder / file.blob.file).read_bytes() for file in files] == [PNG, PDF]
    shown = output(result)["content"]
    assert shown[1] == {"type": "image", "mimeType": "image/png", "file": 1}
    assert shown[2]["resource"] == {"uri": "file:///a.pdf", "mimeType": "application/pdf", "file": 2}
    assert shown[3:] == given["content"][3:]


def test_an_output_without_files_is_the_same_object(shelf: Shelf) -> None:
    for value in (
        "text",
        {"data": "x" * 99},
        {"type": "file", "data": "short"},
        [1],
        {"blob": b64encode(PNG).decode()},
    ):
        result = ok(value)
        assert shelf.files.lift(result) == (result, [])
        assert shelf.files.lift(result)[0] is result
    assert shelf.files.place is None


# --- bodies


def whole(vendor: Vendor[Any], request: ModelRequest, folder: Path) -> Any:
    """The body as it goes over the wire."""
    assert request.files is not None
    body = with_files(vendor.request(request).body, request.files)
    data = b"".join(parts_of(body))
    assert len(data) == sum(map(len, body))
    assert MARK.encode() not in data
    return msgspec.json.decode(data)


def conversation(picture: FilePart, paper: FilePart, seen: FilePart) -> list[Message]:
    call = ToolCallPart("c1", "camera__shoot", {})
    return [
        user("t1.0", picture, paper),
        Message("t1.1", AssistantData([TextPart("So."), call]), AT, MessageSource("assistant")),
        result_message("t1.2", ToolResultPart("c1", "camera__shoot", ok({"file": 1}), [seen]), AT),
    ]


def test_files_stand_in_the_vendors_forms(tmp_path: Path) -> None:
    contents = {1: PNG, 2: PDF, 3: PNG + b"3" * (2 * PART_BYTES)}
    parts = [part(n, media_type_of(content) or "", len(content)) for n, content in contents.items()]
    for number, content in contents.items():
        (tmp_path / f"{number:032x}").write_bytes(content)
    spec = ModelSpec(provider="openai", model="m")
    place = FilesPlace(str(tmp_path), MARK)
    request = ModelRequest(agent="a", model=spec, messages=conversation(*parts), tools=[], step=1, files=place)

    blocks = whole(Anthropic(), request, tmp_path)["messages"]
    assert [block["type"] for block in blocks[0]["content"]] == ["image", "document", "text"]
    assert blocks[0]["content"][1]["source"]["media_type"] == "application/pdf"
    assert b64decode(blocks[0]["content"][0]["source"]["data"]) == PNG
    text, shot = blocks[2]["content"][0]["content"]
    assert text == {"type": "text", "text": '{"file":1}'}
    assert b64decode(shot["source"]["data"]) == contents[3]

    messages = whole(OpenAI(), request, tmp_path)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user"]
    text, picture, paper = messages[0]["content"]
    assert text == {"type": "text", "text": "look"}
    assert picture["image_url"]["url"] == "data:image/png;base64," + b64encode(PNG).decode()
    assert paper["file"]["filename"] == "2.bin"
    assert paper["file"]["file_data"].startswith("data:application/pdf;base64,")
    assert messages[2]["content"] == '{"file":1}'
    assert messages[3]["content"][1]["image_url"]["url"].endswith(b64encode(contents[3]).decode())

    items = whole(Responses(), request, tmp_path)["input"]
    text, picture, paper = items[0]["content"]
    assert text == {"type": "input_text", "text": "look"}
    assert (picture["type"], picture["image_url"]) == ("input_image", messages[0]["content"][1]["image_url"]["url"])
    assert (paper["type"], paper["filename"]) == ("input_file", "2.bin")
    text, shot = items[-1]["output"]
    assert text == {"type": "input_text", "text": '{"file":1}'}
    assert shot["image_url"].endswith(b64encode(contents[3]).decode())


def test_words_stand_for_files_that_are_hidden() -> None:
    request = asked(conversation(part(1), part(2), part(3)), hidden_files=frozenset(f"{n:032x}" for n in (1, 2, 3)))
    assert request.files is not None
    body = with_files(OpenAI().request(request).body, request.files)
    messages = msgspec.json.decode(b"".join(parts_of(body)))["messages"]
    assert messages[0]["content"].splitlines()[1] == "[picture 1.bin, image/png, 100 bytes: not shown here]"
    assert messages[2]["content"].splitlines()[1] == "[picture 3.bin, image/png, 100 bytes: not shown here]"


def test_a_file_that_changed_is_no_request(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(PNG)
    for pieces in ([FileText(str(tmp_path / "f"), len(PNG) + 1)], [FileText(str(tmp_path / "g"), 1)]):
        with pytest.raises(Fault) as raised:
            list(parts_of(pieces))
        assert raised.value.kind == "final"


# --- what a model sees


def seeing() -> Seeing:
    return Seeing(lambda path, size: not path.endswith("9"))


def hidden(request: ModelRequest) -> list[int]:
    return sorted(int(name, 16) for name in request.hidden_files)


def test_only_a_file_of_the_turns_own_message_has_to_be_seen() -> None:
    spec = ModelSpec(provider="openai", model="m", sees=["image"])
    old = seeing().ready(asked([user("t1.0", part(1), part(2, "application/pdf")), user("t2.0")], model=spec))
    assert hidden(old) == [2]
    with pytest.raises(GoondanError, match="E_MODEL_CANNOT_SEE") as raised:
        seeing().ready(asked([user("t2.0", part(2, "application/pdf"))], model=spec))
    assert "PDFs" in raised.value.info.message
    words = seeing().ready(asked([user("t2.0", part(2))], model=spec, files_as_words=True))
    assert hidden(words) == [2]


def test_files_that_are_gone_and_the_oldest_of_too_many_become_words() -> None:
    assert hidden(seeing().ready(asked([user("t1.0", part(1), part(9)), user("t2.0")]))) == [9]
    many = [user(f"t1.{n}", part(0x1000 + 16 * n)) for n in range(MAX_SHOWN + 1)]
    assert len(hidden(seeing().ready(asked(many)))) == 8
    large = [user("t1.0", part(1, size=15 << 20)), user("t2.0", part(2, size=15 << 20))]
    assert hidden(seeing().ready(asked(large))) == [1]


@pytest.mark.parametrize(
    "words",
    [
        "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj",
        "'claude-2.1' does not support image input.",
        "Invalid content type. image_url is only supported by certain models.",
        "unknown variant `image_url`, expected `text`",
        "At most 0 image(s) may be provided in one request.",
        "x is not a multimodal model",
        "No endpoints found that support image input",
        "this model is missing data required for image input",
    ],
)
def test_a_refusal_teaches_what_a_model_cannot_see(words: str) -> None:
    eyes = seeing()
    with pytest.raises(GoondanError, match="E_MODEL_CANNOT_SEE"):
        eyes.learn(eyes.ready(asked([user("t2.0", part(1))])), *refusal(words))
    later = eyes.ready(asked([user("t1.0", part(1)), user("t2.0")]))
    assert hidden(later) == [1]
    other = asked([user("t2.0", part(1))], model=ModelSpec(provider="openai", model="another"))
    assert hidden(eyes.ready(other)) == []


def test_a_file_that_a_server_does_not_take_fails_its_own_turn_only() -> None:
    eyes = seeing()
    bad = refusal("messages.0.content.0.image: Could not process image")
    assert eyes.learn(eyes.ready(asked([user("t2.0", part(1))])), *bad) is None
    later = eyes.ready(asked([user("t1.0", part(1)), user("t2.0")]))
    assert hidden(later) == []
    told = eyes.learn(later, *bad)
    assert told is not None
    assert hidden(told) == [1]
    assert eyes.learn(told, *bad) is None  # nothing is left to leave out


@pytest.mark.parametrize("refused", [refusal("you have no credit"), refusal("image", 401), refusal("image", 429)])
def test_other_refusals_say_nothing_about_files(refused: tuple[int, str]) -> None:
    eyes = seeing()
    assert eyes.learn(eyes.ready(asked([user("t1.0", part(1)), user("t2.0")])), *refused) is None
