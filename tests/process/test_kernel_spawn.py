"""Starting and ending real processes: descriptors, environment, readiness, the reaper, the locks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kernel import rundir, spawn
from kernel.reaping import Exit, Readiness, Reaper, children_of_this_process, describe_exit
from kernel.workers import Workers
from schemas import startup
from schemas.errors import GoondanError
from tests.kernel_fixture import wait_until

PYTHON = sys.executable


def start(code: str, *, pass_fds: tuple[int, ...] = (), output_fd: int | None = None, **env: str) -> int:
    argv = [PYTHON, "-I", "-c", code]
    return spawn.start_program(argv, env={"PATH": os.defpath, **env}, output_fd=output_fd, pass_fds=pass_fds)


def outcome(pid: int) -> str:
    return describe_exit(os.waitid(os.P_PID, pid, os.WEXITED)).cause


def test_a_program_has_only_what_it_was_given(tmp_path: Path) -> None:
    log = spawn.open_log(str(tmp_path / "log"))
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


def test_logs_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"a" * (spawn.MAX_LOG_BYTES + 1))
    os.close(spawn.open_log(str(path)))
    assert path.stat().st_size == 0
    with path.open("ab") as writer:
        writer.write(b"b" * (spawn.MAX_LOG_BYTES + 1))
        writer.flush()
        spawn.bound_log(str(path))
        writer.write(b"after\n")
    assert path.read_bytes() == b"after\n"
    assert (tmp_path / "x.log.1").read_bytes()[:1] == b"b"
    assert spawn.last_line(str(path)) == "after"
    assert spawn.last_line(str(tmp_path / "none")) == ""


async def test_ready_and_not_ready() -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    readiness = Readiness(loop, ready.set)
    pid = start(f"import os; os.write({readiness.write_fd}, b'\\n')", pass_fds=(readiness.write_fd,))
    readiness.handed_over()
    await asyncio.wait_for(ready.wait(), 10)
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
        assert (await asyncio.wait_for(ended, 10)).cause == "signal SIGKILL"
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
        assert (await asyncio.wait_for(gone, 10)).clean
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


# --- the runtime directory


def test_one_kernel_at_a_time(short_tmp: Path) -> None:
    run_dir = str(short_tmp / "goondan" / "d")
    locks = rundir.lock(run_dir)
    with pytest.raises(GoondanError, match="E_KERNEL_RUNNING"):
        rundir.lock(run_dir)
    assert rundir.is_quiet(locks)
    (short_tmp / "goondan" / "d" / "agents.sock").touch()
    rundir.sweep(run_dir)
    assert sorted(os.listdir(run_dir)) == ["alive", "lock"]
    rundir.remove(run_dir)
    assert not (short_tmp / "goondan").exists()
    again = rundir.lock(run_dir)  # the old lock's file is gone, and with it its meaning
    for fd in (locks.lock_fd, locks.alive_fd, again.lock_fd, again.alive_fd):
        os.close(fd)


def test_a_start_waits_for_whoever_inherited_the_lock(short_tmp: Path) -> None:
    run_dir = str(short_tmp / "d")
    locks = rundir.lock(run_dir)
    assert rundir.is_quiet(locks)
    child = subprocess.Popen([PYTHON, "-c", "import time; time.sleep(60)"], pass_fds=[locks.alive_fd])
    os.close(locks.lock_fd)
    os.close(locks.alive_fd)
    later = rundir.lock(run_dir)  # the kernel is gone, but not its last process
    assert not rundir.is_quiet(later)
    os.close(later.lock_fd)
    os.close(later.alive_fd)
    assert not rundir.clear_after_death(run_dir, 0.05)
    child.kill()
    child.wait()
    assert rundir.clear_after_death(run_dir)
    assert not os.path.exists(run_dir)


def test_a_directory_that_is_not_ours_alone_is_refused(short_tmp: Path) -> None:
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
            rundir.lock(str(path))


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
    os.close(write)
    for _ in range(100):
        await asyncio.sleep(0.001)
    assert workers.processes() == []


def test_what_was_inherited_by_accident_is_closed() -> None:
    read, write = os.pipe()
    kept, keep = os.pipe()
    code = f"from kernel.spawn import close_unknown_descriptors as c; c([{keep}]); import os; os.write({keep}, b'k')"
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
