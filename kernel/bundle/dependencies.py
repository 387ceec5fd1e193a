"""Dependencies of extensions: circles among them, and agents whose order does not fit. Pure.

Extensions are loaded in the order of the agent, whatever they depend on. So the problems found here are warnings.

Source: requirement LOAD-06.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


def circles(dependencies: Mapping[str, Sequence[str]]) -> Iterator[list[str]]:
    """Each circle once, as the names along it. It begins with the name that comes first in `dependencies`."""
    order = {name: place for place, name in enumerate(dependencies)}
    done: set[str] = set()
    for start in dependencies:
        if start not in done:
            yield from _circles_from(start, dependencies, order, done)


def _circles_from(
    start: str, dependencies: Mapping[str, Sequence[str]], order: Mapping[str, int], done: set[str]
) -> Iterator[list[str]]:
    """The circles below `start`, found without recursion. Extensions in `done` need no second visit."""
    path = [start]
    waiting = [iter(dependencies[start])]
    while waiting:
        following = next((name for name in waiting[-1] if name in dependencies and name not in done), None)
        if following is None:
            waiting.pop()
            done.add(path.pop())
        elif following in path:
            circle = path[path.index(following) :]
            first = min(range(len(circle)), key=lambda place: order[circle[place]])
            yield [*circle[first:], *circle[:first]]
        else:
            path.append(following)
            waiting.append(iter(dependencies[following]))


def misplaced(loaded: Sequence[str], dependencies: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str, bool]]:
    """The dependencies that are not loaded before their extension, for an agent with this order: (extension,
    dependency, whether the dependency is loaded at all).
    """
    there: set[str] = set()
    for name in loaded:
        for wanted in dependencies.get(name, ()):
            if wanted not in there and wanted != name:
                yield name, wanted, wanted in loaded
        there.add(name)
