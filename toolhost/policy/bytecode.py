"""Compiled forms of what is ours inside jails. A jail cannot write them, and compiling takes 30 ms of a cold start.

Installers compile what they install; a checkout is compiled here, the first time a tool host runs from it. Only our own
sources: a hostile one could hurt the compiler, so the modules of tools are compiled in their jails.
"""

from __future__ import annotations

import importlib.util
import os
import py_compile
import sys
from collections.abc import Iterable
from contextlib import suppress


def compile_sources(folders: Iterable[str]) -> None:
    """Write the missing and outdated ones beside their sources. Where that is not allowed, jails only start slower."""
    for folder in folders:
        for place, names, files in os.walk(folder):
            names[:] = [name for name in names if name != "__pycache__"]
            for name in files:
                if name.endswith(".py"):
                    _compile(place, name)


def _compile(place: str, name: str) -> None:
    source = f"{place}/{name}"
    # Jails ignore PYTHONPYCACHEPREFIX, so the place is this one whatever our own environment says.
    compiled = f"{place}/__pycache__/{name.removesuffix('.py')}.{sys.implementation.cache_tag}.pyc"
    with suppress(OSError, py_compile.PyCompileError):
        if not is_current(compiled, source):
            py_compile.compile(
                source, cfile=compiled, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP
            )


def is_current(compiled: str, source: str) -> bool:
    """Whether the interpreter would take the compiled form. Raises OSError when there is no source."""
    status = os.stat(source)
    try:
        with open(compiled, "rb") as opened:
            header = opened.read(16)
    except OSError:
        return False
    if header[:4] != importlib.util.MAGIC_NUMBER:
        return False
    if header[4:8] != bytes(4):
        return True  # bound to the source by a hash, which the installer has checked
    stamps = (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
    return header[8:] == b"".join(stamp.to_bytes(4, "little") for stamp in stamps)
