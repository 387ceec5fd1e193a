"""Pending work: every piece ends exactly once, and whoever asks in time is told."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec import Raw

from goondan.schemas.bundle.launch import ExportSpec, ToolSpec
from goondan.schemas.wire.frames import Frame
from goondan.schemas.wire.spans import call_span
from goondan.toolhost.app import read_promises, write_promises
from goondan.toolhost.calls.call_registry import Call
from goondan.toolhost.calls.results import KEPT_S, MAX_RUNNING, PENDING_S, PendingRegistry, Promise, Work
from goondan.toolhost.serving.answers import Answers, Asking


def promise(handle: str, *, key: str = "k", call: str = "t1/a") -> Promise:
    return Promise(
        agent="a", instance_key=key, handle=handle, tool="t__f", call_id=call, turn_id="t1", tool_call_id="a"
    )


@pytest.mark.requirement("RESULT-03", "RESULT-04")
def test_work_is_running_then_done_then_forgotten() -> None:
    book = PendingRegistry()
    work = book.begin(promise("h"), 0.0)
    assert isinstance(work, Work)
    assert (book.get(("a", "k"), "h"), work.done, book.of(("a", "k"))) == (work, False, [work])
    assert book.get(("a", "other"), "h") is None, "a handle belongs to one instance"
    assert book.end(work, Raw(b"x"), 10.0) == []
    assert (work.done, book.of(("a", "k"))) == (True, [])
    assert book.end(work, Raw(b"y"), 11.0) is None, "it ends once"
    book.expire(10.0 + KEPT_S - 1)
    assert book.get(("a", "k"), "h") is work
    book.expire(10.0 + KEPT_S)
    assert (book.get(("a", "k"), "h"), book.empty) == (None, True)


def test_a_handle_in_use_is_refused_and_free_again_afterwards() -> None:
    book = PendingRegistry()
    first = book.begin(promise("h"), 0.0)
    assert isinstance(first, Work)
    assert book.begin(promise("h", call="t1/b"), 1.0) == "taken"
    assert isinstance(book.begin(promise("h", key="other"), 1.0), Work)
    book.end(first, Raw(b"x"), 2.0)
    second = book.begin(promise("h", call="t1/c"), 3.0)
    assert isinstance(second, Work)
    assert book.get(("a", "k"), "h") is second


def test_an_instance_has_only_so_much_work_and_only_for_so_long() -> None:
    book = PendingRegistry()
    begun = [book.begin(promise(f"h{number}"), float(number)) for number in range(MAX_RUNNING)]
    assert all(isinstance(work, Work) for work in begun)
    assert book.begin(promise("one more"), 0.0) == "full"
    assert isinstance(book.begin(promise("another's", key="other"), 2.0), Work)
    assert book.overdue(PENDING_S - 0.1) == []
    assert [work.promise.handle for work in book.overdue(PENDING_S + 1)] == ["h0", "h1"]


def test_kept_results_are_bounded_in_bytes_and_the_oldest_go_first() -> None:
    book = PendingRegistry(kept_bytes=100)
    for number in range(5):
        work = book.begin(promise(f"h{number}"), 0.0)
        assert isinstance(work, Work)
        book.end(work, Raw(b"x" * 40), float(number))
    assert [book.get(("a", "k"), f"h{number}") is not None for number in range(5)] == [False, False, False, True, True]


class Machine(RuleBasedStateMachine):
    """Any order of beginnings, ends and time."""

    def __init__(self) -> None:
        super().__init__()
        self.book = PendingRegistry(kept_bytes=50)
        self.now = 0.0
        self.running: dict[str, Work] = {}
        self.ended: list[Work] = []

    @rule(handle=st.sampled_from("abc"))
    def begin(self, handle: str) -> None:
        work = self.book.begin(promise(handle), self.now)
        assert (work == "taken") == (handle in self.running)
        if isinstance(work, Work):
            self.running[handle] = work

    @rule(handle=st.sampled_from("abc"), size=st.integers(1, 40))
    def end(self, handle: str, size: int) -> None:
        work = self.running.pop(handle, None)
        if work is not None:
            assert self.book.end(work, Raw(b"x" * size), self.now) == []
            assert not any(work is other for other in self.ended)
            self.ended.append(work)
            assert self.book.get(("a", "k"), handle) is work

    @rule(seconds=st.floats(0, 400))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.book.expire(self.now)

    @invariant()
    def running_work_is_never_forgotten(self) -> None:
        assert {work.promise.handle for work in self.book.of(("a", "k"))} == set(self.running)
        for handle, work in self.running.items():
            assert self.book.get(("a", "k"), handle) is work


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=30, deadline=None)


def test_promises_survive_in_a_private_file_and_a_broken_one_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "pending.json"
    file = str(path)
    assert read_promises(file) == []
    write_promises(file, [promise("h"), promise("i")])
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_promises(str(path)) == [promise("h"), promise("i")]
    for broken in (b"", b"[{}]", b"\xff", b"[" * 5000):
        path.write_bytes(broken)
        assert read_promises(file) == []
    write_promises(file, [])
    assert not path.exists()
    write_promises(file, [])
    path.symlink_to("/etc/passwd")
    assert read_promises(file) == []
    for unusable in ("/proc/no/such/place", None):
        write_promises(unusable, [promise("h")])
        assert read_promises(unusable) == []


async def test_the_end_of_work_is_told_with_the_root_of_its_call_also_by_the_next_tool_host(tmp_path: Path) -> None:
    sent: list[Frame] = []
    file = str(tmp_path / "pending.json")

    def answers() -> Answers:
        loop = asyncio.get_running_loop()
        asking = Asking(loop, None, lambda line: None, {})
        return Answers(
            loop,
            lambda frame: True,
            asking,
            lambda event, told: sent.append(event),
            partial(write_promises, file),
            lambda: None,
        )

    export = ExportSpec(name="f")
    tool = ToolSpec(name="t", entry="/t.py", root="/t.py", exports=[export])
    call = Call(
        id="t1/a", agent="coder", instance_key="k", tool=tool, export=export, args=Raw(b"\x80"), turn_id="t1",
        tool_call_id="a", message_id=None, workdir=None, deadline=None, root_event="e-0", trace_id="a" * 32,
    )  # fmt: skip
    first = answers()
    work = first.begin_work(call, "h")
    assert isinstance(work, Work)
    promises = read_promises(file)
    first.end_work(work, Raw(b"\x80"))
    answers().give_up(promises)
    assert [(event.event_id, event.root_event) for event in sent] == [("t1/a~completed", "e-0")] * 2
    assert [(event.trace_id, event.parent_span_id) for event in sent] == [("a" * 32, call_span("t1/a"))] * 2
