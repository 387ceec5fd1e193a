"""`python -m scripts.freeze_client NAME [--client]`: keep what the protocol has as it is now.

It writes `tests/frozen/NAME`: the sequences of a client, and the names of all types and fields. With `--client` it also
keeps the client for Python. tests/process/test_minor_versions.py tries the kept client with the kernel as it becomes,
and the client as it becomes with a kernel that knows no more than the kept names.

Run it when the protocol changes before its minor is released, and with `--client` at the release. Until then the client
in `clients/python` is the client of that minor, and a copy would only repeat it.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any, Final

from scripts.export_schemas import frame_types

ROOT: Final = Path(__file__).resolve().parent.parent
FROZEN: Final = ROOT / "tests" / "frozen"
#: What a client sends and is sent.
STRUCTS: Final = ("AgentEvent", "Answer", "Credit", "ErrorPayload", "Hello", "RuntimeEvent", "Usage", "Wait", "Welcome")


def freeze(place: Path, *, client: bool) -> None:
    """Write everything into the folder `place`, in the stead of what is there. `client`: the package as well."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    if client:
        source = ROOT / "clients" / "python" / "goondan_client"
        shutil.copytree(source, place / "goondan_client", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "schemas" / "vectors" / "sequences.json", place / "sequences.json")
    (place / "names.json").write_text(json.dumps(names(), indent=1) + "\n", encoding="utf-8")


def names() -> dict[str, Any]:
    """The types of frames, and the fields of headers and payloads."""
    fields = {}
    for name, file in (("Frame", "frame"), *((name, "payloads") for name in STRUCTS)):
        schema = json.loads((ROOT / "schemas" / "json" / f"{file}.schema.json").read_text(encoding="utf-8"))
        fields[name] = sorted(schema["$defs"][name]["properties"])
    return {"types": sorted(frame_types()), "fields": fields}


if __name__ == "__main__":
    minor, *options = sys.argv[1:] or [""]
    if not minor.replace(".", "").isdecimal() or options not in ([], ["--client"]):
        sys.exit("usage: freeze_client.py MINOR [--client], for example 1.0")
    freeze(FROZEN / minor, client=bool(options))
