"""A program in Python that a test starts many times, forked from a process that has imported it.

To start an interpreter and to import a client takes 0.2 s of processor time, and a certificate starts one for each of
its hundred scenarios. Each run is a process of its own all the same, with the streams, the arguments and the
environment that it is given.

`forked(PATH)` gives the command to start. This file is both ends of it. `python -I program_forks.py FD PATH` is the
process that forks: FD is a listening socket, PATH the program. `python -I -S program_forks.py SOCKET [ARGUMENT …]` is
the command: it hands its streams over, waits, and ends with the program's exit status. When it is killed, the program
is killed.
"""

# The command imports no module that takes long: it is what is left of each start.
import _socket
import array
import marshal
import os
import sys

SOL_SOCKET, SCM_RIGHTS = _socket.SOL_SOCKET, _socket.SCM_RIGHTS
#: The longest request (bytes): arguments and environment.
MAX_REQUEST = 1 << 20


def command() -> int:
    """Have the program run. Returns its exit status, 128 and the number of the signal that ended it."""
    asking = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    asking.connect(sys.argv[1])
    request = marshal.dumps((sys.argv[2:], dict(os.environ)))
    asking.sendmsg([request], [(SOL_SOCKET, SCM_RIGHTS, array.array("i", [0, 1, 2]))])
    return int(asking.recv(16))


def serve(listening_fd: int, path: str) -> None:
    """Fork the program for each command, until whoever started this has closed its end of stdin."""
    import contextlib
    import gc
    import runpy
    import selectors
    import signal
    import socket

    os.environ["GOONDAN_RUN_DIR"] = "/nonexistent"  # a program may look for it while it is imported
    runpy.run_path(path, run_name="imported")
    gc.freeze()
    listening = socket.socket(fileno=listening_fd)
    looking = selectors.DefaultSelector()
    looking.register(0, selectors.EVENT_READ)
    looking.register(listening, selectors.EVENT_READ)

    def begin() -> None:
        asked, _ = listening.accept()
        request, streams, _, _ = socket.recv_fds(asked, MAX_REQUEST, 3)
        pid = os.fork()
        if not pid:
            os.setsid()
            for number, fd in enumerate(streams):
                os.dup2(fd, number)
            os.closerange(3, 1024)
            sys.argv[1:], environment = marshal.loads(request)
            os.environ.clear()
            os.environ.update(environment)
            try:
                runpy.run_path(path, run_name="__main__")
                status = 0
            except SystemExit as end:
                if isinstance(end.code, str):
                    print(end.code, file=sys.stderr)
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                status = 1
            sys.stdout.flush()
            os._exit(status)
        for fd in streams:
            os.close(fd)
        ended = os.pidfd_open(pid)
        looking.register(ended, selectors.EVENT_READ, (pid, ended, asked))
        looking.register(asked, selectors.EVENT_READ, (pid, ended, asked))

    def end(pid: int, ended: int, asked: socket.socket) -> None:
        os.kill(pid, signal.SIGKILL)  # it has ended, or nobody waits for it any more
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        looking.unregister(ended)
        looking.unregister(asked)
        os.close(ended)
        with contextlib.suppress(OSError):  # it was killed
            asked.send(str(status if status >= 0 else 128 - status).encode())
        asked.close()

    while True:
        for key, _ in looking.select():
            if key.fileobj == 0:
                return
            if key.fileobj is listening:
                begin()
            elif looking.get_map().get(key.fd) is key:  # not both of the two
                end(*key.data)


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        serve(int(sys.argv[1]), sys.argv[2])
    else:
        sys.exit(command())
