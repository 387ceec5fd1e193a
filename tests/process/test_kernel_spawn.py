"""Starting and ending real processes: descriptors, environment, readiness, the reaper, the locks."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from goondan.kernel import lock, spawn
from goondan.kernel.cli import beside
from goondan.kernel.premises import Premises
from goondan.kernel.supervisor.reaping import (
    Exit,
    Readiness,
    Reaper,
    children_of_this_process,
    describe_exit,
    last_line,
)
from goondan.kernel.supervisor.services import Workers
from goondan.kernel.traces import logs
from goondan.schemas.system import startup
from goondan.schemas.wire.errors import GoondanError
from tests.kernel_fixture import READY, ROOT, wait_until

PYTHON = sys.executable


@pytest.fixture(autouse=True)
def _no_other_children() -> None:
    """The reaper of a supervisor ends every child that it does not know, and here it runs in the tests' own process."""
    READY.close()


def start(code: str, *, pass_fds: tuple[int, ...] = (), output_fd: int | None = None, **env: str) -> int:
    argv = [PYTHON, "-I", "-c", code]
    return spawn.start_program(argv, env={"PATH": os.defpath, **env}, output_fd=output_fd, pass_fds=pass_fds)


def outcome(pid: int) -> str:
    return describe_exit(os.waitid(os.P_PID, pid, os.WEXITED)).cause


def test_a_program_has_only_what_it_was_given(tmp_path: Path) -> None:
    log = logs.open_log(str(tmp_path / "log"))
    read, write = os.pipe()
    stray = os.open("/dev/null", os.O_RDONLY)
    show = "import os; print(os.listdir('/proc/self/fd'), os.environ.get('SECRET'), os.getsid(0) == os.getpid())"
    pid = start(f"{show}; os.write({write}, b'x')", pass_fds=(write,), output_fd=log, LANG="C.UTF-8")
    os.close(write)
    assert outcome(pid) == "exit 0"
    assert os.read(read, 10) == b"x"
    listed, rest = (tmp_path / "log").read_text().split("] ")
    assert rest == "None True\n"
    assert f"'{write}'" in listed
    for fd in (log, read, stray):
        assert f"'{fd}'" not in listed
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    for fd in (log, read, stray):
        os.close(fd)


def test_the_environment_is_chosen_by_name() -> None:
    source = {"PATH": "p", "LC_ALL": "C", "PYTHONPATH": "x", "OPENAI_API_KEY": "k", "LD_PRELOAD": "l", "TELEGRAM": "t"}
    assert spawn.environment(source) == {"PATH": "p", "LC_ALL": "C"}
    assert spawn.environment(source, ["TELEGRAM"]) == {"PATH": "p", "LC_ALL": "C", "TELEGRAM": "t"}


def test_a_memory_file_is_read_to_its_end() -> None:
    fd = spawn.memory_file("plan", b"x" * 100_000)
    pid = start(f"import os,sys; sys.exit(len(open({fd}, 'rb').read()) // 1000)", pass_fds=(fd,))
    os.close(fd)
    assert outcome(pid) == "exit 100"


def test_how_processes_end() -> None:
    assert outcome(start("raise SystemExit(3)")) == "exit 3"
    assert outcome(start("import os; os.kill(os.getpid(), 9)")) == "signal SIGKILL"


def test_a_program_without_output_ends_as_it_says() -> None:
    program = [PYTHON, "-I", spawn.START, "goondan.kernel.broker.token", "--help"]
    assert subprocess.run(["sh", "-c", '"$@" >&- 2>&-', "sh", *program]).returncode == 0


def test_logs_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"a" * (logs.MAX_LOG_BYTES + 1))
    os.close(logs.open_log(str(path)))
    assert path.stat().st_size == 0
    with path.open("ab") as writer:
        writer.write(b"b" * (logs.MAX_LOG_BYTES + 1))
        writer.flush()
        logs.bound_log(str(path))
        writer.write(b"after\n")
    assert path.read_bytes() == b"after\n"
    assert (tmp_path / "x.log.1").read_bytes()[:1] == b"b"
    assert last_line(str(path)) == "after"
    assert last_line(str(tmp_path / "none")) == ""


async def test_ready_and_not_ready() -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    readiness = Readiness(loop, ready.set)
    pid = start(f"import os; os.write({readiness.write_fd}, b'\\n')", pass_fds=(readiness.write_fd,))
    readiness.handed_over()
    await asyncio.wait_for(ready.wait(), 20)
    os.waitid(os.P_PID, pid, os.WEXITED)

    failed = Readiness(loop, ready.clear)
    report = '{"error":{"code":"E_SANDBOX_UNAVAILABLE","message":"no bubblewrap"}}'
    pid = start(f"import os; os.write({failed.write_fd}, {report!r}.encode() + b'\\n')", pass_fds=(failed.write_fd,))
    failed.handed_over()
    os.waitid(os.P_PID, pid, os.WEXITED)
    assert failed.report is not None
    assert failed.report.message == "no bubblewrap"
    failed.close()
    assert ready.is_set()


@pytest.mark.parametrize("said", [b"", b"garbage\n", b'{"error":1}', b"{" * 100_000])
async def test_what_else_a_program_says_is_no_report(said: bytes) -> None:
    readiness = Readiness(asyncio.get_running_loop(), lambda: None)
    os.write(readiness.write_fd, said[:60_000])
    readiness.handed_over()
    assert readiness.report is None
    readiness.close()


async def test_the_reaper_reports_ends_and_collects_orphans() -> None:
    startup.become_subreaper()
    reaper = Reaper(asyncio.get_running_loop())
    reaper.start()
    try:
        ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        child = reaper.watch(start("import time; time.sleep(60)"), ended.set_result, leads_group=True)
        assert child is not None
        child.kill()
        assert (await asyncio.wait_for(ended, 20)).cause == "signal SIGKILL"
        assert not child.alive
        child.kill()  # its number may be another process's by now: nothing is sent

        # A child that leaves an orphan behind; the orphan comes to us and lives on.
        read, write = os.pipe()
        code = f"import os, time\nif os.fork() == 0:\n  os.write({write}, b'%d' % os.getpid())\n  time.sleep(60)"
        gone: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        assert reaper.watch(start(code, pass_fds=(write,)), gone.set_result, leads_group=False)
        os.close(write)
        orphan = int(os.read(read, 20))
        os.close(read)
        assert (await asyncio.wait_for(gone, 20)).clean
        children = children_of_this_process()
        assert orphan in children
        loop = asyncio.get_running_loop()
        # It gets its time to turn out to be known; so does a launcher of jails that tests before this one started.
        assert reaper.sweep(loop.time()) == len(set(children))
        os.kill(orphan, 0)
        for _ in range(500):
            if not reaper.sweep(loop.time(), patience=0.0):
                break
            await asyncio.sleep(0.01)
        assert orphan not in children_of_this_process()
        assert not Path(f"/proc/{orphan}").exists()
    finally:
        reaper.stop()
        startup._prctl(startup._PR_SET_CHILD_SUBREAPER, 0)


async def test_only_children_of_ours_are_watched() -> None:
    reaper = Reaper(asyncio.get_running_loop())
    assert reaper.watch(os.getppid(), lambda seen: None, leads_group=False) is None
    for pid in (2**22 - 1, 0, -1, 2**40):
        assert reaper.watch(pid, lambda seen: None, leads_group=False) is None


# --- locks and runtime directory


def test_one_kernel_at_a_time(short_tmp: Path) -> None:
    state_dir = str(short_tmp / "state")
    locks = lock.lock(state_dir)
    with pytest.raises(GoondanError, match="E_KERNEL_RUNNING"):
        lock.lock(state_dir)
    assert lock.is_quiet(locks)
    locks.close()
    lock.lock(state_dir).close()


def test_a_lock_whose_state_was_deleted_means_nothing(short_tmp: Path) -> None:
    state_dir = str(short_tmp / "state")
    locks = lock.lock(state_dir)
    shutil.rmtree(state_dir)
    again = lock.lock(state_dir)  # it would be another state
    again.close()
    locks.close()


def enter(state_dir: str, base: Path, run_dir: Path | None = None) -> Premises:
    return Premises.enter("/b", state_dir, str(run_dir) if run_dir else None, base=str(base))


def test_a_kernel_takes_away_what_it_has_made(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    state_dir = str(short_tmp / "state")
    premises = enter(state_dir, short_tmp)
    assert premises.run_dir.startswith(f"{short_tmp}/goondan-{os.geteuid()}/")
    record = lock.read_record(state_dir)
    assert record is not None and (record.pid, record.run_dir) == (os.getpid(), premises.run_dir)
    assert premises.is_quiet()
    Path(premises.run_dir, "agents.sock").touch()
    premises.settle()
    assert os.listdir(premises.run_dir) == []
    premises.write("client.token", b"t")
    assert Path(premises.run_dir, "client.token").stat().st_mode & 0o777 == 0o600
    premises.leave()
    assert sorted(os.listdir(short_tmp)) == ["state"]
    assert sorted(os.listdir(f"{state_dir}/kernel")) == ["alive", "lock"]
    assert lock.read_record(state_dir) is None


def test_without_room_for_the_record_it_is_one_error_and_nothing_is_held(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    state_dir = str(short_tmp / "state")
    with monkeypatch.context() as full:
        full.setattr(lock, "write_record", write)
        with pytest.raises(GoondanError, match="No space left"):
            enter(state_dir, short_tmp)
    enter(state_dir, short_tmp).leave()


def test_what_ran_beside_a_kernel_and_has_ended_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "offered", lambda: {"serve": "a door"})
    with subprocess.Popen(["sleep", "60"]) as process:
        stat = Path(f"/proc/{process.pid}/stat")
        began = int(stat.read_text().rpartition(")")[2].split()[19])
        record = beside.Beside("serve", process.pid, began, "here", "2026-01-01T00:00:00.000Z")
        (tmp_path / "beside-serve.json").write_bytes(msgspec.json.encode(record))
        assert beside.running(str(tmp_path)) == [record]
        process.kill()
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
        assert beside.running(str(tmp_path)) == [], "nobody has asked yet how it ended"


def test_what_is_not_the_kernels_stays_in_a_directory_that_was_named_by_hand(short_tmp: Path) -> None:
    (short_tmp / "mine").mkdir(mode=0o700)
    (short_tmp / "mine/notes").write_text("dear diary")
    premises = enter(str(short_tmp / "state"), short_tmp, short_tmp / "mine")
    assert premises.is_quiet()
    premises.settle()
    premises.leave()
    assert (short_tmp / "mine/notes").read_text() == "dear diary"


def test_two_kernels_do_not_share_a_runtime_directory(short_tmp: Path) -> None:
    enter(str(short_tmp / "one"), short_tmp, short_tmp / "r")
    with pytest.raises(GoondanError, match="E_RUN_DIR"):
        enter(str(short_tmp / "two"), short_tmp, short_tmp / "r")
    lock.lock(str(short_tmp / "two")).close()  # a start that failed holds nothing


def test_a_start_waits_for_whoever_inherited_the_lock(short_tmp: Path) -> None:
    """And what the killed kernel had made is cleared then, wherever it was."""
    state_dir = str(short_tmp / "state")
    hold = f"""
import os, subprocess
from goondan.kernel.premises import Premises
premises = Premises.enter("/b", {state_dir!r}, {str(short_tmp / "r1")!r})
assert premises.is_quiet()
premises.settle()
premises.write("client.token", b"t")
subprocess.Popen(["sleep", "60"], pass_fds=[premises.alive_fd])
os.kill(os.getpid(), 9)
"""
    kernel = subprocess.Popen([PYTHON, "-c", hold], cwd=ROOT, start_new_session=True)
    assert kernel.wait(timeout=30) == -9
    assert not lock.is_held(state_dir)
    later = enter(state_dir, short_tmp, short_tmp / "r2")  # the kernel is gone, but not its last process
    assert not later.is_quiet()
    later.leave()
    record = lock.read_record(state_dir)
    assert record is not None and record.leftovers == [str(short_tmp / "r1")]
    assert not lock.clear_after_death(state_dir, 0.05)
    os.killpg(kernel.pid, signal.SIGKILL)
    assert lock.clear_after_death(state_dir)
    assert not (short_tmp / "r1").exists() and not (short_tmp / "r2").exists()
    assert lock.read_record(state_dir) is None


def test_a_runtime_directory_that_is_not_ours_alone_is_refused(short_tmp: Path) -> None:
    open_to_others, link, file = short_tmp / "open", short_tmp / "link", short_tmp / "file"
    open_to_others.mkdir()
    open_to_others.chmod(0o750)
    link.symlink_to(open_to_others)
    file.touch(0o600)
    below_a_public_one = short_tmp / "public" / "mine"
    below_a_public_one.mkdir(parents=True, mode=0o700)
    (short_tmp / "public").chmod(0o777)
    for path in (open_to_others, link, file, below_a_public_one, short_tmp / ("x" * 100)):
        with pytest.raises(GoondanError, match="E_RUN_DIR"):
            enter(str(short_tmp / "state"), short_tmp, path)
    assert not (short_tmp / ("x" * 100)).exists()


@pytest.mark.parametrize("squat", ["file", "open", "link"])
def test_a_squatted_place_is_left_for_a_fresh_one(short_tmp: Path, monkeypatch: pytest.MonkeyPatch, squat: str) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    usual = short_tmp / f"goondan-{os.geteuid()}"
    short_tmp.chmod(0o1777)
    if squat == "file":
        usual.touch()
    elif squat == "open":
        usual.mkdir()
        usual.chmod(0o777)
    else:
        usual.symlink_to("/")
    state_dir = str(short_tmp / "state")
    premises = enter(state_dir, short_tmp)
    assert premises.run_dir.startswith(f"{usual}-")
    assert str(usual) in premises.unused[0]
    record = lock.read_record(state_dir)
    assert record is not None and record.run_dir == premises.run_dir
    assert premises.is_quiet()
    premises.settle()
    premises.leave()
    assert sorted(os.listdir(short_tmp)) == [usual.name, "state"]


def test_the_state_holds_the_sockets_where_nothing_else_can(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    (short_tmp / "base").mkdir()
    (short_tmp / "base").chmod(0o777)
    premises = enter(str(short_tmp / "state"), short_tmp / "base")
    assert premises.run_dir == f"{short_tmp}/state/run"
    assert os.listdir(short_tmp / "base") == []
    long = short_tmp / ("x" * 90)
    with pytest.raises(GoondanError, match="E_RUN_DIR"):
        enter(str(long), short_tmp / "base")


def test_a_lost_runtime_directory_is_made_again(short_tmp: Path) -> None:
    premises = enter(str(short_tmp / "state"), short_tmp, short_tmp / "r")
    shutil.rmtree(short_tmp / "r")
    assert not premises.is_intact()
    premises.restore()
    premises.write("client.token", b"t")
    assert os.listdir(short_tmp / "r") == ["client.token"]
    shutil.rmtree(short_tmp / "r")
    (short_tmp / "r").symlink_to("/")
    with pytest.raises(GoondanError, match="E_RUN_DIR"):
        premises.restore()


async def test_workers_that_the_tool_host_reports() -> None:
    workers = Workers(asyncio.get_running_loop())
    read, write = os.pipe()
    workers.listen(read)
    os.write(write, b'{"op":"start","pid":7,"tool":"bash","agent":"a","instanceKey":"k","since":"2026-11-21"}\n')
    os.write(write, b'garbage\n{"op":"start"}\n{"op":"exit","pid":8}\n{"op":"start","pid":9,"tool":"x"}\n{"op":"ex')
    for _ in range(100):
        await asyncio.sleep(0.001)
    assert [(row.role, row.pid, row.name, row.instance_key) for row in workers.processes()] == [
        ("worker", 7, "bash", "k"),
        ("worker", 9, "x", None),
    ]
    os.write(write, b'it","pid":7,"cause":"idle"}\n')
    for _ in range(100):
        await asyncio.sleep(0.001)
    assert [row.pid for row in workers.processes()] == [9]
    # An MCP server says how it is, and is remembered when it has ended.
    server = '{"server":"s","extension":"e","transport":"stdio","state":"STATE","calls":2}'
    line = '{"op":"server","pid":5,"tool":"s","instanceKey":"k","server":' + server + "}\n"
    os.write(write, line.replace("STATE", "connected").encode())
    for _ in range(100):
        await asyncio.sleep(0.001)
    assert [(row.role, row.pid, row.status) for row in workers.processes()][1:] == [("mcp", 5, "connected")]
    os.write(write, line.replace("STATE", "ended").encode())
    for _ in range(100):
        await asyncio.sleep(0.001)
    assert [row.role for row in workers.processes()] == ["worker"]
    assert [(news.tool, news.server and news.server.calls) for news in workers.servers()] == [("s", 2)]
    os.close(write)
    for _ in range(100):
        await asyncio.sleep(0.001)
    assert workers.processes() == []


def test_what_was_inherited_by_accident_is_closed() -> None:
    read, write = os.pipe()
    kept, keep = os.pipe()
    closing = "from goondan.kernel.spawn import close_unknown_descriptors as c"
    code = f"{closing}; c([{keep}]); import os; os.write({keep}, b'k')"
    child = subprocess.Popen(
        [PYTHON, "-c", code + "; import time; time.sleep(60)"],
        pass_fds=[write, keep],
        cwd=Path(__file__).parents[2],
    )
    os.close(write)
    os.close(keep)
    try:
        assert os.read(kept, 1) == b"k"
        assert os.read(read, 1) == b""  # the child lives and does not hold it
        assert child.poll() is None
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        os.close(read)
        os.close(kept)
    wait_until(lambda: child.poll() is not None)
