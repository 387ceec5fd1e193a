"""The mounts of a jail: what shows, where, what Landlock gives back for it, and where it is taken from. Pure.

plan.py has the rules.

Source: docs/design/sandbox.md section 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from goondan.schemas.worker.grantable import within
from goondan.toolhost.launcher.request import Stage, Unmapped
from goondan.toolhost.policy.launch_plan import DEVICES, LIST, READ, RUN, WRITE, for_file, memory_files
from goondan.toolhost.policy.subject import JAIL_CODE, JAIL_HOME, WORKDIR_FD, HostFacts, HostPath, Request


class Sources:
    """Where bubblewrap finds what it mounts: at its place, or staged."""

    def __init__(self, request: Request, host: HostFacts) -> None:
        #: What the launcher stages before bubblewrap starts: the path of the host, and how it is staged.
        self.stages: list[tuple[str, Stage]] = []
        self._at: dict[str, str] = {}
        if host.stage is None:
            return
        rooted = not host.user_namespaces
        for place in request.writable:
            ours = request.workspace is not None and place.path == request.workdir_real
            self._add(host.stage, place, "given" if ours else "refused")
        if host.prefix is not None:
            self._add(host.stage, HostPath(host.prefix, "dir"), "shown", owned=not rooted)
        self._add(host.stage, HostPath(host.inside, "dir"), "copied", owned=not rooted)
        if host.bwrap_root is not None and not rooted:
            self._add(host.stage, HostPath(host.bwrap_root, "dir"), "shown")
        for place in request.own:
            self._add(host.stage, place, "copied")
        for place in request.granted:
            self._add(host.stage, place, "shown")
        if request.folder is not None and not any(
            within(request.folder.path, place.path) for place in request.writable
        ):
            self._add(host.stage, request.folder, "shown")

    def stages_alone(self, place: HostPath) -> bool:
        """Whether this place is staged itself, and not only a folder that it lies in."""
        return place.path in self._at

    def _add(self, stage: str, place: HostPath, unmapped: Unmapped, *, owned: bool = True) -> None:
        if place.path in self._at or within(place.path, "/usr"):
            return
        at = self._at[place.path] = f"{stage}/{len(self.stages)}"
        how: Stage = {
            "at": at,
            "readOnly": unmapped in ("shown", "copied"),
            "owned": owned,
            "folder": place.kind == "dir",
            "unmapped": unmapped,
        }
        self.stages.append((place.path, how))

    def of(self, path: str, root: str) -> str:
        """Where `path` can be taken from; it is or lies in the staged place `root`."""
        return self._at[root] + path[len(root) :] if root in self._at and within(path, root) else path


#: Options that put something at a place, and how many words each has: the place is the last word.
_PLACING: Final = {
    "--ro-bind": 3, "--bind": 3, "--bind-fd": 3, "--ro-bind-data": 3, "--symlink": 3,
    "--tmpfs": 2, "--proc": 2, "--dev": 2,
}  # fmt: skip


def with_parents(options: list[str]) -> list[str]:
    """The options with the folders above each place, open to everybody. bubblewrap would make them for their owner
    only.
    """
    made = {"/"}
    done: list[str] = []
    waiting: list[str] = []  # --perms and --size are for the option that comes next
    words = iter(options)
    for option in words:
        if option in ("--perms", "--size"):
            waiting += [option, next(words)]
        elif option not in _PLACING:
            done.append(option)
        else:
            *rest, place = (next(words) for _ in range(_PLACING[option] - 1))
            for above in _between("", place):
                if above not in made:
                    made.add(above)
                    done += ["--perms", "0755", "--dir", above]
            made.add(place)
            done += [*waiting, option, *rest, place]
            waiting = []
    return done


class Mount(NamedTuple):
    """One mount. Mounts are sorted by path, a list of names, so that inner ones come later, and then by rank."""

    #: The place in the jail, as names.
    path: list[str]
    #: The order of mounts at the same place.
    rank: int
    #: bubblewrap's options for it.
    options: list[str]
    #: The path of the host that shows there; None for what belongs to the jail itself.
    source: str | None


_SHOWN, _WRITABLE, _GUARDED, _MASKED = range(4)


def mounts_of(request: Request, host: HostFacts, sources: Sources) -> list[Mount]:
    """The mounts that depend on the request, in the order in which they are made."""
    found = [
        _mount(place.shown, _SHOWN, place.path, "--ro-bind", sources.of(place.path, place.path), place.shown)
        for place in request.shown
        if place.name is not None or not any(within(place.path, writable.path) for writable in request.writable)
    ]
    for place in request.writable:
        found += _writable_mounts(request, host, sources, place)
    for place in request.masked:
        if place.kind == "file":
            for at in _seen_at(place.path, request):
                found.append(_mount(at, _MASKED, None, "--ro-bind", "/dev/null", at))
    found += [_mount(at, _MASKED, None, "--perms", "0555", "--tmpfs", at) for at in emptied_of(request, host)]
    mounts: dict[tuple[str, int], Mount] = {}
    for mount in found:
        mounts.setdefault(("/".join(mount.path), mount.rank), mount)
    return sorted(mounts.values(), key=lambda mount: (mount.path, mount.rank))


def _mount(path: str, rank: int, source: str | None, *options: str) -> Mount:
    return Mount(path.split("/"), rank, list(options), source)


def _writable_mounts(request: Request, host: HostFacts, sources: Sources, place: HostPath) -> Iterator[Mount]:
    """A writable folder, the places in it that stay read-only, and the folders above those."""
    real, shown = place.path, place.shown
    if shown == request.workdir and host.stage is None:
        yield _mount(shown, _WRITABLE, real, "--bind-fd", str(WORKDIR_FD), shown)
    else:
        yield _mount(shown, _WRITABLE, real, "--bind", sources.of(real, real), shown)
    # A writable mount inside a read-only folder would be a hole in it.
    guarded = [
        inner.path
        for inner in request.guarded
        if inner.path != real
        and within(inner.path, real)
        and not any(inner != outer and within(inner.path, outer.path) for outer in request.guarded)
    ]
    hidden = [path for path in host.hidden if path != real and within(path, real)]
    folder = request.folder
    inside = folder is not None and shown != folder.shown and within(folder.shown, shown)
    named = [real + folder.shown[len(shown) :]] if folder is not None and inside else []
    for kept in [*guarded, *hidden, *named]:
        for above in _between(real, kept):
            if not any(within(above, path) for path in guarded):
                at = shown + above[len(real) :]
                yield _mount(at, _WRITABLE, above, "--bind", sources.of(above, real), at)
    for path in guarded:
        at = shown + path[len(real) :]
        yield _mount(at, _GUARDED, path, "--ro-bind", sources.of(path, real), at)
    if folder is not None and inside:
        root = folder.path if sources.stages_alone(folder) else real
        yield _mount(folder.shown, _GUARDED, folder.path, "--ro-bind", sources.of(folder.path, root), folder.shown)


def seen_places(mounts: list[Mount]) -> list[tuple[str, str]]:
    """LaunchPlan.seen for these mounts, which are in their order: of several at one place the last one shows."""
    shows = {"/".join(mount.path): mount.source for mount in mounts}
    return [(at, source) for at, source in shows.items() if source is not None]


def rights_of(request: Request, host: HostFacts) -> list[tuple[str, int]]:
    """What Landlock gives back: the same as the mounts show, by the jail's paths."""
    rights = [("/", LIST), ("/etc", READ), ("/proc", READ), ("/dev", DEVICES), (JAIL_CODE, READ)]
    rights += [(folder, RUN) for folder in host.programs]
    rights += [(path, WRITE) for path in ("/dev/shm", "/tmp", JAIL_HOME)]
    rights += [(path, for_file(READ)) for path, _ in memory_files(request.tool)]
    return rights + granted_rights(request.shown, RUN) + granted_rights(request.writable, WRITE)


def granted_rights(places: list[HostPath], rights: int) -> list[tuple[str, int]]:
    """These rights for each of the places, by its path in the jail; a file gets only the rights that a file can
    have.
    """
    return [(place.shown, rights if place.kind == "dir" else for_file(rights)) for place in places]


def _seen_at(path: str, request: Request) -> list[str]:
    """The paths in the jail of a path of the tool's folder: a workdir keeps the name that the caller has for it."""
    found = [place.shown + path[len(place.path) :] for place in request.writable if within(path, place.path)][-1:]
    if request.home is not None:
        return [*found, request.home + path[len(request.tool.root) :]]
    return found or [path]


def emptied_of(request: Request, host: HostFacts) -> list[str]:
    """Folders that show empty: masked folders of the tool, and hidden folders inside anything that shows, at each place
    where they would show.
    """
    paths = [at for place in request.masked if place.kind == "dir" for at in _seen_at(place.path, request)]
    for folder in _folders_of(request, host):
        # The workdir usually lies inside the state root; then nothing of the state root shows but the workdir.
        paths += [folder.shown + path[len(folder.path) :] for path in host.hidden if _is_inside(path, folder)]
    return list(dict.fromkeys(paths))


def hidden_in(request: Request, host: HostFacts) -> list[str]:
    """The hidden folders inside something that shows, whether they exist or not."""
    folders = _folders_of(request, host)
    return [path for path in [*host.hidden, *host.absent] if any(_is_inside(path, folder) for folder in folders)]


def _is_inside(path: str, folder: HostPath) -> bool:
    return path != folder.path and within(path, folder.path)


def _folders_of(request: Request, host: HostFacts) -> list[HostPath]:
    """Every folder of the host that shows."""
    system = [HostPath(path, "dir") for path in [*host.programs, *host.etc]]
    return [*system, *(place for place in request.shown if place.kind == "dir"), *request.writable]


def _between(outer: str, inner: str) -> list[str]:
    """The folders strictly between two paths, outermost first."""
    names = inner[len(outer) + 1 :].split("/")[:-1]
    return [outer + "/" + "/".join(names[: index + 1]) for index in range(len(names))]
