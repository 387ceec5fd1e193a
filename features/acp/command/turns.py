"""A prompt: its folder, its message, what is told while the turn runs, and what a person is asked meanwhile.

Tools work in the editor's folder only after a yes, which is asked once for each folder of a bundle. Without one they
work in the folder of the instance.

Live events wait in a bounded queue. What a slow client makes of them to wait for is dropped, and comes from the stored
messages and the answer instead.

Source: docs/grants.md; docs/approvals.md; https://agentclientprotocol.com/protocol/prompt-turn.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final

import acp
from acp.connection import Connection

from goondan.features.acp.command import records
from goondan.features.acp.command.rules import prompts, updates
from goondan.features.acp.command.swarm import Swarm
from goondan.kernel.cli.console.questions import Questions, Waiting
from goondan.kernel.cli.one_message import Message
from goondan.kernel.cli.rules.plain import one_line
from goondan.kernel.cli.session import CANCEL_S, OpenFile, Session
from goondan.kernel.cli.state import absolute_workdir
from goondan.schemas.bundle.address import instance_dir
from goondan.schemas.wire import blobs
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import Answer, FilePart
from goondan.schemas.wire.runtime_events import RuntimeEvent
from goondan.schemas.worker.grantable import within

#: The most live events that wait for the client. An agent sends some thirty a second.
MAX_WAITING: Final = 1024
#: The longest title of a session (characters).
MAX_TITLE: Final = 80
_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | os.O_NOFOLLOW
#: The answers to whether tools may work in a folder: id, words, kind of the protocol.
_FOLDER_ANSWERS: Final = (
    ("always", "Yes, and remember it for this folder", "allow_always"),
    ("once", "Yes, in this session", "allow_once"),
    ("no", "No, in this session", "reject_once"),
    ("never", "No, and remember it for this folder", "reject_always"),
)
_CALL_ANSWERS: Final = (("yes", "Allow this call", "allow_once"), ("no", "Deny it", "reject_once"))


class Conversation:
    """A session that is open: an instance, and the agent that answers in it now."""

    def __init__(self, session_id: str, agent: str, cwd: str) -> None:
        #: Its id.
        self.id = session_id
        #: The key of its instance.
        self.key = prompts.session_of(session_id)[1]
        #: The agent that answers.
        self.agent = agent
        #: The editor's folder.
        self.cwd = cwd
        #: Whether tools work there. None: nobody was asked yet.
        self.granted: bool | None = None
        #: What the client is told with the next prompt.
        self.notes: list[str] = []
        #: The prompt that is worked on.
        self.turn: Turn | None = None


class Turn:
    """One prompt of a session."""

    def __init__(self, conversation: Conversation, swarm: Swarm, client: Connection, state_dir: str) -> None:
        self._conversation = conversation
        self._swarm = swarm
        self._client = client
        self._state_dir = state_dir
        self._agent = conversation.agent
        self._session: Session | None = None
        #: The id of its event, once it was sent.
        self._event_id: str | None = None
        self._cancelled = asyncio.Event()
        self._over = asyncio.Event()
        self._news: asyncio.Queue[RuntimeEvent] = asyncio.Queue(MAX_WAITING)
        #: What the client was asked, by the names of the questions.
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def run(self, blocks: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Send the prompt and tell the client of the turn. Returns the result. Raises GoondanError."""
        try:
            self._session = session = await self._swarm.session()
            workdir = await self._until_cancelled(self._workdir())
            if workdir is None:
                return {"stopReason": "cancelled"}
            answer = await self._turn(session, blocks, workdir)
        finally:
            self._over.set()
            for task in self._asking.values():
                task.cancel()
        reason = "cancelled" if self._cancelled.is_set() else updates.stop_reason(answer)
        if reason is None:
            raise GoondanError(answer.error) if answer.error is not None else fail("E_AGENT_FAILED", "the turn failed")
        usage = updates.usage_of(answer.usage)
        return {"stopReason": reason} if usage is None else {"stopReason": reason, "usage": usage}

    async def cancel(self) -> None:
        """End the turn. Returns when it has ended, or nobody knows."""
        self._cancelled.set()
        if self._session is not None and self._event_id is not None:
            with suppress(GoondanError):  # it has just ended, or the prompt gets the error
                await self._session.cancel(self._event_id, CANCEL_S)

    async def leave(self, asked: Questions) -> None:
        """The client has gone: end the turn, unless it waits for a person, who can still answer by a command."""
        if self._event_id is None or not (asked.stops(self._event_id) or self._waits(asked)):
            await self.cancel()
            with suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_S):
                    await self._over.wait()

    def asked(self, waiting: Waiting, asked: Questions) -> None:
        """Something is asked in the swarm. If this turn waits for it, the client is asked, once."""
        if self._event_id in waiting.events and waiting.code not in self._asking and not self._cancelled.is_set():
            self._asking[waiting.code] = asyncio.ensure_future(self._permission(waiting, asked))

    # --- the folder

    async def _workdir(self) -> str:
        """Where tools work: in the editor's folder, or (relative paths are of it) in that of the instance."""
        conversation = self._conversation
        if conversation.granted is None:
            conversation.granted = await self._grant()
        if conversation.granted:
            return absolute_workdir(conversation.cwd, self._swarm.place)
        return f"{instance_dir(self._state_dir, self._agent, conversation.key)}/workspace"

    async def _grant(self) -> bool:
        """Whether tools may work in the editor's folder: a person is asked, once for each folder of the bundle."""
        cwd = self._conversation.cwd
        try:
            folder = os.path.realpath(absolute_workdir(cwd, self._swarm.place))
        except GoondanError as error:
            self._conversation.notes.append(f"Tools do not work in {one_line(cwd, 200)}: {error.info.message}.")
            return False
        kept = records.read(self._state_dir).folders.get(folder)
        if kept is None:
            kept = await self._ask_for(folder)
        if not kept:
            self._conversation.notes.append(
                f"Tools do not work in {one_line(folder, 200)}, because you have not allowed it; they have a folder of "
                "this conversation. `gdn acp --ask-again` forgets such answers."
            )
        return kept

    async def _ask_for(self, folder: str) -> bool:
        title = f"Let tools read and change what is in {one_line(folder, 200)}?"
        about = {"toolCallId": f"folder-{os.urandom(4).hex()}", "title": title, "kind": "other", "status": "pending"}
        said = await self._choose({**about, "locations": [{"path": folder}]}, _FOLDER_ANSWERS)
        if said is None:
            raise fail("E_USAGE", "the client did not say whether tools may work in its folder")
        granted = said in ("always", "once")
        if said in ("always", "never"):
            await asyncio.to_thread(records.remember_folder, self._state_dir, folder, granted)
        return granted

    # --- the message

    async def _turn(self, session: Session, blocks: Sequence[dict[str, Any]], workdir: str) -> Answer:
        conversation = self._conversation
        read = prompts.read_prompt(blocks, workdir)
        text = "\n".join(block.text for block in read if block.text)
        files = await asyncio.to_thread(_lay_down, session, read, workdir)
        keep, title = records.remember_session, one_line(text, MAX_TITLE).strip()
        await asyncio.to_thread(keep, self._state_dir, conversation.id, conversation.cwd, self._agent, title)
        while conversation.notes:
            await self._tell(updates.said(f"{conversation.notes[0]}\n\n"))
            del conversation.notes[0]
        event_id = self._event_id = session.new_id()
        granted = workdir if conversation.granted else None
        message = Message(self._agent, conversation.key, text, event_id=event_id, workdir=granted, files=files)
        telling = updates.Telling(event_id, workdir)
        following = asyncio.ensure_future(self._follow(telling))
        asking = asyncio.ensure_future(session.ask(message, listener=self._hear))
        if self._cancelled.is_set():
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self.cancel()))
        try:
            await asyncio.wait({asking})
        except asyncio.CancelledError:
            asking.cancel()
            raise
        finally:
            following.cancel()
            await asyncio.wait({following})
        answer = asking.result()
        while not self._news.empty():
            await self._news_of(telling, self._news.get_nowait())
        for update in telling.end(answer, await self._stored()):
            await self._tell(update)
        return answer

    def _hear(self, event: RuntimeEvent) -> None:
        with suppress(asyncio.QueueFull):  # it comes from what is stored
            self._news.put_nowait(event)

    async def _follow(self, telling: updates.Telling) -> None:
        """Tell the client of live events, until cancelled between two of them."""
        while True:
            event = await self._news.get()
            await _whole(self._news_of(telling, event))

    async def _news_of(self, telling: updates.Telling, event: RuntimeEvent) -> None:
        told = telling.stored(await self._stored()) if telling.wants_stored(event) else []
        for update in [*told, *telling.hear(event)]:
            await self._tell(update)

    async def _stored(self) -> list[Any]:
        with suppress(GoondanError):  # the answer still has its text
            return await self._swarm.messages(self._agent, self._conversation.key, self._event_id or "")
        return []

    # --- the client

    async def _tell(self, update: updates.Update) -> None:
        told = {"sessionId": self._conversation.id, "update": update}
        await self._client.send_notification("session/update", told)

    async def _choose(self, call: dict[str, Any], answers: Sequence[tuple[str, str, str]]) -> str | None:
        """Have a person choose one of the answers. None: the client has cancelled, or cannot ask."""
        options = [{"optionId": name, "name": words, "kind": kind} for name, words, kind in answers]
        asked = {"sessionId": self._conversation.id, "toolCall": call, "options": options}
        try:
            told = await self._client.send_request("session/request_permission", asked)
        except acp.RequestError:
            return None
        outcome = told.get("outcome") if isinstance(told, dict) else None
        chosen = outcome.get("optionId") if isinstance(outcome, dict) and outcome.get("outcome") == "selected" else None
        return next((name for name, _, _ in answers if name == chosen), None)

    async def _permission(self, waiting: Waiting, asked: Questions) -> None:
        """Ask the client about one call. What it does not answer stays in the list, and is answered by a command."""
        with suppress(ConnectionError):  # the client has gone
            try:
                lines = await asked.whole(waiting.code)
                if waiting.yes_or_no:
                    about = {"toolCallId": f"ask-{waiting.code}", "title": waiting.title[: updates.MAX_TITLE]}
                    kind = updates.kind_of(waiting.title.partition(" ")[0])
                    content = [{"type": "content", "content": {"type": "text", "text": "\n".join(lines)}}]
                    call = {**about, "kind": kind, "status": "pending", "content": content}
                    said = await self._choose(call, _CALL_ANSWERS)
                    if said is not None:
                        await asked.decide(waiting.code, yes=said == "yes")
                        return
                if not self._cancelled.is_set():
                    await self._tell(updates.said("\n".join(["", *lines, waiting.command, ""])))
            except GoondanError as error:  # somebody was quicker, or its turn has ended
                await self._tell(updates.said(f"\n{waiting.code}: {error.info.message}\n"))

    def _waits(self, asked: Questions) -> bool:
        return any(self._event_id in waiting.events for waiting in asked.waiting())

    async def _until_cancelled(self, work: Awaitable[str]) -> str | None:
        """The result of some work. None when the prompt was cancelled meanwhile."""
        task, cancelled = asyncio.ensure_future(work), asyncio.ensure_future(self._cancelled.wait())
        try:
            await asyncio.wait({task, cancelled}, return_when=asyncio.FIRST_COMPLETED)
            return None if self._cancelled.is_set() else task.result()
        finally:
            task.cancel()
            cancelled.cancel()


async def _whole(work: Awaitable[None]) -> None:
    """Do some work to its end, also when cancelled meanwhile: half of an event must not be told again."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def _lay_down(session: Session, read: Sequence[prompts.Said], workdir: str) -> list[FilePart]:
    """The files of a prompt where its event names them. Raises GoondanError."""
    with ExitStack() as closing:
        files = []
        for block in read:
            if block.data is not None:
                files.append(_sent(block.data, block.name, closing))
            elif block.path is not None and (found := _picture(block.path, block.name, workdir, closing)) is not None:
                files.append(found)
        size = sum(file.size for file in files)
        if len(files) > blobs.MAX_FILES or size > blobs.MAX_MESSAGE_BYTES:
            limits = f"{blobs.MAX_FILES} files and {blobs.MAX_MESSAGE_BYTES} bytes"
            raise fail("E_FILE_INVALID", f"{len(files)} files of {size} bytes with one message, limits {limits}")
        return session.lay_down(files)


def _sent(data: bytes, name: str, closing: ExitStack) -> OpenFile:
    """A file that stands in the prompt itself. Raises GoondanError E_FILE_INVALID."""
    media_type = blobs.media_type_of(data[: blobs.HEAD_BYTES])
    if media_type is None or len(data) > blobs.MAX_FILE_BYTES:
        message = f"{one_line(name, 100)}: is no png, jpeg, gif, webp or PDF of at most {blobs.MAX_FILE_BYTES} bytes"
        raise fail("E_FILE_INVALID", message)
    descriptor = os.memfd_create("prompt", os.MFD_CLOEXEC)
    closing.callback(os.close, descriptor)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    return OpenFile(descriptor, len(data), media_type, name)


def _picture(path: str, name: str, workdir: str, closing: ExitStack) -> OpenFile | None:
    """A picture or PDF in the folder where tools work. None: it is another file, or it lies elsewhere by a link."""
    with suppress(OSError):
        descriptor = os.open(path, _FLAGS)
        closing.callback(os.close, descriptor)
        status = os.fstat(descriptor)
        real = os.readlink(f"/proc/self/fd/{descriptor}")  # a tool may have put a link there a moment ago
        if stat.S_ISREG(status.st_mode) and within(real, os.path.realpath(workdir)):
            media_type = blobs.media_type_of(os.pread(descriptor, blobs.HEAD_BYTES, 0))
            if media_type is not None and status.st_size <= blobs.MAX_FILE_BYTES:
                return OpenFile(descriptor, status.st_size, media_type, name)
    return None
