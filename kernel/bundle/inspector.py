"""The kernel's side of the program that inspects the modules of tools.

The kernel imports neither a tool's code nor the tool host. It starts `goondan.toolhost.inspection` once for all tools,
which loads each module in a jail. The answer is checked like all data from outside.

Source: docs/design/bundle.md section 5; toolhost/inspection/ has the other half.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final, Self

import msgspec

from goondan.kernel.paths import state_root
from goondan.kernel.spawn import command, environment
from goondan.schemas.bundle.launch import ToolSpec
from goondan.schemas.worker.tool_host_reports import InspectionAnswer, InspectionRequest, ModuleReport

#: How long one module may take to load (seconds): the import of a large library from a cold disk.
LOAD_TIMEOUT_S: Final = 5.0
#: How long the whole inspection may take (seconds). Modules are loaded side by side, and a machine may be busy.
INSPECTION_TIMEOUT_S: Final = 30.0
#: The longest answer of the program (bytes): it has only names of exports and short messages.
MAX_ANSWER: Final = 4 << 20
#: What is known about handlers, in the workspace's state.
CACHE_FILE: Final = "cache/handlers.json"


class Inspector:
    """The inspecting program. Started early it loads its own modules while documents are being checked.

    A context manager: the program is gone when it ends. `state_dir` None: nothing is remembered.
    """

    def __init__(self, state_dir: str | None) -> None:
        self.state_dir = state_dir
        self.cache = os.path.join(state_dir, CACHE_FILE) if state_dir is not None else None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            self._process.communicate()

    def start_early(self) -> None:
        """Start now, unless the reports are probably known already. Never raises."""
        if self.cache is None or not os.path.exists(self.cache):
            try:
                self._start()
            except OSError:
                self._process = None  # ask() tries again, and the caller says when nothing was checked

    def ask(self, tools: Sequence[ToolSpec], documents: Sequence[str], values: Mapping[str, str]) -> list[ModuleReport]:
        """Inspect the modules of `tools`. `documents` are the bundle's files, which no module sees.

        `values` are variables of the environment. A module gets those that its sandbox.env names.

        Call it once. The result is empty when there is no answer. Never raises.
        """
        request = InspectionRequest(
            tools=[*tools],
            state_dir=self.state_dir or state_root(),
            protected=[*documents],
            timeout_s=LOAD_TIMEOUT_S,
            values={**values},
        )
        try:
            process = self._process or self._start()
            data, _ = process.communicate(msgspec.json.encode(request), timeout=INSPECTION_TIMEOUT_S)
            if process.returncode == 0 and len(data) <= MAX_ANSWER:
                asked = {tool.name for tool in tools}
                answer = msgspec.json.decode(data, type=InspectionAnswer)
                return [finding for finding in answer.tools if finding.name in asked]
        except (OSError, subprocess.SubprocessError, msgspec.DecodeError):
            pass  # nothing was checked, and the caller says so
        return []

    def _start(self) -> subprocess.Popen[bytes]:
        # A session of its own, so that Ctrl-C reaches only this process. Processes that it starts end with it.
        # It talks to jails, so its environment has only values that a module gets.
        self._process = subprocess.Popen(
            command("goondan.toolhost.inspection", []),
            env=environment(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self._process
