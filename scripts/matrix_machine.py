"""The machine of somebody who uses it: what `lived_in` adds to a setup of `make test-matrix`, and takes away again.

Two accounts with ranges for their containers, in a copy of /etc that only this process and its children see; a locale
and a time zone of elsewhere; a proxy that everything but loopback is reached by; umask 077; three busy processes.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

#: Two accounts, as `useradd` writes them: passwd, group, and 65,536 numbers each for containers.
ACCOUNTS: Final = {"alice": (20_001, 100_000), "bob": (20_002, 165_536)}
#: Where nobody who wrote this lives; the locale is made here where it can be, and else one that is not installed.
_LOCALE: Final = ("tr_TR", "Asia/Kathmandu")
_BUSY: Final = 3
_NEWNS, _BIND, _PRIVATE, _REC = 0x20000, 0x1000, 0x40000, 0x4000
_READ: Final = 1 << 16


@contextmanager
def lived_in(folder: Path) -> Iterator[dict[str, str]]:
    """Be on such a machine; the variables that its logins have. Needs root. `folder` is for what is made."""
    folder.mkdir()
    folder.chmod(0o755)
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/self/ns/mnt", os.O_RDONLY)
    umask = os.umask(0o022)
    started: list[subprocess.Popen[bytes]] = []
    try:
        etc = folder / "etc"
        shutil.copytree("/etc", etc, symlinks=True, ignore_dangling_symlinks=True)
        _add_accounts(etc)
        _do(libc.unshare(_NEWNS))
        _do(libc.mount(None, b"/", None, _PRIVATE | _REC, None))
        _do(libc.mount(os.fsencode(etc), b"/etc", None, _BIND, None))
        proxy = subprocess.Popen(
            [sys.executable, "-m", __name__], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]
        )
        started = [proxy, *(subprocess.Popen(["/bin/sh", "-c", "while :; do :; done"]) for _ in range(_BUSY))]
        assert proxy.stdout is not None
        environment = _login(folder, proxy.stdout.readline().decode().strip())
        os.umask(0o077)
        yield environment
    finally:
        for process in started:
            process.kill()
            process.wait()
        os.umask(umask)
        _do(libc.setns(before, _NEWNS))
        os.close(before)


def _do(failed: int) -> None:
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _add_accounts(etc: Path) -> None:
    for name, (number, first) in ACCOUNTS.items():
        for file, line in (
            ("passwd", f"{name}:x:{number}:{number}::/home/{name}:/bin/sh"),
            ("group", f"{name}:x:{number}:"),
            *((file, f"{name}:{first}:65536") for file in ("subuid", "subgid")),
        ):
            with (etc / file).open("a", encoding="utf-8") as text:
                text.write(line + "\n")


def _login(folder: Path, proxy: str) -> dict[str, str]:
    locale, zone = _LOCALE
    name = f"{locale}.UTF-8"
    with suppress(OSError):
        subprocess.run(["localedef", "-i", locale, "-f", "UTF-8", folder / name], check=False, capture_output=True)
    found = {"TZ": zone, "LC_ALL": name, "LANG": name, "LOCPATH": str(folder), "no_proxy": "localhost,127.0.0.1"}
    both = (variable for word in ("http_proxy", "https_proxy") for variable in (word, word.upper()))
    return found | dict.fromkeys(both, proxy)


async def _serve_proxy() -> None:
    """Pass connections on; what should not come by it (loopback, plain requests) is refused."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError, asyncio.IncompleteReadError):
            method, target, *_ = (await reader.readuntil(b"\r\n\r\n")).decode().split()
            host, _, port = target.rpartition(":")
            if method == "CONNECT" and host not in ("localhost", "127.0.0.1", "[::1]"):
                there, back = await asyncio.open_connection(host, int(port))
                writer.write(b"HTTP/1.1 200 Connected\r\n\r\n")
                await asyncio.gather(_pass_on(reader, back), _pass_on(there, writer))
            else:
                writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_READ):
            writer.write(data)
            await writer.drain()
    writer.close()


if __name__ == "__main__":
    asyncio.run(_serve_proxy())
