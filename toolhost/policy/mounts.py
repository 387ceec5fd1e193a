"""What shows in a jail, and where: the mounts, what Landlock gives back for them, and where they are taken from. Pure.

The rules are those of plan.py.

Source: docs/design/sandbox.md section 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from msgspec import Struct

from schemas.grantable import within
from toolhost.policy.conventions import JAIL_CODE, JAIL_HOME, WORKDIR_FD
from toolhost.policy.landlock import DEVICES, LIST, READ, RUN, WRITE, for_file
from toolhost.policy.subject import HostFacts, Place, Request

Unmapped = Literal["shown", "copied", "given", "refused"]


class Stage(Struct, frozen=True):
    """A place that the launcher mounts at `at` before bubblewrap starts, its owner shown as the jail's user.

    `unmapped` is for a file system, or a host, on which owners cannot be shown as others. What is only read is `shown`
    as it is, or in a copy where not everybody may read it and it is small (`copied`); a workdir of ours is `given` to
    the instance's user, and what is somebody's own is `refused`. Without `mapped` this counts everywhere: root reads
    it before it drops its powers, and the jail's user afterwards.
    """

    source: str
    at: str
    kind: Literal["dir", "file"]
    read_only: bool
    unmapped: Unmapped = "refused"
    mapped: bool = True


class Sources:
    """Where bubblewrap finds what it mounts: at its place, or staged."""

    def __init__(self, request: Request, host: HostFacts) -> None:
        self.stages: list[Stage] = []
        self._at: dict[str, str] = {}
        if host.stage is None:
            return
        for path, _ in writable_of(request):
            kind: Literal["dir", "file"] = "file" if _is_file(request.write, path) else "dir"
            ours = request.own_workdir and path == request.workdir_real
            self._add(host.stage, Place(path, kind), "given" if ours else "refused")
        rooted = not host.user_namespaces
        if host.prefix is not None:
            self._add(host.stage, Place(host.prefix, "dir"), "shown", mapped=not rooted)
        self._add(host.stage, Place(host.inside, "dir"), "copied", mapped=not rooted)
        if host.bwrap_root is not None and not rooted:
            self._add(host.stage, Place(host.bwrap_root, "dir"), "shown")
        own, *granted = shown_of(request)
        self._add(host.stage, own, "copied")
        for place in granted:
            self._add(host.stage, place, "shown")

    def _add(self, stage: str, place: Place, unmapped: Unmapped, *, mapped: bool = True) -> None:
        if place.path not in self._at and not within(place.path, "/usr"):
            at = self._at[place.path] = f"{stage}/{len(self.stages)}"
            read_only = unmapped in ("shown", "copied")
            self.stages.append(Stage(place.path, at, place.kind, read_only, unmapped, mapped))

    def of(self, path: str, root: str) -> str:
        """Where `path`, which is or lies in the staged place `root`, can be taken from."""
        return self._at[root] + path[len(root) :] if root in self._at and within(path, root) else path


def _is_file(places: list[Place], path: str) -> bool:
    return any(place.path == path and place.kind == "file" for place in places)


#: Options that put something at a place, and how many words they have: the place is the last one.
_PLACING: Final = {
    "--ro-bind": 3, "--bind": 3, "--bind-fd": 3, "--ro-bind-data": 3, "--symlink": 3,
    "--tmpfs": 2, "--proc": 2, "--dev": 2,
}  # fmt: skip


def with_parents(options: list[str]) -> list[str]:
    """The options with the folders above each place, open to everybody: those that bubblewrap makes itself are closed
    to all but their owner.
    """
    made = {"/"}
    done: list[str] = []
    waiting: list[str] = []  # --perms and --size are for the option that comes next
    at = 0
    while at < len(options):
        words = _PLACING.get(options[at], 1)
        option = options[at : at + words]
        at += words
        if words == 1:
            if option[0] in ("--perms", "--size"):
                waiting += [option[0], options[at]]
                at += 1
            else:
                done += option
            continue
        place = option[-1]
        for above in _between("", place):
            if above not in made:
                made.add(above)
                done += ["--perms", "0755", "--dir", above]
        made.add(place)
        done += [*waiting, *option]
        waiting = []
    return done


class Mount(NamedTuple):
    """It sorts by its path, as a list of names so that what is inside comes later, then by rank. `source` is the path
    of the host that shows there, None for what is of the jail's own.
    """

    path: list[str]
    rank: int
    options: list[str]
    source: str | None


_SHOWN, _WRITABLE, _GUARDED, _MASKED = range(4)


def mounts_of(request: Request, host: HostFacts, sources: Sources) -> list[Mount]:
    writable = writable_of(request)
    found = [
        _mount(place.shown, _SHOWN, place.path, "--ro-bind", sources.of(place.path, place.path), place.shown)
        for place in shown_of(request)
        if not any(within(place.path, real) for real, _ in writable)
    ]
    for real, shown in writable:
        found += _writable_mounts(request, host, sources, real, shown)
    for place in request.masked:
        if place.kind == "file":
            at = seen_at(place.path, writable)
            found.append(_mount(at, _MASKED, None, "--ro-bind", "/dev/null", at))
    found += [_mount(at, _MASKED, None, "--perms", "0555", "--tmpfs", at) for at in emptied_of(request, host)]
    mounts: dict[tuple[str, int], Mount] = {}
    for mount in found:
        mounts.setdefault(("/".join(mount.path), mount.rank), mount)
    return list(mounts.values())


def _mount(path: str, rank: int, source: str | None, *options: str) -> Mount:
    return Mount(path.split("/"), rank, list(options), source)


def _writable_mounts(request: Request, host: HostFacts, sources: Sources, real: str, shown: str) -> Iterator[Mount]:
    """A writable folder, what stays read-only in it, and the folders above that."""
    if shown == request.workdir and host.stage is None:
        yield _mount(shown, _WRITABLE, real, "--bind-fd", str(WORKDIR_FD), shown)
    else:
        yield _mount(shown, _WRITABLE, real, "--bind", sources.of(real, real), shown)
    guarded = [place for place in _outermost(request.guarded) if place.path != real and within(place.path, real)]
    hidden = [path for path in host.hidden if path != real and within(path, real)]
    for kept in [*(place.path for place in guarded), *hidden]:
        for above in _between(real, kept):
            if not any(within(above, place.path) for place in guarded):
                at = shown + above[len(real) :]
                yield _mount(at, _WRITABLE, above, "--bind", sources.of(above, real), at)
    for place in guarded:
        at = shown + place.path[len(real) :]
        yield _mount(at, _GUARDED, place.path, "--ro-bind", sources.of(place.path, real), at)


def seen_places(mounts: list[Mount]) -> list[tuple[str, str]]:
    """LaunchPlan.seen of these mounts, which are in their order: of several at one place the last one shows."""
    shows = {"/".join(mount.path): mount.source for mount in mounts}
    return [(at, source) for at, source in shows.items() if source is not None]


def rights_of(request: Request, host: HostFacts) -> list[tuple[str, int]]:
    """What Landlock gives back: the same that the mounts give, by the paths of the jail."""
    rights = [("/", LIST), ("/usr", RUN), ("/etc", READ), ("/proc", READ), ("/dev", DEVICES), (JAIL_CODE, READ)]
    rights += [(folder, RUN) for folder in [*host.dirs, *([host.prefix] if host.prefix else [])]]
    rights += [(path, WRITE) for path in ("/dev/shm", "/tmp", JAIL_HOME)]
    writable = [place for place in request.write if place.kind == "file"]
    for place in shown_of(request):
        rights.append((place.shown, RUN if place.kind == "dir" else for_file(RUN)))
    rights += [(shown, WRITE) for _, shown in writable_of(request) if all(shown != file.shown for file in writable)]
    return rights + [(place.shown, for_file(WRITE)) for place in writable]


def writable_of(request: Request) -> list[tuple[str, str]]:
    """Writable folders: the real path, and where it stands in the jail."""
    pairs = [(place.path, place.shown) for place in request.write]
    if request.workdir is not None and request.workdir_real is not None:
        pairs.append((request.workdir_real, request.workdir))
    return pairs


def named(request: Request) -> list[str]:
    """The writable places that are somebody's own."""
    return [real for real, _ in writable_of(request) if not request.own_workdir or real != request.workdir_real]


def shown_of(request: Request) -> list[Place]:
    """What shows read-only: the tool's folder, read grants, the declared environment."""
    tool = request.tool
    own = Place(tool.entry, "file") if request.entry_only else Place(tool.root, "dir")
    return [own, *request.read, *([Place(request.venv, "dir")] if request.venv else [])]


def seen_at(path: str, writable: list[tuple[str, str]]) -> str:
    """Where a path of the host stands in the jail: a workdir keeps the name that the caller has for it."""
    for real, shown in reversed(writable):
        if within(path, real):
            return shown + path[len(real) :]
    return path


def emptied_of(request: Request, host: HostFacts) -> list[str]:
    """Folders that show as empty ones: masked folders of the tool, and what is hidden inside anything that shows, at
    each place where it would.
    """
    writable = writable_of(request)
    paths = [seen_at(place.path, writable) for place in request.masked if place.kind == "dir"]
    for real, shown in _folders_of(request, host):
        # The workdir usually lies inside the state root; then nothing of the state root shows but the workdir.
        paths += [shown + path[len(real) :] for path in host.hidden if path != real and within(path, real)]
    return list(dict.fromkeys(paths))


def hidden_in(request: Request, host: HostFacts) -> list[str]:
    """The hidden folders that lie in something that shows, those that do not exist among them."""
    shown = [real for real, _ in _folders_of(request, host)]
    hidden = [*host.hidden, *host.absent]
    return [path for path in hidden if any(path != real and within(path, real) for real in shown)]


def _folders_of(request: Request, host: HostFacts) -> list[tuple[str, str]]:
    """Every folder of the host that shows: the real path, and where it stands in the jail."""
    system = ["/usr", *host.dirs, *host.etc, *([host.prefix] if host.prefix else [])]
    places = [(place.path, place.shown) for place in shown_of(request) if place.kind == "dir"]
    return [*((path, path) for path in system), *places, *writable_of(request)]


def _outermost(places: list[Place]) -> list[Place]:
    """Without those that lie in another one: a writable mount inside a read-only folder would be a hole in it."""
    return [p for p in places if not any(p != other and within(p.path, other.path) for other in places)]


def _between(outer: str, inner: str) -> list[str]:
    """The folders strictly between two paths, outermost first."""
    names = inner[len(outer) + 1 :].split("/")[:-1]
    return [outer + "/" + "/".join(names[: index + 1]) for index in range(len(names))]
