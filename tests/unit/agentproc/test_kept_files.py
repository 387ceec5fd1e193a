"""The files of events in turns: whose they may be, and how long they are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from goondan.agentproc.extensions.points.contexts import StepContext
from goondan.schemas.wire.blobs import describe
from goondan.schemas.wire.frames import OPERATOR, FilePart, Source
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says
from tests.unit.agentproc.turns import Make, failed, the_answer


async def test_a_file_to_which_no_message_refers_goes_with_the_next_process(make: Make, tmp_path: Path) -> None:
    content = b"\x89PNG\r\n\x1a\n" + b"pixels"
    blob = describe(content, "5e" * 16)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / blob.file).write_bytes(content)
    link, model = FakeLink(), FakeModel(says("a cat"))
    frame = event_frame("e1", "look", files=[FilePart(blob, "image/png")], source=OPERATOR)
    runner = make(link, model)
    await runner.run(frame)
    assert model.requests[0].files is not None
    kept = Path(model.requests[0].files.folder, blob.file)
    (blobs / blob.file).unlink()

    await make(link, FakeModel(says("still"))).run(event_frame("e2", "and?", epoch=2))
    assert kept.read_bytes() == content
    forgetful = make(link, FakeModel(says("gone")))

    async def forget(ctx: StepContext) -> Any:
        ctx.emit_message_event({"type": "truncate"})
        return await ctx.next()

    forgetful.instance.pipeline.register("step", forget, extension="forgetful")
    await forgetful.run(event_frame("e3", "forget", epoch=3))
    assert kept.exists()
    await make(link, FakeModel(says("clean"))).run(event_frame("e4", "and?", epoch=4))
    assert not kept.exists()


async def test_only_an_operators_event_has_files(make: Make, link: FakeLink) -> None:
    part = FilePart(describe(b"x", "5e" * 16), "image/png")
    await make(link, FakeModel()).run(event_frame("e1", "look", files=[part], source=Source("agent", "other", "k")))
    failed(the_answer(link), "E_FORBIDDEN")
