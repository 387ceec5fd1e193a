"""When a limit is reached, and what keeps it: the pure half of the limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.schemas.bundle.launch import Limits
from goondan.schemas.worker.worker_frames import WorkerError
from goondan.toolhost.policy.limits import (
    KEPT_S,
    MIB,
    MOVED_S,
    ORDINARY,
    SLOW_WEIGHT,
    Allowance,
    CpuMeter,
    DiskMeter,
    GroupPlan,
    Growth,
    HiddenMemory,
    InFlight,
    KeptDescriptors,
    Lost,
    Pace,
    Tree,
    Usage,
    exceeded,
    group_plan,
    limit_error,
    mechanisms,
    niceness_of_slow,
    processes_of_a_namespace,
    resource_limits,
    walk_again_at,
    walked_before,
    weight_of,
    with_limit,
)
from goondan.toolhost.watch.keeper import weight

LIMITS = Limits(memory_mb=100, processes=10, cpu_seconds=5, disk_mb=100, files=1000)


@pytest.mark.parametrize(
    ("usage", "limit"),
    [
        (Usage(), None),
        (Usage(memory=100 * MIB, tasks=9), None),
        (Usage(memory=100 * MIB + 1), "memoryMb"),
        (Usage(out_of_memory=True, refused=True), "memoryMb"),
        (Usage(tasks=10), "processes"),
        (Usage(refused=True), "processes"),
    ],
)
def test_limits_of_a_jail(usage: Usage, limit: str | None) -> None:
    assert exceeded(usage, LIMITS) == limit


@pytest.mark.parametrize("limit", ["memoryMb", "processes", "cpuSeconds", "diskMb", "files", "fileMb", "openFiles"])
def test_every_limit_is_named_with_its_value(limit: str) -> None:
    error = limit_error(limit, LIMITS)
    assert error.code == "E_TOOL_LIMIT"
    assert error.message.startswith(f"the limit {limit} was reached: ")
    assert any(character.isdigit() for character in error.message)


@pytest.mark.parametrize(
    ("error", "refused", "counted", "limit"),
    [
        (WorkerError(name="MemoryError", message=""), False, True, "memoryMb"),
        (WorkerError(name="OSError", message="no", code="ENOMEM"), False, True, "memoryMb"),
        (WorkerError(name="OSError", message="no", code="EMFILE"), False, True, "openFiles"),
        (WorkerError(name="OSError", message="no", code="EFBIG"), False, True, "fileMb"),
        (WorkerError(name="BlockingIOError", message="no", code="EAGAIN"), True, True, "processes"),
        (WorkerError(name="BlockingIOError", message="no", code="EAGAIN"), False, True, None),
        (WorkerError(name="BlockingIOError", message="no", code="EAGAIN"), False, False, "processes"),
        (WorkerError(name="RuntimeError", message="can't start new thread"), True, True, "processes"),
        (WorkerError(name="RuntimeError", message="can't start new thread"), False, True, "memoryMb"),
        (WorkerError(name="RuntimeError", message="other"), True, False, None),
        (WorkerError(name="MemoryError", message="", code="MY_OWN"), False, True, None),
        (WorkerError(name="OSError", message="no", code="ENOSPC"), True, False, None),  # /tmp may be full, or the disk
    ],
)
def test_a_handlers_error_names_the_limit(error: WorkerError, refused: bool, counted: bool, limit: str | None) -> None:
    told = with_limit(error, LIMITS, refused=refused, counted=counted)
    if limit is None:
        assert told is error
    else:
        assert told.code == "E_TOOL_LIMIT"
        assert told.name == error.name
        assert told.message.startswith(f"the limit {limit} was reached")
        assert told.message.endswith(f"({error.message or error.name})")


def test_a_limit_of_the_watch_is_told_with_the_part_at_which_it_ends_a_jail() -> None:
    told = limit_error("diskMb", Limits(disk_mb=1024)).message
    assert told == "the limit diskMb was reached: 922 of 1024 MiB on disk"
    assert limit_error("files", Limits(files=100)).message == "the limit files was reached: 90 of 100 files"
    assert limit_error("memoryMb", Limits(memory_mb=64)).message == "the limit memoryMb was reached: 64 MiB of memory"


def test_calls_with_processes_of_their_own_are_charged_for_these() -> None:
    meter = CpuMeter()
    meter.charge(2.0, ["a", "b"], {"a": 1.8, "b": 0.0})
    assert meter.used("a") == pytest.approx(1.9)  # what nobody was seen to use is everybody's
    assert meter.used("b") == pytest.approx(0.1)
    meter.charge(3.0, ["a", "b"], {"a": 3.4, "b": 0.4})  # more was seen than was counted: it is cut to that
    assert meter.used("a") == pytest.approx(2.7)
    assert meter.used("b") == pytest.approx(0.3)
    meter.charge(4.0, ["b"], {"b": 1.2})
    assert meter.used("a") == 0.0
    assert meter.used("b") == pytest.approx(1.3)


def test_a_jail_is_quick_that_has_answered_and_uses_little() -> None:
    pace = Pace()
    assert not pace.is_quick(0.1, 0.1, answered=False)
    assert pace.is_quick(0.1, 0.2, answered=True)
    assert not pace.is_quick(0.4, 0.5, answered=True)
    assert not pace.is_quick(0.4, 0.6, answered=True), "of late"
    assert pace.is_quick(0.4, 2.6, answered=True)
    for second in range(3, 60):
        assert pace.is_quick(0.3 + second * 0.05, float(second), answered=True), "a little all the time"


def test_all_jails_that_are_not_quick_weigh_less_together_than_one_ordinary_process() -> None:
    assert niceness_of_slow(0) == niceness_of_slow(1) == 2
    for count in range(1, 60):
        assert 0.8 * SLOW_WEIGHT < count * weight_of(niceness_of_slow(count)) < ORDINARY, count
    assert niceness_of_slow(10_000) == 19
    assert (weight(V1, 0), weight(V1, 15)) == (("cpu.shares", "1024"), ("cpu.shares", "36"))
    assert (weight(V2, 0), weight(V2, 19)) == (("cpu.weight", "100"), ("cpu.weight", "1"))


def test_a_call_that_runs_alone_is_charged_exactly() -> None:
    meter = CpuMeter()
    meter.charge(3.0, ["a"])
    meter.charge(4.5, ["a"])
    assert meter.used("a") == 4.5
    assert meter.over(4.0) == ["a"]
    meter.charge(5.0, [])
    meter.charge(9.0, ["b"])
    assert meter.over(4.0) == []  # not what others have used before
    assert meter.used("b") == 4.0


def test_calls_side_by_side_share() -> None:
    meter = CpuMeter()
    meter.charge(2.0, ["a", "b"])
    meter.charge(3.0, ["b"])
    assert meter.used("b") == 2.0
    assert meter.used("a") == 0.0  # ended, forgotten


@given(
    st.lists(
        st.tuples(st.floats(0, 1, allow_nan=False), st.sets(st.sampled_from("abcd"), max_size=4)),
        min_size=1,
        max_size=50,
    )
)
def test_no_more_is_charged_than_was_used(steps: list[tuple[float, set[str]]]) -> None:
    meter = CpuMeter()
    total = 0.0
    for used, running in steps:
        total += used
        meter.charge(total, sorted(running))
        assert sum(meter.used(call) for call in "abcd") <= total + 1e-9
    meter.charge(total - 1, ["a"])  # a counter that falls is no credit
    assert meter.total_s == total


def test_time_is_spent_up_to_a_part_and_some_at_once() -> None:
    allowance, now, spent = Allowance(0.5, 0.1), 100.0, 0.0
    while now < 110.0:
        if allowance.allowed(now):
            allowance.spend(now, now + 0.03)
            spent += 0.03
            now += 0.03
        else:
            now += 0.001
    assert 0.5 * 10 < spent < 0.5 * 10 + 0.1 + 0.03
    allowance = Allowance(0.5, 0.1)
    allowance.spend(100.0, 100.09)
    assert allowance.allowed(100.09)
    allowance.spend(100.09, 100.3)
    assert not allowance.allowed(100.31)
    assert allowance.allowed(100.6)


def test_who_is_frozen_waits_the_longer_the_less_it_has_to_be_done_with() -> None:
    """Frozen and quick, frozen, not frozen and busy, not frozen and quick."""
    order = [(True, True), (True, False), (False, False), (False, True)]
    places = [walked_before(*each) for each in order]
    assert places == sorted(set(places))


def test_a_walk_that_found_too_little_is_not_repeated_at_once() -> None:
    assert walk_again_at(10.0, cost_s=0.1, frozen_s=0.0) == pytest.approx(10.3)
    assert walk_again_at(10.0, cost_s=0.1, frozen_s=0.2) == pytest.approx(10.3)
    assert walk_again_at(10.0, cost_s=0.1, frozen_s=0.5) == pytest.approx(10.5), "half of its time is the jail's"


def walked(meter: DiskMeter, found: Growth, lost: Lost) -> str | None:
    """A walk during which nothing was written."""
    return meter.walked(found, lost, lost, LIMITS)


def test_a_disk_is_walked_when_the_file_system_has_lost_enough() -> None:
    meter = DiskMeter(Lost(1000 * MIB, 0))
    assert not meter.suspects(Lost(1089 * MIB, 0), LIMITS)
    assert meter.suspects(Lost(1090 * MIB, 0), LIMITS)
    assert walked(meter, Growth(10 * MIB, 5), Lost(1090 * MIB, 5)) is None  # somebody else's
    assert not meter.suspects(Lost(1169 * MIB, 5), LIMITS)
    assert meter.suspects(Lost(1170 * MIB, 5), LIMITS)
    assert walked(meter, Growth(90 * MIB, 5), Lost(1170 * MIB, 5)) == "diskMb"


def test_what_is_lost_during_a_walk_may_be_in_it_and_counts_towards_the_next() -> None:
    meter = DiskMeter(Lost(0, 0))
    assert meter.walked(Growth(95 * MIB, 5), Lost(80 * MIB, 0), Lost(95 * MIB, 0), LIMITS) == "diskMb"
    meter = DiskMeter(Lost(0, 0))
    assert meter.walked(Growth(50 * MIB, 5), Lost(80 * MIB, 0), Lost(95 * MIB, 0), LIMITS) is None
    assert not meter.suspects(Lost(119 * MIB, 0), LIMITS)
    assert meter.suspects(Lost(120 * MIB, 0), LIMITS)


def test_a_large_file_that_was_touched_is_not_what_was_written() -> None:
    meter = DiskMeter(Lost(0, 0))
    assert walked(meter, Growth(5000 * MIB, 1), Lost(20 * MIB, 1)) is None
    assert walked(meter, Growth(5000 * MIB, 1), Lost(91 * MIB, 1)) == "diskMb"


def test_entries_count_where_the_file_system_counts_them_and_where_not() -> None:
    meter = DiskMeter(Lost(0, 0))
    assert meter.suspects(Lost(0, 900), LIMITS)
    assert walked(meter, Growth(0, 5000), Lost(0, 800)) is None  # a tree that was touched, not made
    assert walked(meter, Growth(0, 5000), Lost(0, 901)) == "files"
    assert walked(DiskMeter(Lost(0, 0)), Growth(0, 900), Lost(0, 0)) == "files"


def test_what_lies_in_flight_is_what_the_file_system_has_lost_and_nobody_shows() -> None:
    meter = DiskMeter(Lost(1000 * MIB, 0))
    lost, little = Lost(1095 * MIB, 0), Growth(10 * MIB, 5)
    assert meter.hides(little, lost, LIMITS)
    assert not meter.hides(Growth(90 * MIB, 5), lost, LIMITS), "it was found"
    assert not meter.hides(little, Lost(1089 * MIB, 0), LIMITS), "no more than that is lost"
    assert meter.walked(little, lost, lost, LIMITS, kept_in_flight=True) == "diskMb"
    meter = DiskMeter(Lost(1000 * MIB, 0))
    assert walked(meter, little, lost) is None, "it keeps none: somebody else's"
    lost = Lost(1174 * MIB, 0)
    assert meter.walked(little, lost, lost, LIMITS, kept_in_flight=True) is None, "79 MiB since, and 10"
    lost = Lost(1176 * MIB, 0)
    assert meter.walked(little, lost, lost, LIMITS, kept_in_flight=True) == "diskMb"


def stayed(*sockets: int) -> InFlight:
    return InFlight(frozenset(sockets), frozenset(sockets))


def looks(kept: KeptDescriptors, at_s: float, until_s: float, *sockets: set[int]) -> list[float]:
    """Every 10 ms, in turns: when descriptors were held to be kept in flight."""
    times = [at_s + step / 100 for step in range(round((until_s - at_s) * 100) + 1)]
    return [now for step, now in enumerate(times) if kept.look(now, stayed(*sockets[step % len(sockets)]))]


def test_descriptors_are_kept_in_flight_when_they_lie_there_at_every_look() -> None:
    assert looks(KeptDescriptors(), 5.0, 6.0, {1, 2}, {2, 3})[0] == pytest.approx(5.0 + KEPT_S)
    assert looks(KeptDescriptors(), 5.0, 9.0, *[{1}] * 7, set()) == [], "they are received"
    assert looks(KeptDescriptors(), 5.0, 9.0, {1}, {2}, {3})[0] == pytest.approx(5.0 + MOVED_S), "from one to the next"
    kept = KeptDescriptors()
    assert looks(kept, 5.0, 6.0, {1})
    assert not kept.look(6.01, InFlight())
    assert not kept.look(6.02, stayed(1))
    few = KeptDescriptors()
    assert [few.look(5.0 + second, stayed(1)) for second in range(4)][:2] == [False, False], (
        "a slow machine looks again"
    )


def test_a_socket_that_was_empty_between_looks_keeps_nothing() -> None:
    """Who passes a descriptor on often has it in the same socket when somebody looks."""
    kept = KeptDescriptors()
    passing = InFlight(last=frozenset({1}), each=frozenset())
    assert not any(kept.look(5.0 + step / 100, passing) for step in range(100))


def test_memory_that_nobody_shows_is_what_the_machine_has_more_of() -> None:
    hidden = HiddenMemory(1000)
    assert hidden.most(1300, seen=100) == 200
    assert hidden.most(900, seen=100) == 0, "others gave it back"
    assert hidden.most(1100, seen=100) == 200, "and it may have taken that"
    hidden.clear(1100, seen=100)
    assert hidden.most(1150, seen=150) == 0
    assert hidden.most(1250, seen=150) == 100


V1 = Tree(version=1, memory="/m/g", pids="/p/g", cpu="/c/g", cpuacct="/a/g")
V2 = Tree(version=2, memory="/u/g", pids="/u/g", cpu="/u/g", cpuacct="/u/g")


def test_what_is_written_into_groups() -> None:
    assert group_plan(None, LIMITS) is None
    assert group_plan(V1, LIMITS) == GroupPlan(
        V1,
        [
            ("/m/g", "memory.limit_in_bytes", str(100 * MIB)),
            ("/m/g", "memory.memsw.limit_in_bytes", str(100 * MIB)),
            ("/p/g", "pids.max", "11"),
        ],
    )
    assert group_plan(V2, LIMITS) == GroupPlan(
        V2,
        [
            ("/u/g", "memory.max", str(100 * MIB)),
            ("/u/g", "memory.swap.max", "0"),
            ("/u/g", "memory.oom.group", "1"),
            ("/u/g", "pids.max", "11"),
        ],
    )
    assert V1.folders == ["/m/g", "/p/g", "/c/g", "/a/g"]
    assert V2.folders == ["/u/g"]


def test_receipts_say_what_keeps_each_limit() -> None:
    assert mechanisms(V2)["memoryMb"] == mechanisms(V1)["cpuSeconds"] == mechanisms(V1)["processes"] == "cgroup"
    assert mechanisms(None)["memoryMb"] == mechanisms(None)["cpuSeconds"] == mechanisms(V1)["diskMb"] == "watched"
    assert mechanisms(None)["processes"] == "rlimit"
    assert tuple(mechanisms(None)) == Limits.__struct_encode_fields__, (
        "every limit has its row, and no row is left over"
    )
    assert processes_of_a_namespace(None, LIMITS) == 10
    assert processes_of_a_namespace(V1, LIMITS) > 11


def test_each_process_has_the_resource_limits_of_the_table() -> None:
    limits = Limits(memory_mb=3, processes=4, open_files=5, file_mb=6)
    core, data, size, processes, files, locked, signals = 4, 2, 1, 6, 7, 8, 11
    found = dict(resource_limits(limits, trusted=2))
    assert found.pop(locked) > 0 and found.pop(signals) > 0
    assert found == {core: 0, data: 3 << 20, processes: 6, files: 5, size: 6 << 20}
    assert data not in dict(resource_limits(limits, data=False))
