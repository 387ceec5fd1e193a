"""The recorded frames of schemas/vectors/frames.json, read, opened and refused as the file says of a client."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from goondan_client import frames
from goondan_client.errors import GoondanError
from goondan_client.files import read_blob
from goondan_client.frames import check_reference, check_values, checked, decode, encode, opened

CONTENT: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "schemas" / "vectors" / "frames.json").read_text(encoding="utf-8")
)
VALID: list[dict[str, Any]] = CONTENT["valid"]
BAD: list[dict[str, Any]] = CONTENT["bad"]
#: What a client opens.
KINDS: dict[str, Any] = {
    "any": Any,
    "AgentEvent": frames.AgentEvent,
    "Credit": frames.Credit,
    "ErrorPayload": frames.ErrorPayload,
    "RuntimeEvent": frames.LiveEvent,
    "ToolResult": frames.ToolResult,
    "Welcome": frames.Welcome,
}
NAMES = {"type", "id", "eventId", "inReplyTo", "stage"}


def _bytes(vector: dict[str, Any]) -> bytes:
    if "repeat" not in vector:
        return bytes.fromhex(vector["bytes"])
    prefix, unit, suffix = (bytes.fromhex(vector["repeat"][name]) for name in ("prefix", "unit", "suffix"))
    return prefix + unit * int(vector["repeat"]["times"]) + suffix


def test_limits_are_those_of_the_file() -> None:
    assert CONTENT["limits"] == {
        "maxFrameBytes": frames.MAX_SENT,
        "maxDepth": frames.MAX_DEPTH,
        "maxBlobBytes": frames.MAX_BLOB,
    }


@pytest.mark.parametrize("vector", VALID, ids=lambda vector: vector["name"])
def test_what_is_good_is_read(vector: dict[str, Any]) -> None:
    for data in (vector["bytes"], vector.get("canonical", vector["bytes"])):
        frame = decode(bytes.fromhex(data))
        meant = vector["frame"]
        found = {name: value for name, value in _plain(frame).items() if name in NAMES}
        assert found == {name: value for name, value in meant.items() if name in NAMES}
        check_reference(frame)
        if vector.get("payloadKind") in KINDS:
            opened(frame.payload, KINDS[vector["payloadKind"]])
        assert decode(encode(frame)) == frame
    if "file" in vector:
        content = bytes.fromhex(vector["file"])
        assert frame.blob is not None and frame.blob.digest == hashlib.sha256(content).hexdigest()
        check_values(content)


def _plain(frame: frames.Frame) -> dict[str, Any]:
    import msgspec

    return {
        field.encode_name: value for field in msgspec.structs.fields(frame) if (value := getattr(frame, field.name))
    }


@pytest.mark.parametrize("vector", BAD, ids=lambda vector: vector["name"])
def test_what_is_bad_is_refused(vector: dict[str, Any]) -> None:
    """A client must refuse what names it. It may refuse the others too, and knows no other end than its error."""
    refusal = _refusal(vector)
    if refusal is None:
        assert "client" not in vector["refusedBy"] or vector["payloadKind"] == "Shutdown"  # which it does not open
    else:
        assert refusal.code == vector["code"] and len(refusal.message) < 400


def _refusal(vector: dict[str, Any]) -> GoondanError | None:
    try:
        frame = decode(_bytes(vector))
        check_reference(frame)
        if vector.get("payloadKind") in KINDS:
            opened(frame.payload, KINDS[vector["payloadKind"]])
    except GoondanError as error:
        return error
    return None


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), b"x", {1: 2}, [{"a": {b"k": 1}}]], ids=["nan", "inf", "bin", "int key", "key"]
)
def test_what_is_no_json_is_refused(value: Any) -> None:
    with pytest.raises(GoondanError):
        opened(encode(value), Any)
    with pytest.raises(GoondanError):
        checked({"deeper": [value]})


def test_integers_of_64_bits_are_exact() -> None:
    assert opened(encode([2**64 - 1, -(2**63)]), Any) == [2**64 - 1, -(2**63)]


def test_values_are_counted_before_anything_is_made_of_them() -> None:
    check_values(encode([[None] * 10, {"a": "text" * 1000}]), 14)
    for bomb in (b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", encode([[None] * 10, {"a": 1}])):
        with pytest.raises(GoondanError):
            check_values(bomb, 13)


def test_no_value_is_looked_at_behind_the_first() -> None:
    class Looked(bytes):
        looks = 0

        def __getitem__(self, at: Any) -> Any:
            self.looks += 1
            return super().__getitem__(at)

    zeros = Looked(4096)  # each byte is a value, and none is announced
    check_values(zeros)
    assert zeros.looks == 1


def test_a_payload_is_what_its_reference_says(tmp_path: Path) -> None:
    content = encode({"a": 1})
    name = "0" * 32
    (tmp_path / name).write_bytes(content)
    good = frames.Blob(name, hashlib.sha256(content).hexdigest(), len(content))
    assert read_blob(str(tmp_path), good) == content
    (tmp_path / ("1" * 32)).symlink_to(tmp_path / name)
    for blob, folder, code in (
        (good, None, "E_BLOB_UNAVAILABLE"),
        (frames.Blob("2" * 32, good.digest, good.size), str(tmp_path), "E_BLOB_MISSING"),
        (frames.Blob("1" * 32, good.digest, good.size), str(tmp_path), "E_BLOB_MISSING"),
        (frames.Blob(name, good.digest, good.size + 1), str(tmp_path), "E_BLOB_MISMATCH"),
        (frames.Blob(name, "0" * 64, good.size), str(tmp_path), "E_BLOB_MISMATCH"),
    ):
        with pytest.raises(GoondanError) as caught:
            read_blob(folder, blob)
        assert caught.value.code == code
