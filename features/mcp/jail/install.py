"""A tool of the kernel's own that `gdn mcp add` runs in a jail: npm or pip install one package into one folder.

It is copied into a bundle of its own, and runs with the standard library alone. No code of the package runs: npm runs
no scripts, pip takes wheels only. What the network needs beside the registry's names (certificates, another address)
comes as arguments.
"""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: So much of what an installer printed is in an error (characters).
SHOWN = 2000
#: How much of a request's head the way to the registry reads (bytes).
HEAD = 8192


def run(ctx: Any, input: dict[str, Any]) -> dict[str, Any]:
    """Install `packages` (names and versions as the installer reads them) into `folder`. The first as it is there."""
    with way(input["via"]) as proxy:
        return _npm(input, proxy) if input["registry"] == "npm" else _pypi(input, proxy)


handlers = {"run": run}


# --- npm


def _npm(input: dict[str, Any], proxy: str | None) -> dict[str, Any]:
    folder, settings = Path(input["folder"]), dict(input["settings"])
    if proxy is not None:
        settings |= {"https-proxy": proxy, "proxy": proxy}
    settings |= {"fetch-retries": "2", "fetch-retry-mintimeout": "500", "fetch-retry-maxtimeout": "2000"}
    config = Path("/tmp/npmrc")
    config.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    words = [*input["installer"], "install", "--ignore-scripts", "--save-exact", "--no-audit", "--no-fund"]
    words += ["--no-update-notifier", "--userconfig", str(config), "--globalconfig", "/dev/null", "--cache", "/tmp/npm"]
    _installed([*words, "--prefix", str(folder), "--", *input["packages"]], input["certificates"])
    lock = json.loads((folder / "package-lock.json").read_text())["packages"]
    inside = f"node_modules/{input['name']}"
    told = json.loads((folder / inside / "package.json").read_text())
    programs = told.get("bin", {})
    if isinstance(programs, str):
        programs = {input["name"].rpartition("/")[2]: programs}
    return {
        "version": str(lock[inside]["version"]),
        "programs": {str(name): f"{inside}/{os.path.normpath(path)}" for name, path in programs.items()},
        "packages": sum(1 for name in lock if name),
        "scripts": sorted(
            name.rpartition("node_modules/")[2] for name, one in lock.items() if one.get("hasInstallScript")
        ),
    }


# --- pip


def _pypi(input: dict[str, Any], proxy: str | None) -> dict[str, Any]:
    folder = Path(input["folder"])
    environment = folder / "venv"
    _installed([*input["installer"], "-m", "venv", "--copies", "--without-pip", str(environment)], None)
    parser = configparser.RawConfigParser()
    parser["global"] = {**input["settings"], **({"proxy": proxy} if proxy is not None else {})}
    with open("/tmp/pip.conf", "w") as config:
        parser.write(config)
    python = str(environment / "bin" / "python")
    words = [*input["installer"], "-m", "pip", "--python", python, "install", "--only-binary", ":all:", "--no-input"]
    words += [
        "--disable-pip-version-check",
        "--no-cache-dir",
        "--retries",
        "2",
        "--report",
        "/tmp/report.json",
        "--",
        *input["packages"],
    ]
    _installed(words, input["certificates"], PIP_CONFIG_FILE="/tmp/pip.conf")
    told = json.loads(Path("/tmp/report.json").read_text())["install"]
    pins = []
    version = ""
    for one in told:
        digest = one.get("download_info", {}).get("archive_info", {}).get("hashes", {}).get("sha256", "")
        name = one["metadata"]["name"]
        pins.append(f"{name}=={one['metadata']['version']}" + (f" --hash=sha256:{digest}" if digest else ""))
        if one.get("requested") and name.lower().replace("_", "-") == input["name"].lower().replace("_", "-"):
            version = one["metadata"]["version"]
    (folder / "requirements.txt").write_text("".join(f"{pin}\n" for pin in sorted(pins, key=str.lower)))
    return {"version": version, "programs": _scripts(environment, input["name"]), "packages": len(pins), "scripts": []}


def _scripts(environment: Path, package: str) -> dict[str, str]:
    """The programs that the package's metadata names, which are in the environment's bin."""
    plain = package.lower().replace("-", "_").replace(".", "_")
    found: dict[str, str] = {}
    for info in environment.glob("lib/python*/site-packages/*.dist-info"):
        if info.name.lower().partition("-")[0].replace(".", "_") != plain:
            continue
        parser = configparser.RawConfigParser(delimiters=("=",))
        parser.optionxform = str  # type: ignore[assignment]
        with contextlib.suppress(OSError, configparser.Error):
            parser.read_string((info / "entry_points.txt").read_text())
        for name in parser["console_scripts"] if parser.has_section("console_scripts") else ():
            if (environment / "bin" / name).is_file():
                found[name] = f"venv/bin/{name}"
    return found


def _installed(words: list[str], certificates: str | None, **more: str) -> None:
    """Run an installer to its end. Raises RuntimeError with what it said."""
    environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": "/tmp", "LANG": "C.UTF-8", **more}
    if certificates is not None:
        environment |= {"NODE_EXTRA_CA_CERTS": certificates, "SSL_CERT_FILE": certificates}
    done = subprocess.run(
        words, env=environment, cwd="/tmp", stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stderr.strip() or done.stdout.strip()).splitlines()]
        wrong = [line for line in lines if line.lower().startswith(("error", "npm err"))] or lines
        said = "; ".join(wrong)[:SHOWN]
        raise RuntimeError(f"{os.path.basename(words[0])} ended with {done.returncode}: {said}")


# --- a registry whose name leads to an address of this machine or network


@contextlib.contextmanager
def way(via: dict[str, str]) -> Iterator[str | None]:
    """The URL of an HTTP proxy of our own that carries `HOST:PORT` to `ADDRESS:PORT`; None: there is nothing to carry.

    A jail reaches a granted name only at the addresses that such a name may have. A registry behind an address of this
    machine or of its own network is granted by the address, and installers know names.
    """
    if not via:
        yield None
        return
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=_listen, args=(listening, via), daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def _listen(listening: socket.socket, via: dict[str, str]) -> None:
    while True:
        try:
            stream, _ = listening.accept()
        except OSError:
            return
        threading.Thread(target=_carry, args=(stream, via), daemon=True).start()


def _carry(stream: socket.socket, via: dict[str, str]) -> None:
    with stream, contextlib.suppress(OSError, ValueError):
        head = b""
        while b"\r\n\r\n" not in head and len(head) < HEAD:
            chunk = stream.recv(4096)
            if not chunk:
                return
            head += chunk
        method, target = head.split(b" ", 2)[:2]
        asked = target.decode("ascii")
        if method != b"CONNECT":  # plain HTTP: the whole request goes on as it is
            asked = asked.split("//", 1)[1].split("/", 1)[0]
            asked = asked if ":" in asked else f"{asked}:80"
        host, _, port = via.get(asked, asked).rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=60) as other:
            if method == b"CONNECT":
                stream.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            else:
                other.sendall(head)
            _both_ways(stream, other)


def _both_ways(one: socket.socket, other: socket.socket) -> None:
    while True:
        for ready in select.select([one, other], [], [])[0]:
            chunk = ready.recv(65536)
            if not chunk:
                return
            (other if ready is one else one).sendall(chunk)


if __name__ == "__main__":
    print(json.dumps(run(None, json.load(sys.stdin))))
