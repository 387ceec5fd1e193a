"""Installations of other kinds than `make setup` makes, from links: nothing is fetched or built."""

from __future__ import annotations

import sys
from pathlib import Path

from goondan.kernel.import_path import NEEDED

ROOT = Path(__file__).parents[2]
#: The interpreter that .venv was made of.
BASE = getattr(sys, "_base_executable", sys.executable)
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"


def site_packages(place: Path) -> Path:
    """A folder with what an installation for one user, or into one folder, has: our packages, and what they need."""
    place.mkdir(parents=True)
    for module in {*NEEDED, "_yaml"}:
        for folder in sys.path:
            for name in (module, f"{module}.py", f"{module.replace('_', '-')}.libs", f"{module}.libs", "pyzmq.libs"):
                if folder.endswith("-packages") and (Path(folder) / name).exists() and not (place / name).exists():
                    (place / name).symlink_to(Path(folder) / name)
    (place / "goondan").symlink_to(ROOT / "goondan")
    return place


def environment(place: Path) -> tuple[Path, Path]:
    """A virtual environment: its interpreter, and its site-packages, in which files can be replaced."""
    packages = site_packages(place / "lib" / VERSION / "site-packages")
    (place / "pyvenv.cfg").write_text(f"home = {Path(BASE).parent}\ninclude-system-site-packages = false\n")
    python = place / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(BASE)
    return python, packages
