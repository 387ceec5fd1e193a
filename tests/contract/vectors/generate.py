"""`python -m tests.contract.vectors.generate [--check]`: writes frames.json, or says that it is out of date.

Good frames are built from the structs; bad and unusual ones are put together byte by byte, because no encoder of ours
would write them.

Source: docs/design/wire.md section 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Raw

from goondan.schemas.wire.blobs import MAX_BLOB_BYTES
from goondan.schemas.wire.codec import MAX_DEPTH, MAX_FRAME_BYTES, encode, encode_value, to_raw
from goondan.schemas.wire.frames import (
    Frame,
)
from tests.contract.vectors.bad import ID, PING, TYPE, bad_frames, mapping, refused_by, text
from tests.contract.vectors.good import good_frames, references

FILE: Final = Path(__file__).resolve().parents[3] / "schemas" / "vectors" / "frames.json"
#: Integers that every JSON parser keeps.
SAFE_INT: Final = 2**53 - 1
FORMAT: Final = 1


def to_json(value: Any) -> Any:
    """A decoded msgpack value as the vectors write it."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > SAFE_INT:
        return {"$int": str(value)}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    return {key: to_json(item) for key, item in value.items()} if isinstance(value, dict) else value


def from_json(value: Any) -> Any:
    """The other way."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if isinstance(value, dict):
        return int(value["$int"]) if value.keys() == {"$int"} else {k: from_json(v) for k, v in value.items()}
    return value


def describe(frame: Frame) -> dict[str, Any]:
    """A frame in its decoded form: the header without defaults, opaque fields opened."""
    described: dict[str, Any] = {}
    for field in msgspec.structs.fields(Frame):
        value = getattr(frame, field.name)
        if value is None or value == field.default or value == "" or bytes_of(value) == b"\xc0":
            continue
        described[field.encode_name] = to_json(msgspec.msgpack.decode(encode_value(value)))
    return described


def bytes_of(value: Any) -> bytes | None:
    """What an opaque field holds."""
    return bytes(value) if isinstance(value, Raw) else None


# --- unusual frames that are as good --------------------------------------------------------------------------------


def unusual_frames() -> list[tuple[str, bytes, Frame]]:
    """Name, bytes, and the frame they mean."""
    long_text = b"\xdb\x00\x00\x00\x04ping"
    wide = b"\xdf\x00\x00\x00\x02" + TYPE + long_text + text("epoch") + b"\xd3" + (7).to_bytes(8, "big")
    return [
        ("fields in another order", mapping(ID, PING), Frame("ping", id="x.1")),
        ("without an id", mapping(PING), Frame("ping")),
        (
            "defaults written out",
            mapping(PING, (text("v"), b"\x01"), (text("payload"), b"\xc0")),
            Frame("ping", payload=Raw(b"\xc0")),
        ),
        (
            "nil for an absent field",
            mapping(PING, *((text(name), b"\xc0") for name in ("to", "epoch", "id", "v", "live"))),
            Frame("ping"),
        ),
        ("lengths and numbers in their widest form", wide, Frame("ping", epoch=7)),
        (
            "a field of the future is skipped",
            mapping(PING, (text("priority"), b"\x05"), (text("x"), b"\x81\xa1y\x90")),
            Frame("ping"),
        ),
        ("of two equal keys the last one counts", mapping(PING, (TYPE, text("pong"))), Frame("pong")),
        ("a forged sender is only a field", mapping(PING, (text("from"), text("coder"))), Frame("ping", from_="coder")),
        ("another version", mapping(PING, (text("v"), b"\x02")), Frame("ping", v=2)),
        (
            "a payload that is no map",
            mapping(PING, (text("payload"), encode_value("free"))),
            Frame("ping", payload=to_raw("free")),
        ),
        (
            "a float32 in the payload",
            mapping(PING, (text("payload"), b"\xca\x3f\x00\x00\x00")),
            Frame("ping", payload=Raw(b"\xca\x3f\x00\x00\x00")),
        ),
    ]


# --- the file -------------------------------------------------------------------------------------------------------


def build() -> dict[str, Any]:
    """The content of frames.json."""
    valid: list[dict[str, Any]] = []
    for name, frame, kind in good_frames():
        vector: dict[str, Any] = {"name": name, "bytes": encode(frame).hex(), "frame": describe(frame)}
        valid.append(vector if kind is None else {**vector, "payloadKind": kind})
    for name, frame, kind, data in references():
        vector = {"name": name, "bytes": encode(frame).hex(), "frame": describe(frame)}
        valid.append({**vector, "file": data.hex(), "fileKind": kind})
    for name, data, frame in unusual_frames():
        valid.append({"name": name, "bytes": data.hex(), "frame": describe(frame), "canonical": encode(frame).hex()})
    bad: list[dict[str, Any]] = []
    for item in bad_frames():
        vector = {"name": item.name}
        if item.times:
            parts = {"prefix": item.prefix.hex(), "unit": item.unit.hex(), "times": item.times}
            vector["repeat"] = {**parts, "suffix": item.suffix.hex()}
        else:
            vector["bytes"] = item.prefix.hex()
        vector |= {"stage": item.stage, "code": item.code, "refusedBy": refused_by(item)}
        bad.append(vector if item.payload_kind is None else {**vector, "payloadKind": item.payload_kind})
    limits = {"maxFrameBytes": MAX_FRAME_BYTES, "maxDepth": MAX_DEPTH, "maxBlobBytes": MAX_BLOB_BYTES}
    return {"format": FORMAT, "limits": limits, "valid": valid, "bad": bad}


def render(content: dict[str, Any]) -> str:
    """One vector a line, so that a change of one is a change of one line."""
    lines = [f'{{"format": {content["format"]},', f'"limits": {json.dumps(content["limits"])},']
    for key, end in (("valid", ","), ("bad", "")):
        vectors = ",\n".join(json.dumps(vector, ensure_ascii=False) for vector in content[key])
        lines.append(f'"{key}": [\n{vectors}\n]{end}')
    return "\n".join(lines) + "}\n"


def main(arguments: list[str] | None = None) -> int:
    """Write the file, or check it: 1 when it is out of date."""
    parser = argparse.ArgumentParser(prog="python -m tests.contract.vectors.generate", description="Recorded frames.")
    parser.add_argument("--check", action="store_true", help="write nothing; say whether the file is up to date")
    options = parser.parse_args(arguments)
    content = render(build())
    if not options.check:
        FILE.write_text(content, encoding="utf-8")
        return 0
    if not FILE.is_file() or FILE.read_text(encoding="utf-8") != content:
        print(f"{FILE} is out of date; run `python -m tests.contract.vectors.generate`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
