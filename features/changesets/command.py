"""`gdn changeset list|diff|revert`: the changes that agents have made to the bundle, or are making.

Source: docs/changesets.md.
"""

from __future__ import annotations

import os
from typing import Any, Final

import click
import msgspec

from goondan.features.changesets.bundle.recovery import Record, locked
from goondan.features.changesets.process.engine import Engine, not_committed
from goondan.features.changesets.wire import FEATURE, CommittedChangeset
from goondan.kernel.cli import options, output
from goondan.kernel.cli.rules.plain import one_line
from goondan.kernel.cli.state import locate
from goondan.kernel.supervisor.options import Options
from goondan.kernel.supervisor_client import ask_supervisor
from goondan.schemas.wire.errors import GoondanError, fail

#: How long a running kernel may take to revert a commit (seconds). Changesets of agents come first.
_PATIENCE_S: Final = 180.0


@click.group()
def changeset() -> None:
    """List what agents have changed in the bundle, show it, or take it back."""


@changeset.command(name="list")
@options.bundle
@options.json
def list_(bundle: str | None) -> None:
    """List the open changesets and those that were committed, the latest first."""
    records = _engine(bundle).records.all()
    document = {"changesets": [_plain(record) for record in records]}
    output.emit(document, [_line(record) for record in records] or ["there are no changesets"])


@changeset.command()
@click.argument("changeset_id")
@options.bundle
@options.json
def diff(changeset_id: str, bundle: str | None) -> None:
    """Show what a changeset has changed, or would change, as a patch."""
    engine = _engine(bundle)
    patch = engine.difference(changeset_id).decode("utf-8", "replace")
    record = engine.records.get(changeset_id)
    document = {**({} if record is None else _plain(record)), "diff": patch}
    output.emit(document, [output.printable(line) for line in patch.splitlines()] or [""])


@changeset.command()
@click.argument("changeset_id")
@options.bundle
@options.json
def revert(changeset_id: str, bundle: str | None) -> None:
    """Take a committed changeset back with a new commit; in a running swarm it is in force from the next step."""
    done = _revert(bundle, changeset_id)
    if done.error is not None:
        raise fail(done.error.code, done.error.message)
    text = f"took changeset {changeset_id} back: {(done.new_ref or '').removeprefix('git:')[:12]}"
    output.emit(msgspec.to_builtins(done), [text])


def _revert(bundle: str | None, changeset_id: str) -> CommittedChangeset:
    """Revert in the kernel, if one runs, so that its agents get the change. Otherwise revert here."""
    place = locate(bundle)
    reply = ask_supervisor(place.state_dir, "feature", _PATIENCE_S, feature=FEATURE, question=changeset_id)
    if reply is not None:
        return msgspec.convert(reply.answer, CommittedChangeset)
    engine = _engine(bundle)
    with locked(engine.folder, wait=True):
        engine.recover()
        try:
            return engine.revert(changeset_id, engine.look)
        except GoondanError as error:
            if not error.info.code.startswith("E_CHANGESET_"):
                raise
            return not_committed(changeset_id, "", error.info)


def _engine(bundle: str | None) -> Engine:
    place = locate(bundle)
    mask = os.umask(0o077)
    os.umask(mask)
    return Engine(Options(bundle=place.bundle, state_dir=place.state_dir, umask=mask), [])


def _plain(record: Record) -> dict[str, Any]:
    done = record.result
    summary = None if done is None else done.summary
    return {
        "changesetId": record.changeset_id,
        "state": record.state,
        "agent": record.agent or None,
        "instanceKey": record.instance_key or None,
        "reason": record.reason,
        "openedAt": record.opened_at,
        "endedAt": record.ended_at or None,
        "baseRef": f"git:{record.base}",
        "newRef": None if done is None else done.new_ref,
        "filesChanged": [] if summary is None else summary.files_changed,
        "filesAdded": [] if summary is None else summary.files_added,
        "filesDeleted": [] if summary is None else summary.files_deleted,
        "reverts": record.reverts or None,
    }


def _line(record: Record) -> str:
    who = f"{record.agent} ({one_line(record.instance_key, 40)})" if record.agent else "operator"
    commit = record.commit[:12] if record.commit else "-"
    when = (record.ended_at or record.opened_at)[:19].replace("T", " ")
    return f"{record.changeset_id}  {record.state:<9}  {commit:<12}  {when}  {who}  {one_line(record.reason, 100)}"


COMMANDS: Final = {"changeset": changeset}
