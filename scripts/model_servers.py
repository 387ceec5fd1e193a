"""`make test-models`: whole turns against real model servers (tests/real_models), llama.cpp's and the proxy of LiteLLM;
and programs that use agents as models.

Everything is installed from PyPI into .cache/model-servers, by pip as this machine has it set up. What is there already
stays. The model is one of random numbers, written when the tests begin: no weights are fetched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".cache" / "model-servers"
#: The versions; docs/context.md lists those of servers. Each set has an environment of its own: their dependencies
#: differ.
PYPI: Final = {
    "llama-cpp": {"xllamacpp": "2026.10.11549", "gguf": "0.19.0"},
    "litellm": {"litellm[proxy]": "1.106.2"},
    "llm": {"llm": "0.36"},
}


def install() -> None:
    """Make the folder as PYPI says."""
    for name, versions in PYPI.items():
        folder, wanted = FOLDER / name, json.dumps(versions)
        stamp = folder / "installed.json"
        if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        venv.create(folder, with_pip=True, clear=True)
        pins = [f"{package}=={version}" for package, version in versions.items()]
        subprocess.run([folder / "bin/pip", "install", "--quiet", *pins], check=True)
        stamp.write_text(wanted, encoding="utf-8")


def main() -> int:
    """Install, and run the tests."""
    install()
    environment = {**os.environ, "GOONDAN_MODEL_SERVERS": str(FOLDER)}
    of_features = sorted(map(str, ROOT.glob("tests/features/*/process/test_programs_of_others.py")))
    tests = [sys.executable, "-m", "pytest", "-q", "tests/real_models", *of_features, *sys.argv[1:]]
    return subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
