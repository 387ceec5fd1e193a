"""The page in a real browser: a swarm, its door, and a headless Chromium that does what a person would do.

`site` starts a swarm with its door. `Site.see` opens the page with a code, does some steps in JavaScript (puppeteer's;
driver.mjs says what they have), and returns what they return. What the page's policy has forbidden, requests to
elsewhere and errors of scripts are failures, whatever the steps were about.

Without a browser the tests are skipped, but not when `GOONDAN_PAGE_MUST` is set (`make test-page`).
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest

from tests.kernel_fixture import BUNDLE, Sandbox, sandbox
from tests.machine import FOUND
from tests.npm_fixture import beside, installed

SOURCES: Final = Path(__file__).parents[2] / "servers" / "browser"
#: How long a browser may take to unpack and start, and the steps of one test (seconds).
START_S: Final = 40.0
STEPS_S: Final = 50.0
#: All of the page is to be tried (`make test-page`): a missing browser is a failure.
MUST: Final = "GOONDAN_PAGE_MUST" in os.environ
WIDE, PHONE = (1280, 800), (360, 640)


class Chromium:
    """A browser for all tests of a process: it takes longer to start than most of them."""

    def __init__(self) -> None:
        folder = packages()
        unpacked = folder / "unpacked"  # the browser itself, once
        unpacked.mkdir(exist_ok=True)
        program = ["node", str(beside(folder, Path(__file__).with_name("driver.mjs")))]
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._process = subprocess.Popen(program, env={**FOUND, "TMPDIR": str(unpacked)}, text=True, **streams)
        #: The driver's process; those of the browser are below it.
        self.pid = self._process.pid
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.version = self._line(START_S)["version"]
        except AssertionError as error:
            missing(f"no browser starts here: {error}")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _line(self, patience_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=patience_s)
        except queue.Empty:
            line = ""
        if not line:
            self._process.kill()
            assert self._process.stderr is not None
            raise AssertionError(f"the browser says nothing: {self._process.stderr.read()[-2000:]}")
        told: dict[str, Any] = json.loads(line)
        return told

    def run(self, **asked: Any) -> dict[str, Any]:
        """Do the steps of one test (driver.mjs, `run`), and say what was seen."""
        self.tell(asked)
        seen: dict[str, Any] = self.heard()
        return seen

    def tell(self, value: Any) -> None:
        """A line for the driver: steps to do, or what steps that go on wait for (`it.told`)."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def heard(self) -> Any:
        """The next line of the driver: what steps say (`it.say`), or what was seen when they are done."""
        return self._line(STEPS_S)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()


def packages() -> Path:
    """The folder of npm's packages for these tests. Skips or fails the test where they cannot be had."""
    try:
        return installed(SOURCES)
    except pytest.skip.Exception as why:
        missing(str(why))


def missing(why: str) -> NoReturn:
    """Something that not every machine has is not here: skips the test, or fails it."""
    if MUST:
        pytest.fail(why)
    pytest.skip(why)


class Site:
    """A swarm with its page, in a browser."""

    def __init__(self, kernel: Sandbox, told: dict[str, Any], chromium: Chromium, end: Callable[[], str] = str) -> None:
        """`told` is what the door has said of itself; `end` ends it, and returns its log."""
        self.kernel = kernel
        self._end = end
        self.address: str = told["url"]
        #: The door's process.
        self.pid: int = told["pid"]
        self.token = Path(told["tokenFile"]).read_text().split()[0]
        self._chromium = chromium

    def ask(self, path: str, body: Any = None, token: str | None = None, **more: str) -> Any:
        """The door's answer, by the token of its file or another one: a document of JSON. `more`: headers."""
        connection = http.client.HTTPConnection(self.address.rpartition("/")[2], timeout=30)
        headers = {"Authorization": f"Bearer {token or self.token}", "Content-Type": "application/json", **more}
        content = None if body is None else json.dumps(body)
        try:
            connection.request("GET" if body is None else "POST", path, content, headers)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def code(self, kind: str = "look") -> str:
        """A code, as `gdn ui` gets one."""
        return str(self.ask("/page/api/codes", {"kind": kind})["code"])

    def streams(self) -> int:
        """How many live streams the door has given. Ends the door: then its log has all of them.

        The driver hears of a shared worker when it runs already, and may miss what that has asked for.
        """
        return self._end().count('"way":"/page/api/live"')

    def see(
        self,
        steps: str,
        route: str | None = None,
        *,
        size: tuple[int, int] = WIDE,
        dark: bool = False,
        anyway: bool = False,
        **args: Any,
    ) -> Any:
        """What the steps return. `route`: what stands behind the address, instead of a code. `args`: `it.args` of the
        steps. `anyway`: errors and what was forbidden are expected; the result is all that was seen (`value`, `errors`,
        `violations`, `requests`).
        """
        entered, route = route is None, f"#code={self.code()}" if route is None else route
        asked: dict[str, Any] = {"route": route, "steps": steps, "size": size, "dark": dark, "args": args}
        seen = self._chromium.run(address=f"{self.address}/page/", entered=entered, **asked)
        assert "failed" not in seen, f"{seen['failed']}\n{seen['value']}\n{seen['errors']}"
        if anyway:
            return seen
        assert seen["violations"] == [], "the policy of the page has forbidden something"
        origin = (f"{self.address}/", "data:", "blob:")
        assert [url for url in seen["requests"] if not url.startswith(origin)] == [], "nothing comes from elsewhere"
        assert seen["errors"] == []
        return seen["value"]


@contextmanager
def site(chromium: Chromium, bundle: str = BUNDLE, **extra_env: str) -> Iterator[Site]:
    """A swarm with this bundle, its door, and the page of it."""
    with sandbox(bundle, extra_env=extra_env) as kernel, door(kernel, chromium) as made:
        yield made


@contextmanager
def door(kernel: Sandbox, chromium: Chromium) -> Iterator[Site]:
    """The door of a swarm, which it starts, and the page of it."""
    log = kernel.home / "door.log"
    with log.open("wb") as stderr:
        process = kernel.popen("serve", "--port", "0", "--json", "--log", stderr=stderr)

    def end() -> str:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(30)
        return log.read_text()

    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()
        yield Site(kernel, json.loads(line), chromium, end)
    finally:
        end()
