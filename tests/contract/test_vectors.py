"""Every recorded frame, read and written, opened and refused as the file says."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from goondan.schemas.bundle import effective_config
from goondan.schemas.wire import frames, questions, runtime_events
from goondan.schemas.wire.blobs import MAX_BLOB_BYTES, check_reference
from goondan.schemas.wire.blobs import describe as describe_payload
from goondan.schemas.wire.codec import MAX_DEPTH, MAX_FRAME_BYTES, FrameError, decode, encode, encode_value, from_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import AckStage, Frame
from goondan.schemas.worker import servers
from scripts.export_schemas import frame_types
from tests.contract.vectors import generate
from tests.contract.vectors.generate import FILE, describe, from_json, to_json
from tests.contract.vectors.good import of_features

FILE_CONTENT: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
VALID: list[dict[str, Any]] = FILE_CONTENT["valid"]
BAD: list[dict[str, Any]] = FILE_CONTENT["bad"]
KINDS: dict[str, Any] = {
    "any": Any,
    **{kind.__name__: kind for module in of_features() for kind in module.KINDS},
    "AgentEvent": frames.AgentEvent,
    "AgentsList": frames.AgentsList,
    "AgentsSpawn": frames.AgentsSpawn,
    "RestartRequest": frames.RestartRequest,
    "LiveChanges": effective_config.LiveChanges,
    "Credit": frames.Credit,
    "ErrorPayload": frames.ErrorPayload,
    "Hello": frames.Hello,
    "RuntimeEvent": runtime_events.RuntimeEvent,
    "Gap": runtime_events.Gap,
    "InstanceEnd": frames.InstanceEnd,
    "InstanceEnded": frames.InstanceEnded,
    "Shutdown": frames.Shutdown,
    "ToolCallPayload": frames.ToolCallPayload,
    "ToolProgress": runtime_events.ToolProgress,
    "ToolResult": frames.ToolResult,
    "Welcome": frames.Welcome,
    "ToolAnswer": questions.ToolAnswer,
    "ToolAsk": questions.ToolAsk,
    "NamedServer": servers.NamedServer,
    "ServerListing": servers.ServerListing,
    "ServerNews": servers.ServerNews,
}


def test_the_file_is_up_to_date() -> None:
    assert generate.main(["--check"]) == 0


def test_names_are_unique_and_limits_are_those_of_the_codec() -> None:
    names = [vector["name"] for vector in VALID + BAD]
    assert len(names) == len(set(names))
    assert FILE_CONTENT["limits"] == {
        "maxFrameBytes": MAX_FRAME_BYTES,
        "maxDepth": MAX_DEPTH,
        "maxBlobBytes": MAX_BLOB_BYTES,
    }


def test_every_type_stage_and_payload_is_recorded() -> None:
    assert {vector["frame"]["type"] for vector in VALID} >= set(frame_types())
    assert {vector["frame"].get("stage") for vector in VALID} >= set(AckStage.__args__)  # type: ignore[attr-defined]
    opened = {vector.get("payloadKind") for vector in VALID}
    assert opened >= KINDS.keys() - {"any"}
    fields = {key for vector in VALID for key in vector["frame"]}
    assert fields >= {f.encode_name for f in msgspec.structs.fields(Frame)}


@pytest.mark.parametrize("vector", VALID, ids=lambda vector: vector["name"])
def test_bytes_to_meaning(vector: dict[str, Any]) -> None:
    frame = decode(bytes.fromhex(vector["bytes"]))
    assert describe(frame) == vector["frame"]
    assert encode(frame).hex() == vector.get("canonical", vector["bytes"])


@pytest.mark.parametrize("vector", VALID, ids=lambda vector: vector["name"])
def test_meaning_to_bytes(vector: dict[str, Any]) -> None:
    names = {field.encode_name: field for field in msgspec.structs.fields(Frame)}
    values: dict[str, Any] = {}
    for key, value in vector["frame"].items():
        opaque = key in ("payload", "auth")
        plain = encode_value(from_json(value))
        values[names[key].name] = Raw(plain) if opaque else msgspec.msgpack.decode(plain, type=names[key].type)
    data = encode(Frame(**values))
    assert describe(decode(data)) == vector["frame"]
    if "canonical" not in vector:
        assert data.hex() == vector["bytes"]


@pytest.mark.parametrize(
    "vector", [vector for vector in VALID if "payloadKind" in vector], ids=lambda vector: vector["name"]
)
def test_payloads_open_as_what_they_are(vector: dict[str, Any]) -> None:
    frame = decode(bytes.fromhex(vector["bytes"]))
    opened = from_raw(frame.payload, KINDS[vector["payloadKind"]])
    again = msgspec.msgpack.decode(encode_value(opened))
    assert to_json(again) == vector["frame"]["payload"]


@pytest.mark.parametrize("vector", [v for v in VALID if "file" in v], ids=lambda vector: vector["name"])
def test_references_are_to_their_files(vector: dict[str, Any]) -> None:
    frame, content = decode(bytes.fromhex(vector["bytes"])), bytes.fromhex(vector["file"])
    check_reference(frame)
    assert frame.blob is not None
    assert frame.blob == describe_payload(content, frame.blob.file)
    assert encode_value(from_raw(content, KINDS[vector["fileKind"]])) == content


@pytest.mark.parametrize("vector", BAD, ids=lambda vector: vector["name"])
def test_what_is_bad_is_refused_with_its_code(vector: dict[str, Any]) -> None:
    if "repeat" in vector:
        repeat = vector["repeat"]
        unit = bytes.fromhex(repeat["unit"])
        data = bytes.fromhex(repeat["prefix"]) + unit * repeat["times"] + bytes.fromhex(repeat["suffix"])
    else:
        data = bytes.fromhex(vector["bytes"])
    caught: pytest.ExceptionInfo[GoondanError]
    if vector["stage"] == "frame":
        with pytest.raises(FrameError) as caught:
            decode(data)
    elif vector["stage"] == "reference":
        frame = decode(data)
        with pytest.raises(GoondanError) as caught:
            check_reference(frame)
    else:
        frame = decode(data)
        with pytest.raises(FrameError) as caught:
            from_raw(frame.payload, KINDS[vector["payloadKind"]])
    assert caught.value.info.code == vector["code"]
    assert caught.value.info.suggestion
    assert len(caught.value.info.message) < 400


def test_a_frame_of_exactly_the_limit_is_fine() -> None:
    frame = Frame("ping", payload=Raw(encode_value(b"\0" * (MAX_FRAME_BYTES - 30))))
    room = MAX_FRAME_BYTES - len(encode(frame))
    frame.payload = Raw(encode_value(b"\0" * (MAX_FRAME_BYTES - 30 + room)))
    data = encode(frame)
    assert len(data) == MAX_FRAME_BYTES
    assert decode(data).type == "ping"
    frame.payload = Raw(encode_value(b"\0" * (MAX_FRAME_BYTES - 29 + room)))
    with pytest.raises(FrameError) as caught:
        encode(frame)
    assert caught.value.info.code == "E_FRAME_TOO_LARGE"


def test_a_client_refuses_what_it_opens_itself() -> None:
    """A client has to refuse bad payloads that it reads, and bad references; the broker all the others."""
    assert all(vector["refusedBy"] for vector in BAD)
    for vector in BAD:
        alone = vector["refusedBy"] == ["broker"]
        assert alone is (vector["stage"] == "frame" or vector.get("payloadKind") == "Hello"), vector["name"]
    assert {vector["name"] for vector in BAD if "client" in vector["refusedBy"]} >= {
        "a payload one level too deep", "a blob whose file is a path", "an answer of an unknown status"
    }  # fmt: skip
