"""What an MCP worker could do that a hostile server has taken over: compute, and speak on what it was given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.containment.ordinary_user import ROOT

#: The template's walls and its loop, with a worker that tries what somebody would who has taken it over.
PROGRAM = r"""
import json, os, socket, sys
sys.path.insert(0, sys.argv[1])
import ctypes, errno, resource, signal, subprocess, threading
from goondan.toolhost.inside.confine import Filter
from goondan.features.mcp.jail import template
from goondan.toolhost.lookup.this_host import machine
from goondan.toolhost.policy.seccomp import NUMBERS
from goondan.toolhost.policy.seccomp import own_program

first = os.getpid()
prctl, PR_SET_PDEATHSIG = NUMBERS[machine()]["prctl"], 1
secret, user = sys.argv[2], int(sys.argv[3])
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(1, 9, 0, 0, 0)  # whatever the system needs for a first call

def attempt(action):
    try: return f"done: {action()}"
    except OSError as error: return errno.errorcode.get(error.errno, str(error))
    except MemoryError: return "MemoryError"

def system(number, *arguments):
    if libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)) < 0:
        raise OSError(ctypes.get_errno(), "")
    return "it"

def tries(parent):
    names = ("ptrace", "io_uring_setup", "pidfd_open", "kill", "process_vm_readv", "setns")
    numbers = {name: NUMBERS[machine()][name] for name in names}
    found = {name: attempt(lambda: system(number, parent, 0)) for name, number in numbers.items()}
    found |= {
        "read": attempt(lambda: open(secret).read()),
        "list": attempt(lambda: os.listdir("/")),
        "write": attempt(lambda: open("/tmp/gdn-worker-wrote", "w")),
        "tcp": attempt(lambda: socket.socket()), "unix": attempt(lambda: socket.socket(socket.AF_UNIX)),
        "fork": attempt(os.fork), "exec": attempt(lambda: os.execv("/bin/true", ["true"])),
        "other": attempt(lambda: open(f"/proc/{parent}/environ", "rb").read()),
        "memory": attempt(lambda: len(bytearray(600 << 20))),
        "user": [os.getuid(), os.geteuid()],
        "dumpable": attempt(lambda: open("/proc/self/mem", "rb")),
        "alive": attempt(lambda: system(prctl, PR_SET_PDEATHSIG, 0)),  # not to be killed with the template
    }
    return found

def become(channel, server, connector):
    channel.sendall(json.dumps(tries(first)).encode())
    return 0

ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
fd = os.memfd_create("filter")
os.write(fd, own_program("template", machine())); os.lseek(fd, 0, 0)
of_worker = Filter(own_program("worker", machine()))
pid = os.fork()
if pid == 0:
    ours.close()
    template.confine(fd, user or None)
    os._exit(template.serve(theirs, of_worker, become))
theirs.close()
channel, its = socket.socketpair()
socket.send_fds(ours, [json.dumps({"ends": ["channel", "output"]}).encode()], [its.fileno(), 2])
its.close()
told, fds, _, _ = socket.recv_fds(ours, 4096, 1)
data = b""
while chunk := channel.recv(65536): data += chunk
found = json.loads(data)
found["forked"] = sorted(json.loads(told))
ours.close()
found["template"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(json.dumps(found))
"""


def test_a_worker_that_was_taken_over_gets_nowhere(short_tmp: Path) -> None:
    secret = short_tmp / "secret"
    secret.write_text("secret")
    secret.chmod(0o644)
    short_tmp.chmod(0o755)
    user = 0 if os.geteuid() else 65533
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ROOT), str(secret), str(user)], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    for name in ("ptrace", "io_uring_setup", "pidfd_open", "kill", "process_vm_readv", "setns"):
        assert found[name] == "ENOSYS", name
    for name in ("read", "list", "write", "other", "dumpable"):
        assert found[name] in ("EACCES", "EPERM"), (name, found[name])
    for name in ("tcp", "unix", "fork"):
        assert found[name] == "EPERM", (name, found[name])
    assert found["exec"] in ("ENOSYS", "EPERM")
    assert found["alive"] == "EPERM"
    assert found["memory"] == "MemoryError"
    assert found["user"] == [user or os.geteuid()] * 2
    assert (found["forked"], found["template"]) == (["pid"], 0)
