"""Receipts: what is in them, and when the jail is looked at for them."""

from __future__ import annotations

import msgspec

from goondan.schemas.bundle.launch import ToolSpec
from goondan.schemas.worker.receipts import Receipt
from goondan.toolhost.calls.results import LONG_S, LOOK_S, JailReceipts
from goondan.toolhost.policy.limits import Used
from goondan.toolhost.policy.plan import plan
from goondan.toolhost.policy.subject import Request
from tests.unit.toolhost.test_policy import HOST

PLAN = plan(Request(tool=ToolSpec(name="t", entry="/b/t/h.py", root="/b/t", exports=[])), HOST)


def read(receipts: JailReceipts, call_s: float = 0.0) -> Receipt:
    return msgspec.msgpack.decode(receipts.receipt(500, 1000, 1000 + round(call_s * 1e6)), type=Receipt)


def test_a_fresh_jail() -> None:
    found = read(JailReceipts(PLAN), 0.0123456)
    assert (found.jail.tier, found.jail.walls) == ("full", ["namespaces", "seccomp", "limits"])
    assert found.jail.limits["memoryMb"] == "watched"
    assert (found.jail.cpu_ms, found.jail.peak_memory_kb, found.jail.exit) == (0, 0, None)
    assert (found.call.wall_ms, found.call.came_us, found.call.began_us) == (12.346, 500, 1000)


def test_what_was_seen_never_falls() -> None:
    receipts = JailReceipts(PLAN)
    receipts.look(1.0, Used(50, 9000))
    receipts.look(2.0, Used(40, 12000))
    receipts.look(3.0, Used(60, 100))
    assert (read(receipts).jail.cpu_ms, read(receipts).jail.peak_memory_kb) == (60, 12000)


def test_quick_calls_are_not_looked_at_each_time() -> None:
    receipts = JailReceipts(PLAN)
    assert receipts.is_due(10.0, 0.0)  # never looked at
    receipts.look(10.0, Used(1, 1))
    assert not receipts.is_due(10.0 + LOOK_S / 2, LONG_S / 2)
    assert receipts.is_due(10.0 + LOOK_S / 2, LONG_S)
    assert not receipts.is_due(10.0 + LONG_S / 2, LONG_S)  # it was looked at while this call ran
    assert receipts.is_due(10.0 + LOOK_S, 0.0)


def test_hosts_and_the_end() -> None:
    receipts = JailReceipts(PLAN)
    receipts.network(["a:1"], [])
    receipts.network(["a:1"], ["b:2"])
    receipts.ended("ended by SIGKILL")
    jail = read(receipts).jail
    assert (jail.reached, jail.denied, jail.exit) == (["a:1"], ["b:2"], "ended by SIGKILL")
