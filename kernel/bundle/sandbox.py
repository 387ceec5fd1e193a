"""The sandbox requests of documents: whether anybody can grant them, and how the tool host is told. Pure.

Source: docs/design/bundle.md section 3; docs/design/sandbox.md section 1.
"""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from typing import Any

from goondan.kernel.bundle.lookup import Files
from goondan.kernel.bundle.problems import Path, Report
from goondan.kernel.bundle.shape import Document
from goondan.kernel.bundle.variables import VARIABLE_NAME
from goondan.schemas.bundle import launch, resources
from goondan.schemas.wire.blobs import MAX_OUTPUT_BYTES
from goondan.schemas.worker.hosts import MAX_RULES, BadHost, parse_rule, write_network
from goondan.schemas.worker.hosts import network as make_network


def check_sandbox(
    sandbox: resources.Sandbox | resources.SandboxPart, document: Document, at: Path, files: Files, report: Report
) -> None:
    """Report requests that nobody can grant: bad hosts and names, bad limits, a folder that is not a venv."""
    check = _Check(document, at, report)
    if isinstance(sandbox.network, resources.NetworkAllow):
        check.network(sandbox.network)
    check.env(sandbox)
    check.filesystem(sandbox.filesystem)
    check.limits(sandbox.limits)
    if sandbox.python is not None and sandbox.python.venv is not None:
        check.environment(sandbox.python.venv, files)


class _Check:
    """One sandbox of a document, part by part."""

    def __init__(self, document: Document, at: Path, report: Report) -> None:
        self._document = document
        self._at = at
        self._report = report

    def _wrong(self, path: Path, message: str, hint: str) -> None:
        self._report.error("E_CONFIG_INVALID_VALUE", message, self._document.place(*self._at, *path), hint)

    def _text(self, *path: str | int) -> str:
        return self._document.text(*self._at, *path)

    def network(self, network: resources.NetworkAllow) -> None:
        for index, host in enumerate(network.allow):
            try:
                parse_rule(to_ascii(host))
            except BadHost as error:
                path = ("network", "allow", index)
                hint = "Write for example api.example.com:443 or *.example.org:443."
                if host:
                    self._wrong(path, f"{self._text(*path)} is no host:port: {error}", hint)
        if len(network.allow) > MAX_RULES:
            hint = "Name fewer, or use *.example.org:443."
            self._wrong(("network", "allow"), f"there are more than {MAX_RULES} hosts", hint)

    def env(self, sandbox: resources.Sandbox | resources.SandboxPart) -> None:
        for index, name in enumerate(sandbox.env or []):
            if not VARIABLE_NAME.match(name):
                message = f"{self._text('env', index)} is no name of an environment variable"
                self._wrong(("env", index), message, "Write for example API_TOKEN.")
        if sandbox.isolation == "shared" and (sandbox.env or sandbox.permissions):
            what = "env" if sandbox.env else "permissions"
            self._wrong((what,), f"a shared jail has no {what}", "Use isolation: instance.")

    def filesystem(self, filesystem: launch.Filesystem | resources.FilesystemPart | None) -> None:
        for access in ("read", "write"):
            for index, path in enumerate(getattr(filesystem, access, None) or []):
                if not path or any(c < " " for c in path):
                    message = "the path is empty or holds control characters"
                    self._wrong(("filesystem", access, index), message, "Write a path.")

    def limits(self, limits: launch.Limits | resources.LimitsPart | None) -> None:
        names = zip(launch.Limits.__struct_fields__, launch.Limits.__struct_encode_fields__, strict=True)
        for attribute, key in names:
            value = getattr(limits, attribute, None)
            if value is not None and value < 1:
                self._wrong(("limits", key), "a limit is at least 1", "Write a positive number.")
            elif key == "outputMb" and value is not None and value > MAX_OUTPUT_BYTES >> 20:
                hint = "Write less, and let the tool write to a file in the workdir."
                self._wrong(("limits", key), f"an output has at most {MAX_OUTPUT_BYTES >> 20} MiB", hint)

    def environment(self, venv: str, files: Files) -> None:
        place = files.resolve(venv)
        if not files.is_environment(place):
            message = f"{self._text('python', 'venv')} is no virtual environment"
            hint = f"Make it: {sys.executable} -m venv {shlex.quote(place)}, and install what the tool needs."
            self._wrong(("python", "venv"), message, hint)


def to_ascii(host: str) -> str:
    """A rule with its name as the network knows it (`xn--…`). Raises BadHost for what has no such form."""
    if host.isascii():
        return host
    import idna  # 4 ms, and hardly any bundle needs it

    name, colon, port = host.rpartition(":")
    pattern = name.startswith("*.")
    try:
        encoded = idna.encode(name.removeprefix("*."), uts46=True, transitional=False).decode()
    except idna.IDNAError:
        raise BadHost("its name has no form in ASCII") from None
    return f"{'*.' if pattern else ''}{encoded}{colon}{port}"


def resolve_network(network: Any) -> Any:
    """A manifest's network as launch specifications write it; what is no rule has been reported and is left out."""
    if not isinstance(network, resources.NetworkAllow):
        return network
    rules = []
    for host in network.allow:
        with suppress(BadHost):
            rules.append(parse_rule(to_ascii(host)))
    return write_network(make_network(rules))


def resolve_sandbox(asked: resources.Sandbox, files: Files) -> launch.SandboxSpec:
    """What a document asks for as the tool host gets it."""
    venv = asked.python.venv
    return launch.SandboxSpec(
        isolation=asked.isolation,
        network=resolve_network(asked.network),
        filesystem=launch.Filesystem(
            read=[files.resolve(path) for path in asked.filesystem.read],
            write=[files.resolve(path) for path in asked.filesystem.write],
        ),
        env=asked.env,
        permissions=asked.permissions,
        python=launch.PythonSpec(venv=None if venv is None else files.resolve(venv)),
        limits=asked.limits,
        min_tier=asked.min_tier,
    )
