"""PROTOCOL.md and its parts name everything that the structs have, and nothing that they have not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from goondan.kernel.broker.journal import tables as retention
from goondan.kernel.broker.loop import SWEEP_S
from goondan.kernel.broker.routing import directory
from goondan.kernel.broker.routing.intake import MAX_CHAIN
from goondan.kernel.broker.state import bus, mailbox
from goondan.kernel.broker.state.blobs import MAX_CALL_BYTES
from goondan.kernel.broker.state.presence import MAX_CLIENTS
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.bundle.resources import SwarmPolicy
from goondan.schemas.transport import SOCKETS
from goondan.schemas.wire import blobs, frames
from goondan.schemas.wire.codec import MAX_DEPTH, MAX_FRAME_BYTES, MAX_RELAYED_BYTES
from goondan.schemas.wire.errors import CODES
from goondan.schemas.wire.frames import AckStage, Frame
from scripts.export_schemas import frame_types

FRAME_TYPES = set(frame_types())

PAGES = {
    page.name: page.read_text(encoding="utf-8")
    for page in sorted((Path(__file__).parent.parent.parent / "schemas").glob("PROTOCOL*.md"))
}
CLIENT = PAGES["PROTOCOL.md"]
TEXT = "\n".join(PAGES.values())
NAMED = set(re.findall(r"`([^`\n]+)`", TEXT))


def section(title: str) -> str:
    """The text of `## title`, of all pages that have it."""
    parts = [part for page in PAGES.values() for part in re.split(r"^## ", page, flags=re.MULTILINE)]
    return "\n".join(part for part in parts if part.split("\n")[0] == title)


def test_the_pages_are_those_of_the_readers() -> None:
    assert PAGES.keys() == {
        "PROTOCOL.md", "PROTOCOL-AGENTS.md", "PROTOCOL-KERNEL.md", "PROTOCOL-OPERATORS.md", "PROTOCOL-TOOLHOSTS.md"
    }  # fmt: skip
    assert all(f"]({name})" in CLIENT for name in PAGES if name != "PROTOCOL.md")


def test_an_example_comes_before_any_table_and_two_pages_suffice_for_a_client() -> None:
    assert CLIENT.index("```json") < CLIENT.index("\n| ")
    first = CLIENT[CLIENT.index("## Find a running kernel") : CLIENT.index("## The whole client")]
    assert len(first.split()) < 1000


def test_the_examples_are_frames() -> None:
    """Each example in JSON is a frame that the structs take, with a payload of its type."""
    kinds = {"hello": frames.Hello, "welcome": frames.Welcome, "event": frames.AgentEvent, "error": frames.ErrorPayload}
    count = 0
    for block in re.findall(r"^```json\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE):
        for text in block.strip().split("\n\n"):
            example = msgspec.json.decode(text)
            if "type" in example and "answer" not in example:
                frame = msgspec.convert({**example, "payload": msgspec.Raw(b"\xc0")}, Frame)
                assert frame.type in FRAME_TYPES
                payload, kind = example.get("payload"), kinds.get(frame.type)
            else:
                payload, kind = example, frames.AgentEvent
            if payload is not None and kind is not None:
                msgspec.msgpack.decode(msgspec.msgpack.encode(payload), type=kind)
            count += 1
    assert count >= 7


def test_every_header_field_has_its_row() -> None:
    table = section("Frames") + section("Header fields")
    rows = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)}
    fields = {field.encode_name for field in msgspec.structs.fields(Frame)}
    types = FRAME_TYPES | {name for name in rows if "." in name}  # some are of features
    assert rows - types - {"inReplyTo"} == fields - {"inReplyTo"}


def test_every_frame_type_has_its_row() -> None:
    first_cells = re.findall(r"^\| (.*?) \|", section("Frames") + section("Frame types"), re.MULTILINE)
    named = {name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}
    assert named >= FRAME_TYPES


def test_stages_and_sockets() -> None:
    assert set(AckStage.__args__) <= NAMED  # type: ignore[attr-defined]
    assert set(SOCKETS.values()) <= NAMED


@pytest.mark.parametrize(
    "kind",
    [
        frames.Hello, frames.Welcome, frames.AgentEvent, frames.Answer, frames.ToolCallPayload, frames.ToolResult,
        frames.ToolError, frames.Shutdown, frames.InstanceEnd, frames.InstanceEnded, frames.Credit,
        frames.ErrorPayload, frames.Lease,
        frames.AgentsSpawn, frames.SpawnedAgent, frames.AgentsList, frames.AgentsListed, frames.ListedAgent,
        frames.AgentsCatalog,
    ],
)  # fmt: skip
def test_every_field_of_a_payload_is_named(kind: type[Any]) -> None:
    payloads = section("Payloads")
    for field in msgspec.structs.fields(kind):
        assert re.search(rf"`{field.encode_name}\??`", payloads), f"{kind.__name__}.{field.encode_name}"


@pytest.mark.feature("approvals", "budgets", "edits", "mcp", "oauth")
def test_every_code_is_one() -> None:
    codes = set(re.findall(r"\bE_[A-Z_]+[A-Z]\b", TEXT))
    assert codes <= CODES.keys()


def test_the_limits_are_those_of_the_code() -> None:
    limits = section("Limits")
    assert MAX_FRAME_BYTES == 1 << 20
    assert "| a frame | 1 MiB |" in limits
    assert f"| nesting in a payload | {MAX_DEPTH} |" in limits
    assert (blobs.MAX_BLOB_BYTES, blobs.MAX_OUTPUT_BYTES, blobs.MAX_FOLDER_BYTES) == (67_371_008, 64 << 20, 1 << 30)
    assert f"from 1 to {blobs.MAX_BLOB_BYTES:,} (64¼ MiB)" in TEXT
    assert f"call {blobs.MAX_REQUEST_BYTES >> 20} MiB, arguments of a call {blobs.MAX_ARGS_BYTES:,} bytes" in limits
    assert f"| {blobs.MAX_VALUES:,} |" in limits
    assert f"more than {blobs.INLINE_FRAME_BYTES >> 10} KiB" in TEXT
    assert f"more than {MAX_CALL_BYTES >> 20} MiB in all" in " ".join(TEXT.split())
    assert f"every {SWEEP_S / 60:g} minutes" in TEXT
    assert f"written {blobs.KEEP_S / 60:g} minutes ago" in TEXT
    assert {f"`{name}`" for name in blobs.REFERENCES} <= set(re.findall(r"`[^`]+`", section("Large payloads")))
    assert f"{bus.MAX_ID} characters" in limits
    assert f"({bus.CREDIT})" in limits
    assert f"| {mailbox.MAX_QUEUED:,} |" in limits
    policy = SwarmPolicy()
    assert f"| {policy.max_open_events:,}, and {policy.mailbox_mb} MiB of payloads;" in limits
    plan = {field.name: field.default for field in msgspec.structs.fields(KernelPlan)}
    for name in ("max_live_agents", "kept_agents", "mailbox_mb", "max_open_events"):
        assert plan[name] == getattr(policy, name)
    assert f"| {MAX_CHAIN} |" in limits
    assert f"| {MAX_CLIENTS:,} |" in limits
    assert f"| {mailbox.LEASE_S:g} s;" in limits
    assert f"a lease that is silent for {mailbox.LEASE_S:g} seconds" in " ".join(TEXT.split())
    assert f"at most {MAX_RELAYED_BYTES:,} bytes" in " ".join(CLIENT.split())
    assert f"{directory.MAX_OWNED} are remembered, of all {directory.MAX_SPAWNED:,}" in " ".join(TEXT.split())
    assert f"({directory.SPAWN_S:g} seconds if there is none)" in " ".join(TEXT.split())
    kept = f"{retention.KEEP_ANSWERS_MS // 3_600_000} hours, {retention.KEEP_ANSWER_BYTES >> 30} GiB of them in all"
    assert f"({kept})" in TEXT
    assert (
        f"for {retention.KEEP_IDS_MS // 86_400_000} days, and for {retention.KEPT_IDS:,} more events at least"
        in " ".join(TEXT.split())
    )
